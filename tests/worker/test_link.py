"""The worker's side of a Run stream: which tokens share a message, and what happens if the gateway does not read."""

import asyncio
import math
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc import aio

from protos import inference_pb2 as api
from protos import mesh_pb2 as mesh
from protos import mesh_pb2_grpc as mesh_grpc
from services import rpc
from services.send_queue import SendQueue
from services.worker.engine.base import BlockLoan, BlockRead
from services.worker.engine.profiling import PhaseRecorder, Profiler
from services.worker.job import Adapter, Job, StepOutput, TokenOut
from services.worker.loader import checkpoint
from services.worker.loader.config import load_config
from services.worker.service import gateway_link as links
from services.worker.service.adapters import Adapters
from services.worker.service.block_lender import BlockLender
from services.worker.service.block_sender import BlockSender
from services.worker.service.gateway_link import GatewayLink
from services.worker.service.heartbeat import Progress
from services.worker.service.jobs import Jobs
from services.worker.service.metrics import WorkerMetrics
from services.worker.service.servicer import Loaded, WorkerService
from services.worker.service.startup import Startup
from weft.launch.demo_model import model_folder


def no_stats() -> Any:
    """The counters of an engine that has done nothing."""
    return SimpleNamespace(steps=0, predicted_step_s=0.0)


def no_adapter(name: str, folder: str) -> Adapter:
    raise AssertionError(name)


async def written(link: GatewayLink[object]) -> list[mesh.RunResponse]:
    """Closes the link and returns all its messages."""
    link.close()
    return [message async for message in link]


def entries(message: mesh.RunResponse) -> list[tuple[int, int, int]]:
    return list(zip(message.stream_ids, message.positions, message.token_ids, strict=True))


async def test_a_gateway_that_keeps_up_receives_one_message_per_step() -> None:
    link: GatewayLink[object] = GatewayLink("g")
    stream = aiter(link)
    for position in range(3):
        link.send_token(1, TokenOut(7, position, 40 + position))
        assert entries(await anext(stream)) == [(1, position, 40 + position)]
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    assert not waiting.done(), "an empty message is not sent"
    link.send_end(mesh.JobEnd(stream_id=1, reason=api.FINISH_REASON_LENGTH))
    assert [end.stream_id for end in (await waiting).ends] == [1]


async def test_steps_that_complete_during_a_write_share_a_message() -> None:
    link: GatewayLink[object] = GatewayLink("g")
    stream = aiter(link)
    link.send_token(1, TokenOut(7, 0, 40))
    assert len((await anext(stream)).stream_ids) == 1
    for position in (1, 2):
        link.send_token(1, TokenOut(7, position, 50))
        link.send_token(2, TokenOut(8, position, 60))
    link.send_end(mesh.JobEnd(stream_id=2, reason=api.FINISH_REASON_LENGTH))
    (rest,) = await written(link)
    assert entries(rest) == [(1, 1, 50), (2, 1, 60), (1, 2, 50), (2, 2, 60)]
    assert [end.stream_id for end in rest.ends] == [2]


async def test_log_probabilities_stay_with_their_tokens() -> None:
    link: GatewayLink[object] = GatewayLink("g")
    link.send_token(1, TokenOut(7, 0, 40))
    link.send_token(2, TokenOut(8, 0, 41, -0.5, [(41, -0.5), (3, -1.5)]))
    link.send_token(1, TokenOut(7, 1, 42))
    (message,) = await written(link)
    assert [math.isnan(value) for value in message.logprobs] == [True, False, True]
    assert message.logprobs[1] == -0.5
    (top,) = message.tops
    assert (top.entry, list(top.token_ids), list(top.logprobs)) == (1, [41, 3], [-0.5, -1.5])


async def test_messages_are_bounded_and_nothing_is_lost() -> None:
    link: GatewayLink[object] = GatewayLink("g")
    count = 2 * links.MOST_ENTRIES + 5
    for position in range(count):
        link.send_token(1, TokenOut(7, position, 1))
    messages = await written(link)
    assert [len(message.stream_ids) for message in messages] == [links.MOST_ENTRIES, links.MOST_ENTRIES, 5]
    assert [position for message in messages for position in message.positions] == list(range(count))


async def test_the_link_of_a_gateway_that_does_not_read_is_closed() -> None:
    link: GatewayLink[object] = GatewayLink("g")
    for position in range(links.MOST_ENTRIES * links.MOST_MESSAGES):
        link.send_token(1, TokenOut(7, position, 1))
    before = link.overrun
    link.send_token(1, TokenOut(7, 0, 1))
    assert (before, link.overrun) == (False, True)
    assert sum([len(message.stream_ids) async for message in link]) == 1, "the link ends and drops unsent messages"


class RecordingEngine:
    """An engine that records the keys of its jobs."""

    def __init__(self) -> None:
        self.keys: asyncio.Queue[int] = asyncio.Queue()

    def submit(self, job: Job) -> None:
        self.keys.put_nowait(job.key)

    def cancel(self, key: int, position: int) -> None:
        """Does nothing."""

    def prefetch(self, source: str, keys: Sequence[bytes]) -> None:
        """Does nothing."""

    block_layout = ""

    def read_blocks(self, read: BlockRead) -> None:
        """It has none."""

    def lend_blocks(self, loan: BlockLoan) -> None:
        """It has none."""

    def wake(self) -> None:
        """Does nothing."""


async def read_to_the_end(call: AsyncIterable[mesh.RunResponse]) -> None:
    async for _ in call:
        pass


@asynccontextmanager
async def served() -> AsyncIterator[tuple[RecordingEngine, Jobs, aio.Channel]]:
    """A worker's service, its engine and its jobs, and a connection to it."""
    engine, folder = RecordingEngine(), model_folder()
    card = checkpoint.model_card(
        folder, load_config(folder), name="m", context_length=2048, block_size=16, parameters=1
    )
    jobs = Jobs(engine, card, 1.0, WorkerMetrics())
    service = WorkerService(Startup("w", "m"))
    service.loaded(
        Loaded(
            jobs,
            Adapters(no_adapter, 0),
            Progress(no_stats, jobs),
            b"",
            b"",
            mesh.WorkerReport,
            Profiler(PhaseRecorder),
            BlockSender(engine, b""),
            BlockLender(engine, b"", "", False),
        )
    )
    server = await rpc.serve(
        "127.0.0.1:0", [rpc.Service("weft.v1.Worker", mesh_grpc.add_WorkerServicer_to_server, service)]
    )
    try:
        async with rpc.link_channel(f"127.0.0.1:{server.port}") as channel:
            yield engine, jobs, channel
    finally:
        await server.stop(0)


def job(stream_id: int) -> mesh.Job:
    """A job of this stream."""
    sampling = api.Sampling(max_tokens=100, seed=1)
    return mesh.Job(
        stream_id=stream_id, job_id=f"j{stream_id}", attempt=1, token_ids=[5, 6], prompt_len=2, sampling=sampling
    )


async def test_a_gateway_that_reads_too_slowly_receives_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a real connection: the call ends with an error, so that the gateway sends the next attempts of its jobs."""
    monkeypatch.setattr(links, "MOST_ENTRIES", 4)
    monkeypatch.setattr(links, "MOST_MESSAGES", 2)
    async with served() as (engine, jobs, channel):
        requests: SendQueue[mesh.RunRequest] = SendQueue()
        requests.put(mesh.RunRequest(hello=mesh.GatewayHello(gateway_id="g")))
        requests.put(mesh.RunRequest(job=job(1)))
        call = mesh_grpc.WorkerStub(channel).Run(aiter(requests))
        key = await asyncio.wait_for(engine.keys.get(), 5)
        jobs.deliver(StepOutput([TokenOut(key, position, 1) for position in range(9)], []))
        with pytest.raises(aio.AioRpcError) as caught:
            await asyncio.wait_for(read_to_the_end(call), 5)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert caught.value.details() == "the gateway reads too slowly"


async def test_several_jobs_share_a_message_and_each_is_acknowledged() -> None:
    async with served() as (engine, jobs, channel):
        requests: SendQueue[mesh.RunRequest] = SendQueue()
        requests.put(mesh.RunRequest(hello=mesh.GatewayHello(gateway_id="g")))
        more = [mesh.RunRequest(job=job(number)) for number in (2, 3)]
        requests.put(mesh.RunRequest(job=job(1), more=more))
        call = mesh_grpc.WorkerStub(channel).Run(aiter(requests))
        keys = [await asyncio.wait_for(engine.keys.get(), 5) for _ in range(3)]
        jobs.deliver(StepOutput([TokenOut(key, 0, 9) for key in keys], []))
        streams: list[int] = []
        received = 0
        async for message in call:
            streams += message.stream_ids
            if message.HasField("heartbeat"):
                assert message.heartbeat.reads_more
                received = message.heartbeat.received
            if received == 3 and len(streams) == 3:
                break
        assert sorted(streams) == [1, 2, 3]
