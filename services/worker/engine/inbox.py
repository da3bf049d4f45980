"""What crosses between an engine's thread and all others: jobs and cancels in, stats and block events out.

Knows when to wake a sleeping engine, never how jobs are run.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from services.worker.job import Job, Stats


class Arrival(NamedTuple):
    """A job that was submitted."""

    job: Job
    number: int
    """Its number among all arrivals, from 1."""
    at: float
    """When it arrived, on the clock `time.monotonic`."""


class Cancel(NamedTuple):
    """A job that is to end."""

    key: int
    position: int | None
    """Tokens of its answer that may stay in the prefix cache; None: all."""


class Inbox:
    """The first five methods may be called from any thread, the others from the engine's."""

    def __init__(self, stats: Stats) -> None:
        """stats: those of an engine that has not run."""
        self._condition = threading.Condition()
        self._messages: deque[Arrival | Cancel] = deque()
        self._block_changes: dict[bytes, bool] = {}
        self._stats = stats
        self._predicted_step_s = 0.0
        self._arrivals = 0

    # ---- any thread ----

    def submit(self, job: Job) -> None:
        """Add a job and wake the engine."""
        now = time.monotonic()
        with self._condition:
            self._arrivals += 1
            self._messages.append(Arrival(job, self._arrivals, now))
            self._condition.notify()

    def cancel(self, key: int, position: int | None) -> None:
        """Add a cancel and wake the engine."""
        with self._condition:
            self._messages.append(Cancel(key, position))
            self._condition.notify()

    def wake(self) -> None:
        """Wake the engine."""
        with self._condition:
            self._condition.notify()

    def stats(self) -> Stats:
        """The stats that were published last, with the prediction for the step in flight."""
        return replace(self._stats, predicted_step_s=self._predicted_step_s)

    def take_block_events(self) -> tuple[list[bytes], list[bytes]]:
        """Keys of stored and of evicted blocks since the last call. Only the last state of each key is returned."""
        with self._condition:
            changes, self._block_changes = self._block_changes, {}
        return [k for k, stored in changes.items() if stored], [k for k, stored in changes.items() if not stored]

    # ---- the engine's thread ----

    @property
    def pending(self) -> bool:
        """Whether there are messages."""
        return bool(self._messages)

    def take(self) -> Iterator[Arrival | Cancel]:
        """The messages in the order of their arrival, including those that arrive meanwhile."""
        while self._messages:
            yield self._messages.popleft()

    def sleep(self, most_s: float, unless: Callable[[], bool]) -> None:
        """Sleep until something wakes the engine, unless there are messages or the condition holds already."""
        with self._condition:
            if not (self._messages or unless()):
                self._condition.wait(most_s)

    def predict(self, step_s: float) -> None:
        """Publish the predicted seconds of the step in flight; 0: none is."""
        self._predicted_step_s = step_s

    def publish(self, stats: Stats, stored: Iterable[bytes], evicted: Iterable[bytes]) -> None:
        """Publish the state after a step."""
        if stored or evicted:
            with self._condition:
                self._block_changes.update(dict.fromkeys(evicted, False))
                self._block_changes.update(dict.fromkeys(stored, True))
        self._stats = stats
