"""Runs the engine in a thread of its own and passes its events to the event loop in order. Knows no model."""

import asyncio
import threading
import time
from collections import deque
from operator import attrgetter

from services import telemetry
from services.worker.engine.base import Engine
from services.worker.job import StepOutput, TokenOut
from services.worker.service.jobs import Jobs
from services.worker.service.scheduler_link import SchedulerLink

_LONG_STEP_S = 0.5
_MOST_UNDELIVERED = 32  # steps whose tokens the event loop has not taken yet: a faster engine waits
_ROOM_WAIT_S = 0.5
# Links write a job's first token before the engine's thread takes the interpreter for its next launch.
_FIRST_WAIT_S = 0.0005
_position = attrgetter("position")


def _position_above_0(token: TokenOut) -> bool:
    """A key that sorts first tokens before all others and keeps every stream's order."""
    return token.position > 0


class EngineFailed(Exception):
    """The engine's thread has ended by a bug, or because its device is lost: only a new process can recover."""


class EngineThread:
    """Runs the engine in a thread of its own; as `EngineEvents` it passes what happens to the event loop in order.

    As a context manager it returns a future that never has a result; it raises EngineFailed when the thread has failed.
    """

    def __init__(self, engine: Engine, jobs: Jobs, attachment: SchedulerLink) -> None:
        self._engine = engine
        self._jobs = jobs
        self._attachment = attachment
        self._loop = asyncio.get_running_loop()
        self._stop = threading.Event()
        self._undelivered: deque[tuple[StepOutput, float | None]] = deque()
        """Outputs and the seconds of their steps. The engine's thread adds, the event loop takes."""
        self._delivery_due = False
        self._taken = threading.Event()
        self._written = threading.Event()
        self._launched_at: float | None = None
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def __enter__(self) -> "asyncio.Future[None]":
        self.thread.start()
        return self._failed

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._engine.wake()
        self.thread.join(timeout=5)

    def _run(self) -> None:
        try:
            self._engine.run(self, self._stop)
        except Exception as error:
            telemetry.log_exception("the engine failed", error)
            self._loop.call_soon_threadsafe(self._failed.set_exception, EngineFailed())

    def launched(self, predicted_s: float) -> None:
        """A step begins. The scheduler is informed at once if the step will take long."""
        self._launched_at = time.monotonic()
        if predicted_s > _LONG_STEP_S:
            self._loop.call_soon_threadsafe(self._attachment.changed)

    def begun(self, output: StepOutput) -> None:
        """Answers have begun in a step that is not over."""
        self._pass_on(output, None)

    def stepped(self, output: StepOutput) -> None:
        """A step is over."""
        launched_at, self._launched_at = self._launched_at, None
        self._pass_on(output, None if launched_at is None else time.monotonic() - launched_at)

    def _pass_on(self, output: StepOutput, step_s: float | None) -> None:
        """Have an output delivered, waiting while too many are not delivered yet."""
        while len(self._undelivered) >= _MOST_UNDELIVERED and not self._stop.is_set():
            self._taken.clear()
            if len(self._undelivered) >= _MOST_UNDELIVERED:
                self._taken.wait(_ROOM_WAIT_S)
        first = 0 in map(_position, output.tokens)
        if first:
            output.tokens.sort(key=_position_above_0)
            self._written.clear()
        self._undelivered.append((output, step_s))
        if not self._delivery_due:
            self._delivery_due = True
            self._loop.call_soon_threadsafe(self._deliver)
        if first:
            self._written.wait(_FIRST_WAIT_S)

    def _deliver(self) -> None:
        """Deliver all outputs that there are."""
        self._delivery_due = False  # First: an output that is added from now on has a delivery of its own.
        ended = False
        while self._undelivered:
            output, step_s = self._undelivered.popleft()
            self._jobs.deliver(output, step_s)
            ended = ended or bool(output.ended)
        self._loop.call_soon(self._delivered, ended)  # after the links, which write in this iteration of the loop

    def _delivered(self, ended: bool) -> None:
        """The links have written: the engine's thread goes on, and the scheduler is informed."""
        for event in (self._written, self._taken):
            if not event.is_set():
                event.set()
        self._attachment.changed(urgent=ended)
