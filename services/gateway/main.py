"""Wires the gateway together, and runs it until SIGTERM or SIGINT."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import structlog

from protos import mesh_pb2
from protos.inference_pb2_grpc import add_InferenceServicer_to_server
from services import process, rpc, telemetry
from services.gateway.access.authorizer import Authorizer
from services.gateway.access.tenants import TenantsFileError
from services.gateway.answers.serve import AnswerService
from services.gateway.backend import Backend
from services.gateway.doors.grpc_gate import AuthInterceptor
from services.gateway.doors.http import HttpRoutes, HttpServer, listen
from services.gateway.doors.native import InferenceService
from services.gateway.doors.openai import OpenAIDoor
from services.gateway.doors.probes import Probes
from services.gateway.links.catalog import Catalog
from services.gateway.links.result_cache import ResultCache
from services.gateway.links.scheduler_link import SchedulerLink
from services.gateway.links.worker_link import WorkerLinks
from services.gateway.metrics import GatewayMetrics
from services.gateway.settings import GatewaySettings

log = structlog.get_logger("gateway")


@contextlib.asynccontextmanager
async def gateway(settings: GatewaySettings) -> AsyncIterator[rpc.Server]:
    """A running gateway. At the end of the block running calls have `drain_s` seconds to end."""
    gateway_id = f"gateway-{secrets.token_hex(8)}"
    with ThreadPoolExecutor(settings.gateway_tokenizer_threads, "text") as threads:
        catalog = Catalog(threads, settings.gateway_chat_special_tokens)
        workers = WorkerLinks(gateway_id, settings.mesh_id)
        results = ResultCache(settings.cache_address, settings.gateway_cache_budget_s, settings.mesh_id)
        changed = asyncio.Event()

        def on_models(models: mesh_pb2.ModelList) -> None:
            catalog.update(models)
            changed.set()

        scheduler = SchedulerLink(
            settings.scheduler_address,
            gateway_id,
            settings.gateway_scheduler_wait_s,
            on_models,
            workers.lose_worker,
            settings.mesh_id,
        )
        metrics = GatewayMetrics()
        access = Authorizer(settings.tenants_file)
        backend = Backend(settings, catalog, scheduler, workers, results, metrics, threads)
        answers = AnswerService(backend, access)
        service = InferenceService(answers)
        rpc.check_address(settings.listen, settings.allow_remote)
        http = _http_server(settings, answers, access, backend)
        server = await rpc.serve(
            settings.listen,
            [rpc.Service("weft.v1.Inference", add_InferenceServicer_to_server, service)],
            max_message_bytes=rpc.PUBLIC_MESSAGE_BYTES,
            allow_remote=settings.allow_remote,
            counts=metrics.all,
            metrics_port=settings.metrics_port,
            mesh_id=settings.mesh_id,
            interceptors=[AuthInterceptor(access, settings.gateway_open_reflection)],
        )
        if http is not None:
            await http.start()
        tasks = [
            asyncio.create_task(scheduler.run()),
            asyncio.create_task(_follow_models(changed, catalog, workers, server)),
            asyncio.create_task(access.follow()),
        ]
        log.info("listening", port=server.port, http_port=http.port if http is not None else 0)
        try:
            yield server
        finally:
            tasks[1].cancel()
            await asyncio.gather(server.stop(settings.drain_s), *([http.stop()] if http is not None else []))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await catalog.close()
            await workers.close()
            await results.close()


def _http_server(
    settings: GatewaySettings, answers: AnswerService, access: Authorizer, backend: Backend
) -> HttpServer | None:
    """The HTTP server with the routes of all doors, on the host of the gRPC server; None if it is disabled."""
    if not settings.gateway_http_port:
        return None
    routes = HttpRoutes(backend.metrics.all)
    OpenAIDoor(answers, access, backend.catalog).add_to(routes)
    Probes(backend.catalog).add_to(routes)
    listener = listen(rpc.host_of(settings.listen), settings.gateway_http_port)
    return HttpServer(routes.app(), listener, settings.gateway_stall_s, settings.drain_s)


async def _follow_models(changed: asyncio.Event, catalog: Catalog, workers: WorkerLinks, server: rpc.Server) -> None:
    """Updates health and links after each change of the served models."""
    while True:
        await changed.wait()
        changed.clear()
        await server.ready(catalog.available)
        await workers.keep(catalog.addresses)


async def main() -> None:
    """Serves until SIGTERM or SIGINT."""
    settings = GatewaySettings()
    telemetry.setup("gateway", settings)
    stop = rpc.stop_requested()
    try:
        async with gateway(settings):
            rpc.settled()
            await stop.wait()
            log.info("draining", seconds=settings.drain_s)
    except TenantsFileError as error:
        process.refuse_to_serve(f"WEFT_TENANTS_FILE {error}")


def run() -> None:
    """Runs the service as a process."""
    rpc.run(main())
