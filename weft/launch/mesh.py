"""A mesh for the time of a command: starts it, shows how it gets ready, stops it. Knows nothing of its services."""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from rich.console import Console
from rich.status import Status
from rich.text import Text

from protos import inference_pb2 as api
from weft.cli.flags import LOCAL
from weft.cli.terminal import amount
from weft.launch import plan
from weft.launch.startup import Loading, watch
from weft.launch.supervisor import State, Supervisor

_REFRESH_S = 0.1


@dataclass(frozen=True, slots=True)
class Running:
    """A mesh that answers."""

    address: str
    models: list[api.Model]
    supervisor: Supervisor


@contextlib.asynccontextmanager
async def up(wanted: plan.MeshSpec, out: Console, *, verbose: bool = False) -> AsyncIterator[Running]:
    """The mesh, ready, until the block ends or a signal comes; the second signal ends it without waiting for anything.

    Raises GaveUp, PortTaken or NoRedisError with one line for people.
    """
    mesh = await plan.plan(wanted)
    out.print(f"redis: {mesh.redis}")
    progress = _Progress(out)
    supervisor = Supervisor(mesh.specs, None if verbose else wanted.home / "logs", progress.notice)
    _stop_on_signals(supervisor)
    async with progress.following(supervisor), supervisor.running():
        models = await supervisor.during(plan.wait_served(mesh.address, wanted.workers * len(wanted.models)))
        progress.done()
        yield Running(mesh.address, models, supervisor)


async def serve(wanted: plan.MeshSpec, out: Console, *, verbose: bool = False) -> None:
    """Keeps the mesh up until a signal comes. Raises as `up`."""
    try:
        async with up(wanted, out, verbose=verbose) as mesh:
            for model in mesh.models:
                size = f"{amount(model.parameters)} parameters, context {model.context_length}"
                out.print(f"serving [bold]{model.name}[/bold] ({size}) at [bold]{mesh.address}[/bold]")
            if not mesh.models:
                out.print(f"serving at [bold]{mesh.address}[/bold], to those who have an API key")
            where = "" if mesh.address == LOCAL else f" --address {mesh.address}"
            out.print(f"try: weft generate 'Once upon a time'{where}   (Ctrl-C stops)")
            await mesh.supervisor.during(asyncio.Event().wait())
    except asyncio.CancelledError:
        out.print("stopped")


def _stop_on_signals(supervisor: Supervisor) -> None:
    """The first signal ends the task that called this, which stops the mesh; the next one kills it."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    asked = False

    def on_signal() -> None:
        nonlocal asked
        if asked:
            supervisor.kill()
        else:
            task.cancel()
        asked = True

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)


class _Progress:
    """A line for each thing that has happened and, on a terminal until `done`, one for what is awaited."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._began: dict[str, float] = {}
        self._status = Status("", console=out)
        self._refreshing: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._loading: dict[str, Loading] = {}

    def notice(self, name: str, state: State, detail: str) -> None:
        """Takes a change from the supervisor."""
        if state is State.STARTING:
            self._began[name] = time.monotonic()
        elif state is State.READY:
            self._out.print(f"{name}: ready in {time.monotonic() - self._began[name]:.1f} s")
        elif state is State.CRASHED:
            self._out.print(f"{name}: {detail}", style="yellow", markup=False)

    @contextlib.asynccontextmanager
    async def following(self, supervisor: Supervisor) -> AsyncIterator[None]:
        """Shows what the processes are doing."""
        workers = {
            name: process.spec.environment["WEFT_LISTEN"]
            for name, process in supervisor.processes.items()
            if name.startswith("worker")
        }
        self._watching = asyncio.create_task(watch(workers, self._loads))
        if self._out.is_terminal:
            self._status.start()
            self._refreshing = asyncio.create_task(self._refresh(supervisor))
        try:
            yield
        finally:
            self.done()

    def done(self) -> None:
        """Nothing is awaited any more."""
        if self._watching is not None:
            self._watching.cancel()
        if self._refreshing is not None:
            self._refreshing.cancel()
            self._status.stop()

    def _loads(self, name: str, loading: Loading) -> None:
        """A worker is further. What has no line that can be drawn over gets one for each tenth of a phase."""
        before = self._loading.get(name)
        self._loading[name] = loading
        tenths = [(each.phase, (each.percent or 0) // 10) for each in (before, loading) if each is not None]
        if not self._out.is_terminal and len(set(tenths)) == len(tenths):
            self._out.print(f"{name}: {loading}", markup=False)

    async def _refresh(self, supervisor: Supervisor) -> None:
        while True:
            waiting = [process for process in supervisor.processes.values() if process.state is not State.READY]
            names = ", ".join(process.spec.name for process in waiting) or "the links between them"
            loading = [f"{name} {self._loading[name]}" for p in waiting if (name := p.spec.name) in self._loading]
            said = ", ".join(loading) or (waiting[0].last_line() if waiting else "")
            line = f"starting {names}{f' ({said})' if said else ''}"
            # A line that wraps could not be drawn over.
            self._status.update(Text(line[: self._out.width - 4]))
            await asyncio.sleep(_REFRESH_S)
