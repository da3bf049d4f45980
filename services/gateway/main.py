"""Wires the gateway together, and runs it until SIGTERM or SIGINT."""

import asyncio
import contextlib
import functools
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog

from protos import mesh_pb2
from services import process, rpc, telemetry
from services.gateway.access.authorizer import Authorizer
from services.gateway.access.bearer_tokens import BearerTokens, TokenKeysError
from services.gateway.access.tenants import TenantsFileError
from services.gateway.access.usage import UsageTable
from services.gateway.backend import Backend
from services.gateway.links.cache_link import CacheLink
from services.gateway.links.catalog import Catalog
from services.gateway.links.local_placement import LocalPlacement
from services.gateway.links.mesh_view import MeshView
from services.gateway.links.result_cache import ResultCache
from services.gateway.links.scheduler_link import SchedulerLink
from services.gateway.links.vectors.cache import VectorCache
from services.gateway.links.worker_links import WorkerLinks
from services.gateway.member import Member
from services.gateway.metrics import GatewayMetrics
from services.gateway.ports import Ports
from services.gateway.settings import GatewaySettings
from services.gateway.text.encoder import Encoder
from services.security import identity

log = structlog.get_logger("gateway")

_REPORT_S = 1.0
_KEEP_S = 5.0
"""Time between two looks for links that are needed no more."""
READY = "weft.v1.Gateway"
"""The name in the health service for readiness probes: it does not depend on workers."""


@contextlib.asynccontextmanager
async def gateway(
    settings: GatewaySettings, member: Member | None = None, on_failure: Callable[[], None] = lambda: None
) -> AsyncIterator[rpc.Server]:
    """A running gateway. At the end of the block running calls have `drain_s` seconds to end.

    `on_failure` is called if one of its tasks fails: without it the gateway must not go on.
    """
    encoder = Encoder(settings.gateway_tokenizer_threads)
    with ThreadPoolExecutor(1, "bundle") as threads, contextlib.closing(encoder):
        catalog = Catalog(threads, settings.gateway_chat_special_tokens, settings.gateway_tool_format, encoder)
        links = _Links(settings, catalog)
        backend = links.backend(settings, encoder)
        access = _authorizer(settings, member)
        rendered = backend.metrics.all.rendered
        ports = Ports(backend, access, member.scrape if member else rendered, shared=member is not None)
        await ports.open()
        following = asyncio.create_task(links.follow_models(ports.grpc))
        work = [*links.work(), access.follow(), ports.gate.watch(), _report_traffic(links.scheduler, backend.metrics)]
        if member is not None:
            work.append(member.follow(rendered))
        tasks = [asyncio.create_task(each) for each in work]
        for task in (following, *tasks):
            task.add_done_callback(functools.partial(_report_failure, on_failure))
        log.info("listening", port=ports.grpc.port, http_port=ports.http_port)
        try:
            yield ports.grpc
        finally:
            following.cancel()
            backend.view.close()
            await ports.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(following, *tasks, return_exceptions=True)
            await links.close()
            await backend.forms.close()


class _Links:
    """The gateway's links to scheduler, workers and cache, and what each reports to the others."""

    def __init__(self, settings: GatewaySettings, catalog: Catalog) -> None:
        self.gateway_id = f"gateway-{secrets.token_hex(8)}"
        self.catalog = catalog
        self.workers = WorkerLinks(self.gateway_id, settings.mesh_id, settings.gateway_connect_s)
        self.cache = CacheLink(settings.cache_address, settings.gateway_cache_budget_s, settings.mesh_id)
        self.local = LocalPlacement(self.workers)
        self.scheduler = SchedulerLink(
            settings.scheduler_address,
            self.gateway_id,
            settings.gateway_scheduler_wait_s,
            self._on_models,
            self.workers.lose_worker,
            settings.mesh_id,
            self.local.place,
        )
        self.workers.on_unreachable = self.scheduler.report_unreachable
        self._changed = asyncio.Event()

    def backend(self, settings: GatewaySettings, encoder: Encoder) -> Backend:
        """What every request uses."""
        view = MeshView(settings.scheduler_address, self.gateway_id, settings.mesh_id, lambda: self.cache.state)
        metrics = GatewayMetrics()
        results, vectors = ResultCache(self.cache), VectorCache(self.cache, settings.gateway_vector_bytes)
        return Backend(settings, self.catalog, self.scheduler, self.workers, results, vectors, metrics, view, encoder)

    def work(self) -> list[Coroutine[Any, Any, None]]:
        """What runs as long as the gateway."""
        return [self.scheduler.run(), self.workers.watch(), self._close_unneeded()]

    async def follow_models(self, server: rpc.Server) -> None:
        """Updates health and links after each change of the served models.

        The health of the service means that a model is served; that of READY means that the gateway answers: a list of
        models has arrived, and whether workers serve them is no property of this gateway.
        """
        while True:
            await self._changed.wait()
            self._changed.clear()
            await server.set_health(READY, True)
            await server.ready(self.catalog.available)
            await self.workers.keep(self.local.addresses)

    async def _close_unneeded(self) -> None:
        """Closes links to workers that are forgotten, or that had jobs when they were: no new list shows these."""
        while True:
            await asyncio.sleep(_KEEP_S)
            await self.workers.keep(self.local.addresses)

    async def close(self) -> None:
        """Closes all links."""
        await self.catalog.close()
        await self.workers.close()
        await self.cache.close()

    def _on_models(self, models: mesh_pb2.ModelList) -> None:
        self.catalog.update(models)
        self.local.update(models)
        self._changed.set()


def _authorizer(settings: GatewaySettings, member: Member | None) -> Authorizer:
    """Who may call, within limits that hold over all members."""
    shared = UsageTable(member.usage) if member is not None else None
    salts = identity.current().subkey(b"tenant-salts")
    number = member.number if member is not None else 0
    return Authorizer(settings.tenants_file, shared, number, salts, _tokens(settings))


def _tokens(settings: GatewaySettings) -> BearerTokens | None:
    """What checks JSON Web Tokens; None if they are not accepted. The process ends with one line if it is invalid."""
    if not settings.gateway_jwt_keys:
        return None
    try:
        if not settings.tenants_file:
            raise TokenKeysError("needs WEFT_TENANTS_FILE, which has the tenants that tokens name")
        return BearerTokens(
            settings.gateway_jwt_keys,
            settings.gateway_jwt_issuer,
            settings.gateway_jwt_audience,
            settings.gateway_jwt_claim,
        )
    except TokenKeysError as error:
        process.refuse_to_serve(f"WEFT_GATEWAY_JWT_KEYS {error}")


def _report_failure(on_failure: Callable[[], None], task: asyncio.Task[None]) -> None:
    """Reports the end of a task if it is one by an exception, which is a bug."""
    if not task.cancelled() and (error := task.exception()) is not None:
        telemetry.log_exception("a task of the gateway failed", error)
        on_failure()


async def _report_traffic(scheduler: SchedulerLink, metrics: GatewayMetrics) -> None:
    """Reports the recent traffic to the scheduler, which passes it to every gateway that is asked for the mesh."""
    while True:
        await asyncio.sleep(_REPORT_S)
        scheduler.report(metrics.traffic.roll(metrics.in_flight))


async def main() -> None:
    """Serves until SIGTERM or SIGINT, or until a task fails: then the process drains, too, and ends with an error."""
    settings = GatewaySettings()
    telemetry.setup("gateway", settings)
    identity.setup("gateway", settings)
    stop, failed = rpc.stop_requested(), asyncio.Event()

    def fail() -> None:
        failed.set()
        stop.set()

    member = Member.from_arguments(sys.argv[1:], stop)
    try:
        async with gateway(settings, member, fail):
            process.keep_pauses_short()
            await stop.wait()
            log.info("draining", seconds=settings.drain_s)
    except TenantsFileError as error:
        process.refuse_to_serve(f"WEFT_TENANTS_FILE {error}")
    if failed.is_set():
        sys.exit(1)


def run() -> None:
    """Runs the service as a process."""
    rpc.run(main())
