"""How much a draft model may catch up: what it has missed of an answer is the price of guessing it.

Pure; knows no clock and no sequences.
"""

from dataclasses import dataclass

from services.worker.runners.step import CATCH_UP_TOKENS
from services.worker.speculative.depth import size_of_batch

_SHARE = 0.01
"""Share of the time of steps without guesses that looks may take."""
_GAIN_SHARE = 0.75
"""Part of the time that guesses gain that may be spent."""
_MOST_S = 0.4
"""Seconds that guesses may have gained and not spent, and that a batch of many answers has in advance."""
_FIRST_S, _FIRST_ROW_S = 0.2, 0.003
"""Seconds in advance for each size of batch, and for each answer of it, so that guesses are tried at once."""
_SAME = 0.75
"""A batch with this part of its answers is still the same one: as one answer ends, another one begins."""
_FIRST_STEP_S, _FIRST_TOKEN_S = 2e-3, 4e-6
"""Seconds of a step that catches up and of each of its tokens, before any was measured."""
_WEIGHT = 0.5
"""Weight of the last step in both prices."""
_DEAREST = 4.0
"""Time of a step at most, as a multiple of what was known: a kernel that is compiled in a step is not its price."""


@dataclass(slots=True)
class _Account:
    """Of one size of batch, seconds."""

    left_s: float
    """What is left in advance, and the part of the gains that may be spent."""
    net_s: float
    """What is left in advance, and all that was gained and spent."""

    def add(self, spendable_s: float, net_s: float) -> None:
        """Add to both."""
        self.left_s = min(max(self.left_s + spendable_s, 0.0), _MOST_S)
        self.net_s = min(self.net_s + net_s, _MOST_S)


class CatchUpBudget:
    """Seconds earned by steps, and spent on catching up. Rows: answers of the step in question."""

    def __init__(self, most: int = CATCH_UP_TOKENS) -> None:
        """most: tokens that a step catches up at most."""
        self._most = most
        self._earned_s = 0.0
        self._accounts: dict[int, _Account] = {}
        """By `size_of_batch`: guesses may pay in one and not in another."""
        self._rows = 0
        """Answers of the batch, before some of them ended that others will replace."""
        self._step_s, self._token_s = _FIRST_STEP_S, _FIRST_TOKEN_S

    def seconds(self, rows: int) -> float:
        """Seconds that may be spent now."""
        return self._earned_s + self._account(rows).left_s

    def allows(self, tokens: int, rows: int) -> bool:
        """Whether there is time to catch up this number of tokens."""
        return not tokens or self._price_s(tokens) <= self.seconds(rows)

    def earn(self, seconds: float) -> None:
        """A step without guesses took this time."""
        self._earned_s += _SHARE * seconds

    def gain(self, seconds: float, rows: int) -> None:
        """A step with guesses took so much less time than steps without any take for as many tokens; negative: so much
        was lost."""
        self._account(rows).add(_GAIN_SHARE * seconds, seconds)

    def lost_s(self, rows: int) -> float:
        """By how many seconds guesses have lost and spent more than they gained and had in advance."""
        return max(-self._account(rows).net_s, 0.0)

    def looked(self, rows: int) -> None:
        """Guesses were tried and do not pay: later looks are paid from what is earned alone."""
        account = self._account(rows)
        account.left_s = account.net_s = 0.0

    def spend(self, tokens: int, seconds: float, rows: int) -> None:
        """A step that caught up this number of tokens took `seconds` longer than one without guesses."""
        known_s, account = self._price_s(tokens), self._account(rows)
        spent_s = min(seconds, _DEAREST * known_s)
        advanced = min(spent_s, account.left_s)
        account.add(-advanced, -advanced)
        self._earned_s -= spent_s - advanced
        part = tokens / self._most  # A step with few tokens shows what the step costs, and little of a token's price.
        error_s = _WEIGHT * (spent_s - known_s) / (1 + part * part)
        self._step_s = max(self._step_s + error_s, 0.0)
        self._token_s = max(self._token_s + error_s * part / self._most, 0.0)

    def _price_s(self, tokens: int) -> float:
        return -(-tokens // self._most) * self._step_s + tokens * self._token_s

    def _account(self, rows: int) -> _Account:
        if not _SAME * self._rows <= rows <= self._rows:
            self._rows = rows
        size = size_of_batch(self._rows)
        first_s = min(_FIRST_S + _FIRST_ROW_S * (1 << size) / 2, _MOST_S)
        return self._accounts.setdefault(size, _Account(first_s, first_s))
