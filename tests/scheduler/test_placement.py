"""The prefix index against a plain model of it, the cost rule, and the replay of a trace through the real core."""

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.mesh import placement as bench
from services.scheduler.core.placement import Candidate, Choice, PrefixIndex, choose
from tests.scheduler.stage import keys

WORKERS = ("a", "b", "c")
names = st.lists(st.integers(0, 5), max_size=6, unique=True)
actions = st.tuples(st.sampled_from(["add", "drop", "forget"]), st.sampled_from(WORKERS), names)


@given(st.lists(actions, max_size=20), names)
def test_the_index_matches_the_leading_blocks_that_each_worker_holds(
    history: list[tuple[str, str, list[int]]], prompt: list[int]
) -> None:
    index = PrefixIndex()
    held: dict[str, set[int]] = {worker: set() for worker in WORKERS}
    for action, worker, blocks in history:
        if action == "add":
            index.add(worker, keys(*blocks))
            held[worker] |= set(blocks)
        elif action == "drop":
            index.remove(worker, keys(*blocks))
            held[worker] -= set(blocks)
        else:
            index.remove_worker(worker)
            held[worker] = set()
    expected = {worker: _leading(prompt, blocks) for worker, blocks in held.items()}
    assert index.match(keys(*prompt)) == {worker: depth for worker, depth in expected.items() if depth}
    assert len(index) == len(set().union(*held.values()))


def _leading(prompt: list[int], blocks: set[int]) -> int:
    return next((depth for depth, block in enumerate(prompt) if block not in blocks), len(prompt))


def test_the_index_serves_thousands_of_workers() -> None:
    index = PrefixIndex()
    for number in range(3000):
        index.add(f"w{number}", keys(*range(number % 5)))
    matched = index.match(keys(0, 1, 2, 3, 4))
    assert {worker: depth for worker, depth in matched.items() if worker in {"w0", "w1", "w2999"}} == {
        "w1": 1,
        "w2999": 4,
    }
    for number in range(3000):
        index.remove_worker(f"w{number}")
    assert len(index) == 0


@pytest.mark.parametrize(
    ("candidates", "matched", "choice"),
    [
        ([], {}, None),
        ([Candidate("a", 0, 0), Candidate("b", 0, 0)], {"b": 4}, Choice("b", 4)),
        ([Candidate("a", 0, 0), Candidate("b", 17, 0)], {"b": 4}, Choice("a", 0)),
        ([Candidate("a", 0, 0), Candidate("b", 15, 0)], {"b": 4}, Choice("b", 4)),
        ([Candidate("a", 16, 0), Candidate("b", 0, 0)], {"a": 4}, Choice("b", 0)),
        ([Candidate("a", 0, 2), Candidate("b", 0, 1)], {}, Choice("b", 0)),
        ([Candidate("b", 0, 1), Candidate("a", 0, 1)], {}, Choice("a", 0)),
    ],
    ids=[
        "no candidate",
        "prefix",
        "backlog outweighs",
        "prefix outweighs",
        "tie: less backlog",
        "tie: fewer jobs",
        "tie: id",
    ],
)
def test_the_cost_rule(candidates: list[Candidate], matched: dict[str, int], choice: Choice | None) -> None:
    assert choose(candidates, 10, matched) == choice


@pytest.fixture
def trace(tmp_path: Path) -> list[bench.Request]:
    """Conversations that grow by a block each turn, all with the same first block."""
    random.seed(7)
    talks = [[0, 1000 * talk] for talk in range(1, 41)]
    lines = []
    for turn in range(600):
        talk = random.choice(talks)
        talk.append(talk[-1] + 1)
        lines.append(
            {"timestamp": turn * 15, "input_length": 512 * len(talk), "output_length": 50, "hash_ids": talk[:]}
        )
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return list(bench.read_trace(str(path)))


def test_the_core_keeps_conversations_together_and_workers_balanced(trace: list[bench.Request]) -> None:
    mesh = bench.Mesh(workers=4, cache_blocks=150, prefill_rate=15_000, decode_s=0.01)
    cost_rule, round_robin, longest_prefix = (
        rule(trace, mesh) for rule in (bench.cost_rule, bench.round_robin, bench.longest_prefix)
    )
    assert cost_rule.hit_rate > 1.2 * round_robin.hit_rate
    assert cost_rule.imbalance < 1.3
    assert longest_prefix.imbalance > 2, "without the backlog term one worker takes most"
