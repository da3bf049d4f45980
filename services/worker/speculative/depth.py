"""How many tokens to guess: from measured acceptance and the measured time of wider steps. Pure; knows no clock.

A step that guesses d tokens for each answer takes T(d) seconds at this number of rows. The depth with the most expected
tokens per second is taken; 0 is a depth like the others.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

_WEIGHT = 0.2  # of a new measurement of a step
_GLOBAL_WEIGHT = 0.02  # of a guess in the mean over all answers
_OWN_DECAY, _PRIOR_WEIGHT = 0.95, 4.0
_FIRST_RATE = 0.6
_OPTIMISM = 1.02
"""Assumed time of a depth that was not measured, as a multiple of the time of the one below it: it is tried."""
_OWN_PART = 0.5
"""Part of a wider step's additional time that depends on how many guesses it has, and not on the longest alone."""
_TRIALS = 3
"""Steps of a new depth after its first one before it is judged, by the fastest of them: the first are slow."""
_FIRST_GAIN, _LEAST_GAIN = 1.1, 1.04
"""Tokens per second over those without guesses from which on a draft model guesses, and down to which it goes on."""
_ENOUGH_ROWS = 64
"""Rows of guesses that show whether guesses pay: fewer may be wrong by chance."""
PROBE_STEPS = 128
"""Steps after which a depth is measured again, if it is next to the one that is taken."""
_PLAIN_EVERY = 4 * PROBE_STEPS
"""Steps after which those without guesses are measured again while guesses pay: longer answers make both slower."""
_MOST_WAIT = 16 * PROBE_STEPS
"""Steps between two looks at guesses while none pay: the pause doubles with each look in vain up to this."""
_SOONER_STEPS = PROBE_STEPS // 4
"""Steps by which that pause becomes shorter with each step in which guesses pay."""


class Acceptance:
    """How often guesses of one answer are right. Without recent guesses it returns to the mean of all answers."""

    __slots__ = ("hits", "tries")

    def __init__(self) -> None:
        self.hits = self.tries = 0.0

    def observe(self, drafted: int, accepted: int) -> None:
        """Record a row: guesses behind the first wrong one say nothing."""
        self.hits = self.hits * _OWN_DECAY + accepted
        self.tries = self.tries * _OWN_DECAY + accepted + (accepted < drafted)

    def fade(self) -> None:
        """Record a step without a guess."""
        self.hits *= _OWN_DECAY
        self.tries *= _OWN_DECAY

    def rate(self, mean: float) -> float:
        """The chance that the next guess is right; `mean`: of all answers."""
        return (self.hits + mean * _PRIOR_WEIGHT) / (self.tries + _PRIOR_WEIGHT)


@dataclass(slots=True)
class _Times:
    """Seconds of steps by depth, at about the same number of rows."""

    seconds: dict[int, float] = field(default_factory=dict)
    measured_at: dict[int, int] = field(default_factory=dict)
    measured: dict[int, int] = field(default_factory=dict)
    """Steps of each depth that were measured."""
    trials: dict[int, int] = field(default_factory=dict)
    """Choices of each depth to judge it by more than its first step, up to _TRIALS."""
    last: int = 0
    """The depth of the last step that was recorded."""
    steps: int = 0
    checked: int = 0
    """Rows of guesses in the steps that were measured."""
    wait: int = PROBE_STEPS
    """Steps after which a look at guesses is due while none pay."""
    plain_asked: int = 0
    """The step at which one without guesses was last chosen to measure it, while guesses pay."""
    rests_until: int = 0
    """The step at which the next look is due."""
    pays: bool = False
    """The last choice was a depth that is known to gain, and no look."""

    def on_trial(self, longest: int) -> int | None:
        """The least depth up to `longest` that was measured and not tried often enough to judge it; or None."""
        new = (depth for depth in self.seconds if 0 < depth <= longest and self.trials.get(depth, 0) < _TRIALS)
        return min(new, default=None)

    def age(self, depth: int) -> int:
        """Steps since the depth was measured; 0: it never was."""
        return self.steps - self.measured_at.get(depth, self.steps)

    def since_guesses(self) -> int:
        """Steps since one with guesses was measured, or since the first one."""
        return min((self.age(depth) for depth in self.measured_at if depth), default=self.steps)


class DepthChooser:
    """Chooses the depth of each step and cuts the guesses of answers that gain nothing by it."""

    def __init__(self, most: int, draft: bool = False) -> None:
        """most: guesses of a row at most. draft: a draft model guesses on a device, where it has some guesses ready
        behind a step. It has to gain enough there: catching up takes time, and guesses make tokens come less evenly."""
        self.most, self._draft = most, draft
        self._first_gain, self._least_gain = (_FIRST_GAIN, _LEAST_GAIN) if draft else (1.0, 1.0)
        self.mean_rate = _FIRST_RATE
        self._hits, self._tries = [0.0] * most, [0.0] * most
        """By place, right guesses and all that were checked; the earlier ones count less."""
        self._by_size: dict[int, _Times] = {}

    def observe_step(self, rows: int, depth: int, seconds: float) -> None:
        """Record a step without prompts: its rows, its longest guess and its time. A draft's first step with more
        guesses than the one before shows nothing: it takes longer than later ones, because fewer are ready."""
        times = self._times(rows)
        more, times.last = depth > times.last, depth
        if more and self._draft:
            times.steps += 1
            return
        before, age = times.seconds.get(depth), times.age(depth)
        # One step that was interrupted must not look like the cost of its depth; old times are poor estimates.
        weight = 1.0 if age > PROBE_STEPS else _WEIGHT
        if before is None:
            value = seconds
        elif depth and times.measured[depth] <= _TRIALS:
            value = min(before, seconds)
        else:
            value = before + weight * (min(seconds, 3 * before) - before)
        if depth and age >= PROBE_STEPS:
            times.wait = min(2 * times.wait, _MOST_WAIT)
        times.seconds[depth] = value
        times.measured[depth] = times.measured.get(depth, 0) + 1
        times.checked += rows if depth else 0
        times.steps += 1
        times.measured_at[depth] = times.steps

    def observe_guesses(self, drafted: int, accepted: int) -> None:
        """Record a row of guesses of any answer."""
        for place, hit in enumerate([1.0] * accepted + [0.0] * (accepted < drafted)):
            self.mean_rate += _GLOBAL_WEIGHT * (hit - self.mean_rate)
            self._hits[place] += hit - _GLOBAL_WEIGHT * self._hits[place]
            self._tries[place] += 1.0 - _GLOBAL_WEIGHT * self._tries[place]

    def choose(self, rows: int, rates: Sequence[float], room: Sequence[int]) -> list[int]:
        """Guesses for each answer that asks. rows: of the step, of which len(rates) ask; rates: the chance that a guess
        of each is right; room: how many guesses each has at most."""
        times = self._times(rows)
        longest = min(max(room, default=0), self.most)
        if not longest:
            return [0] * len(room)
        if 0 not in times.seconds:
            return [0] * len(room)
        factors = self._factors()
        tokens = expected_tokens(rows, rates, room, longest, factors)
        best = self._best(times, tokens, sum(most > 0 for most in room) / rows)
        tried = times.on_trial(longest)
        if tried is not None and best < tried:  # Its first step alone made it look too slow.
            times.trials[tried] = times.trials.get(tried, 0) + 1
            return [min(tried, most) for most in room]
        if best and min(times.age(0), times.steps - times.plain_asked) >= _PLAIN_EVERY:
            times.plain_asked = times.steps
            return [0] * len(room)
        looked = self._to_measure(times, tokens, best)
        if looked is not None:
            if not best:
                self._forget()
            return [min(looked, most) for most in room]
        chosen = self._cut(times, best, rows, rates, room, factors)
        if best in times.seconds or not best:
            times.pays = any(chosen)
        if not any(chosen):
            times.rests_until = times.steps + max(times.wait - times.since_guesses(), 0)
        return chosen

    def pays(self, rows: int) -> bool:
        """Whether guesses paid at this number of rows when a depth was last chosen for it."""
        return self._times(rows).pays

    def tried(self, rows: int) -> bool:
        """Whether enough guesses were checked at this number of rows to show whether they pay."""
        return self._times(rows).checked >= _ENOUGH_ROWS

    def step_s(self, rows: int, depth: int) -> float | None:
        """Seconds of a step of this number of rows whose longest guess is `depth`; None before any was measured."""
        return self._times(rows).seconds.get(depth)

    def rest(self, rows: int) -> int:
        """Steps of this number of rows until the next look at guesses is due; 0 while guesses pay."""
        times = self._times(rows)
        return max(times.rests_until - times.steps, 0)

    def give_up(self, rows: int) -> None:
        """Guesses cost more at this number of rows than their steps show: the next look is due after a longer pause."""
        times = self._times(rows)
        times.pays, times.wait = False, min(2 * times.wait, _MOST_WAIT)
        times.rests_until = times.steps + times.wait

    def _forget(self) -> None:
        """Forget what earlier guesses showed, because guesses are tried again: too few may have been checked, by chance
        wrong ones, to show that none pay."""
        self.mean_rate = _FIRST_RATE
        self._hits, self._tries = [0.0] * self.most, [0.0] * self.most

    def _best(self, times: _Times, tokens: Sequence[float], asking: float) -> int:
        """The depth that pays most, or 0; asking: part of the rows that can be guessed, which have to gain enough."""
        known = [depth for depth in times.seconds if depth < len(tokens)]
        tried = min(max(known) + 1, len(tokens) - 1)
        best = self._fastest(times, tokens, {*known, tried} - {0})
        gain = tokens[best] / tokens[0] * self._seconds(times, 0) / self._seconds(times, best)
        least = self._least_gain if times.pays else self._first_gain
        return best if gain > 1 + (least - 1) * asking else 0

    def _to_measure(self, times: _Times, tokens: Sequence[float], best: int) -> int | None:
        """A depth that is due to be measured again, because what was slow once may have been so by chance; or None."""
        if best:
            times.wait = max(times.wait - _SOONER_STEPS, PROBE_STEPS)
            nearby = (best + 1, best - 1)
            return next((near for near in nearby if near < len(tokens) and times.age(near) > PROBE_STEPS), None)
        if times.since_guesses() < times.wait:
            return None
        # The first guess of a row costs more than each further one, so that two may pay where one does not.
        return self._fastest(times, tokens, [depth for depth in times.seconds if 0 < depth < len(tokens)] or [1])

    def _fastest(self, times: _Times, tokens: Sequence[float], depths: Collection[int]) -> int:
        """The depth with the most tokens per second; tokens: of a step, by its depth."""
        return max(sorted(depths), key=lambda depth: tokens[depth] / self._seconds(times, depth))

    def _seconds(self, times: _Times, depth: int) -> float:
        below = depth
        while below not in times.seconds and below > 0:
            below -= 1
        return times.seconds.get(below, 1.0) * _OPTIMISM ** (depth - below)

    def _factors(self) -> list[float]:
        """By depth from 0 on: the chance that all guesses up to it are right, over that of guesses which are all as
        likely to be right as the mean. Those of draft heads and of a parallel draft become less likely with each place;
        a place without guesses is as the one before it."""
        factors, rate = [1.0], self.mean_rate
        for hits, tries in zip(self._hits, self._tries, strict=True):
            rate = (hits + rate * _PRIOR_WEIGHT) / (tries + _PRIOR_WEIGHT)
            factors.append(factors[-1] * rate / self.mean_rate)
        return factors

    def _cut(
        self,
        times: _Times,
        depth: int,
        rows: int,
        rates: Sequence[float],
        room: Sequence[int],
        factors: Sequence[float],
    ) -> list[int]:
        """The guesses of each answer at this depth: those whose chance is worth their part of the wider step. The rest
        is the price of the depth, however many answers are guessed so far: the passes of a draft."""
        chosen = [min(depth, most) for most in room]
        if not depth:
            return chosen
        base = self._seconds(times, 0)
        dearer = max(self._seconds(times, depth) / base - 1, 0.0) / depth  # of one guess for each row
        least = _OWN_PART * dearer * len(rates) / rows
        for index, rate in enumerate(rates):
            worth = chosen[index]
            while worth and rate**worth * factors[worth] < least:
                worth -= 1
            chosen[index] = worth
        return chosen

    def _times(self, rows: int) -> _Times:
        return self._by_size.setdefault(size_of_batch(rows), _Times())


def size_of_batch(rows: int) -> int:
    """The size of a batch of this many rows: 1, 2 to 3, 4 to 7, ... rows are alike in what guesses cost and gain."""
    return rows.bit_length()


def expected_tokens(
    rows: int, rates: Sequence[float], room: Sequence[int], longest: int, factors: Sequence[float] | None = None
) -> list[float]:
    """Tokens that a step of this many rows draws on average, for each depth from 0 to `longest`: each guess is right
    with the chance `rates` of its row, which has at most `room` guesses. factors: by depth, how much likelier all
    guesses up to it are right than by `rates` alone."""
    factors = factors or [1.0] * (longest + 1)
    of_row = list(zip(rates, room, strict=True))
    more = (
        min(factors[depth] * sum(rate**depth for rate, most in of_row if most >= depth), float(len(of_row)))
        for depth in range(1, longest + 1)
    )
    return list(accumulate(more, initial=float(rows)))
