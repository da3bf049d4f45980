"""The scheduler's end of one peer's stream: what waits to be sent, and why the stream ends. Knows no message."""

import asyncio
from typing import Any, Generic, TypeVar

from grpc import StatusCode, aio

from protos import mesh_pb2 as mesh
from services.errors import WeftError
from services.send_queue import SendQueue, SendQueueFull

Response = TypeVar("Response", mesh.DispatchResponse, mesh.AttachResponse)


class PeerStream(Generic[Response]):
    """One stream. A peer that is `queue_limit` messages behind is disconnected, so it delays no other."""

    def __init__(self, queue_limit: int, joins: bool = False) -> None:
        """`joins`: the peer reads several messages in one."""
        self._queue: SendQueue[Response] = SendQueue(queue_limit)
        self._queue.joins = joins
        self._aborted: asyncio.Future[WeftError] = asyncio.get_running_loop().create_future()

    def send(self, message: Response) -> None:
        """Queues a message; never waits. Aborts the stream if the queue is full."""
        try:
            self._queue.put(message)
        except SendQueueFull:
            self.abort(WeftError(StatusCode.ABORTED, "LINK_TOO_SLOW", "the reader of this link is too slow"))

    def finish(self) -> None:
        """Ends the stream after the queued messages."""
        self._queue.close()

    def abort(self, error: WeftError) -> None:
        """Ends the stream now, with this error."""
        if not self._aborted.done():
            self._aborted.set_result(error)

    async def run(self, reader: "asyncio.Task[None]", context: aio.ServicerContext[Any, Any]) -> None:
        """Sends queued messages until `reader` returns or the stream is finished or aborted. Raises WeftError."""
        # Sent here: an abort after a cancelled first write would send the metadata twice and leave the call open.
        await context.send_initial_metadata(())
        writer = asyncio.create_task(self._write(context))
        try:
            ends: list[asyncio.Future[Any]] = [reader, writer, self._aborted]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._aborted.done():
                raise self._aborted.result()
            await (reader if reader.done() else writer)
        finally:
            for task in (reader, writer):
                task.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)

    async def _write(self, context: aio.ServicerContext[Any, Any]) -> None:
        async for message in self._queue:
            await context.write(message)


def replace_stream(streams: dict[str, PeerStream[Response]], peer_id: str, stream: PeerStream[Response]) -> None:
    """Stores a peer's new stream and aborts its old one, whose end the server may not have noticed yet."""
    old = streams.get(peer_id)
    streams[peer_id] = stream
    if old is not None:
        old.abort(WeftError(StatusCode.ABORTED, "LINK_REPLACED", "this peer has a newer link"))
