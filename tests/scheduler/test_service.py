"""The scheduler over real gRPC links: the messages of peers, and the isolation of peers from one another."""

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
from services.scheduler.core.limits import Limits
from services.scheduler.core.scheduler import SchedulerCore
from services.scheduler.service import SchedulerService
from services.send_queue import unjoin
from tests.gateway.fakes import until

CARD = mesh.ModelCard(name="story", fingerprint=b"f" * 32, block_size=16, bundle_digest=b"b" * 32, context_length=512)
WAIT_S = 10


@dataclass
class Peer:
    """A gateway's or worker's end of a link to the scheduler."""

    call: Any

    async def send(self, message: mesh.DispatchRequest | mesh.AttachRequest) -> None:
        await self.call.write(message)

    async def receive(self) -> Any:
        """The next message of any kind."""
        message = await asyncio.wait_for(self.call.read(), WAIT_S)
        assert message is not aio.EOF, await self.call.code()
        return getattr(message, message.WhichOneof("message"))

    async def receive_kind(self, kind: type) -> Any:
        """The next message of a kind; those before it are skipped."""
        while not isinstance(message := await self.receive(), kind):
            pass
        return message

    async def status(self) -> grpc.StatusCode:
        """How the link ended; messages before the end are skipped."""
        with contextlib.suppress(aio.AioRpcError):
            while await asyncio.wait_for(self.call.read(), WAIT_S) is not aio.EOF:
                pass
        return await asyncio.wait_for(self.call.code(), WAIT_S)

    async def submit(self, job_id: str, **fields: Any) -> None:
        known: dict[str, Any] = {"attempt": 1, "model": "story", "prompt_tokens": 8, "max_tokens": 8} | fields
        await self.send(mesh.DispatchRequest(submit=mesh.Submit(job_id=job_id, **known)))

    async def report(self, **fields: Any) -> None:
        await self.send(mesh.AttachRequest(report=mesh.WorkerReport(**fields)))


class Mesh:
    """A scheduler on loopback and its peers."""

    def __init__(self, core: SchedulerCore, port: int) -> None:
        self.core = core
        self.address = f"127.0.0.1:{port}"
        self._channels: list[aio.Channel] = []

    def stub(self) -> "mesh_grpc.SchedulerAsyncStub":
        """A stub on a connection of its own."""
        channel = rpc.link_channel(self.address)
        self._channels.append(channel)
        return mesh_grpc.SchedulerStub(channel)

    async def gateway(self, gateway_id: str = "g1") -> Peer:
        peer = Peer(self.stub().Dispatch())
        await peer.send(mesh.DispatchRequest(hello=mesh.GatewayHello(gateway_id=gateway_id)))
        assert (await peer.receive()).epoch == 7
        return peer

    async def worker(
        self, worker_id: str = "w1", *, credits: int = 1, card: mesh.ModelCard = CARD, **fields: Any
    ) -> Peer:
        peer = Peer(self.stub().Attach())
        hello = mesh.WorkerHello(worker_id=worker_id, address=f"{worker_id}:1", card=card, credits=credits, **fields)
        await peer.send(mesh.AttachRequest(hello=hello))
        return peer

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


@contextlib.asynccontextmanager
async def running(limits: Limits | None = None, queue_limit: int = 4096) -> AsyncIterator[Mesh]:
    """A scheduler with its clock, on a free port."""
    loop = asyncio.get_running_loop()
    core = SchedulerCore(7, loop.time(), limits)
    servicer = SchedulerService(core, loop.time, queue_limit)
    served = rpc.Service("weft.v1.Scheduler", mesh_grpc.add_SchedulerServicer_to_server, servicer)
    server = await rpc.serve("127.0.0.1:0", [served])
    clock = asyncio.create_task(servicer.run_clock())
    result = Mesh(core, server.port)
    yield result
    await result.close()
    clock.cancel()
    await server.stop(0)
    core.check_integrity()


@pytest.fixture
async def scheduler() -> AsyncIterator[Mesh]:
    async with running() as result:
        yield result


async def test_a_job_goes_to_a_worker_and_its_credit_to_the_next_job(scheduler: Mesh) -> None:
    worker = await scheduler.worker()
    assert (await worker.receive()).epoch == 7
    gateway = await scheduler.gateway()
    (served,) = (await gateway.receive_kind(mesh.ModelList)).models
    assert (served.card, list(served.addresses)) == (CARD, ["w1:1"])
    await gateway.submit("a")
    await gateway.submit("b")
    assigned = await gateway.receive_kind(mesh.Assigned)
    assert (assigned.job_id, assigned.attempt, assigned.worker_id, assigned.address) == ("a", 1, "w1", "w1:1")
    await worker.report(steps=1, running=0, ended=[mesh.EndedJob(job_id="a", attempt=1, tokens=8)])
    assigned = await gateway.receive_kind(mesh.Assigned)
    assert assigned.job_id == "b"
    assert assigned.queue_s > 0


async def test_messages_count_the_submissions_that_were_read(scheduler: Mesh) -> None:
    first, second = await scheduler.gateway(), await scheduler.gateway("g2")
    await scheduler.worker(credits=8)

    async def counted(peer: Peer, count: int) -> None:
        """A message with this count arrives, at the latest with the next heartbeat."""
        while (message := await asyncio.wait_for(peer.call.read(), WAIT_S)).submissions_read < count:
            pass
        assert message.submissions_read == count

    for number in range(3):
        await first.submit(f"job {number}")
    await counted(first, 3)
    await second.submit("another")
    await counted(second, 1)
    await first.submit("of an unknown model", model="other")
    await counted(first, 4)


async def test_several_messages_share_one(scheduler: Mesh) -> None:
    await scheduler.worker(credits=3)
    gateway = Peer(scheduler.stub().Dispatch())
    await gateway.send(mesh.DispatchRequest(hello=mesh.GatewayHello(gateway_id="g1", reads_more=True)))
    first = await gateway.call.read()
    assert first.hello.reads_more
    submits = [mesh.Submit(job_id=name, attempt=1, model="story", prompt_tokens=8, max_tokens=8) for name in "abc"]
    more = [mesh.DispatchRequest(submit=submit) for submit in submits[1:]]
    await gateway.send(mesh.DispatchRequest(submit=submits[0], more=more))
    answers: list[mesh.DispatchResponse] = []
    while not answers:
        message = await asyncio.wait_for(gateway.call.read(), WAIT_S)
        received: list[mesh.DispatchResponse] = []
        await unjoin(message, received.append)
        answers = [each for each in received if each.WhichOneof("message") == "assigned"]
    assert [each.assigned.job_id for each in answers] == ["a", "b", "c"]
    assert [each.submissions_read for each in answers] == [1, 2, 3]


async def test_the_end_of_a_cancelled_job_frees_no_credit_of_a_new_job_with_its_id(scheduler: Mesh) -> None:
    worker = await scheduler.worker()
    gateway = await scheduler.gateway()
    await gateway.submit("a")
    before = await gateway.receive_kind(mesh.Assigned)
    await gateway.submit("a")
    again = await gateway.receive_kind(mesh.Assigned)
    await gateway.submit("b")
    for tokens, answer in ((5, before), (8, again)):
        ended = mesh.EndedJob(job_id="a", attempt=1, tokens=tokens, placement=answer.placement)
        await worker.report(running=1, ended=[ended])
    assert (await gateway.receive_kind(mesh.Assigned)).job_id == "b"
    assert scheduler.core.state.counters.tokens == 8


async def test_every_gateway_receives_a_new_worker(scheduler: Mesh) -> None:
    gateways = [await scheduler.gateway(name) for name in ("g1", "g2")]
    for gateway in gateways:
        assert not (await gateway.receive_kind(mesh.ModelList)).models
    await scheduler.worker()
    for gateway in gateways:
        assert [served.card.name for served in (await gateway.receive_kind(mesh.ModelList)).models] == ["story"]


async def test_every_refusal_carries_code_reason_and_retry_delay() -> None:
    async with running(Limits(queue_limit=0, unserved_s=0)) as scheduler:
        await (await scheduler.worker()).receive()
        gateway = await scheduler.gateway()
        await gateway.submit("poem", model="poem")
        await gateway.submit("full")
        failures = {r.job_id: r.failure for r in [await gateway.receive_kind(mesh.Rejected) for _ in range(2)]}
    assert (failures["poem"].code, failures["poem"].reason, failures["poem"].field) == (5, "MODEL_NOT_FOUND", "model")
    assert (failures["full"].code, failures["full"].reason) == (8, "QUEUE_FULL")
    assert failures["full"].retry_after_s > 0


async def test_withdrawn_and_joined_jobs_over_grpc(scheduler: Mesh) -> None:
    await (await scheduler.worker()).receive()
    gateway = await scheduler.gateway()
    await gateway.submit("a", identity=b"same")
    await gateway.submit("b", identity=b"same")
    joined = await gateway.receive_kind(mesh.Joined)
    assert (joined.job_id, joined.leader_job_id, joined.worker_id, joined.address) == ("b", "a", "w1", "w1:1")
    await gateway.submit("c")
    await gateway.send(mesh.DispatchRequest(withdraw=mesh.Withdraw(job_id="a")))
    assert (await gateway.receive_kind(mesh.Assigned)).job_id == "c"


@pytest.mark.parametrize("link", ["Dispatch", "Attach"])
async def test_a_link_begins_with_a_hello(scheduler: Mesh, link: str) -> None:
    first: dict[str, Any] = {
        "Dispatch": mesh.DispatchRequest(withdraw=mesh.Withdraw(job_id="a")),
        "Attach": mesh.AttachRequest(report=mesh.WorkerReport()),
    }
    peer = Peer(getattr(scheduler.stub(), link)())
    await peer.send(first[link])
    assert await peer.status() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_second_hello_ends_the_link(scheduler: Mesh) -> None:
    gateway = await scheduler.gateway()
    await gateway.send(mesh.DispatchRequest(hello=mesh.GatewayHello(gateway_id="g2")))
    assert await gateway.status() is grpc.StatusCode.INVALID_ARGUMENT
    worker = await scheduler.worker()
    await worker.send(mesh.AttachRequest(hello=mesh.WorkerHello(worker_id="w2")))
    assert await worker.status() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_gateway_without_an_id_is_refused(scheduler: Mesh) -> None:
    peer = Peer(scheduler.stub().Dispatch())
    await peer.send(mesh.DispatchRequest(hello=mesh.GatewayHello()))
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
    await (await scheduler.worker()).receive()
    gateway = await scheduler.gateway()
    await gateway.submit("bad", **fields)
    rejected = await gateway.receive_kind(mesh.Rejected)
    assert (rejected.job_id, rejected.failure.code, rejected.failure.field) == ("bad", 3, field)
    await gateway.submit("good")
    assert (await gateway.receive_kind(mesh.Assigned)).job_id == "good"


@pytest.mark.parametrize(
    "fields",
    [{"stored_keys": b"short"}, {"evicted_keys": b"short"}, {"step_s": float("nan")}, {"prefill_rate": -1.0}],
    ids=lambda fields: next(iter(fields)),
)
async def test_a_malformed_report_ends_its_link(scheduler: Mesh, fields: dict[str, Any]) -> None:
    worker = await scheduler.worker()
    await worker.report(**fields)
    assert await worker.status() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_worker_of_another_model_with_the_same_name_receives_a_refusal(scheduler: Mesh) -> None:
    await (await scheduler.worker("w1")).receive()
    other = mesh.ModelCard()
    other.CopyFrom(CARD)
    other.fingerprint = b"x" * 32
    worker = await scheduler.worker("w2", card=other)
    refused = await worker.receive()
    assert (refused.code, refused.reason) == (9, "MODEL_MISMATCH")
    assert await worker.status() is grpc.StatusCode.OK
    assert list(scheduler.core.state.workers) == ["w1"]


async def test_a_worker_whose_link_breaks_for_good_is_lost() -> None:
    async with running(Limits(grace_s=0.2)) as scheduler:
        worker = await scheduler.worker()
        gateway = await scheduler.gateway()
        await gateway.submit("a")
        await gateway.receive_kind(mesh.Assigned)
        worker.call.cancel()
        assert (await gateway.receive_kind(mesh.WorkerLost)).worker_id == "w1"


async def test_a_worker_that_reconnects_keeps_its_jobs(scheduler: Mesh) -> None:
    first = await scheduler.worker(credits=2)
    gateway = await scheduler.gateway()
    await gateway.submit("a")
    await gateway.receive_kind(mesh.Assigned)
    second = await scheduler.worker(credits=2, running=[mesh.RunningJob(job_id="a", attempt=1)])
    await second.receive()
    assert await first.status() is grpc.StatusCode.ABORTED, "the older link is ended, and its end detaches no worker"
    await gateway.submit("b")
    assert (await gateway.receive_kind(mesh.Assigned)).job_id == "b"
    assert list(scheduler.core.state.workers["w1"].jobs) == ["a", "b"]


async def test_a_hung_worker_is_lost_and_may_register_again() -> None:
    async with running(Limits(stall_s=0.2)) as scheduler:
        worker = await scheduler.worker()
        gateway = await scheduler.gateway()
        await gateway.submit("a")
        await gateway.receive_kind(mesh.Assigned)
        assert (await gateway.receive_kind(mesh.WorkerLost)).worker_id == "w1"
        assert await worker.status() is grpc.StatusCode.ABORTED
        again = await scheduler.worker()
        assert (await again.receive()).epoch == 7


async def test_a_gateways_waiting_jobs_are_dropped_with_its_link(scheduler: Mesh) -> None:
    worker = await scheduler.worker()
    first, second = [await scheduler.gateway(name) for name in ("g1", "g2")]
    await first.submit("runs")
    await first.receive_kind(mesh.Assigned)
    await first.submit("waits")
    await until(lambda: bool(scheduler.core.state.jobs.waiting_of("g1")), 30)
    first.call.cancel()
    await until(lambda: not scheduler.core.state.jobs.waiting_of("g1"), 30)
    await second.submit("next")
    await worker.report(steps=1, ended=[mesh.EndedJob(job_id="runs", attempt=1, tokens=1)])
    assert (await second.receive_kind(mesh.Assigned)).job_id == "next"


async def test_a_gateway_that_does_not_read_is_disconnected_and_delays_no_other() -> None:
    async with running(queue_limit=64) as scheduler:
        worker = await scheduler.worker()
        await worker.receive()
        stalled, quick = [await scheduler.gateway(name) for name in ("stalled", "quick")]

        async def flood() -> None:
            for _ in range(20_000):  # Each answer carries 16 KiB; about 4 MiB fill the buffers of the connection.
                await stalled.submit("x" * 16_384, attempt=0)

        flooding = asyncio.create_task(flood())
        while "stalled" in scheduler.core.state.commands.gateways:
            await quick.submit("a")
            assert (await quick.receive_kind(mesh.Assigned)).job_id == "a"
            await worker.report(steps=1, ended=[mesh.EndedJob(job_id="a", attempt=1, tokens=1)])
            await asyncio.sleep(0.01)
        # A gRPC client reports INTERNAL when it writes into a call that has ended.
        assert await stalled.status() in {grpc.StatusCode.ABORTED, grpc.StatusCode.INTERNAL}
        with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):
            await flooding


async def test_malformed_bytes_end_only_their_link(scheduler: Mesh) -> None:
    gateway = await scheduler.gateway()
    async with aio.insecure_channel(scheduler.address) as channel:
        call: Any = channel.stream_stream("/weft.v1.Scheduler/Dispatch")()
        await call.write(b"\xff\xff\xff")
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    await scheduler.worker()
    await gateway.submit("a")
    assert (await gateway.receive_kind(mesh.Assigned)).job_id == "a"


async def test_the_process_serves_without_a_reader_of_its_log_and_stops_on_sigterm() -> None:
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
        await link.send(mesh.DispatchRequest(hello=mesh.GatewayHello(gateway_id="g1")))
        assert (await link.receive()).epoch == ready["epoch"]
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 10) == 0
