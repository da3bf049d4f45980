"""Steps that were launched and not yet collected. Knows rows and handles of a runner."""

from dataclasses import dataclass
from typing import Any

from services.worker.planner.planner import Row


@dataclass(slots=True)
class StepPart:
    """Rows that were launched together."""

    rows: list[Row]
    preemptions: list[int]
    """For each row, how often its sequence had been paused: a later pause makes the row void."""
    handle: Any
    """The runner's own."""

    def answers(self) -> int:
        """How many rows come before those of prompts, which are the last ones."""
        count = len(self.rows)
        while count and self.rows[count - 1].start < self.rows[count - 1].sequence.prefill_end:
            count -= 1
        return count


@dataclass(slots=True)
class StepInFlight:
    """A step that has been launched and not yet collected."""

    parts: list[StepPart]
    """More than one if a launch failed and the rows were split."""
    prefill: int
    """Prompt tokens."""
    decodes: bool
    guesses: bool
    """Whether it was planned with the values of all tokens known: none may be launched before it is over."""
    launched_s: float
