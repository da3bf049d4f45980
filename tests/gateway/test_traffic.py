"""The counts of a gateway's last seconds: windows, latencies in buckets, percentiles over gateways."""

import gc
import random

import pytest

from protos import inference_pb2 as api
from protos import mesh_pb2 as mesh
from services.gateway.traffic import WINDOW_S, Durations, ModelCounts, Traffic, percentiles


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def latencies(durations: list[float]) -> mesh.Latencies:
    """The distribution of these durations, through a Traffic."""
    traffic = Traffic(Clock())
    traffic.roll(0)
    for seconds in durations:
        traffic.model("fox").first_token.add(seconds)
    return traffic.roll(0).models[0].first_token


@pytest.mark.parametrize("scale", [1e-5, 1e-3, 1.0, 100.0])
def test_percentiles_are_exact_to_a_tenth(scale: float) -> None:
    draws = random.Random(7)
    durations = sorted(scale * draws.lognormvariate(0, 1) for _ in range(4000))
    # Two gateways measured them.
    found = percentiles([latencies(durations[::2]), latencies(durations[1::2])])
    assert found.count == 4000
    for value, share in ((found.p50_s, 0.5), (found.p90_s, 0.9), (found.p99_s, 0.99)):
        assert value == pytest.approx(durations[int(share * 4000)], rel=0.1)


def test_without_durations_there_are_no_percentiles() -> None:
    assert percentiles([mesh.Latencies(), mesh.Latencies()]) == api.Percentiles()


def arrived(counts: ModelCounts, tokens: int, gaps: int, seconds: float) -> None:
    """Counts tokens as an attempt does."""
    counts.tokens += tokens
    counts.inter_token.add(seconds / gaps, gaps)


def test_the_shortest_durations_are_counted() -> None:
    counted = Durations()
    for seconds in (0.0, -1e-9, 1e-9, 1e-6, 2e-6):
        counted.add(seconds)
    assert counted.counts == {0: 4, 4: 1}


def test_the_first_second_stays_in_the_window() -> None:
    clock = Clock()
    traffic = Traffic(clock)
    arrived(traffic.model("fox"), 3, gaps=2, seconds=0.1)
    for second in range(1, WINDOW_S + 1):
        clock.now += 1
        (model,) = traffic.roll(0).models
        assert (model.tokens, sum(model.inter_token.counts)) == (3, 2), second


def test_counts_leave_the_window_after_its_length() -> None:
    clock = Clock()
    traffic = Traffic(clock)
    traffic.roll(0)
    counts = traffic.model("fox")
    arrived(counts, 5, gaps=4, seconds=0.2)
    counts.ended(api.Receipt(prompt_tokens=10, cached_tokens=6, fetched_tokens=2), failed=False)
    counts.ended(api.Receipt(prompt_tokens=10, result_hit=True), failed=False)
    counts.ended(api.Receipt(), failed=True)
    for second in range(1, WINDOW_S + 3):
        clock.now += 1
        report = traffic.roll(running=second)
        assert report.running == second
        if second > WINDOW_S:
            assert not report.models
            continue
        (model,) = report.models
        assert (model.model, model.requests, model.failed, model.result_hits) == ("fox", 3, 1, 1)
        assert (model.prompt_tokens, model.cached_tokens, model.tokens) == (20, 18, 5)
        assert sum(model.inter_token.counts) == 4
        assert report.window_s == min(second, WINDOW_S)


def held() -> int:
    """Counts of models that are in memory."""
    gc.collect()
    return sum(type(each) is ModelCounts for each in gc.get_objects())


def test_models_without_traffic_in_the_window_take_no_memory() -> None:
    before, traffic = held(), Traffic(Clock())
    for number in range(100):
        arrived(traffic.model(f"adapter-{number}"), 3, gaps=2, seconds=0.1)
    assert len(traffic.roll(0).models) == 100
    for _ in range(WINDOW_S):
        arrived(traffic.model("fox"), 3, gaps=2, seconds=0.1)
        report = traffic.roll(0)
    assert [(model.model, model.tokens) for model in report.models] == [("fox", 3 * WINDOW_S)]
    assert held() - before <= WINDOW_S
