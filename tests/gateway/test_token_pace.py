"""Tokens of steps with guesses reach their reader at even times, soon, and all of them. Times are simulated."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest

from services.gateway.links.token_pace import StepMeans, TokenPace

Steps = Sequence[tuple[float, int]]
"""When the tokens of each step arrive, and how many."""


@dataclass(frozen=True, slots=True)
class Released:
    """Tokens that went on together."""

    at: float
    arrived: tuple[float, ...]


def steps_of(seconds: float, guesses: int, chance: float, count: int, seed: int = 0) -> Iterator[tuple[float, int]]:
    """Steps of this many guesses, each right with this chance; a prompt's first token comes at 0."""
    draws, now = random.Random(seed), 0.0
    yield 0.0, 1
    for _ in range(count):
        now += seconds * draws.uniform(1.0, 1.04)
        tokens = 1
        while tokens <= guesses and draws.random() < chance:
            tokens += 1
        yield now, tokens


def released(
    steps: Steps, hold_s: float, late_s: float = 0.0, seed: int = 0, usual: StepMeans | None = None
) -> list[Released]:
    """What a reader receives who asks when there is something new and no wait; timers are up to `late_s` late."""
    pace, draws = TokenPace(hold_s, usual), random.Random(seed)
    found, arrived, wakes = list[Released](), list[float](), -math.inf

    def ask(now: float) -> float:
        count, wait_s = pace.release(now)
        found.append(Released(now, tuple(arrived[:count])))
        del arrived[:count]
        return now + wait_s + draws.uniform(0, late_s) if wait_s else -math.inf

    for now, tokens in steps:
        while arrived and wakes < now:
            wakes = ask(wakes)
        for _ in range(tokens):
            pace.arrived(now)
            arrived.append(now)
        if wakes < now:
            wakes = ask(now)
        assert pace.held == len(arrived)
    return found


def gaps_of(found: Sequence[Released]) -> list[float]:
    """The times between two messages of a reader, ascending."""
    return sorted(after.at - before.at for before, after in pairwise(found))


@pytest.mark.parametrize(
    ("step_ms", "guesses", "chance", "plain_ms"),
    [
        *[(5.07, 4, 0.7, 3.95), (5.63, 5, 0.7, 4.14), (5.96, 4, 0.7, 4.33), (7.86, 5, 0.7, 4.71)],
        *[(4.82, 4, 0.5, 3.95), (5.31, 4, 0.5, 4.14), (5.89, 4, 0.5, 4.33), (6.12, 2, 0.5, 4.71)],
        *[(5.51, 8, 0.9, 3.95), (5.84, 7, 0.9, 4.14), (7.44, 8, 0.9, 4.33), (8.99, 8, 0.9, 4.71)],
    ],
)
def test_no_gap_is_longer_than_a_step_without_guesses(
    step_ms: float, guesses: int, chance: float, plain_ms: float
) -> None:
    """Steps as measured with the 8B shape and a parallel draft on an H200, at 1, 4, 8 and 16 answers."""
    steps = list(steps_of(step_ms / 1e3, guesses, chance, 2000))
    found = released(steps, 0.05, late_s=0.0001)
    gaps = gaps_of(found)
    assert gaps[int(len(gaps) * 0.99)] * 1e3 <= plain_ms
    together = gaps_of(released(steps, 0.0))
    assert together[int(len(together) * 0.01)] * 1e3 > plain_ms, "without holding, every one is"


def test_waits_are_shorter_where_they_end_late() -> None:
    """The longest gaps are then those that would be the longest on time, and half of what waits are late at most."""
    steps = list(steps_of(0.006, 1, 0.5, 4000))
    gaps = gaps_of(released(steps, 0.05, late_s=0.002))
    assert gaps[int(len(gaps) * 0.99)] < 0.0055


def test_a_pause_of_the_process_shortens_later_waits_by_little() -> None:
    pace = TokenPace(0.05)
    for at in (0.0, 0.006, 0.006, 0.012, 0.012):
        pace.arrived(at)
    _, wait_s = pace.release(0.012)
    pace.release(0.012 + wait_s + 1.0)
    assert 0 < pace._late_s < 0.0001


def means_of(steps: Steps) -> StepMeans:
    """Those of an answer that has ended."""
    pace = TokenPace(0.05)
    for now, tokens in steps:
        for _ in range(tokens):
            pace.arrived(now)
    return pace.means


def begun(seconds: float, guesses: int, chance: float, seed: int) -> Steps:
    """The first steps of an answer: in the second one the draft catches up with the prompt."""
    steps = list(steps_of(seconds, guesses, chance, 30, seed))
    return [steps[0], *((at + 0.012, tokens) for at, tokens in steps[1:])]


def test_an_answer_begins_at_the_usual_pace() -> None:
    """The step in which a draft catches up takes longer than later ones."""
    usual = means_of(list(steps_of(0.0052, 7, 0.7, 100)))
    gaps = [gap for seed in range(50) for gap in begun_gaps(seed, usual)]
    alone = [gap for seed in range(50) for gap in begun_gaps(seed, None)]
    assert usual.guessed
    assert sum(gap > 0.0055 for gap in gaps) == 0
    assert sum(gap > 0.0055 for gap in alone) > 50


def begun_gaps(seed: int, usual: StepMeans | None) -> list[float]:
    """The gaps after the first one of an answer that begins."""
    found = released(begun(0.0052, 7, 0.7, seed), 0.05, usual=usual)
    return [after.at - before.at for before, after in pairwise(found[1:])]


def test_an_answer_without_guesses_is_not_held_because_others_had_some() -> None:
    steps = [(0.004 * number, 1) for number in range(100)]
    found = released(steps, 0.05, usual=means_of(list(steps_of(0.008, 7, 0.7, 100))))
    assert [each.at for each in found] == [at for at, _ in steps]


def test_means_contain_some_steps_of_another_answer() -> None:
    means = StepMeans(0.25, 2, 5)
    means.add_some(StepMeans(1.0, 64, 250))
    assert means == StepMeans(0.75, 34, 130), "32 of 64"
    means.add_some(StepMeans(0.25, 10, 20))
    assert means == StepMeans(1.0, 44, 150), "all ten"


def test_an_answer_outgrows_what_was_usual() -> None:
    """Those before drew twice as many tokens in a step."""
    usual, steps = means_of(list(steps_of(0.005, 7, 0.9, 100))), list(steps_of(0.005, 4, 0.5, 600))
    gaps, alone = gaps_of(released(steps, 0.05, usual=usual)[400:]), gaps_of(released(steps, 0.05)[400:])
    assert gaps[int(len(gaps) * 0.99)] == pytest.approx(alone[int(len(alone) * 0.99)], rel=0.05)


@pytest.mark.parametrize("hold_s", [0.0, 0.02, 0.05])
@pytest.mark.parametrize("chance", [0.3, 0.7, 0.95])
def test_no_token_is_held_for_long(hold_s: float, chance: float) -> None:
    found = released(list(steps_of(0.008, 4, chance, 3000)), hold_s)
    held = sorted(each.at - at for each in found for at in each.arrived)
    assert held[int(len(held) * 0.99)] <= hold_s * 1.5
    assert held[-1] <= hold_s * 1.5 + 0.008


def test_slow_tokens_come_as_they_are_drawn() -> None:
    """At a tenth of a second for a token none could be held for less."""
    steps = list(steps_of(0.3, 4, 0.7, 200))
    assert [(each.at, len(each.arrived)) for each in released(steps, 0.05)] == steps


def test_steps_of_one_token_are_not_held() -> None:
    steps = [(0.004 * number, 1) for number in range(500)]
    assert [each.at for each in released(steps, 0.05)] == [at for at, _ in steps]


def test_the_first_token_is_not_held() -> None:
    assert released([(0.0, 1), (0.005, 3)], 0.05)[0] == Released(0.0, (0.0,))


def test_tokens_before_a_subscription_come_together_and_count_as_no_step() -> None:
    steps = [(0.0, 700), *((0.005 * number, 1 + number % 4) for number in range(1, 400))]
    found = released(steps, 0.05)
    assert len(found[0].arrived) == 700
    assert max(len(each.arrived) for each in found[40:]) == 1


def test_what_was_held_is_released_when_steps_draw_one_token_again() -> None:
    steps = [*steps_of(0.005, 4, 0.7, 400)]
    last = steps[-1][0]
    steps += [(last + 0.004 * number, 1) for number in range(1, 400)]
    found = released(steps, 0.05)
    assert found[-1].at - found[-1].arrived[0] == 0, "the last one is not held"


def test_a_reader_who_is_late_gets_what_is_due() -> None:
    steps = list(steps_of(0.005, 4, 0.7, 4000))
    on_time, late = released(steps, 0.05), released(steps, 0.05, late_s=0.05)
    assert len(late) < len(on_time) / 4
    held = sorted(each.at - at for each in late for at in each.arrived)
    assert held[len(held) // 2] < 0.05


def test_a_pause_is_followed_by_the_same_pace() -> None:
    steps = [*steps_of(0.005, 4, 0.7, 600)]
    last = steps[-1][0]
    steps += [(last + 2.0 + at, tokens) for at, tokens in steps_of(0.005, 4, 0.7, 600, seed=1)]
    found = released(steps, 0.05)
    after = [each.at - at for each in found if each.at > last + 3.0 for at in each.arrived]
    assert max(after) < 0.1
