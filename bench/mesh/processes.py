"""Starts a mesh for a benchmark: the real services as processes on free ports. Knows no load and no figures."""

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.mesh.cores import divided
from services.security import identity as identities
from weft.launch import demo_model, plan
from weft.launch.admin import secret_file
from weft.launch.supervisor import Supervisor

_START_S = 120.0


@dataclass(frozen=True, slots=True)
class Up:
    """A running mesh."""

    gateways: list[str]
    """host:port of each gateway."""
    http: str
    """host:port of the first gateway's HTTP server."""
    worker: str
    """host:port of the first worker."""
    cache: str
    """host:port of the cache service."""
    supervisor: Supervisor

    def pid(self, name: str) -> int:
        """Process id of worker-1, gateway, gateway-2, scheduler, cache or redis."""
        pid = self.supervisor.processes[name].pid
        assert pid is not None, f"{name} does not run"
        return pid

    def workers(self) -> list[int]:
        """Process ids of all workers."""
        return [self.pid(name) for name in self.supervisor.processes if name.startswith("worker-")]

    def running(self) -> dict[str, list[int]]:
        """Process ids by service (gateway, scheduler, worker, ...), those of child processes included."""
        found: dict[str, list[int]] = {}
        for name, process in self.supervisor.processes.items():
            if process.pid is not None:
                found.setdefault(name.partition("-")[0], []).extend(_with_descendants(process.pid))
        return found


@contextlib.asynccontextmanager
async def meanwhile(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run the coroutines in the background of the `with` block; cancel them at its end."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def up(
    settings: Mapping[str, str],
    *,
    gateways: int = 1,
    workers: int = 1,
    model: str = "",
    tls: bool = False,
    cores: int = 0,
    roles: Sequence[str] = (),
    start_s: float = _START_S,
    worker: str = "services.worker",
) -> AsyncIterator[Up]:
    """Run a mesh with these environment variables; the default model is the demo model. Raises GaveUp.

    `tls`: the services authenticate one another and encrypt their links, as `weft serve` does by default.
    `cores`: the mesh has that many cores to itself, and this process and its later children have the others.
    `roles`: of the workers, in turn.
    Each gateway is one process unless WEFT_GATEWAY_PROCESSES is among the settings. start_s: the longest start.
    `worker`: the module that workers run.
    """
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as home:
        spec = plan.MeshSpec(
            models=[model or str(demo_model.model_folder())],
            home=Path(home),
            workers=workers,
            roles=roles,
            free_ports=True,
            plain=not tls,
            settings={"WEFT_LOG_LEVEL": "warning", plan.PROCESSES_SETTING: "1", **settings},
        )
        async with plan.planned(spec) as planned:
            with _bound(cores) as clients:
                async with _running(_with_worker(planned, worker), gateways, workers, Path(home), start_s) as running:
                    os.sched_setaffinity(0, clients)
                    with _gateway_of(Path(home)) if tls else contextlib.nullcontext():
                        yield running


def _with_worker(mesh: plan.MeshPlan, module: str) -> plan.MeshPlan:
    """The same mesh, whose workers run this module."""
    command = [sys.executable, "-m", module]
    specs = [replace(spec, command=command) if spec.name.startswith("worker-") else spec for spec in mesh.specs]
    return replace(mesh, specs=specs)


@contextlib.contextmanager
def _bound(count: int) -> Iterator[set[int]]:
    """Binds this process to `count` cores within the block -> the others; 0: to all cores, which are returned."""
    before = os.sched_getaffinity(0)
    own, others = divided(count) if count else (before, before)
    os.sched_setaffinity(0, own)
    try:
        yield others
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def _gateway_of(home: Path) -> Iterator[None]:
    """Connect to the inner ports of the mesh in this folder as a gateway does."""
    before = identities.current()
    environment = {"WEFT_MESH_SECRET_FILE": str(secret_file(home))}
    identities.assume(identities.load("gateway", identities.named(environment)))
    try:
        yield
    finally:
        identities.assume(before)


@contextlib.asynccontextmanager
async def _running(mesh: plan.MeshPlan, gateways: int, workers: int, logs: Path, start_s: float) -> AsyncIterator[Up]:
    """Starts the planned mesh with `gateways` gateways, and yields once each of them serves all workers."""
    first = mesh.specs[-1]
    addresses = [mesh.address, *(f"{plan.HOST}:{mesh.ports.free(plan.HOST)}" for _ in range(gateways - 1))]
    more = [
        replace(
            first,
            name=f"gateway-{number}",
            environment={
                **first.environment,
                "WEFT_LISTEN": address,
                plan.HTTP_PORT_SETTING: str(mesh.ports.free(plan.HOST)),
            },
            ready=plan.serving(address, "weft.v1.Inference", mesh.mesh_id),
        )
        for number, address in enumerate(addresses[1:], 2)
    ]
    supervisor = Supervisor([*mesh.specs, *more], logs)
    async with supervisor.running():
        async with asyncio.timeout(start_s):
            for address in addresses:
                await supervisor.during(plan.wait_served(address, workers))
        listens = {spec.name: spec.environment.get("WEFT_LISTEN", "") for spec in mesh.specs}
        yield Up(addresses, mesh.http_address, listens["worker-1"], listens["cache"], supervisor)


def _with_descendants(pid: int) -> list[int]:
    """A process and all that it, its children and theirs have started; a process that has just ended has none."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for thread in Path(f"/proc/{parent}/task").iterdir():
                found += [int(word) for word in (thread / "children").read_text().split()]
    return found


def paced(step_ms: float, *, batch: int = 64, prefill_rate: float = 0.0) -> dict[str, str]:
    """Settings of a worker with the paced engine."""
    return {
        "ENGINE": "paced",
        "WEFT_PACED_STEP_MS": str(step_ms),
        "WEFT_PACED_PREFILL_RATE": str(prefill_rate),
        "MAX_BATCH_SIZE": str(batch),
        "MAX_SEQ_LENGTH": str(128 * 1024),
        "WEFT_STEP_TOKENS": str(max(8192, batch)),
    }


def processor_s(pid: int) -> float:
    """Processor time that a process has used so far, in seconds. Linux only."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
