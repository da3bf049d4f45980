"""A rogue worker, gateway, server and cache value: each is refused, and the mesh goes on with its own."""

import asyncio
import contextlib
import re
import uuid
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import redis as redis_client
from grpc import aio

from protos import cache_pb2, mesh_pb2
from protos import mesh_pb2_grpc as mesh_grpc
from protos.inference_pb2_grpc import InferenceStub
from services import rpc
from services.gateway.links.worker_links import WorkerLinks
from services.security import frames, identity
from services.security.identity import Identity, of_secret
from tests.mesh.harness import Mesh, Process, Stub, ask, generate
from tests.redis_server import RedisServer
from tests.security import callers
from tests.security.conftest import KEY, PACED, SECRET, Files
from tests.telemetry.scraping import scrape

pytestmark = pytest.mark.asyncio(loop_scope="session")
CODES = grpc.StatusCode
TIMEOUT_S = 60
BEARER = (("authorization", f"Bearer {KEY}"),)
STRANGERS = ("nobody", "stranger", "self-signed")
METHOD_OF_WORKERS = "/weft.v1.Scheduler/Attach"


@contextlib.asynccontextmanager
async def client(mesh: Mesh, files: Files) -> AsyncIterator[Stub]:
    """A client with a key."""
    credentials = grpc.ssl_channel_credentials(files.ca.read_bytes())
    async with aio.secure_channel(mesh.gateways[0].address, credentials) as channel:
        yield InferenceStub(channel)


async def test_a_rogue_worker_gets_no_work(mesh: Mesh, files: Files) -> None:
    """A worker process with another secret, and one without any, serve the same model and are never listed."""
    for number, env in enumerate(({"WEFT_MESH_SECRET": "0" * 64}, {"WEFT_MESH_SECRET": ""}), 7):
        rogue = mesh.new_worker(number, **PACED, **env)
        rogue.start()
        try:
            while '"connecting to the scheduler"' not in rogue.tail():
                assert rogue.popen is not None
                assert rogue.popen.poll() is None, rogue.tail()
                await asyncio.sleep(0.05)
            async with client(mesh, files) as stub:
                answers = [await generate(stub, ask(f"story {i}", max_tokens=3), metadata=BEARER) for i in range(8)]
            assert all(len(answer.ids) == 3 for answer in answers)
            workers = (await _overview(mesh)).workers
            assert [worker.address for worker in workers] == [mesh.workers[0].address]
            assert "registered at the scheduler" not in rogue.tail()
        finally:
            rogue.stop()


async def test_a_role_cannot_take_the_place_of_another(mesh: Mesh) -> None:
    """A gateway cannot register as a worker, and a worker cannot subscribe to answers."""
    gateway, worker = (of_secret(role, SECRET.encode()) for role in ("gateway", "worker"))
    scheduler, own = mesh.scheduler, mesh.workers[0]
    ended = await callers.walk(scheduler.address, "scheduler", gateway, [METHOD_OF_WORKERS])
    assert ended == {METHOD_OF_WORKERS: CODES.PERMISSION_DENIED}
    ended = await callers.walk(own.address, "worker", worker, ["/weft.v1.Worker/Run"])
    assert ended == {"/weft.v1.Worker/Run": CODES.PERMISSION_DENIED}


async def test_a_running_answer_cannot_be_read_over_an_inner_port(mesh: Mesh, files: Files) -> None:
    """Strangers and other roles say hello as a gateway and subscribe to a job of the worker."""
    running = asyncio.Event()
    async with client(mesh, files) as stub:
        request = ask("a secret story", max_tokens=200)
        task = asyncio.create_task(generate(stub, request, metadata=BEARER, on_delta=lambda _: running.set()))
        await asyncio.wait_for(running.wait(), TIMEOUT_S)
        for name, who in callers.callers(SECRET.encode()):
            if name != "gateway":
                code = await _stolen(mesh.workers[0], who)
                assert code is (CODES.UNAVAILABLE if name in STRANGERS else CODES.PERMISSION_DENIED)
        assert len((await task).ids) == 200


async def test_a_rogue_server_at_a_workers_address_receives_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has taken over the port of a worker; a gateway connects and sends neither hello nor job."""
    received: list[mesh_pb2.RunRequest] = []

    class Rogue(mesh_grpc.WorkerServicer):
        async def Run(self, requests: Any, context: Any) -> Any:
            async for request in requests:
                received.append(request)
                yield mesh_pb2.RunResponse()

    monkeypatch.setattr(identity, "_current", of_secret("gateway", SECRET.encode()))
    # Plain, of another mesh, and of the same mesh with another role.
    for own in (identity.NOBODY, callers.stranger("worker"), of_secret("cache", SECRET.encode())):
        served = rpc.Service("weft.v1.Worker", mesh_grpc.add_WorkerServicer_to_server, Rogue())  # type: ignore[abstract]
        server = await rpc.serve("127.0.0.1:0", [served], identity=own)
        links = WorkerLinks("gateway")
        link = links.to(f"127.0.0.1:{server.port}")
        stream = link.run(mesh_pb2.Job(job_id="j", token_ids=[1], prompt_len=1), "worker", lambda: None)
        await asyncio.wait_for(stream.closed, TIMEOUT_S)
        assert stream.loss is not None
        await links.close()
        await server.stop(0)
    assert received == []


async def test_a_forged_cache_value_is_a_counted_miss(mesh: Mesh, files: Files, redis: RedisServer) -> None:
    """Who writes to Redis replaces a result by another one in a frame with a valid checksum, and by one of another
    mesh: the answer is computed again."""
    request = ask(f"a cached story {uuid.uuid4().hex}", max_tokens=8)
    store = redis_client.Redis.from_url(redis.url)
    async with client(mesh, files) as stub:
        before = _results(store)
        genuine = await generate(stub, request, metadata=BEARER)
        name = await _stored(store, before)
        frame = store.get(name)
        assert isinstance(frame, bytes)
        async with asyncio.timeout(TIMEOUT_S):  # The worker may answer before the cache does.
            while not (hit := await generate(stub, request, metadata=BEARER)).receipt.result_hit:
                genuine = hit
        assert hit.ids == genuine.ids
        result = cache_pb2.CachedResult.FromString(frame[frames.HEADER_BYTES :])
        result.token_ids[:] = [token + 1 for token in result.token_ids]
        key = bytes.fromhex(name.decode().rpartition(":")[2])
        for forger in (b"", b"another secret"):
            corrupt = await _corrupt(mesh)
            forged = frames.seal(frames.Kind.RESULT, key, result.SerializeToString(), forger)
            assert frames.unseal(frames.Kind.RESULT, key, forged, forger)
            store.set(name, forged)
            again = await generate(stub, request, metadata=BEARER)
            assert again.ids != list(result.token_ids)
            assert not again.receipt.result_hit
            assert await _corrupt(mesh) == corrupt + 1
            await _stored(store, before)
    store.close()


def _results(store: redis_client.Redis) -> set[bytes]:
    """The names of all results in Redis."""
    names = [bytes(name) for name in store.keys("weft:1:{result}:*")]  # type: ignore[arg-type]
    return {name for name in names if re.search(rb":[0-9a-f]+$", name)}


async def _stored(store: redis_client.Redis, before: set[bytes]) -> bytes:
    """The name of the result that is stored beside those before."""
    async with asyncio.timeout(TIMEOUT_S):
        while not (new := _results(store) - before):  # noqa: ASYNC110 (nothing announces a store)
            await asyncio.sleep(0.02)
    return next(iter(new))


async def _corrupt(mesh: Mesh) -> float:
    assert mesh.cache is not None
    return (await scrape(mesh.cache)).value("weft_cache_misses_total", reason="corrupt")


async def _overview(mesh: Mesh) -> mesh_pb2.OverviewResponse:
    async with mesh.reach.channel(mesh.scheduler.address, "scheduler") as channel:
        stub: Any = mesh_grpc.SchedulerStub(channel)
        overview: mesh_pb2.OverviewResponse = await stub.Overview(mesh_pb2.OverviewRequest())
        return overview


async def _stolen(worker: Process, who: Identity) -> grpc.StatusCode:
    """How a Run stream of this caller ends. Asserts that it delivers nothing."""
    hello = mesh_pb2.RunRequest(hello=mesh_pb2.GatewayHello(gateway_id="g"))
    attach = mesh_pb2.RunRequest(attach=mesh_pb2.AttachJob(stream_id=1, job_id="any"))
    async with rpc.link_channel(worker.address, "worker", who) as channel:
        stub: Any = mesh_grpc.WorkerStub(channel)
        while True:
            call = stub.Run(iter([hello, attach]))
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    assert [answer async for answer in call] == []
            except aio.AioRpcError as error:
                if error.details() != callers.WRITTEN_AFTER_END:
                    return error.code()
