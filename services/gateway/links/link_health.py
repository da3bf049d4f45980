"""When a gateway gives up a worker, judged by its own link to it. Pure: knows heartbeats and times, no sockets.

Two stages. A suspect worker gets no new jobs of this gateway. A lost one loses its job streams, which continue
elsewhere.
The scheduler's word ends no stream: a worker that it has lost may still send tokens.
"""

import math
from dataclasses import dataclass

from protos import mesh_pb2 as mesh

SUSPECT_S = 1.0
"""Silence, or time without an acknowledgement, after which a worker gets no new jobs. It sends four heartbeats a
second, each of which acknowledges what it has received."""
UNANSWERED = 3
"""Heartbeats that acknowledge nothing new, after which a missing acknowledgement counts."""
LEAST_S = 2.0
"""Shortest time without a sign of life after which a worker is lost; longer if its steps are longer."""
STEPS = 3
"""Announced steps without progress after which a worker is lost."""
PATIENCE = 5
"""Factor of all waits where a loss is unlikely: a step uses the CPU, no other worker can continue, or more workers are
silent than would fail at a time."""


@dataclass(slots=True)
class LinkHealth:
    """What a gateway has received from one worker. Times are on one clock, in seconds."""

    opened_at: float
    heard_at: float
    stepped_at: float
    """When the worker last completed a step, or had nothing to do."""
    computed_at: float
    """The same, or when its engine last used the CPU."""
    unacknowledged_at: float = math.inf
    """When the oldest message was sent that the worker has not acknowledged; infinite without one."""
    unanswered: int = 0
    """Heartbeats without a new acknowledgement while one was due. Where heartbeats acknowledge one message after the
    other, but late, this process or the worker is behind; where none arrives between tokens, they wait in the link."""
    last: mesh.WorkerHeartbeat | None = None
    """The last heartbeat; None before the first, and for a worker that sends none."""

    @classmethod
    def begin(cls, now: float) -> "LinkHealth":
        """The health of a link that is opened now."""
        return cls(now, now, now, now)

    def beat(self, heartbeat: mesh.WorkerHeartbeat, now: float) -> None:
        """A heartbeat has arrived."""
        last, self.last = self.last, heartbeat
        due = self.unacknowledged_at < math.inf and last is not None and heartbeat.received == last.received
        self.unanswered = self.unanswered + 1 if due else 0
        if last is None or heartbeat.steps != last.steps or not (heartbeat.busy and last.busy):
            self.stepped_at = self.computed_at = now
        elif heartbeat.engine_cpu_s != last.engine_cpu_s:
            self.computed_at = now

    def excuse(self, seconds: float) -> None:
        """The gateway itself did not run for this time, which counts against no worker."""
        self.heard_at += seconds
        self.stepped_at += seconds
        self.computed_at += seconds
        self.unacknowledged_at += seconds

    @property
    def judges(self) -> bool:
        """The worker sends heartbeats. One of an older version does not; the scheduler judges it."""
        return self.last is not None

    @property
    def limit_s(self) -> float:
        """max(2 s, 3 announced steps)."""
        return max(LEAST_S, STEPS * self.last.step_s if self.last is not None else 0.0)

    def suspect(self, now: float) -> bool:
        """Whether the worker gets no new jobs."""
        if self.last is None:
            return False
        since = now - SUSPECT_S
        quiet = self.heard_at < since or (self.unacknowledged_at < since and self.unanswered >= UNANSWERED)
        return quiet or self.last.draining or now - self.stepped_at > self.limit_s

    def dead(self, now: float, patient: bool) -> bool:
        """Whether the worker has lost its streams: it is silent, or its step hangs. `patient`: wait PATIENCE times as
        long."""
        if self.last is None:
            return False
        limit_s = self.limit_s * (PATIENCE if patient else 1)
        return now - min(self.heard_at, self.computed_at) > limit_s or now - self.stepped_at > PATIENCE * self.limit_s

    def unreceived(self, sent_at: float, now: float, patient: bool) -> bool:
        """Whether a job that was sent then, and is not acknowledged yet, is given up."""
        late = now - sent_at > self.limit_s * (PATIENCE if patient else 1)
        return self.judges and late and self.unanswered >= UNANSWERED


class MigrationBudget:
    """Bounds how many workers a gateway gives up for their silence. If most workers fall silent together, the cause is
    more likely here, or a machine without CPU time, and moving every stream would make it worse."""

    WINDOW_S = 10.0

    def __init__(self) -> None:
        self._spent: list[float] = []

    def allows(self, workers: int, now: float) -> bool:
        """Whether one of the `workers` may be given up now: at most half of them, and at least one, in 10 s."""
        self._spent = [at for at in self._spent if now - at < self.WINDOW_S]
        return len(self._spent) < max(1, workers // 2)

    def spend(self, now: float) -> None:
        """A worker is given up."""
        self._spent.append(now)
