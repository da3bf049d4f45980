"""A server's calls: many are accepted in a few turns of its event loop, and none is left over when it stops. And what a
channel takes unread."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from protos import inference_pb2 as api
from protos.inference_pb2_grpc import InferenceStub, add_InferenceServicer_to_server
from services import rpc
from services.calls.wakeups import read_together

CALLS = 96
DRAIN_S = 60.0


class Turns:
    """Counts turns of the event loop, each of which takes a millisecond."""

    def __init__(self) -> None:
        self.turn = 0
        self.accepted_at: list[int] = []
        """The turns in which calls reached the handler."""

    async def ListModels(self, request: api.ListModelsRequest, context: Any) -> api.ListModelsResponse:
        """Notes the turn."""
        self.accepted_at.append(self.turn)
        return api.ListModelsResponse()

    def __getattr__(self, name: str) -> Any:
        """The other methods, which nothing calls."""

    async def count(self) -> None:
        """Until cancelled."""
        while True:
            self.turn += 1
            time.sleep(1e-3)  # noqa: ASYNC251 - other tasks of this loop take as long
            await asyncio.sleep(0)


@contextmanager
def calls_from_a_thread(port: int) -> Iterator[list[Any]]:
    """Calls of another thread, all sent at once."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        grpc.channel_ready_future(channel).result(30)
        stub: Any = InferenceStub(channel)
        yield [stub.ListModels.future(api.ListModelsRequest(), timeout=2 * DRAIN_S) for _ in range(CALLS)]


@pytest.fixture
def turns() -> Turns:
    """The servicer."""
    return Turns()


async def served(turns: Turns) -> rpc.Server:
    """A running server."""
    return await rpc.serve("127.0.0.1:0", [rpc.Service("weft.v1.Inference", add_InferenceServicer_to_server, turns)])


async def test_a_call_is_accepted_within_a_few_turns_of_the_event_loop(turns: Turns) -> None:
    read_together(asyncio.get_running_loop())
    server = await served(turns)
    counting = asyncio.create_task(turns.count())

    def all_answered() -> None:
        with calls_from_a_thread(server.port) as calls:
            for call in calls:
                call.result()

    await asyncio.to_thread(all_answered)
    counting.cancel()
    await server.stop(0)
    assert turns.accepted_at[-1] - turns.accepted_at[0] < CALLS


async def test_calls_that_arrive_as_a_server_stops_are_answered(turns: Turns) -> None:
    server, sent = await served(turns), threading.Event()

    def ended_s() -> float:
        began = time.monotonic()
        with calls_from_a_thread(server.port) as calls:
            sent.set()
            codes = [call.code() for call in calls]  # Waits for the end of each.
            assert set(codes) == {grpc.StatusCode.OK}
            return time.monotonic() - began

    calling = asyncio.create_task(asyncio.to_thread(ended_s))
    while not turns.accepted_at:  # noqa: ASYNC110 - the loop must turn
        await asyncio.sleep(0)
    assert sent.wait(30)  # The loop accepts none until all are sent,
    time.sleep(1.0)  # noqa: ASYNC251 - and until they have arrived.
    await server.stop(DRAIN_S)
    assert await calling < DRAIN_S / 2


class Writer:
    """Writes messages of a kilobyte, as fast as gRPC takes them, and at last a large one."""

    MESSAGES, LARGE = 500, 1 << 20

    def __init__(self) -> None:
        self.written = 0

    async def Generate(self, request: api.GenerateRequest, context: Any) -> None:
        """The messages."""
        for size in (*[1 << 10] * self.MESSAGES, self.LARGE):
            await context.write(api.GenerateResponse(delta=api.Delta(text="x" * size)))
            self.written += 1

    def __getattr__(self, name: str) -> Any:
        """The other methods, which nothing calls."""


async def test_what_a_peer_sends_beyond_a_few_unread_bytes_waits_there() -> None:
    writer = Writer()
    door = rpc.Service("weft.v1.Inference", add_InferenceServicer_to_server, writer)
    server = await rpc.serve("127.0.0.1:0", [door])
    async with rpc.link_channel(f"127.0.0.1:{server.port}", unread_bytes=rpc.FEW_UNREAD_BYTES) as channel:
        stub: Any = InferenceStub(channel)
        messages = aiter(stub.Generate(api.GenerateRequest()))
        received = [await anext(messages)]
        before, same = -1, 0
        while same < 20:  # Until nothing more is written.
            await asyncio.sleep(0.02)
            before, same = writer.written, same + 1 if writer.written == before else 0
        unread = writer.written
        received += [each async for each in messages]
    await server.stop(0)
    assert unread << 10 < 2 * rpc.FEW_UNREAD_BYTES
    assert [len(each.delta.text) for each in received] == [1 << 10] * Writer.MESSAGES + [Writer.LARGE]
