"""What crosses between an engine's thread and all others: jobs and cancels in, block events out.

Knows when to wake a sleeping engine, never how jobs are run.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from services.worker.job import Failure, Job
from services.worker.structured.base import Matcher


class Arrival(NamedTuple):
    """A job that was submitted."""

    job: Job
    number: int
    """Its number among all arrivals, from 1."""
    at: float
    """When it arrived, on the clock `time.monotonic`."""
    form: Matcher | Failure | None = None
    """If the job's answer has a form: the matcher that follows it, or why the job cannot run."""


class Cancel(NamedTuple):
    """A job that is to end."""

    key: int
    position: int | None
    """Tokens of its answer that may stay in the prefix cache; None: all."""


class Prefetch(NamedTuple):
    """Blocks that another worker computes, for a job that will come here."""

    source: str
    """host:port of the other worker."""
    keys: Sequence[bytes]


Message = Arrival | Cancel | Prefetch


class Inbox:
    """The first five methods may be called from any thread, the others from the engine's."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self.messages: deque[Message] = deque()
        """In the order of their arrival. The engine's thread takes them from the left."""
        self._block_changes: dict[bytes, bool] = {}
        self.predicted_step_s = 0.0
        """Predicted seconds of the step in flight; 0: none is."""
        self._arrivals = 0

    # ---- any thread ----

    def submit(self, job: Job, at: float | None = None, form: Matcher | Failure | None = None) -> None:
        """Add a job and wake the engine. at: when it arrived, if not now; form as in `Arrival`."""
        now = time.monotonic() if at is None else at
        with self._condition:
            self._arrivals += 1
            self.messages.append(Arrival(job, self._arrivals, now, form))
            self._condition.notify()

    def cancel(self, key: int, position: int | None) -> None:
        """Add a cancel and wake the engine."""
        with self._condition:
            self.messages.append(Cancel(key, position))
            self._condition.notify()

    def prefetch(self, source: str, keys: Sequence[bytes]) -> None:
        """Add an announcement and wake the engine."""
        with self._condition:
            self.messages.append(Prefetch(source, keys))
            self._condition.notify()

    def wake(self) -> None:
        """Wake the engine."""
        with self._condition:
            self._condition.notify()

    def take_block_events(self) -> tuple[list[bytes], list[bytes]]:
        """Keys of stored and of evicted blocks since the last call. Only the last state of each key is returned."""
        with self._condition:
            changes, self._block_changes = self._block_changes, {}
        return [k for k, stored in changes.items() if stored], [k for k, stored in changes.items() if not stored]

    # ---- the engine's thread ----

    def sleep(self, most_s: float, unless: Callable[[], bool]) -> None:
        """Sleep until something wakes the engine, unless there are messages or the condition holds already."""
        with self._condition:
            if not (self.messages or unless()):
                self._condition.wait(most_s)

    def publish(self, stored: Iterable[bytes], evicted: Iterable[bytes]) -> None:
        """Publish keys of blocks that a step has stored and evicted."""
        with self._condition:
            self._block_changes.update(dict.fromkeys(evicted, False))
            self._block_changes.update(dict.fromkeys(stored, True))
