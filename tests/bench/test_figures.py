"""The arithmetic of `weft bench`: percentiles, rates, goodput, merging of the counts of several processes."""

import json
import math
import random
from itertools import pairwise
from pathlib import Path

import pytest

from bench.table import Figure
from protos import inference_pb2 as api
from weft.load import metrics
from weft.load.distribution import Distribution
from weft.load.plan import Plan, PlanError, goodput_from
from weft.load.tally import Outcome, Tally
from weft.load.workload import Workload


def seen(values: list[float]) -> Distribution:
    distribution = Distribution()
    for value in values:
        distribution.add(value)
    return distribution


def outcome(began: float, first: float, last: float, tokens: int, **receipt: int) -> Outcome:
    return Outcome(began, first, last, last + 0.001, tokens, api.Receipt(prompt_tokens=7, attempts=1, **receipt))  # type: ignore[arg-type]


@pytest.mark.parametrize("percent", [1, 25, 50, 90, 99, 100])
def test_percentiles_are_within_half_a_percent_of_the_sorted_list(percent: int) -> None:
    chance = random.Random(5)
    values = [chance.lognormvariate(3, 2) for _ in range(5000)]
    exact = sorted(values)[math.ceil(len(values) * percent / 100) - 1]
    assert seen(values).percentile(percent) == pytest.approx(exact, rel=0.0051)


def test_mean_and_extremes_are_exact() -> None:
    distribution = seen([1.0, 2.0, 6.0, 0.0])
    assert (distribution.mean, distribution.least, distribution.greatest, distribution.count) == (2.25, 0.0, 6.0, 4)
    assert distribution.percentile(100) == 6.0
    assert Distribution().percentile(99) == Distribution().mean == 0.0


def test_merged_halves_equal_the_whole() -> None:
    chance = random.Random(6)
    values = [chance.expovariate(0.1) for _ in range(1000)]
    half = seen(values[:500])
    half.merge(Distribution.from_json(json.loads(json.dumps(seen(values[500:]).to_json()))))
    whole = seen(values)
    assert half.count == whole.count
    assert half.mean == pytest.approx(whole.mean)
    assert [half.percentile(p) for p in (5, 50, 95)] == [whole.percentile(p) for p in (5, 50, 95)]
    assert half.steps()[-1] == (whole.greatest, 1.0)


def test_the_times_of_one_answer() -> None:
    times = outcome(began=10.0, first=10.2, last=11.2, tokens=11).milliseconds()
    assert times["ttft"] == pytest.approx(200)
    assert times["tpot"] == pytest.approx(100), "eleven tokens in a second have ten gaps"
    assert times["e2el"] == pytest.approx(1201)
    assert "tpot" not in outcome(10.0, 10.2, 10.2, tokens=1).milliseconds()


def test_one_gap_of_a_hundred_may_be_long() -> None:
    def answer(gaps: list[float]) -> Outcome:
        return Outcome(0.0, 0.1, 1.0, 1.0, len(gaps) + 1, api.Receipt(), gaps)

    assert answer([10.0] * 198 + [50.0]).is_within("itl", 15.0)
    assert not answer([10.0] * 197 + [50.0] * 2).is_within("itl", 15.0)
    assert not answer([10.0] * 98 + [50.0]).is_within("itl", 15.0)
    assert answer([]).is_within("itl", 15.0)


def test_rates_and_goodput_over_two_processes() -> None:
    bounds = {"ttft": 250.0, "tpot": 150.0}
    one, other = Tally(), Tally()
    one.add(outcome(100.0, 100.2, 101.2, 11, cached_tokens=4), 100.0, bounds)
    one.add(outcome(100.0, 100.3, 101.3, 11), 100.0, bounds)  # the first token exceeds its bound
    other.add(outcome(102.0, 102.1, 103.999, 10), 100.0, bounds)  # the later tokens exceed their bound
    other.errors["UNAVAILABLE/WORKER_LOST"] += 1
    one.merge(Tally.from_json(json.loads(json.dumps(other.to_json()))))
    figures = metrics.figures(one, goodput=True)
    assert (figures["completed"], figures["failed"]) == (3, 1)
    assert figures["duration"] == pytest.approx(4.0)
    assert figures["request_throughput"] == pytest.approx(0.75)
    assert figures["request_goodput"] == pytest.approx(0.25)
    assert one.within == {"ttft": 2, "tpot": 2}
    assert figures["output_throughput"] == pytest.approx(8.0)
    assert figures["total_token_throughput"] == pytest.approx((32 + 21) / 4)
    assert figures["mean_ttft_ms"] == pytest.approx(200)
    assert metrics.receipts(one)["cached_share"] == pytest.approx(4 / 21)
    assert [line["ended"] for line in metrics.timeline(one)] == [0, 2, 0, 0, 1]


def test_goodput_bounds_are_parsed_and_invalid_ones_refused() -> None:
    assert goodput_from(["ttft:200 tpot:50"]) == goodput_from(["ttft:200", "tpot:50"]) == {"ttft": 200, "tpot": 50}
    for word in ("ttft", "ttft:soon", "speed:3", "ttft:nan", "ttft:-5", "ttft:0"):
        with pytest.raises(PlanError):
            goodput_from([word])


def plan(**changes: object) -> Plan:
    values: dict[str, object] = {"address": "x", "vocab_size": 100, "context_length": 64, "input_tokens": 8}
    return Plan(**{**values, "output_tokens": 4, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        *({"rate": 0.0}, {"rate": math.nan}, {"time_scale": 0.0}, {"duration_s": -1.0}, {"deadline_s": 0.0}),
        *({"concurrency": None}, {"prefix_tokens": 8}, {"input_tokens": 61}, {"temperature": -1.0}),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(PlanError):
        plan(**changes).checked()


def test_prompts_differ_except_for_the_shared_prefix() -> None:
    workload = Workload(plan(requests=6, prefix_tokens=5, prefixes=2))
    prompts = [workload.prompt(due) for due in workload.share(0)]
    assert prompts == [Workload(workload.plan).prompt(due) for due in workload.share(0)], "the seed selects prompts"
    assert len({tuple(prompt[:5]) for prompt in prompts}) == 2
    assert len({tuple(prompt) for prompt in prompts}) == 6
    assert {len(prompt) for prompt in prompts} == {8}
    warm = {tuple(workload.prompt(due)) for due in workload.warmup(0)}
    assert not warm & {tuple(prompt) for prompt in prompts}


@pytest.mark.parametrize("constant", [True, False])
def test_processes_divide_the_arrivals_of_a_rate(constant: bool) -> None:
    shared = plan(requests=2000, rate=100.0, constant=constant, processes=3)
    dues = sorted((due for number in range(3) for due in Workload(shared).share(number)), key=lambda due: due.index)
    assert [due.index for due in dues] == list(range(2000))
    assert dues[-1].at_s == pytest.approx(20, rel=0.1)
    gaps = [b.at_s - a.at_s for a, b in pairwise(dues)]
    assert (max(gaps) - min(gaps) < 1e-9) is constant


def test_equal_ids_of_a_trace_give_equal_blocks(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 3000, "input_length": 1024, "output_length": 5, "hash_ids": [1, 3]},
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    traced = plan(trace=str(tmp_path / "trace.jsonl"), time_scale=4.0, context_length=2048, concurrency=None)
    first, second = (Workload(traced), list(Workload(traced).share(0)))
    one, two = (first.prompt(due) for due in second)
    assert (len(one), len(two)) == (600, 1024)
    assert one[:512] == two[:512]
    assert one[512:] != two[512:600]
    assert [due.at_s for due in second] == [0.0, 0.5]


def test_a_goal_is_compared_with_the_measured_figure() -> None:
    assert Figure("a", 5, goal=">= 5").met is True
    assert Figure("a", 5, goal="<= 4").met is False
    assert Figure("a", 5).met is None
