"""Two meshes on one network: hellos, calls and health answers carry the mesh id, and another mesh is refused."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import ValidationError

from protos import cache_pb2 as cache
from protos import cache_pb2_grpc as cache_grpc
from protos import mesh_pb2 as mesh
from protos import mesh_pb2_grpc as mesh_grpc
from services import rpc
from services.gateway.links import scheduler_link
from services.gateway.links.cache_link import CacheLink
from services.gateway.links.result_cache import ResultCache
from services.gateway.links.scheduler_link import SchedulerLink
from services.gateway.links.worker_links import WorkerLinks
from services.scheduler.core.scheduler import SchedulerCore
from services.scheduler.service import service as scheduler_service
from services.security import mesh_id
from services.settings import CommonSettings
from services.worker.service.servicer import WorkerService
from services.worker.service.startup import Startup

TIMEOUT_S = 10
REFUSED = grpc.StatusCode.FAILED_PRECONDITION
Stub = Any


@contextlib.asynccontextmanager
async def scheduler(own: str) -> AsyncIterator[str]:
    """Runs a scheduler with the mesh id `own`; yields its address."""
    _, served = scheduler_service(SchedulerCore(7, time.monotonic()), own)
    server = await rpc.serve("127.0.0.1:0", [served], mesh_id=own)
    await server.ready()
    yield f"127.0.0.1:{server.port}"
    await server.stop(0)


async def code_of(call: Any, hello: Any) -> grpc.StatusCode | None:
    """The status with which a hello ends a stream; None if the hello is answered."""
    await call.write(hello)
    try:
        answer = await asyncio.wait_for(call.read(), TIMEOUT_S)
    except aio.AioRpcError as error:
        return error.code() if mesh_id.REASON in str(error.trailing_metadata()) else grpc.StatusCode.UNKNOWN
    assert answer is not aio.EOF
    call.cancel()
    return None


@pytest.mark.parametrize(
    ("own", "other", "code"), [("a", "a", None), ("a", "", None), ("", "b", None), ("a", "b", REFUSED)]
)
async def test_a_scheduler_refuses_hellos_of_another_mesh(own: str, other: str, code: grpc.StatusCode | None) -> None:
    async with scheduler(own) as address, rpc.link_channel(address) as channel:
        stub: Stub = mesh_grpc.SchedulerStub(channel)
        gateway = mesh.DispatchRequest(hello=mesh.GatewayHello(gateway_id="g", mesh_id=other))
        card = mesh.ModelCard(name="m", fingerprint=b"f" * 32, block_size=16, bundle_digest=b"b" * 32, context_length=9)
        hello = mesh.WorkerHello(worker_id="w", address="w:1", card=card, credits=1, mesh_id=other)
        assert await code_of(stub.Dispatch(), gateway) is code
        assert await code_of(stub.Attach(), mesh.AttachRequest(hello=hello)) is code


async def test_a_scheduler_refuses_the_start_of_another_meshs_worker() -> None:
    async with scheduler("a") as address, rpc.link_channel(address) as channel:
        stub: Stub = mesh_grpc.SchedulerStub(channel)
        loading = mesh.WorkerLoading(worker_id="w", model="m", mesh_id="b")
        assert await code_of(stub.Attach(), mesh.AttachRequest(loading=loading)) is REFUSED
        assert not (await stub.Overview(mesh.OverviewRequest())).loading


async def test_a_worker_refuses_a_gateway_of_another_mesh(capfd: pytest.CaptureFixture[str]) -> None:
    service = WorkerService(Startup("w", "m", mesh_id="a"))
    service.loaded(_Loaded())  # type: ignore[arg-type]
    served = rpc.Service("weft.v1.Worker", mesh_grpc.add_WorkerServicer_to_server, service)
    server = await rpc.serve("127.0.0.1:0", [served], mesh_id="a")
    links = WorkerLinks("g", "b")
    link = links.to(f"127.0.0.1:{server.port}")
    async with asyncio.timeout(TIMEOUT_S):
        while link.alive:  # noqa: ASYNC110 (a link sets no event)
            await asyncio.sleep(0.01)
    await links.close()
    await server.stop(0)
    assert "the worker refuses this process" in (log := "".join(capfd.readouterr()))
    assert "belongs to mesh 'b'" in log


class _Loaded:
    jobs = None
    progress = None


async def test_a_gateway_logs_once_that_its_scheduler_belongs_to_another_mesh(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = asyncio.Semaphore(0)

    async def pause(seconds: float) -> None:
        if seconds not in (scheduler_link.WATCH_S, scheduler_link.IDLE_S):
            attempts.release()
        await real_sleep(0)

    real_sleep = asyncio.sleep
    async with scheduler("a") as address:
        link = SchedulerLink(address, "g", 1.0, lambda models: None, lambda worker: None, "b")
        monkeypatch.setattr("services.gateway.links.scheduler_link.asyncio.sleep", pause)
        running = asyncio.create_task(link.run())
        async with asyncio.timeout(TIMEOUT_S):
            for _ in range(3):
                await attempts.acquire()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        monkeypatch.undo()
    assert "".join(capfd.readouterr()).count("the scheduler refuses this process") == 1
    assert not link.models_known.is_set()


async def test_a_gateway_accepts_no_scheduler_that_names_another_mesh() -> None:
    """A gateway checks the id even if the scheduler accepts the gateway."""
    closed = asyncio.Event()

    class AcceptsAll(mesh_grpc.SchedulerServicer):
        async def Dispatch(self, requests: Any, context: Any) -> Any:
            try:
                yield mesh.DispatchResponse(hello=mesh.SchedulerHello(epoch=1, mesh_id="a"))
                yield mesh.DispatchResponse(models=mesh.ModelList())
                await asyncio.Event().wait()
            finally:
                closed.set()

    served = rpc.Service("weft.v1.Scheduler", mesh_grpc.add_SchedulerServicer_to_server, AcceptsAll())  # type: ignore
    server = await rpc.serve("127.0.0.1:0", [served])
    link = SchedulerLink(f"127.0.0.1:{server.port}", "g", 1.0, lambda models: None, lambda worker: None, "b")
    running = asyncio.create_task(link.run())
    await asyncio.wait_for(closed.wait(), TIMEOUT_S)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await server.stop(0)
    assert not link.models_known.is_set()


class _AlwaysHit(cache_grpc.CacheServicer):
    """A cache service that returns a result for every key."""

    def __init__(self) -> None:
        self.stored = 0

    async def GetResult(self, request: cache.GetResultRequest, context: Any) -> cache.GetResultResponse:
        return cache.GetResultResponse(result=cache.CachedResult(token_ids=[1]))

    async def PutResult(self, request: cache.PutResultRequest, context: Any) -> cache.PutResultResponse:
        self.stored += 1
        return cache.PutResultResponse(stored=True)


class _Key:
    digest = b"k" * 32


@pytest.mark.parametrize(("other", "found"), [("a", True), ("", True), ("b", False)])
async def test_a_cache_service_answers_its_own_mesh(other: str, found: bool) -> None:
    service = _AlwaysHit()  # type: ignore[abstract]
    served = rpc.Service("weft.v1.Cache", cache_grpc.add_CacheServicer_to_server, service)
    server = await rpc.serve("127.0.0.1:0", [served], mesh_id="a")
    link = CacheLink(f"127.0.0.1:{server.port}", TIMEOUT_S, other)
    results = ResultCache(link)
    got = await results.get(_Key(), "00-" + "1" * 32 + "-" + "1" * 16 + "-00")  # type: ignore[arg-type]
    results.put(_Key(), cache.CachedResult())  # type: ignore[arg-type]
    await link.close()
    await server.stop(0)
    assert (got is not None, service.stored) == (found, int(found))


async def test_a_refusal_names_both_meshes() -> None:
    async with scheduler("a") as address, rpc.link_channel(address) as channel:
        stub: Stub = mesh_grpc.SchedulerStub(channel)
        with pytest.raises(aio.AioRpcError) as caught:
            await stub.Overview(mesh.OverviewRequest(), metadata=mesh_id.metadata("b"))
        assert caught.value.code() is REFUSED
        assert caught.value.details() == "the caller belongs to mesh 'b', this process to mesh 'a'"
        await stub.Overview(mesh.OverviewRequest(), metadata=mesh_id.metadata("a"))
        await stub.Overview(mesh.OverviewRequest())  # A caller without a mesh id is accepted.


async def test_health_answers_carry_the_mesh_id() -> None:
    for own in ("a", ""):
        async with scheduler(own) as address, rpc.link_channel(address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            call = stub.Check(health_pb2.HealthCheckRequest(service="weft.v1.Scheduler"))
            carried = dict(await call.initial_metadata())
            assert (await call).status == health_pb2.HealthCheckResponse.SERVING
            assert carried.get(mesh_id.METADATA_KEY, "") == own


def test_an_id_that_metadata_cannot_carry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_MESH_ID", "caf\u00e9")
    with pytest.raises(ValidationError, match="mesh_id"):
        CommonSettings()
