"""How much a draft model may catch up: what it has missed of an answer is the price of guessing it.

Pure; knows no clock and no sequences.
"""

from services.worker.runners.step import CATCH_UP_TOKENS
from services.worker.speculative.depth import size_of_batch

_SHARE = 0.01
"""Share of the time of steps without guesses that looks may take."""
_GAIN_SHARE = 0.75
"""Part of the time that guesses gain that may be spent."""
_FIRST_S = 1.0
"""Seconds in advance for each size of batch, so that guesses are tried at once: enough for sixteen answers. To what is
left of them is added what guesses gain."""
_FIRST_STEP_S, _FIRST_TOKEN_S = 4e-3, 1e-5
"""Seconds of a step that catches up and of each of its tokens, before any was measured."""
_WEIGHT = 0.5
"""Weight of the last step in both prices."""
_DEAREST = 4.0
"""Time of a step at most, as a multiple of what was known: a kernel that is compiled in a step is not its price."""


class CatchUpBudget:
    """Seconds earned by steps, and spent on catching up. Rows: answers of the step in question."""

    def __init__(self, most: int = CATCH_UP_TOKENS) -> None:
        """most: tokens that a step catches up at most."""
        self._most = most
        self._earned_s = 0.0
        self._advances_s: dict[int, float] = {}
        """What is left in advance and was gained, by `size_of_batch`: guesses may pay in one and not in another."""
        self._step_s, self._token_s = _FIRST_STEP_S, _FIRST_TOKEN_S

    def seconds(self, rows: int) -> float:
        """Seconds that may be spent now."""
        return self._earned_s + self._advance_s(rows)

    def allows(self, tokens: int, rows: int) -> bool:
        """Whether there is time to catch up this number of tokens."""
        return not tokens or self._price_s(tokens) <= self.seconds(rows)

    def earn(self, seconds: float) -> None:
        """A step without guesses took this time."""
        self._earned_s += _SHARE * seconds

    def gain(self, seconds: float, rows: int) -> None:
        """A step with guesses took so much less time than steps without any take for as many tokens."""
        left_s = self._advance_s(rows) + _GAIN_SHARE * seconds
        self._advances_s[size_of_batch(rows)] = min(max(left_s, 0.0), _FIRST_S)

    def looked(self, rows: int) -> None:
        """Guesses were tried and do not pay: later looks are paid from what is earned alone."""
        self._advances_s[size_of_batch(rows)] = 0.0

    def spend(self, tokens: int, seconds: float, rows: int) -> None:
        """A step that caught up this number of tokens took `seconds` longer than one without guesses."""
        known_s = self._price_s(tokens)
        spent_s = min(seconds, _DEAREST * known_s)
        advanced = min(spent_s, self._advance_s(rows))
        self._advances_s[size_of_batch(rows)] = self._advance_s(rows) - advanced
        self._earned_s -= spent_s - advanced
        part = tokens / self._most  # A step with few tokens shows what the step costs, and little of a token's price.
        error_s = _WEIGHT * (spent_s - known_s) / (1 + part * part)
        self._step_s = max(self._step_s + error_s, 0.0)
        self._token_s = max(self._token_s + error_s * part / self._most, 0.0)

    def _price_s(self, tokens: int) -> float:
        return -(-tokens // self._most) * self._step_s + tokens * self._token_s

    def _advance_s(self, rows: int) -> float:
        return self._advances_s.get(size_of_batch(rows), _FIRST_S)
