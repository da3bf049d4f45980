"""Runs a mesh for the time of a command: starts it, shows its progress, stops it. Knows nothing of its services."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.status import Status
from rich.text import Text

from protos import inference_pb2 as api
from report.console import amount, bold
from weft.client.api import DEFAULT_ADDRESS
from weft.client.channel import TLS_PREFIX
from weft.launch import plan
from weft.launch.reach import Reach
from weft.launch.startup import Loading, watch
from weft.launch.supervisor import State, Supervisor

_REFRESH_S = 0.1
_FALSE = {"false", "0", "no", "off", "n", "f"}


@dataclass(frozen=True, slots=True)
class Running:
    """A mesh that is ready."""

    address: str
    """host:port at which this machine reaches the gateway: by a name of its certificate, if it has one."""
    listen: str
    """host:port at which the gateway listens for other machines; empty: for this one alone."""
    http_address: str
    """The same over HTTP; empty for none."""
    models: list[api.Model]
    supervisor: Supervisor
    tls: bool = False
    """The ports for callers are encrypted."""
    tools: str = ""
    """A command that reaches the inner ports; empty: it needs no more than its defaults."""


@contextlib.asynccontextmanager
async def up(spec: plan.MeshSpec, out: Console, *, verbose: bool = False) -> AsyncIterator[Running]:
    """The mesh, ready, until the block ends or a signal comes; the second signal kills it without a grace period.

    Raises GaveUp, CannotServe or NoRedisError with one line for people.
    """
    async with plan.planned(spec) as mesh:
        out.print(f"redis: {mesh.redis}", markup=False)
        progress = _Progress(out, mesh.mesh_id, mesh.reach)
        supervisor = Supervisor(mesh.specs, None if verbose else mesh.home / "logs", progress.notice)
        _stop_on_signals(supervisor)
        async with progress.following(supervisor), supervisor.running():
            models = await supervisor.during(
                plan.wait_served(mesh.address, spec.workers * len(spec.models), mesh.reach)
            )
            progress.done()
            named, over_http = (mesh.reach.by_name(address) for address in (mesh.address, mesh.http_address))
            listen = mesh.listen if mesh.listen != mesh.address else ""
            yield Running(named, listen, over_http, models, supervisor, bool(mesh.reach.door), mesh.tools)


async def serve(spec: plan.MeshSpec, out: Console, *, verbose: bool = False) -> None:
    """Keeps the mesh up until a signal comes. Raises as `up`."""
    try:
        async with up(spec, out, verbose=verbose) as mesh:
            for model in mesh.models:
                size = f"{amount(model.parameters)} parameters, context {model.context_length}"
                out.print(f"serving {bold(model.name)} ({size}) at {bold(mesh.address)}", markup=True)
            if not mesh.models:
                out.print(f"serving at {bold(mesh.address)}, for callers with an API key", markup=True)
            scheme = "https" if mesh.tls else "http"
            if mesh.http_address:
                out.print(f"OpenAI's API: {bold(f'{scheme}://{mesh.http_address}/v1')}", markup=True)
                if os.environ.get("WEFT_GATEWAY_PAGE", "").lower() not in _FALSE:
                    page = f"{scheme}://{mesh.http_address}/"
                    out.print(f"playground and live view: {bold(page)}", markup=True)
            if mesh.listen:
                out.print(f"listening at {mesh.listen}: open to other machines", style="yellow", markup=False)
            if mesh.tools:
                out.print(f"adapters and profiles, as in: {mesh.tools}", markup=False)
            address = f"{TLS_PREFIX if mesh.tls else ''}{mesh.address}"
            where = "" if address == DEFAULT_ADDRESS else f" --address {address}"
            where += "" if mesh.models else " --api-key KEY"
            out.print(f"try: weft {first_command(mesh.models)}{where}   (Ctrl-C stops)", markup=False)
            await mesh.supervisor.during(asyncio.Event().wait())
    except asyncio.CancelledError:
        out.print("stopped")


def first_command(models: Sequence[api.Model]) -> str:
    """A command that these models answer, without the address; the first model is named if there are several."""
    own = [model for model in models if not model.base]
    for task, command in (("generate", "generate 'Once upon a time'"), ("embed", "embed 'Once upon a time'")):
        able = [model.name for model in own if task in model.tasks]
        if able or not own:
            return f"{command} --model {able[0]}" if len(own) > 1 else command
    return "models"


def _stop_on_signals(supervisor: Supervisor) -> None:
    """The first signal cancels the calling task, which stops the mesh; the next one kills the mesh."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    signalled = False

    def on_signal() -> None:
        nonlocal signalled
        if signalled:
            supervisor.kill()
        else:
            task.cancel()
        signalled = True

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)


class _Progress:
    """Prints a line for each event of the start and, on a terminal until `done`, one line that follows the start."""

    def __init__(self, out: Console, mesh_id: str, reach: Reach) -> None:
        self._out = out
        self._reach = reach
        self._mesh_id = mesh_id
        self._started_at: dict[str, float] = {}
        self._status = Status("", console=out)
        self._refreshing: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._loading: dict[str, Loading] = {}

    def notice(self, name: str, state: State, detail: str) -> None:
        """Takes a change of a process from the supervisor."""
        if state is State.STARTING:
            self._started_at[name] = time.monotonic()
        elif state is State.READY:
            self._out.print(f"{name}: ready in {time.monotonic() - self._started_at[name]:.1f} s")
        elif state is State.CRASHED:
            self._out.print(f"{name}: {detail}", style="yellow", markup=False)

    @contextlib.asynccontextmanager
    async def following(self, supervisor: Supervisor) -> AsyncIterator[None]:
        """Shows the start of the processes inside the block."""
        workers = {
            name: process.spec.environment["WEFT_LISTEN"]
            for name, process in supervisor.processes.items()
            if name.startswith("worker")
        }
        self._watching = asyncio.create_task(watch(workers, self._on_loading, self._mesh_id, self._reach))
        if self._out.is_terminal:
            self._status.start()
            self._refreshing = asyncio.create_task(self._refresh(supervisor))
        try:
            yield
        finally:
            self.done()

    def done(self) -> None:
        """The start is over: nothing more is shown."""
        if self._watching is not None:
            self._watching.cancel()
        if self._refreshing is not None:
            self._refreshing.cancel()
            self._status.stop()

    def _on_loading(self, name: str, loading: Loading) -> None:
        """Takes a worker's progress. Output that is no terminal gets a line for each tenth of a phase."""
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
            detail = ", ".join(loading) or (waiting[0].last_line() if waiting else "")
            line = f"starting {names}{f' ({detail})' if detail else ''}"
            # A line that wraps could not be drawn over.
            self._status.update(Text(line[: self._out.width - 4]))
            await asyncio.sleep(_REFRESH_S)
