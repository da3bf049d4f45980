"""Builds the scheduler and runs it until SIGTERM or SIGINT."""

import asyncio
import time

import structlog

from services import process, rpc, telemetry
from services.scheduler.core.scheduler import SchedulerCore
from services.scheduler.service import service
from services.scheduler.settings import SchedulerSettings
from services.security import identity

log = structlog.get_logger("scheduler")


async def main() -> None:
    """Serves until SIGTERM or SIGINT. The state is not stored: gateways and workers register at the next scheduler."""
    settings = SchedulerSettings()
    telemetry.setup("scheduler", settings)
    own = identity.setup("scheduler", settings)
    stop = rpc.stop_requested()
    epoch = time.time_ns() // 1_000_000
    servicer, served = service(SchedulerCore(epoch, time.monotonic(), settings.limits()), settings.mesh_id)
    server = await rpc.serve(
        settings.listen,
        [served],
        allow_unprotected=settings.allow_unprotected,
        identity=own,
        counts=servicer.metrics.all,
        metrics_port=settings.metrics_port,
        mesh_id=settings.mesh_id,
    )
    process.keep_pauses_short()
    await server.ready()
    log.info("ready", port=server.port, epoch=epoch)
    clock = asyncio.create_task(servicer.run_clock())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({clock, stopping}, return_when=asyncio.FIRST_COMPLETED)
    await server.stop(0)  # Nothing to drain: no tokens pass through here, and gateways submit waiting jobs again.
    if clock.done():  # Only after a bug: without ticks the scheduler must not go on, so the process ends.
        clock.result()
    clock.cancel()


def run() -> None:
    """Runs the service as a process."""
    rpc.run(main())
