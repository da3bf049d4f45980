"""Wires a worker together: load the model, serve the Run link, stay attached to the scheduler, drain at the end."""

import asyncio
import contextlib
import os
import sys
import uuid
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, NoReturn

import structlog

from protos import inference_pb2 as api
from protos import mesh_pb2 as mesh
from protos import mesh_pb2_grpc as mesh_grpc
from protos import vllm_engine_pb2_grpc as vllm_grpc
from services import host, process, rpc, telemetry
from services.hang_watch import watching
from services.security import identity
from services.worker.build.load import LoadedModel, abandon, load_model
from services.worker.build.share_blocks import described, peer_prefixes, rounding_of, shared_prefixes
from services.worker.errors import CheckpointError
from services.worker.loader.stop_watch import StopWatches
from services.worker.service.adapters import Adapters
from services.worker.service.address import NoAddress, advertised
from services.worker.service.block_lender import BlockLender
from services.worker.service.block_sender import BlockSender
from services.worker.service.engine_thread import EngineFailed, EngineThread
from services.worker.service.heartbeat import Progress
from services.worker.service.jobs import Jobs
from services.worker.service.metrics import WorkerMetrics
from services.worker.service.scheduler_link import Refused, SchedulerLink, report_of
from services.worker.service.servicer import Loaded, WorkerService
from services.worker.service.startup import READY, Startup, announce
from services.worker.service.vllm.servicer import NAME as VLLM
from services.worker.service.vllm.servicer import EngineModel, VllmEngineService
from services.worker.settings import WorkerSettings

log = structlog.get_logger("worker")

NAME = "weft.v1.Worker"
BLOCK_FRAMES = b"worker-blocks"
"""What the key of the frames of blocks between workers is derived for."""
_ROLES = {
    "both": api.WORKER_ROLE_UNSPECIFIED,
    "prefill": api.WORKER_ROLE_PREFILL,
    "decode": api.WORKER_ROLE_DECODE,
}
# The engine's thread releases the GIL with every kernel that it launches. With Python's default of 5 ms, a thread that
# reads a burst of requests would keep the GIL for 5 ms each time.
_SWITCH_S = 0.001
# A thread of OpenMP that waits for another one spins for milliseconds by default, on a busy machine perhaps on the very
# processor that the other one waits for.
_SPINS = "1000"


def spin_briefly(environment: MutableMapping[str, str]) -> None:
    """Make a thread of OpenMP that waits for another one sleep after a short spin, unless the environment sets how
    threads wait. Libraries that are loaded later read this, such as that of torch; so do the processes of ranks."""
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", _SPINS)


async def main() -> None:
    """Serve until SIGTERM or SIGINT, then let running jobs finish. Exits with a one-line reason if it cannot serve."""
    spin_briefly(os.environ)
    settings = WorkerSettings()
    telemetry.setup("worker", settings)
    own = identity.setup("worker", settings)
    stop = rpc.stop_requested()
    startup, metrics = _startup(settings), WorkerMetrics()
    service, others = WorkerService(startup), VllmEngineService(startup)
    server = await rpc.serve(
        settings.listen,
        [
            rpc.Service(NAME, mesh_grpc.add_WorkerServicer_to_server, service),
            rpc.Service(VLLM, vllm_grpc.add_VllmEngineServicer_to_server, others),
        ],
        allow_unprotected=settings.allow_unprotected,
        identity=own,
        counts=metrics.all,
        metrics_port=settings.metrics_port,
        mesh_id=settings.mesh_id,
    )
    announcing = asyncio.create_task(announce(settings.scheduler_address, settings.aliases, startup))
    try:
        address = await asyncio.to_thread(
            advertised, settings.advertise, settings.listen, server.port, settings.scheduler_address
        )
        model = await _load(settings, startup, server, stop)
        adapters = Adapters(
            model.read_adapter, settings.most_adapters, lambda: model.engine.stats().resident, model.adapters
        )
        jobs, progress = _open_jobs(model, adapters, service, others, metrics, settings)
        sharing = settings.cache_address if settings.prefix_fetch and settings.prefix_cache else ""
        async with (
            shared_prefixes(sharing, model.engine, metrics.all, settings.mesh_id),
            _peers(settings, model, metrics, own),
        ):
            hello = mesh.WorkerHello(
                worker_id=startup.worker_id,
                address=address,
                card=model.card,
                credits=model.max_batch_size,
                mesh_id=settings.mesh_id,
                role=_ROLES[settings.role],
            )
            attachment = SchedulerLink(settings.scheduler_address, hello, model.engine, jobs, progress, adapters)
            adapters.changed = attachment.changed
            structlog.contextvars.bind_contextvars(worker=hello.worker_id)
            with (engine_thread := EngineThread(model.engine, jobs, attachment)) as failed:
                progress.watch(engine_thread.thread)
                await _ready(server, startup)
                attached = asyncio.create_task(attachment.run())
                with watching(progress.hang_check()):
                    await _until(stop, attached, failed)
                await _drain(settings.drain_s, startup, jobs, attachment)
                attached.cancel()
                await server.stop(1.0)
    except (CheckpointError, NoAddress, Refused) as error:
        log.error("cannot serve", reason=str(error))
        process.refuse_to_serve(str(error))
    except EngineFailed:  # Its jobs are continued elsewhere, and the process's parent starts another worker.
        sys.exit("weft: the engine failed")
    finally:
        announcing.cancel()
        await server.stop(0)


def _peers(
    settings: WorkerSettings, model: LoadedModel, metrics: WorkerMetrics, own: identity.Identity
) -> contextlib.AbstractAsyncContextManager[None]:
    """Lets the engine fetch prefixes from other workers inside the block, unless the settings say otherwise."""
    if not (settings.prefix_fetch and settings.prefix_cache):
        return contextlib.nullcontext()
    memory = model.shared_memory if own.protected else None
    rounding = rounding_of(model.engine) if settings.fetch_dtype == "fp8" else None
    return peer_prefixes(model.engine, metrics.all, own.subkey(BLOCK_FRAMES), settings.mesh_id, memory, rounding)


def _startup(settings: WorkerSettings) -> Startup:
    """The worker's id and model name, before the model is loaded. A symbolic link is named after the link, not its
    target."""
    name = settings.served_name or Path(os.path.abspath(Path(settings.model).expanduser())).name
    return Startup(f"{name}-{uuid.uuid4().hex[:8]}", name, mesh_id=settings.mesh_id)


async def _load(settings: WorkerSettings, startup: Startup, server: rpc.Server, stop: asyncio.Event) -> LoadedModel:
    """Load the model in a thread, or end the process if `stop` is set before. Raises CheckpointError."""

    def progress(phase: str, done: int, total: int) -> None:
        if phase != startup.phase or done == total:
            log.info("loading", phase=phase, done=done, total=total)
        startup.phase, startup.done, startup.total = phase, done, total

    loading = asyncio.create_task(asyncio.to_thread(load_model, settings, startup.model, progress))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([loading, stopping], return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        await _leave_at_once(server)
    stopping.cancel()
    return await loading


async def _leave_at_once(server: rpc.Server) -> NoReturn:
    """End the process. The thread that loads the model cannot be stopped and may take minutes."""
    log.info("stopped while loading")
    abandon()
    await server.stop(0)
    telemetry.close()
    os._exit(0)


def _open_jobs(
    model: LoadedModel,
    adapters: Adapters,
    service: WorkerService,
    others: VllmEngineService,
    metrics: WorkerMetrics,
    settings: WorkerSettings,
) -> tuple[Jobs, Progress]:
    """The jobs of a loaded model, which both services accept from now on."""
    engine, card = model.engine, model.card
    metrics.loaded(card.name, model.max_batch_size, engine.stats)
    jobs = Jobs(engine, card, settings.orphan_s, metrics, adapters)
    progress = Progress(engine.stats, jobs, guesses=bool(settings.speculate))

    def report() -> mesh.WorkerReport:
        return report_of(engine.stats(), jobs, progress)

    own = identity.current()
    blocks = BlockSender(engine, own.subkey(BLOCK_FRAMES), rounding_of(engine))
    memory = described(model.shared_memory) if own.protected else b""
    lender = BlockLender(engine, memory, host.identity(), own.protected)
    service.loaded(
        Loaded(jobs, adapters, progress, model.bundle, card.bundle_digest, report, engine.profiler, blocks, lender)
    )
    watches = StopWatches(mesh.Bundle.FromString(model.bundle).tokenizer_json)
    others.loaded(EngineModel(jobs, card, model.bundle, report, watches.watch, model.max_batch_size))
    return jobs, progress


async def _ready(server: rpc.Server, startup: Startup) -> None:
    startup.phase = READY
    process.keep_pauses_short()
    await server.ready()


async def _until(stop: asyncio.Event, attached: "asyncio.Future[None]", failed: "asyncio.Future[None]") -> None:
    """Wait until `stop` is set. Raises what ends the engine or the attachment before: EngineFailed or Refused."""
    stopping = asyncio.create_task(stop.wait())
    ends: list[asyncio.Future[Any]] = [stopping, attached, failed]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if failed.done():
        failed.result()
    if not stopping.done():
        await attached


async def _drain(drain_s: float, startup: Startup, jobs: Jobs, attachment: SchedulerLink) -> None:
    """Let running jobs finish, for at most `drain_s` seconds."""
    startup.phase, jobs.draining = "draining", True
    attachment.changed()
    log.info("draining", jobs=len(jobs.running()))
    deadline = asyncio.get_running_loop().time() + drain_s
    while not jobs.idle and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110 - no single event ends it
        await asyncio.sleep(0.02)


def run() -> None:
    """The worker as a process."""
    sys.setswitchinterval(_SWITCH_S)
    rpc.run(main())
