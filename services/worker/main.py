"""Wires a worker together: load the model, serve the Run link, stay attached to the scheduler, drain at the end."""

import asyncio
import os
import sys
import uuid
from pathlib import Path
from typing import Any, NoReturn

import structlog

from protos import mesh_pb2 as mesh
from protos import mesh_pb2_grpc as mesh_grpc
from services import process, rpc, telemetry
from services.worker.build.choose import open_engine, resolve_engine
from services.worker.engine.base import Engine
from services.worker.errors import CheckpointError
from services.worker.loader import checkpoint, presets
from services.worker.loader.config import load_config
from services.worker.options import EngineOptions
from services.worker.service.address import NoAddress, advertised
from services.worker.service.engine_thread import EngineFailed, EngineThread
from services.worker.service.jobs import Jobs
from services.worker.service.metrics import WorkerMetrics
from services.worker.service.scheduler_link import Refused, SchedulerLink, report_of
from services.worker.service.servicer import Loaded, WorkerService
from services.worker.service.share_blocks import shared_prefixes
from services.worker.service.startup import READY, Startup, announce
from services.worker.settings import WorkerSettings

log = structlog.get_logger("worker")

NAME = "weft.v1.Worker"
# The engine's thread gives the interpreter away with every kernel that it launches. At Python's 5 ms a burst of
# requests would take it for so long each time.
_SWITCH_S = 0.001


async def main() -> None:
    """Serves until SIGTERM or SIGINT, then lets running jobs finish. Exits with the reason in a line if it cannot."""
    settings = WorkerSettings()
    telemetry.setup("worker", settings)
    stop = rpc.stop_requested()
    startup, metrics = _startup(settings), WorkerMetrics()
    service = WorkerService(startup)
    server = await rpc.serve(
        settings.listen,
        [rpc.Service(NAME, mesh_grpc.add_WorkerServicer_to_server, service)],
        allow_remote=settings.allow_remote,
        counts=metrics.all,
        metrics_port=settings.metrics_port,
        mesh_id=settings.mesh_id,
    )
    announcing = asyncio.create_task(announce(settings.scheduler_address, settings.aliases, startup))
    try:
        address = await asyncio.to_thread(
            advertised, settings.advertise, settings.listen, server.port, settings.scheduler_address
        )
        loading = asyncio.create_task(asyncio.to_thread(_load, settings, startup))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([loading, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            await _leave_at_once(server)
        settings, engine, card, bundle = await loading
        metrics.loaded(card.name, settings.max_batch_size, engine.stats)
        jobs = Jobs(engine, card, settings.orphan_s, metrics)
        service.loaded(
            Loaded(jobs, bundle, card.bundle_digest, lambda: report_of(engine.stats(), jobs), engine.profiler)
        )
        credits = settings.max_batch_size
        hello = mesh.WorkerHello(
            worker_id=startup.worker_id, address=address, card=card, credits=credits, mesh_id=settings.mesh_id
        )
        sharing = settings.cache_address if settings.prefix_fetch and settings.prefix_cache else ""
        async with shared_prefixes(sharing, engine, metrics.all, settings.mesh_id):
            await _serve(settings, server, startup, stop, engine, jobs, hello)
    except (CheckpointError, NoAddress, Refused) as error:
        log.error("cannot serve", reason=str(error))
        process.refuse_to_serve(str(error))
    except EngineFailed:  # Its jobs go on elsewhere, and whoever started this process starts another.
        sys.exit("weft: the engine failed")
    finally:
        announcing.cancel()
        await server.stop(0)


def _startup(settings: WorkerSettings) -> Startup:
    """The names that the worker will have, known before its model is: of a link its own, not that of what it is to."""
    name = settings.served_name or Path(os.path.abspath(Path(settings.model).expanduser())).name
    return Startup(f"{name}-{uuid.uuid4().hex[:8]}", name, mesh_id=settings.mesh_id)


async def _leave_at_once(server: rpc.Server) -> NoReturn:
    """Ends the process. Its thread that loads a model may take minutes more, and nobody can tell it to end."""
    log.info("stopped while loading")
    presets.remove_folders()
    await server.stop(0)
    telemetry.close()
    os._exit(0)


def _load(settings: WorkerSettings, startup: Startup) -> tuple[WorkerSettings, Engine, mesh.ModelCard, bytes]:
    """The settings with the engine chosen, the engine, its model's card and its tokenizer. Raises CheckpointError."""

    def progress(phase: str, done: int, total: int) -> None:
        if phase != startup.phase or done == total:
            log.info("loading", phase=phase, done=done, total=total)
        startup.phase, startup.done, startup.total = phase, done, total

    settings = resolve_engine(settings)
    folder = checkpoint.locate(settings.model)
    with checkpoint.start_hashing(folder) as digests:
        config = load_config(folder)
        bundle, digest = checkpoint.serialize(checkpoint.read_bundle(folder))
        engine = open_engine(settings, folder, engine_options(settings), progress)
        progress("fingerprint", 0, 1)
        fingerprint = checkpoint.fingerprint(digests, *_numerics(settings))
        progress("fingerprint", 1, 1)
    engine.use_fingerprint(fingerprint)
    presets.remove_folders()
    memory = engine.memory
    log.info(
        "loaded",
        parameters=engine.parameters,
        memory=str(memory),
        kv_tokens=memory.kv_tokens,
        max_concurrency=round(memory.concurrency, 1),
    )
    card = checkpoint.model_card(
        folder,
        config,
        name=startup.model,
        context_length=engine.memory.max_seq_length,
        block_size=settings.block_size,
        parameters=engine.parameters,
    )
    card.aliases.extend(settings.aliases)
    card.fingerprint, card.bundle_digest = fingerprint, digest
    return settings, engine, card, bundle


def _dtype(settings: WorkerSettings) -> str:
    return "float32" if settings.dtype == "auto" else settings.dtype


def _numerics(settings: WorkerSettings) -> list[str]:
    """What tokens depend on beside the checkpoint."""
    numerics = [_dtype(settings), str(settings.deterministic)]
    # Of equal fingerprints equal bits are expected where the mode promises them: the devices sum in other orders.
    if settings.engine == "paced" or (settings.engine == "gpu" and settings.deterministic):
        numerics.append(settings.engine)
    if settings.quantize:
        numerics.append(settings.quantize)
    if settings.kv_dtype != "auto":
        numerics.append(settings.kv_dtype)
    if settings.kv_scales != "checkpoint":
        numerics.append(settings.kv_scales)
    return numerics


def engine_options(settings: WorkerSettings) -> EngineOptions:
    """How the settings, whose engine is chosen, say that the model runs; all but its fingerprint."""
    return EngineOptions(
        block_size=settings.block_size,
        kv_blocks=settings.kv_blocks,
        kv_bytes=settings.kv_bytes,
        max_batch_size=settings.max_batch_size,
        max_seq_length=settings.max_seq_length,
        step_tokens=max(settings.step_tokens, settings.max_batch_size),
        chunk_tokens=settings.chunk_tokens,
        device="cuda" if settings.engine == "gpu" else "cpu",
        compile_ahead=True,
        deterministic=settings.deterministic,
        dtype=_dtype(settings),
        quantize=settings.quantize,
        kv_dtype=settings.kv_dtype,
        kv_scales=settings.kv_scales,
        threads=settings.threads,
        prefix_cache=settings.prefix_cache,
        host_kv_bytes=settings.host_kv_bytes,
    )


async def _serve(
    settings: WorkerSettings,
    server: rpc.Server,
    startup: Startup,
    stop: asyncio.Event,
    engine: Engine,
    jobs: Jobs,
    hello: mesh.WorkerHello,
) -> None:
    """Runs the engine, attached to the scheduler, until `stop` is set or one of the two has ended; then drains."""
    attachment = SchedulerLink(settings.scheduler_address, hello, engine, jobs)
    structlog.contextvars.bind_contextvars(worker=hello.worker_id)
    with EngineThread(engine, jobs, attachment) as failed:
        startup.phase = READY
        rpc.settled()
        await server.ready()
        attached = asyncio.create_task(attachment.run())
        stopping = asyncio.create_task(stop.wait())
        ends: list[asyncio.Future[Any]] = [attached, stopping, failed]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            failed.result()
        if not stopping.done():
            await attached
        await _drain(settings.drain_s, startup, jobs, attachment)
        attached.cancel()
        await server.stop(1.0)


async def _drain(drain_s: float, startup: Startup, jobs: Jobs, attachment: SchedulerLink) -> None:
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
