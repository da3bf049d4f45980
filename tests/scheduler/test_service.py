"""The scheduler over real gRPC links: what peers hear, and what each of them cannot do to the others."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import mesh_pb2 as mesh
from protos import mesh_pb2_grpc as mesh_grpc
from services import rpc
from services.scheduler.core.pool import Pool
from services.scheduler.limits import Limits
from services.scheduler.service import SchedulerService

CARD = mesh.ModelCard(name="story", fingerprint=b"f" * 32, block_size=16, bundle_digest=b"b" * 32, context_length=512)
PATIENCE_S = 10


@dataclass
class Peer:
    """One end of a link."""

    call: Any

    async def say(self, message: mesh.DispatchRequest | mesh.AttachRequest) -> None:
        await self.call.write(message)

    async def hear(self) -> Any:
        """The next message, whichever it is."""
        message = await asyncio.wait_for(self.call.read(), PATIENCE_S)
        assert message is not aio.EOF, await self.call.code()
        return getattr(message, message.WhichOneof("message"))

    async def hear_of(self, kind: type) -> Any:
        """The next message of a kind; those before it are skipped."""
        while not isinstance(message := await self.hear(), kind):
            pass
        return message

    async def status(self) -> grpc.StatusCode:
        """How the link ended; messages before the end are skipped."""
        with contextlib.suppress(aio.AioRpcError):
            while await asyncio.wait_for(self.call.read(), PATIENCE_S) is not aio.EOF:
                pass
        return await asyncio.wait_for(self.call.code(), PATIENCE_S)

    async def submit(self, job_id: str, **fields: Any) -> None:
        known: dict[str, Any] = {"attempt": 1, "model": "story", "prompt_tokens": 8, "max_tokens": 8} | fields
        await self.say(mesh.DispatchRequest(submit=mesh.Submit(job_id=job_id, **known)))

    async def report(self, **fields: Any) -> None:
        await self.say(mesh.AttachRequest(report=mesh.WorkerReport(**fields)))


class Mesh:
    """A scheduler on loopback and its peers."""

    def __init__(self, pool: Pool, port: int) -> None:
        self.pool = pool
        self.address = f"127.0.0.1:{port}"
        self._channels: list[aio.Channel] = []

    def stub(self) -> "mesh_grpc.SchedulerAsyncStub":
        """A stub on a connection of its own."""
        channel = rpc.link_channel(self.address)
        self._channels.append(channel)
        return mesh_grpc.SchedulerStub(channel)

    async def gateway(self, gateway_id: str = "g1") -> Peer:
        peer = Peer(self.stub().Dispatch())
        await peer.say(mesh.DispatchRequest(hello=mesh.GatewayHello(gateway_id=gateway_id)))
        assert (await peer.hear()).epoch == 7
        return peer

    async def worker(
        self, worker_id: str = "w1", *, credits: int = 1, card: mesh.ModelCard = CARD, **fields: Any
    ) -> Peer:
        peer = Peer(self.stub().Attach())
        hello = mesh.WorkerHello(worker_id=worker_id, address=f"{worker_id}:1", card=card, credits=credits, **fields)
        await peer.say(mesh.AttachRequest(hello=hello))
        return peer

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


@contextlib.asynccontextmanager
async def running(limits: Limits | None = None, outbox_limit: int = 4096) -> AsyncIterator[Mesh]:
    """A scheduler with its clock, on a free port."""
    loop = asyncio.get_running_loop()
    pool = Pool(7, loop.time(), limits)
    servicer = SchedulerService(pool, loop.time, outbox_limit)
    served = rpc.Service("weft.v1.Scheduler", mesh_grpc.add_SchedulerServicer_to_server, servicer)
    server = await rpc.serve("127.0.0.1:0", [served])
    clock = asyncio.create_task(servicer.run_clock())
    result = Mesh(pool, server.port)
    yield result
    await result.close()
    clock.cancel()
    await server.stop(0)
    pool.check_integrity()


@pytest.fixture
async def scheduler() -> AsyncIterator[Mesh]:
    async with running() as result:
        yield result


async def test_a_job_goes_to_a_worker_and_its_credit_to_the_next_job(scheduler: Mesh) -> None:
    worker = await scheduler.worker()
    assert (await worker.hear()).epoch == 7
    gateway = await scheduler.gateway()
    (served,) = (await gateway.hear_of(mesh.ModelList)).models
    assert (served.card, list(served.addresses)) == (CARD, ["w1:1"])
    await gateway.submit("a")
    await gateway.submit("b")
    assigned = await gateway.hear_of(mesh.Assigned)
    assert (assigned.job_id, assigned.attempt, assigned.worker_id, assigned.address) == ("a", 1, "w1", "w1:1")
    await worker.report(steps=1, running=0, ended=[mesh.EndedJob(job_id="a", attempt=1, tokens=8)])
    assigned = await gateway.hear_of(mesh.Assigned)
    assert assigned.job_id == "b"
    assert assigned.queue_s > 0


async def test_the_end_of_a_cancelled_job_leaves_its_successor_of_the_same_name_in_the_books(scheduler: Mesh) -> None:
    worker = await scheduler.worker()
    gateway = await scheduler.gateway()
    await gateway.submit("a")
    before = await gateway.hear_of(mesh.Assigned)
    await gateway.submit("a")
    again = await gateway.hear_of(mesh.Assigned)
    await gateway.submit("b")
    for tokens, answer in ((5, before), (8, again)):
        ended = mesh.EndedJob(job_id="a", attempt=1, tokens=tokens, placement=answer.placement)
        await worker.report(running=1, ended=[ended])
    assert (await gateway.hear_of(mesh.Assigned)).job_id == "b"
    assert scheduler.pool.counters.tokens == 8


async def test_a_new_worker_is_news_to_every_gateway(scheduler: Mesh) -> None:
    gateways = [await scheduler.gateway(name) for name in ("g1", "g2")]
    for gateway in gateways:
        assert not (await gateway.hear_of(mesh.ModelList)).models
    await scheduler.worker()
    for gateway in gateways:
        assert [served.card.name for served in (await gateway.hear_of(mesh.ModelList)).models] == ["story"]


async def test_every_refusal_carries_code_reason_and_time_to_come_back() -> None:
    async with running(Limits(queue_limit=0, orphan_s=0)) as scheduler:
        await (await scheduler.worker()).hear()
        gateway = await scheduler.gateway()
        await gateway.submit("poem", model="poem")
        await gateway.submit("full")
        failures = {r.job_id: r.failure for r in [await gateway.hear_of(mesh.Rejected) for _ in range(2)]}
    assert (failures["poem"].code, failures["poem"].reason, failures["poem"].field) == (5, "MODEL_NOT_FOUND", "model")
    assert (failures["full"].code, failures["full"].reason) == (8, "QUEUE_FULL")
    assert failures["full"].retry_after_s > 0


async def test_withdrawn_and_joined_jobs_over_the_wire(scheduler: Mesh) -> None:
    await (await scheduler.worker()).hear()
    gateway = await scheduler.gateway()
    await gateway.submit("a", identity=b"same")
    await gateway.submit("b", identity=b"same")
    joined = await gateway.hear_of(mesh.Joined)
    assert (joined.job_id, joined.leader_job_id, joined.worker_id, joined.address) == ("b", "a", "w1", "w1:1")
    await gateway.submit("c")
    await gateway.say(mesh.DispatchRequest(withdraw=mesh.Withdraw(job_id="a")))
    assert (await gateway.hear_of(mesh.Assigned)).job_id == "c"


@pytest.mark.parametrize("link", ["Dispatch", "Attach"])
async def test_a_link_begins_with_a_hello(scheduler: Mesh, link: str) -> None:
    first: dict[str, Any] = {
        "Dispatch": mesh.DispatchRequest(withdraw=mesh.Withdraw(job_id="a")),
        "Attach": mesh.AttachRequest(report=mesh.WorkerReport()),
    }
    peer = Peer(getattr(scheduler.stub(), link)())
    await peer.say(first[link])
    assert await peer.status() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_second_hello_ends_the_link(scheduler: Mesh) -> None:
    gateway = await scheduler.gateway()
    await gateway.say(mesh.DispatchRequest(hello=mesh.GatewayHello(gateway_id="g2")))
    assert await gateway.status() is grpc.StatusCode.INVALID_ARGUMENT
    worker = await scheduler.worker()
    await worker.say(mesh.AttachRequest(hello=mesh.WorkerHello(worker_id="w2")))
    assert await worker.status() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_gateway_without_a_name_is_refused(scheduler: Mesh) -> None:
    peer = Peer(scheduler.stub().Dispatch())
    await peer.say(mesh.DispatchRequest(hello=mesh.GatewayHello()))
    assert await peer.status() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"attempt": 0}, "attempt"),
        ({"block_keys": b"short"}, "block_keys"),
        ({"deadline_s": float("nan")}, "deadline_s"),
        ({"deadline_s": float("inf")}, "deadline_s"),
    ],
)
async def test_a_malformed_job_is_refused_alone(scheduler: Mesh, fields: dict[str, Any], field: str) -> None:
    await (await scheduler.worker()).hear()
    gateway = await scheduler.gateway()
    await gateway.submit("bad", **fields)
    rejected = await gateway.hear_of(mesh.Rejected)
    assert (rejected.job_id, rejected.failure.code, rejected.failure.field) == ("bad", 3, field)
    await gateway.submit("good")
    assert (await gateway.hear_of(mesh.Assigned)).job_id == "good"


@pytest.mark.parametrize(
    "fields",
    [{"stored_keys": b"short"}, {"evicted_keys": b"short"}, {"step_s": float("nan")}, {"prefill_rate": -1.0}],
    ids=lambda fields: next(iter(fields)),
)
async def test_a_malformed_report_ends_its_link(scheduler: Mesh, fields: dict[str, Any]) -> None:
    worker = await scheduler.worker()
    await worker.report(**fields)
    assert await worker.status() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_worker_of_another_model_with_the_same_name_is_told_so(scheduler: Mesh) -> None:
    await (await scheduler.worker("w1")).hear()
    other = mesh.ModelCard()
    other.CopyFrom(CARD)
    other.fingerprint = b"x" * 32
    worker = await scheduler.worker("w2", card=other)
    refused = await worker.hear()
    assert (refused.code, refused.reason) == (9, "MODEL_MISMATCH")
    assert await worker.status() is grpc.StatusCode.OK
    assert list(scheduler.pool.workers) == ["w1"]


async def test_a_worker_whose_link_breaks_for_good_is_lost() -> None:
    async with running(Limits(grace_s=0.2)) as scheduler:
        worker = await scheduler.worker()
        gateway = await scheduler.gateway()
        await gateway.submit("a")
        await gateway.hear_of(mesh.Assigned)
        worker.call.cancel()
        assert (await gateway.hear_of(mesh.WorkerLost)).worker_id == "w1"


async def test_a_worker_that_comes_back_keeps_its_jobs(scheduler: Mesh) -> None:
    first = await scheduler.worker(credits=2)
    gateway = await scheduler.gateway()
    await gateway.submit("a")
    await gateway.hear_of(mesh.Assigned)
    second = await scheduler.worker(credits=2, running=[mesh.RunningJob(job_id="a", attempt=1)])
    await second.hear()
    assert await first.status() is grpc.StatusCode.ABORTED, "the older link is cut, and its end means nothing"
    await gateway.submit("b")
    assert (await gateway.hear_of(mesh.Assigned)).job_id == "b"
    assert list(scheduler.pool.workers["w1"].jobs) == ["a", "b"]


async def test_a_hung_worker_is_lost_and_may_say_hello_again() -> None:
    async with running(Limits(stall_s=0.2)) as scheduler:
        worker = await scheduler.worker()
        gateway = await scheduler.gateway()
        await gateway.submit("a")
        await gateway.hear_of(mesh.Assigned)
        assert (await gateway.hear_of(mesh.WorkerLost)).worker_id == "w1"
        assert await worker.status() is grpc.StatusCode.ABORTED
        again = await scheduler.worker()
        assert (await again.hear()).epoch == 7


async def test_a_gateways_waiting_jobs_go_with_its_link(scheduler: Mesh) -> None:
    worker = await scheduler.worker()
    first, second = [await scheduler.gateway(name) for name in ("g1", "g2")]
    await first.submit("runs")
    await first.hear_of(mesh.Assigned)
    await first.submit("waits")
    await asyncio.sleep(0.1)
    first.call.cancel()
    await asyncio.sleep(0.1)
    await second.submit("next")
    await worker.report(steps=1, ended=[mesh.EndedJob(job_id="runs", attempt=1, tokens=1)])
    assert (await second.hear_of(mesh.Assigned)).job_id == "next"


async def test_a_gateway_that_does_not_read_is_cut_off_and_delays_nobody() -> None:
    async with running(outbox_limit=64) as scheduler:
        worker = await scheduler.worker()
        await worker.hear()
        deaf, quick = [await scheduler.gateway(name) for name in ("deaf", "quick")]

        async def shout() -> None:
            for _ in range(20_000):  # Each answer carries 16 KiB; some 4 MiB fill the buffers between us.
                await deaf.submit("x" * 16_384, attempt=0)

        shouting = asyncio.create_task(shout())
        while "deaf" in scheduler.pool._books.out.gateways:
            await quick.submit("a")
            assert (await quick.hear_of(mesh.Assigned)).job_id == "a"
            await worker.report(steps=1, ended=[mesh.EndedJob(job_id="a", attempt=1, tokens=1)])
            await asyncio.sleep(0.01)
        # INTERNAL is how a gRPC client names a write of its own into a call that has ended.
        assert await deaf.status() in {grpc.StatusCode.ABORTED, grpc.StatusCode.INTERNAL}
        with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):
            await shouting


async def test_bytes_that_are_no_message_end_only_their_link(scheduler: Mesh) -> None:
    gateway = await scheduler.gateway()
    async with aio.insecure_channel(scheduler.address) as channel:
        call: Any = channel.stream_stream("/weft.v1.Scheduler/Dispatch")()
        await call.write(b"\xff\xff\xff")
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    await scheduler.worker()
    await gateway.submit("a")
    assert (await gateway.hear_of(mesh.Assigned)).job_id == "a"


async def test_the_process_serves_without_a_reader_of_its_log_and_stops_when_told() -> None:
    reader, writer = os.pipe()
    environment = {"WEFT_LISTEN": "127.0.0.1:0", "WEFT_LOG_FORMAT": "json", "WEFT_SCHEDULER_QUEUE_LIMIT": "3"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.scheduler", env={**os.environ, **environment}, stderr=writer
    )
    os.close(writer)
    with os.fdopen(reader) as lines:
        ready = json.loads(await asyncio.wait_for(asyncio.to_thread(lines.readline), 60))
    assert ready["event"] == "ready"
    async with aio.insecure_channel(f"127.0.0.1:{ready['port']}") as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service="weft.v1.Scheduler"))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        link = Peer(mesh_grpc.SchedulerStub(channel).Dispatch())
        await link.say(mesh.DispatchRequest(hello=mesh.GatewayHello(gateway_id="g1")))
        assert (await link.hear()).epoch == ready["epoch"]
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 10) == 0
