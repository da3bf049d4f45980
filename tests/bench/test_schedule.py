"""The planner on one H200, simulated by `bench.engine.schedule`: throughput and latencies stay within bounds."""

import pytest

from bench.engine.schedule import closed, step_ms
from services.worker.planner.planner import Row


@pytest.mark.parametrize(
    ("width", "tokens_per_s", "first_ms", "between_ms"),
    [(1, 215, 54, 5), (8, 1108, 390, 6.05), (32, 2227, 1515, 60), (128, 2931, 6048, 224)],
)
def test_throughput_and_latencies_stay_within_bounds(
    width: int, tokens_per_s: float, first_ms: float, between_ms: float
) -> None:
    seen = closed(width)
    assert seen.tokens == max(3 * width, 16) * 200
    assert seen.tokens_per_s >= tokens_per_s
    assert seen.first.percentile(99) <= first_ms
    assert seen.between.percentile(99) <= between_ms


def test_shorter_steps_delay_first_tokens() -> None:
    short, whole = closed(32, step_tokens=512), closed(32)
    assert short.first.percentile(99) > whole.first.percentile(99)
    assert short.between.greatest < whole.between.greatest


def test_the_time_of_a_step_grows_with_rows_and_context() -> None:
    def rows(count: int, tokens: int, start: int) -> list[Row]:
        return [Row(None, start, tokens, True)] * count  # type: ignore[arg-type]

    assert step_ms(rows(1, 1, 2100)) == pytest.approx(4.1, abs=0.1)
    assert step_ms(rows(256, 1, 2200)) == pytest.approx(25.8, rel=0.03)
    assert step_ms(rows(1, 1950, 0)) == pytest.approx(46, rel=0.03)
    assert step_ms(rows(1, 224, 7000)) > step_ms(rows(1, 224, 0)) > step_ms(rows(1, 160, 0))
