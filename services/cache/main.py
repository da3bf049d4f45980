"""Builds the cache service and runs it until SIGTERM or SIGINT."""

import structlog

from services import process, rpc, telemetry
from services.cache.metrics import metrics_of
from services.cache.service import service
from services.cache.settings import CacheSettings
from services.cache.store import Store
from services.security import identity

log = structlog.get_logger("cache")


async def main() -> None:
    """Serves until SIGTERM or SIGINT. It is SERVING with or without Redis: without Redis it answers misses."""
    settings = CacheSettings()
    telemetry.setup("cache", settings)
    own = identity.setup("cache", settings)
    stop = rpc.stop_requested()
    url = settings.redis_url.get_secret_value()
    secret = own.subkey(b"cache-values")
    store = Store(url, settings.timeouts(), secret=secret)
    blocks = Store(url, settings.block_timeouts(), name="blocks", secret=secret)
    await store.open()
    await blocks.open()
    try:
        server = await rpc.serve(
            settings.listen,
            [service(store, blocks, settings)],
            allow_unprotected=settings.allow_unprotected,
            identity=own,
            counts=metrics_of(store.counters, blocks.counters),
            metrics_port=settings.metrics_port,
            mesh_id=settings.mesh_id,
        )
        process.keep_pauses_short()
        await server.ready()
        log.info("ready", port=server.port)
        await stop.wait()
        await server.stop(0)  # Nothing to drain: gateways keep streams open, and a look-up that is cut off is a miss.
    finally:
        await store.close()
        await blocks.close()


def run() -> None:
    """Runs the service as a process."""
    rpc.run(main())
