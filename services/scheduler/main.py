"""Wires the scheduler together and runs it until it is told to stop."""

import asyncio
import time

import structlog

from services import rpc, telemetry
from services.scheduler.core.pool import Pool
from services.scheduler.service import service
from services.scheduler.settings import SchedulerSettings

log = structlog.get_logger("scheduler")


async def main() -> None:
    """Serves until SIGTERM or SIGINT. Its state is soft: gateways and workers say hello again to the next scheduler."""
    settings = SchedulerSettings()
    telemetry.setup("scheduler", settings)
    stop = rpc.stop_requested()
    epoch = time.time_ns() // 1_000_000
    servicer, served = service(Pool(epoch, time.monotonic(), settings.limits()))
    server = await rpc.serve(
        settings.listen,
        [served],
        allow_remote=settings.allow_remote,
        counts=servicer.metrics.all,
        metrics_port=settings.metrics_port,
    )
    rpc.settled()
    await server.ready()
    log.info("ready", port=server.port, epoch=epoch)
    clock = asyncio.create_task(servicer.run_clock())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({clock, stopping}, return_when=asyncio.FIRST_COMPLETED)
    await server.stop(0)  # Nothing to drain: no token passes through here, and what waits will be submitted again.
    if clock.done():  # Only by a bug: better a new scheduler than one without time.
        clock.result()
    clock.cancel()


def run() -> None:
    """The service as a process."""
    rpc.run(main())
