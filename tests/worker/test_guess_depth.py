"""How many tokens to guess, and how much a draft may catch up: from measured times and from chances."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from services.worker.build.drafting.speculate import make_speculation
from services.worker.options import EngineOptions
from services.worker.planner.block_pool import BlockPool
from services.worker.planner.planner import Planner, Row
from services.worker.planner.sequence import Sequence as Planned
from services.worker.runners.step import OWN_GUESS
from services.worker.speculative import draft_model
from services.worker.speculative.catch_up_budget import CatchUpBudget
from services.worker.speculative.depth import PROBE_STEPS, Acceptance, DepthChooser, expected_tokens
from services.worker.speculative.speculation import Speculation
from tests.worker.drive import job, open_engine, prompt_of, run
from tests.worker.test_speculation import STRICT, Replay


def settled(cost: Callable[[int], float], rate: float, rows: int, steps: int = 400) -> list[int]:
    """The depths of the last steps of answers whose guesses are right at this rate."""
    source, chooser, chosen = random.Random(1), DepthChooser(8), []
    answers = [Acceptance() for _ in range(rows)]
    for _ in range(steps):
        depths = chooser.choose(rows, [answer.rate(chooser.mean_rate) for answer in answers], [8] * rows)
        chooser.observe_step(rows, max(depths), cost(max(depths)))
        for answer, depth in zip(answers, depths, strict=True):
            right = next((place for place in range(depth) if source.random() > rate), depth)
            if depth:
                answer.observe(depth, right)
                chooser.observe_guesses(depth, right)
        chosen.append(max(depths))
    return chosen[-PROBE_STEPS:]


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("slope", [0.0, 0.02, 0.1, 0.3, 1.0])
def test_the_depth_settles_near_the_best_one(rate: float, slope: float) -> None:
    def speed(depth: int) -> float:
        return expected_tokens(1, [rate], [depth], depth)[depth] / (1 + slope * depth)

    best = max(speed(depth) for depth in range(9))
    depths = settled(lambda depth: 0.01 * (1 + slope * depth), rate, 8)
    speeds = sum(map(speed, depths)) / len(depths)
    assert speeds >= 0.93 * best, depths
    assert speeds >= 0.97 * speed(0), "speculation made it slower"


def run_guesses(rows: int, rates: Sequence[float], plain_ms: float, pass_ms: float, guess_ms: float) -> float:
    """Tokens a second, as a multiple of those without guesses. A step takes `pass_ms` for each pass of a draft, and
    `guess_ms` for each guess. rates: by place, the chance that a guess is right if those before it are."""
    dice, chooser = random.Random(rows), DepthChooser(8)
    answers = [Acceptance() for _ in range(rows)]
    spent_ms = tokens = 0.0
    for step in range(1500):
        guesses = [0] * rows
        if chooser.pays(rows) or not chooser.rest(rows):
            guesses = chooser.choose(rows, [each.rate(chooser.mean_rate) for each in answers], [8] * rows)
        step_ms = plain_ms + max(guesses) * pass_ms + sum(guesses) * guess_ms
        for answer, drafted in zip(answers, guesses, strict=True):
            accepted = next((place for place in range(drafted) if dice.random() >= rates[place]), drafted)
            if drafted:
                answer.observe(drafted, accepted)
                chooser.observe_guesses(drafted, accepted)
            else:
                answer.fade()
            tokens += (1 + accepted) * (step >= 300)
        chooser.observe_step(rows, max(guesses), step_ms * dice.uniform(0.98, 1.02) / 1e3)
        spent_ms += step_ms * (step >= 300)
    return tokens / spent_ms * plain_ms / rows


@pytest.mark.parametrize("rate", [0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize(("rows", "costs"), [(4, (4.1, 0.6, 0.045)), (16, (4.6, 0.75, 0.047)), (64, (6.8, 1.1, 0.06))])
def test_guesses_cost_no_throughput_where_each_depth_has_a_price(
    rows: int, costs: tuple[float, float, float], rate: float
) -> None:
    """The price of a pass is paid once for all answers: few guesses of many answers would not be worth it."""
    assert run_guesses(rows, [rate] * 8, *costs) >= 0.98


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(
    "rates", [(0.85, 0.3, 0.1, 0.05, 0.02), (0.8, 0.7, 0.6, 0.5, 0.4), (0.68, 0.33, 0.24, 0.05, 0.02)]
)
def test_the_depth_is_the_best_one_where_later_guesses_are_rarely_right(rates: tuple[float, ...], rows: int) -> None:
    """As those of a draft that makes all of them in one pass."""
    every, (plain_ms, pass_ms, guess_ms) = [*rates, *[rates[-1]] * 3], (4.1, 0.3, 0.05)
    tokens = [1.0]
    for depth in range(1, 9):
        tokens.append(tokens[-1] + math.prod(every[:depth]))
    speeds = [tokens[depth] * plain_ms / (plain_ms + depth * pass_ms + rows * depth * guess_ms) for depth in range(9)]
    assert run_guesses(rows, every, plain_ms, pass_ms, guess_ms) >= 0.97 * max(speeds)


def test_a_depth_that_pays_is_found_behind_one_that_does_not() -> None:
    """A guess has a price of its own, and the first measurements may have been bad luck."""
    chooser = DepthChooser(8)
    for depth in range(9):
        chooser.observe_step(1, depth, 0.01 if not depth else 0.1)
    chosen = []
    for _ in range(4 * PROBE_STEPS):
        (depth,) = chooser.choose(1, [0.8], [8])
        chooser.observe_step(1, depth, 0.01 if not depth else 0.0185 + 0.0005 * depth)
        chosen.append(depth)
    last = sorted(chosen[-PROBE_STEPS:])
    assert last[1] >= 4, "and one step without guesses at most is measured again"


def test_looks_in_vain_become_rare() -> None:
    chooser, looks = DepthChooser(8), 0
    for _ in range(100 * PROBE_STEPS):
        (depth,) = chooser.choose(1, [0.1], [8])
        chooser.observe_step(1, depth, 0.01 + 0.01 * depth)
        looks += depth > 0
    assert 3 <= looks <= 16
    assert chooser.rest(1) > 0


def test_a_draft_catches_up_in_a_hundredth_of_the_time() -> None:
    budget, plain_s, spent_s = CatchUpBudget(), 0.0, 0.0
    assert budget.allows(2000, 64)
    assert not budget.allows(128 * 512, 64)
    while plain_s < 300:
        if budget.allows(64 * 512, 64):
            for _ in range(64):
                budget.spend(512, 0.018, 64)
                spent_s += 0.018
        budget.earn(0.0065)
        plain_s += 0.0065
    assert 0.0 < spent_s <= 0.011 * plain_s + 1.2


def test_only_the_first_look_at_a_size_of_batch_is_paid_in_advance() -> None:
    budget = CatchUpBudget()
    budget.spend(4096, 0.08, 5)
    budget.earn(0.004)
    assert budget.allows(1024, 5), "the first look at guesses that did not pay"
    budget.looked(5)
    assert not budget.allows(1024, 5)
    assert not budget.allows(1024, 7), "batches of 4 to 7 are of one size"
    assert budget.allows(8192, 16)
    for _ in range(1000):
        budget.earn(0.004)
    assert budget.allows(1024, 5)


def test_what_guesses_gain_pays_for_the_answers_that_join() -> None:
    budget = CatchUpBudget(2048)
    budget.looked(64)
    budget.gain(0.01, 64)
    assert not budget.allows(2048, 64)
    budget.gain(0.01, 64)
    assert budget.allows(2048, 64), "three quarters of 20 ms"
    assert budget.seconds(16) == CatchUpBudget().seconds(16), "other sizes of batch have what they had"
    budget.gain(-0.04, 64)
    assert not budget.allows(2048, 64), "guesses that were wrong cost time"
    budget.gain(-1.0, 64)
    budget.gain(0.04, 64)
    assert budget.seconds(64) == pytest.approx(0.03), "a loss is no debt"
    budget.gain(100.0, 64)
    assert budget.seconds(64) == pytest.approx(0.4), "no more, however much was gained"


def test_a_batch_of_which_some_answers_ended_keeps_its_account() -> None:
    """63 answers are of another size than 64, but others begin in the place of those that ended."""
    budget = CatchUpBudget()
    budget.looked(64)
    assert [budget.seconds(rows) for rows in (63, 48, 64)] == [0.0, 0.0, 0.0]
    assert budget.seconds(47) > 0.2
    assert budget.seconds(47) == budget.seconds(36) < CatchUpBudget().seconds(64) < 0.4


@pytest.mark.parametrize("with_draft", [True, False])
def test_guesses_that_cost_more_than_their_steps_show_are_given_up(with_draft: bool) -> None:
    """Steps with as many guesses took less time before."""
    speculation, rows = behind_a_prompt()
    speculation._draft_model = speculation._draft_model if with_draft else None
    chooser, guessed = speculation._chooser, [replace(row, guesses=[OWN_GUESS], samples=2) for row in rows]
    for _ in range(19):
        assert chooser.pays(2), "19 times 6 ms are less than 12 steps"
        speculation.drawn(guessed[0], 2)
        speculation.stepped(guessed, 0.021, overlapped=False)
    assert chooser.pays(2)
    speculation.stepped(guessed, 0.021, overlapped=False)
    assert chooser.pays(2) != with_draft
    assert (chooser.rest(2) >= 255) == with_draft, "twice the usual pause"
    assert speculation._budget.seconds(2) == 0


def test_what_is_spent_may_be_lost_once() -> None:
    budget = CatchUpBudget(2048)
    budget.gain(100.0, 64)
    budget.spend(8 * 2048, 0.1, 64)
    assert budget.seconds(64) == pytest.approx(0.3)
    budget.gain(-0.4, 64)
    assert budget.lost_s(64) == pytest.approx(0.1)


def test_right_guesses_of_a_step_that_catches_up_are_gained_and_not_its_price() -> None:
    speculation, rows = behind_a_prompt()
    guessed = [replace(row, guesses=[OWN_GUESS], samples=2) for row in rows]
    usual_s = speculation._chooser._times(2).seconds[1] = 0.012
    speculation._budget.gain(0.1, 2)
    speculation._caught_up = 40
    speculation.drawn(guessed[0], 2)
    speculation.stepped(guessed, usual_s + 0.008, overlapped=False)
    assert speculation._budget.seconds(2) == pytest.approx(0.75 * (0.1 + (2 + 1) / 2 * 0.01 - usual_s) - 0.008)
    assert speculation._chooser.step_s(2, 1) == usual_s


def behind_a_prompt(most_caught_up: int = 512) -> tuple[Speculation, list[Row]]:
    """Guesses for an answer with a prompt of 40 tokens and one with a prompt of 3; the draft has computed none of
    them. Guesses pay, and nothing is left in advance."""
    progress = draft_model.DraftProgress(4, 512, most_caught_up=most_caught_up)
    speculation = Speculation(progress, overlaps=True)
    planner = Planner(BlockPool(64), 4, slots=2, step_tokens=64, prefix_cache=True)
    for key, length in enumerate((40, 3)):
        planner.add(Planned(job(key, prompt_of(length), max_tokens=20), 1, 4, 64, b""))
    chooser, rows = speculation._chooser, planner.plan().rows
    for depth in (0, 1, 1, 1, 1, 1):
        chooser.observe_step(2, depth, 0.01)
    chooser._times(2).pays, chooser._times(2).trials[1] = True, 3
    speculation._budget.looked(2)
    return speculation, rows


def test_an_answer_is_guessed_beside_others_once_catching_up_is_paid() -> None:
    speculation, rows = behind_a_prompt()
    asked = [(row.sequence, 1) for row in rows]
    assert [len(guesses) for guesses in speculation.guess(asked, 2)] == [0, 1], "the other one is guessed on"
    assert speculation.catch_ups([]) == []
    speculation._budget.gain(0.1, 2)
    assert [len(guesses) for guesses in speculation.guess(asked, 2)] == [1, 1]


@pytest.mark.parametrize("pays", [True, False])
def test_while_guesses_pay_answers_catch_up_step_by_step(pays: bool) -> None:
    """There is time for one step of three."""
    speculation, rows = behind_a_prompt(most_caught_up=16)
    speculation._budget.gain(0.004, 2)
    speculation._chooser._times(2).pays = pays
    speculation.guess([(row.sequence, 1) for row in rows], 2)
    assert [(each.first, each.end) for each in speculation.catch_ups([])] == ([(0, 16)] if pays else [])


def test_a_step_with_guesses_gains_what_plain_ones_would_take_longer() -> None:
    speculation, rows = behind_a_prompt()
    guessed = [replace(rows[0], guesses=[OWN_GUESS] * 3, samples=4), rows[1]]
    for pays in (True, True, False):  # What was right is counted for one step.
        speculation._chooser._times(2).pays = pays
        speculation.drawn(guessed[0], 3)
        speculation.stepped(guessed, 0.014, overlapped=False)
    assert speculation._budget.seconds(2) == pytest.approx(2 * 0.75 * ((2 + 2) / 2 * 0.01 - 0.014))


@pytest.mark.parametrize("enough", [False, True])
def test_guesses_that_were_tried_in_vain_are_tried_again_from_earnings_alone(enough: bool) -> None:
    speculation = Speculation(draft_model.DraftProgress(4, 512), overlaps=True)
    planner = Planner(BlockPool(8), 4, slots=1, step_tokens=6, prefix_cache=True)
    planner.add(Planned(job(1, prompt_of(3), max_tokens=20), 1, 4, 64, b""))
    sequence = planner.plan().rows[0].sequence
    times = speculation._chooser._times(1)
    speculation._chooser.observe_step(1, 0, 0.01)
    assert not speculation._chooser.tried(1)
    assert speculation.guess([(sequence, 4)], 1)[0]
    assert speculation._budget.seconds(1) > 0
    for depth in (each for each in range(1, 9) for _ in range(2)):
        speculation._chooser.observe_step(1, depth, 9.0)
        times.trials[depth] = 3
    for _ in range(56 * enough):
        speculation._chooser.observe_step(1, 1, 9.0)
    assert speculation.guess([(sequence, 4)], 1) == [[]]
    assert (speculation._budget.seconds(1) == 0) == enough, "eight guesses may be wrong by chance"
    assert speculation._budget.seconds(2) > 0


def test_a_few_steps_show_what_those_without_guesses_take() -> None:
    """While guesses pay they are no look in vain, and the draft misses but a few tokens."""
    speculation = Speculation(draft_model.DraftProgress(4, 512), overlaps=True)
    planner = Planner(BlockPool(8), 4, slots=1, step_tokens=6, prefix_cache=True)
    planner.add(Planned(job(1, prompt_of(3), max_tokens=20), 1, 4, 64, b""))
    sequence, chooser = planner.plan().rows[0].sequence, speculation._chooser
    chooser.observe_step(1, 0, 0.01)
    for _ in range(5 * PROBE_STEPS):
        chooser.observe_step(1, 1, 0.011)
    chooser._times(1).pays, chooser._times(1).trials[1] = True, 3
    assert speculation.guess([(sequence, 1)], 1) == [[]]
    assert chooser.pays(1)
    assert [speculation.begins_step() for _ in range(5)] == [False] * 4 + [True]
    assert speculation._budget.seconds(1) > 0


@pytest.mark.parametrize(("overlaps", "guesses"), [(True, 0), (False, 1)])
def test_a_draft_on_a_device_has_to_gain_more(overlaps: bool, guesses: int) -> None:
    """Its guesses gain 3%."""
    chooser = Speculation(draft_model.DraftProgress(4, 512), overlaps=overlaps)._chooser
    for depth in (0, 1, 1):
        chooser.observe_step(1, depth, 0.01 if not depth else 0.01456)
    chooser._times(1).trials[1] = 3
    assert chooser.choose(1, [0.5], [1]) == [guesses]


@pytest.mark.parametrize(("most", "allowed"), [(512, False), (2048, True)])
def test_a_catch_up_has_the_price_of_its_steps(most: int, allowed: bool) -> None:
    progress = draft_model.DraftProgress(4, 4096, most_caught_up=most)
    assert Speculation(progress, overlaps=True)._budget.allows(128 * 512, 64) == allowed


@pytest.mark.parametrize(("overlaps", "step_tokens", "most"), [(True, 8192, 2048), (True, 64, 64), (False, 8192, 512)])
def test_a_device_catches_up_more_tokens_in_a_step(overlaps: bool, step_tokens: int, most: int) -> None:
    options = EngineOptions(speculate="draft:any", step_tokens=step_tokens)
    speculation = make_speculation(options, 4096, overlaps)
    assert speculation is not None
    planner = Planner(BlockPool(1024), 4, slots=1, step_tokens=4096, prefix_cache=True)
    planner.add(Planned(job(1, prompt_of(most + 900), max_tokens=20), 1, 4, 4096, b""))
    sequence = planner.plan().rows[0].sequence
    assert not any(speculation.guess([(sequence, 4)], 1))
    assert [(each.first, each.end) for each in speculation.catch_ups([])] == [(0, most)]


def test_steps_that_catch_up_a_few_tokens_do_not_make_many_dear() -> None:
    """Each step that catches up takes 5 ms longer, however few tokens: a look at 16 answers of 512 is 0.08 s."""
    budget = CatchUpBudget()
    for _ in range(8):
        budget.spend(512, 0.005, 4)
        budget.spend(12, 0.005, 4)
    assert budget.allows(16 * 512, 16)


def test_a_look_after_a_short_pause_is_paid_from_what_was_earned() -> None:
    """A step that catches up takes 12 ms longer, nearly all of it whatever its tokens: an answer that was not guessed
    for a while is guessed again each time that steps without guesses have earned as much."""
    budget, plain_s, missing, looks = CatchUpBudget(2048), 0.0, 0, 0
    budget.looked(1)
    while plain_s < 20:
        budget.earn(0.004)
        plain_s, missing = plain_s + 0.004, missing + 1
        if missing % 32 == 0 and budget.allows(missing, 1):
            budget.spend(missing, 0.012 + missing * 3e-6, 1)
            missing, looks = 0, looks + 1
    assert 8 <= looks <= 20, "20 s pay for 16 of them"


def test_guesses_that_were_wrong_by_chance_are_soon_tried_again() -> None:
    chooser, chance, acceptance, guessed = DepthChooser(8), random.Random(1), Acceptance(), list[bool]()
    for step in range(8 * PROBE_STEPS):
        (depth,) = chooser.choose(1, [acceptance.rate(chooser.mean_rate)], [8])
        right = next((place for place in range(depth) if chance.random() > 0.5), depth) if step > 20 else 0
        if depth:
            acceptance.observe(depth, right)
            chooser.observe_guesses(depth, right)
        else:
            acceptance.fade()
        chooser.observe_step(1, depth, 0.004 + 0.0009 * (depth > 0) + 0.0001 * depth)
        guessed.append(depth > 0)
    assert not all(guessed[: 2 * PROBE_STEPS]), "none of the first guesses is right"
    assert sum(guessed[-4 * PROBE_STEPS :]) >= 4 * PROBE_STEPS - 1, "a step without guesses is measured now and then"


def test_no_look_is_due_before_guesses_are_measured_again() -> None:
    """Answers would catch up for guesses that are not taken."""
    chooser = DepthChooser(8)
    for depth in (0, 1, 2):
        chooser.observe_step(1, depth, 0.01 + 0.01 * depth)
    for step in range(40 * PROBE_STEPS):
        (depth,) = chooser.choose(1, [0.1], [2])
        assert depth or chooser.rest(1) or step < 3 * PROBE_STEPS
        chooser.observe_step(1, depth, 0.01 + 0.01 * depth)


def test_a_depth_is_measured_as_long_as_it_is_chosen() -> None:
    """The depth that was the best from its first step on becomes slower as answers grow."""
    chooser, seconds, depth = DepthChooser(8), [0.0044, 0.0054, 0.0055, 0.0056, 0.0057], 0
    for step in range(4 * PROBE_STEPS):
        depth = max(chooser.choose(16, [0.5] * 16, [4] * 16))
        if step == PROBE_STEPS - 1:
            assert depth == 4
        chooser.observe_step(16, depth, seconds[depth] + 0.004 * (depth > 1 and step > PROBE_STEPS))
    assert depth == 1


def test_the_first_step_with_more_guesses_is_no_measurement() -> None:
    """It takes 3 ms longer, because the draft guesses once more with nothing in flight. Two guesses cost more at
    first."""
    chooser, before, chosen = DepthChooser(8, draft=True), 0, list[int]()
    for step in range(8 * PROBE_STEPS):
        (depth,) = chooser.choose(1, [0.9], [2])
        seconds = (0.004, 0.005, 0.009 if step < 2 * PROBE_STEPS else 0.0052)[depth]
        chooser.observe_step(1, depth, seconds + 0.003 * (depth > before))
        before = depth
        chosen.append(depth)
    assert chosen[2 * PROBE_STEPS - 1] == 1
    assert sum(chosen[-2 * PROBE_STEPS :]) > 1.9 * 2 * PROBE_STEPS


def test_steps_without_guesses_are_measured_again_while_guesses_pay() -> None:
    chooser = DepthChooser(8)
    for step in range(12 * PROBE_STEPS):
        (depth,) = chooser.choose(1, [0.8], [4])
        plain_s = 0.005 if step < PROBE_STEPS else 0.007
        chooser.observe_step(1, depth, 0.009 if depth else plain_s)
    assert chooser.pays(1)
    assert chooser.step_s(1, 0) == pytest.approx(0.007)


def test_a_single_step_that_pays_does_not_make_looks_frequent() -> None:
    chooser, looks, before = DepthChooser(8), 0, 0
    for _ in range(100 * PROBE_STEPS):
        (depth,) = chooser.choose(1, [0.9 if before else 0.1], [1])
        looks += depth > 0 and not before
        before = 0 if before else depth
        chooser.observe_step(1, depth, 0.01 + 0.008 * depth)
    assert 3 <= looks <= 40


@pytest.mark.parametrize(("seconds", "pays"), [(0.0095, False), (0.0085, True)])
def test_a_draft_has_to_gain_more_to_begin_than_to_go_on(seconds: float, pays: bool) -> None:
    chooser = DepthChooser(1, draft=True)
    for _ in range(4 * PROBE_STEPS):
        (depth,) = chooser.choose(1, [0.5], [1])
        chooser.observe_step(1, depth, seconds if depth else 0.0066)
    assert chooser.pays(1) == pays
    for _ in range(PROBE_STEPS):
        (depth,) = chooser.choose(1, [0.5], [1])
        chooser.observe_step(1, depth, 0.0092 if depth else 0.0066)
    assert chooser.pays(1) == pays, "1.075 times as fast"


def test_answers_that_cannot_be_guessed_yet_need_not_gain() -> None:
    """They catch up with others' guesses beside them, of which few are right in a large batch at first."""
    chooser = DepthChooser(1, draft=True)
    chooser.observe_step(64, 0, 0.006)
    assert sum(chooser.choose(64, [0.9] * 64, [1] * 4 + [0] * 60)) == 4


def test_a_compilation_is_not_the_price_of_a_token() -> None:
    budget = CatchUpBudget()
    budget.spend(512, 2.3, 1)
    for _ in range(1000):
        budget.earn(0.004)
    assert budget.allows(512, 1)


def test_the_first_step_of_a_depth_does_not_judge_it() -> None:
    chooser, seconds = DepthChooser(8), {0: 0.0042, 1: 0.0058, 2: 0.0068, 3: 0.0079}
    chooser.observe_step(8, 0, seconds[0])
    chosen, seen = [], set[int]()
    for _ in range(4 * PROBE_STEPS):
        depth = max(chooser.choose(8, [0.5] * 8, [3] * 8))
        chooser.observe_step(8, depth, seconds[depth] + 0.003 * (depth not in seen))
        seen.add(depth)
        chosen.append(depth)
    assert min(chosen[20:PROBE_STEPS]) > 0


def test_many_answers_are_not_guessed_before_there_was_time_to_catch_up(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("llama")
    engine = open_engine(folder, warm_up=True, kv_blocks=512, max_batch_size=16, **STRICT, speculate=f"draft:{folder}")
    assert engine.speculation is not None
    engine.speculation._budget.spend(25_000, 1.0, 16)
    run(engine, *(job(key, prompt_of(100, key), max_tokens=60) for key in range(16)), steps=50)
    assert engine.stats().guesses.drafted == 0
    engine.speculation._budget.earn(10_000.0)
    while engine.has_work() and not engine.stats().guesses.drafted:
        engine.step()
    assert engine.stats().guesses.drafted > 0


def test_a_plain_step_that_waited_for_a_question_is_no_measurement() -> None:
    speculation = Speculation(Replay({}), overlaps=True)
    planner = Planner(BlockPool(8), 4, slots=1, step_tokens=6, prefix_cache=True)
    planner.add(Planned(job(1, prompt_of(3), max_tokens=20), 1, 4, 64, b""))
    rows = planner.plan().rows
    speculation.stepped(rows, 0.02, overlapped=False)
    assert not speculation._chooser._times(1).seconds
    speculation.stepped(rows, 0.01, overlapped=True)
    assert speculation._chooser._times(1).seconds == {0: 0.01}


def test_a_step_in_which_a_draft_catches_up_is_no_measurement(checkpoint: Callable[[str], Path]) -> None:
    """Otherwise the price of a prompt would be that of a guess, and none would ever pay."""
    folder = checkpoint("llama")
    engine = open_engine(folder, kv_blocks=64, **STRICT, speculate=f"draft:{folder}")
    speculation = engine.speculation
    assert speculation is not None
    run(engine, job(1, prompt_of(200), max_tokens=100), steps=2)
    speculation._chooser.observe_step(1, 0, 1.0)
    while not engine.stats().guesses.drafted:
        assert not engine.step().ended
    assert set(speculation._chooser._times(1).seconds) == {0}, "the draft computed the prompt in this step"
    engine.step()
    assert set(speculation._chooser._times(1).seconds) > {0}


def test_an_answer_that_gains_nothing_is_not_guessed() -> None:
    chooser = DepthChooser(8)
    for depth in [0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4]:
        chooser.choose(4, [0.9] * 4, [depth] * 4)
        chooser.observe_step(4, depth, 0.01 * (1 + 0.1 * depth))
    depths = chooser.choose(4, [0.9, 0.9, 0.9, 0.02], [4] * 4)
    assert depths[0] >= 3
    assert depths[3] == 0


def test_acceptance_returns_to_the_mean_without_guesses() -> None:
    one = Acceptance()
    for _ in range(20):
        one.observe(4, 0)
    assert one.rate(0.8) < 0.25
    for _ in range(100):
        one.fade()
    assert one.rate(0.8) > 0.75
