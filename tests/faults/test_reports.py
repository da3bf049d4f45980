"""The reports of `make chaos` and `make soak`: what breaks a promise is found, and the pages show it."""

from pathlib import Path

from tests.faults import chaos, soak
from tests.faults.history import History, Stream, percentile
from tests.faults.rows import BY_NAME, Row, Run

ROW = BY_NAME["cut worker|scheduler, both ways, 2 workers"]


def result_of(row: Row, *streams: Stream) -> chaos.Result:
    """A result of one run with these streams, whose fault began at 0.05 s."""
    result = chaos.Result(row.name, asked=1)
    run = Run.__new__(Run)
    run.history, run.began, run.in_flight, run.proof = History(list(streams)), 0.05, len(streams), "12 bytes held"
    run.waits = []
    result.add(run, 7)
    return result


def stream(times: list[float], attempts: list[int], code: str = "") -> Stream:
    positions = list(range(len(times)))
    tokens = [5, 6, 7][: len(times)]
    return Stream("s", [5, 6, 7], 0.0, tokens, times, positions, attempts, not code, code=code)


def test_a_whole_stream_without_pause_keeps_the_promise() -> None:
    result = result_of(ROW, stream([0.0, 0.1, 0.2], [1, 1, 1]))
    assert result.verdict == "holds"
    assert result.cells()[1:6] == ["1", "1", "0", "0", "0"]


def test_lost_moved_and_late_streams_break_it() -> None:
    lost = result_of(ROW, stream([0.0, 0.1], [1, 1], code="UNAVAILABLE"))
    assert lost.verdict == "broken"
    assert "1 streams were not completed: UNAVAILABLE/" in lost.problems[0]
    assert result_of(ROW, stream([0.0, 0.1, 0.2], [1, 1, 2])).verdict == "broken", "it moved"
    assert result_of(ROW, stream([0.0, 0.1, 3.0], [1, 1, 1])).verdict == "slow"
    assert result_of(BY_NAME["worker SIGKILL"], stream([0.0, 0.1, 0.2], [1, 1, 1])).verdict == "broken", "none moved"


def test_parts_of_a_row_are_added_and_a_run_that_was_never_calm_is_missing() -> None:
    result = result_of(ROW, stream([0.0, 0.1, 0.2], [1, 1, 1]))
    result.merge(result_of(ROW, stream([0.0, 0.1, 0.2], [1, 1, 1])))
    assert (len(result.seeds), result.in_flight, result.verdict) == (2, 2, "holds")
    result.asked = 3
    assert result.verdict == "disturbed"


def test_a_run_that_resumes_has_the_seeds_that_are_missing(tmp_path: Path) -> None:
    options = chaos.parse(["--seeds", "0", "--out", str(tmp_path), "--resume"])
    results = chaos.load(options)
    assert [len(seeds) for seeds in chaos.parts_of(results["worker SIGKILL"], options)] == [10] * 10
    results[ROW.name].merge(result_of(ROW, stream([0.0, 0.1, 0.2], [1, 1, 1])))
    chaos.save(results.values(), 1.0, options)
    again = chaos.load(options)
    assert again[ROW.name] == results[ROW.name]
    assert [seed for seeds in chaos.parts_of(again[ROW.name], options) for seed in seeds][:7] == [1, 2, 3, 4, 5, 6, 8]
    without = chaos.load(chaos.parse(["--seeds", "2", "--out", str(tmp_path)]))
    assert (without[ROW.name].seeds, without[ROW.name].asked) == ([], 2)


def test_the_page_shows_rows_problems_and_plots() -> None:
    page = chaos.document([result_of(ROW, stream([0.0, 0.1], [1, 1], code="INTERNAL"))], 3.0)
    assert ROW.name in page
    assert "Broken promises" in page
    assert "12 bytes held" in page
    assert "<polyline" in page


def test_the_soak_page_shows_slopes() -> None:
    samples = {"worker-0 12": [(float(at), 100.0 + at / 36, 20) for at in range(10)]}
    page = soak.document({"sent": 3, "faults": 1}, {"pause p99 s": 0.1}, samples)
    assert "100.0" in page, "MiB per hour"
    assert soak.slope([(0.0, 1.0), (1.0, 1.0), (2.0, 3.0), (3.0, 5.0)]) == 2.0


def test_percentiles() -> None:
    assert percentile([], 0.99) == 0.0
    assert percentile(range(100), 0.99) == 99
    assert percentile([1.0], 0.5) == 1.0
