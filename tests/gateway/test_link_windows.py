"""What workers and the scheduler send to a gateway that is behind waits at the sender, which joins it."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent import futures

import grpc
import pytest

from protos import mesh_pb2 as mesh
from services import rpc
from services.gateway.links.scheduler_link import SchedulerLink
from services.gateway.links.worker_link import WorkerLink
from tests.gateway.fakes import until

MESSAGES = 500
"""Of a kilobyte. Without a bound gRPC takes all of them before one is read."""


class Writer:
    """A gRPC server in threads of its own. It sends its messages as fast as gRPC takes them."""

    def __init__(self, service: str, method: str, message: bytes) -> None:
        self.written = 0
        self._message = message
        streams: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self._write)
        handlers = grpc.method_handlers_generic_handler(service, {method: streams})
        self.server = grpc.server(futures.ThreadPoolExecutor(1), handlers=[handlers])
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def _write(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for _ in range(MESSAGES):
            yield self._message
            self.written += 1  # Once gRPC has taken it.

    def written_unread(self) -> int:
        """Messages that are sent while this thread, and so the gateway's event loop, does nothing."""
        before, same = -1, 0
        while same < 10:
            time.sleep(0.03)
            before, same = self.written, same + 1 if self.written == before else 0
        return self.written


@contextlib.asynccontextmanager
async def link_to_worker(address: str, received: Callable[[], None]) -> AsyncIterator[None]:
    link = WorkerLink(address, "a gateway")
    receive = link._receive

    def counted(message: mesh.RunResponse) -> None:
        received()
        receive(message)

    link._receive = counted  # type: ignore[method-assign]
    yield
    await link.close()


@contextlib.asynccontextmanager
async def link_to_scheduler(address: str, received: Callable[[], None]) -> AsyncIterator[None]:
    link = SchedulerLink(address, "a gateway", 10.0, lambda models: None, lambda worker_id: received())
    running = asyncio.create_task(link.run())
    yield
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


TOKENS = [7] * 200
NOBODYS_TOKENS = mesh.RunResponse(stream_ids=[1 << 20] * 200, positions=TOKENS, token_ids=TOKENS)
NOBODYS_LOSS = mesh.DispatchResponse(worker_lost=mesh.WorkerLost(worker_id="x" * 1020))


@pytest.mark.parametrize(
    ("service", "method", "message", "linked"),
    [
        ("weft.v1.Worker", "Run", NOBODYS_TOKENS, link_to_worker),
        ("weft.v1.Scheduler", "Dispatch", NOBODYS_LOSS, link_to_scheduler),
    ],
)
async def test_messages_wait_at_the_peer_of_a_gateway_that_is_behind(
    service: str,
    method: str,
    message: mesh.RunResponse | mesh.DispatchResponse,
    linked: Callable[[str, Callable[[], None]], contextlib.AbstractAsyncContextManager[None]],
) -> None:
    sent, read, unread = message.SerializeToString(), 0, 0
    writer = Writer(service, method, sent)

    def received() -> None:
        nonlocal read, unread
        read += 1
        if read == 1:  # The event loop stands still from here on.
            unread = writer.written_unread()

    async with linked(writer.address, received):
        await until(lambda: read >= MESSAGES)
    await asyncio.to_thread(writer.server.stop(None).wait)
    assert len(sent) >= 1000
    assert 0 < unread * len(sent) < 2 * rpc.FEW_UNREAD_BYTES
