"""Keeps processes running: starts them, waits until they are ready, restarts those that crash, stops all in order.

Knows processes, signals and log files, never what the processes do.
"""

import asyncio
import contextlib
import enum
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TypeVar

Result = TypeVar("Result")

PARENT_DEATH = Path(__file__).parents[2] / "services" / "parent_death.py"
_LOG_BYTES = 16 << 20
# Beginnings of last lines of common error reports that hold no reason.
_NOISE = ("For further information visit",)


class State(enum.StrEnum):
    """The state of a process."""

    STARTING = "starting"
    READY = "ready"
    CRASHED = "crashed"
    GAVE_UP = "gave up"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process to keep running."""

    name: str
    command: Sequence[str]
    ready: Callable[[], Awaitable[bool]]
    """Whether it is ready; polled until it is."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables beside those of the supervisor's own environment."""
    orphan_signal: signal.Signals = signal.SIGKILL
    """The signal that it gets when the supervisor dies without stopping it."""
    repair: Callable[[], str | None] = lambda: None
    """Called once before giving up: repairs what may have kept the process from starting and returns a description, or
    None if there is nothing to repair."""
    inherited: Sequence[int] = ()
    """File descriptors that it inherits."""


@dataclass(frozen=True, slots=True)
class Policy:
    """When a process is restarted or given up, and how long the supervisor waits."""

    first_backoff_s: float = 0.2
    longest_backoff_s: float = 10.0
    settled_s: float = 10.0
    """After a run of this many seconds the next backoff is the first one again."""
    max_starts: int = 3
    """Starts of a process that was never ready, before it is given up."""
    poll_s: float = 0.1
    grace_s: float = 15.0
    """Seconds from SIGTERM to SIGKILL."""


class GaveUp(Exception):
    """A process cannot be started; the message is one line with its name and the reason."""


Notice = Callable[[str, State, str], None]
"""Called at each change: name of the process, its new state, a detail or ""."""


class Supervisor:
    """Runs the processes of `specs`, each in a process group of its own, with a log file `<name>.log` in `logs` (None:
    their output goes to this process's stderr).

    Run it in the main thread: to the kernel, a parent dies when the thread that started the process ends.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        logs: Path | None,
        notice: Notice = lambda *_: None,
        policy: Policy | None = None,
    ) -> None:
        policy = policy or Policy()
        self.processes = {spec.name: Process(spec, logs, notice, policy) for spec in specs}
        self._tasks: list[asyncio.Task[None]] = []

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Starts all at once, enters the block when all are ready, stops them in reverse order. Raises GaveUp."""
        try:
            self._tasks = [asyncio.create_task(process.run()) for process in self.processes.values()]
            await self.during(self._all_ready())
            yield
        finally:
            await self.stop()

    async def stop(self) -> None:
        """Stops all processes, the last one first."""
        try:
            for process in reversed(self.processes.values()):
                await process.stop()
        finally:
            self.kill()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def kill(self) -> None:
        """Kills all processes at once, without the grace period of `stop`."""
        for process in self.processes.values():
            process.kill()

    async def during(self, work: Awaitable[Result]) -> Result:
        """Awaits `work` while the processes run. Raises GaveUp as soon as one of them is given up."""
        waiting = asyncio.ensure_future(work)
        try:
            await asyncio.wait([waiting, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in self._tasks:
                if task.done():
                    task.result()
            return await waiting
        finally:
            waiting.cancel()

    async def _all_ready(self) -> None:
        for process in self.processes.values():
            await process.was_ready.wait()


class Process:
    """One process and its restarts."""

    def __init__(self, spec: ProcessSpec, logs: Path | None, notice: Notice, policy: Policy) -> None:
        self.spec = spec
        self.log = logs / f"{spec.name}.log" if logs else None
        self.was_ready = asyncio.Event()
        self.state = State.STOPPED
        self.restarts = 0
        self._notice = notice
        self._policy = policy
        self._child: asyncio.subprocess.Process | None = None
        self._log_start = self.log.stat().st_size if self.log and self.log.exists() else 0
        self._repaired = False
        self._stopping = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """The process id; None while the process does not run."""
        return self._child.pid if self._child and self._child.returncode is None else None

    def last_line(self) -> str:
        """The last line of this run's log; "" without one."""
        if self.log is None or not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            file.seek(max(self._log_start, self.log.stat().st_size - (64 << 10)))
            lines = file.read().decode(errors="replace").splitlines()
        newest_first = (line.strip() for line in reversed(lines))
        return next((_plain(line) for line in newest_first if line and not line.startswith(_NOISE)), "")

    async def run(self) -> None:
        """Runs the process until `stop`, restarts it after a crash. Raises GaveUp if it is never ready."""
        failures = 0
        while not self._stopping.is_set():
            started_at = time.monotonic()
            code = await self._run_once()
            if self._stopping.is_set():
                break
            self.restarts += 1
            settled = time.monotonic() - started_at >= self._policy.settled_s
            failures = 1 if settled and self.state is State.READY else failures + 1
            # EX_CONFIG means a configuration that cannot work: another start would fail in the same way.
            if not self.was_ready.is_set() and (code == os.EX_CONFIG or failures >= self._policy.max_starts):
                self._repair_or_give_up(code)
                failures = 0
            backoff_s = min(self._policy.first_backoff_s * 2 ** max(failures - 1, 0), self._policy.longest_backoff_s)
            self._change(State.CRASHED, f"{self._ended(code)}; restart in {backoff_s:.1f} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), backoff_s)

    async def stop(self) -> None:
        """Sends SIGTERM, and SIGKILL to what is left after the grace period."""
        self._stopping.set()
        if self._child is None or self._child.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._child.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._child.wait(), self._policy.grace_s)
        self.kill()
        await self._child.wait()
        self._change(State.STOPPED)

    def kill(self) -> None:
        """Sends SIGKILL to the process and to whatever it started in its process group."""
        self._stopping.set()
        if self.pid is not None:
            self._kill_group()

    async def _run_once(self) -> int:
        self._change(State.STARTING)
        self._child = await self._spawn()
        polling = asyncio.create_task(self._poll_until_ready())
        try:
            return await self._child.wait()
        finally:
            polling.cancel()
            self._kill_group()

    async def _spawn(self) -> asyncio.subprocess.Process:
        orphan_signal = str(int(self.spec.orphan_signal))
        wrapper = [sys.executable, "-I", "-S", str(PARENT_DEATH), str(os.getpid()), orphan_signal]
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(self._open_log()) if self.log else None
            return await asyncio.create_subprocess_exec(
                *wrapper,
                *self.spec.command,
                env={**os.environ, **self.spec.environment},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output or sys.stderr,
                stderr=output,
                # A Ctrl-C at the terminal reaches the supervisor alone.
                process_group=0,
                pass_fds=self.spec.inherited,
            )

    def _open_log(self) -> IO[bytes]:
        assert self.log is not None
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if self.log.exists() and self.log.stat().st_size > _LOG_BYTES:
            self.log.replace(self.log.with_suffix(".log.old"))
        file = self.log.open("ab")
        self._log_start = file.tell()
        return file

    async def _poll_until_ready(self) -> None:
        while not await self.spec.ready():  # noqa: ASYNC110 (the event is in another process)
            await asyncio.sleep(self._policy.poll_s)
        self._change(State.READY)
        self.was_ready.set()

    def _repair_or_give_up(self, code: int) -> None:
        repaired = None if self._repaired else self.spec.repair()
        if repaired is None:
            reason = f"{self.spec.name} {self._ended(code)}{f' (log: {self.log})' if self.log else ''}"
            self._change(State.GAVE_UP, reason)
            raise GaveUp(reason)
        self._repaired = True
        self._change(State.CRASHED, repaired)

    def _ended(self, code: int) -> str:
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        line = self.last_line()
        return f"ended with exit code {code}{f': {line}' if line else ''}"

    def _kill_group(self) -> None:
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._child.pid, signal.SIGKILL)

    def _change(self, state: State, detail: str = "") -> None:
        self.state = state
        self._notice(self.spec.name, state, detail)


def _plain(line: str) -> str:
    """A line of a log for people: of a JSON record its event and its values."""
    try:
        record = json.loads(line)
    except ValueError:
        return line
    if not isinstance(record, dict) or "event" not in record:
        return line
    hidden = {"event", "level", "timestamp", "service", "frames"}
    values = [f"{name}={value}" for name, value in record.items() if name not in hidden]
    return " ".join([str(record["event"]), *values])
