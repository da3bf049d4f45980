"""Speculation on a clock that is only counted: the choice and the pace of a mesh, and equal figures each time."""

import random
from pathlib import Path

import pytest

from bench.speculation import simulated
from services.gateway.links.token_pace import TokenPace
from weft.launch.demo_model import model_folder


def figures(acceptance: float) -> dict[str, float]:
    """Those of one answer."""
    random.seed(1)
    with simulated.simulated_engine(acceptance, Path(model_folder())) as (engine, runner, clock):
        return simulated.measure(engine, runner, clock, 1, 1.0, 0.0)


def test_answers_are_guessed_where_that_pays() -> None:
    found = {acceptance: figures(acceptance) for acceptance in (0.0, 0.9)}
    assert found[0.9]["ratio"] > 2
    assert found[0.9]["p99 ratio"] < 0.9
    assert found[0.9]["guessed"] > 0.9
    assert found[0.0]["ratio"] == pytest.approx(1.0, abs=0.05)
    assert found[0.0]["guessed"] < 0.1
    assert figures(0.9) == found[0.9]


def test_tokens_of_a_step_come_to_a_client_one_after_another() -> None:
    random.seed(2)
    steps = [0.008 * step for step in range(1000) for _ in range(2)]
    gaps = [gap for at, gap in simulated.received(steps, 0.0, TokenPace(0.05)) if at > 4.0]
    assert len(gaps) == pytest.approx(1000, rel=0.02)
    assert max(gaps) < 0.007
    late = [gap for at, gap in simulated.received(steps, 0.0014, TokenPace(0.05)) if at > 4.0]
    assert max(late) > max(gaps)


@pytest.mark.parametrize("count", [1, 64])
def test_short_answers_are_not_guessed_at_a_loss(count: int) -> None:
    """Each is replaced when it ends, and the draft has to catch up with the next one: 64 of them try it once."""
    random.seed(3)
    with simulated.simulated_engine(0.7, Path(model_folder())) as (engine, runner, clock):
        found = simulated.measure(engine, runner, clock, count, 8.0, 0.0003, tokens=200)
    assert found["ratio"] > (2 if count == 1 else 0.96)
    assert found["p99 ratio"] < 1.05
