"""The progress of this worker as gateways and the scheduler receive it. Knows counters, no job and no link."""

import time
from collections.abc import Callable
from threading import Thread
from typing import Protocol

from protos import mesh_pb2 as mesh
from services.hang_watch import StepCheck
from services.worker.job import Stats

HEARTBEAT_S = 0.25
"""Time between two heartbeats on a link to a gateway."""
_HANG_S, _HANG_STEPS = 2.0, 3


class JobCounts(Protocol):
    """What the progress reads of the jobs."""

    draining: bool

    @property
    def idle(self) -> bool:
        """No job runs."""


class Progress:
    """Reads the progress of the engine and of its thread."""

    def __init__(self, stats: Callable[[], Stats], jobs: JobCounts, guesses: bool = False) -> None:
        """guesses: steps may have guesses."""
        self._stats = stats
        self._jobs = jobs
        self._guesses = guesses
        self._clock_id: int | None = None

    def watch(self, thread: Thread) -> None:
        """Reads the CPU time of this thread from now on. Without it, or where there is none, that time is 0."""
        if hasattr(time, "pthread_getcpuclockid") and thread.ident is not None:
            self._clock_id = time.pthread_getcpuclockid(thread.ident)

    def cpu_s(self) -> float:
        """CPU time of the engine's thread in seconds."""
        try:
            return time.clock_gettime(self._clock_id) if self._clock_id is not None else 0.0
        except OSError:  # The thread has ended.
            return 0.0

    def hang_check(self) -> StepCheck:
        """Finds an engine that makes no step although jobs run, by the rule of the gateways: nothing for 2 s and for
        three times what the step was announced to take."""

        def read() -> tuple[bool, int, float]:
            stats = self._stats()
            return not self._jobs.idle, stats.steps, max(_HANG_S, _HANG_STEPS * stats.predicted_step_s)

        return StepCheck("engine", read)

    def heartbeat(self, received: int) -> mesh.WorkerHeartbeat:
        """The heartbeat of a link. received: how many messages the link has received."""
        stats = self._stats()
        return mesh.WorkerHeartbeat(
            steps=stats.steps,
            step_s=stats.predicted_step_s,
            engine_cpu_s=self.cpu_s(),
            busy=not self._jobs.idle,
            received=received,
            draining=self._jobs.draining,
            reads_more=True,
            guesses=self._guesses,
        )
