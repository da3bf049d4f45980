"""Requests for vectors on an open stream, where a message takes less time than a call. Knows one RPC, no channels."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Self, TypeAlias, Unpack

import grpc
from grpc import aio

from protos import inference_pb2 as api
from weft.client.embeddings import EmbedSettings, Input, embed_request
from weft.client.errors import WeftError, from_response, from_rpc, made_by_grpc
from weft.client.retry import RetryState

RpcCall: TypeAlias = "aio.StreamStreamCall[api.EmbedStreamRequest, api.EmbedStreamResponse]"
_MOST_BYTES = 1 << 20
"""Bytes of a request. A gateway ends the stream of a larger one, and with it the other requests."""
_TAKEN_S = 1.0
"""A gateway sends initial metadata when it takes a stream, or else an error, which gRPC would lose during a write. A
proxy may hold the metadata back until the first response: so the first request waits for this time at the most."""


class EmbedStream:
    """Requests for vectors on an open stream, made by `Client.embed_stream`. Many tasks may use it at the same time.

    The first request opens the stream; if it has ended, the next request opens it again. Leaving the block waits for
    the requests under way. If an exception leaves it, these fail with RuntimeError instead.
    """

    def __init__(self, open_call: Callable[[], RpcCall], retry_state: Callable[[float | None], RetryState]) -> None:
        """`open_call` begins a call of EmbedStream. `retry_state` returns that of a new request with this deadline."""
        self._open_call = open_call
        self._retry_state = retry_state
        self._numbers = itertools.count()
        self._under_way = 0
        self._idle = asyncio.Event()
        """No request is under way."""
        self._idle.set()
        self._closing = self._closed = False
        self._call: _Call | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self.close()
        else:
            await self._end()

    async def embed(
        self, texts: Sequence[Input], *, deadline_s: float | None = None, **settings: Unpack[EmbedSettings]
    ) -> api.EmbedResponse:
        """A vector for each text (or list of token ids), in `embeddings`, and the receipt: what `Client.embed` returns.

        Raises the errors of `Client.embed` and retries as it does. An error of a request is its own. When the stream
        ends with an error, each request without a response has this error. When `deadline_s` has passed or the awaiting
        task is cancelled, the client waits no longer; the gateway goes on computing, and the stream stays open. Raises
        RuntimeError if the stream is closed.
        """
        message = api.EmbedStreamRequest(number=next(self._numbers), request=embed_request(texts, settings))
        retry = self._retry_state(deadline_s)
        if self._closing:
            raise _closed()
        if message.ByteSize() > _MOST_BYTES:
            raise made_by_grpc(grpc.StatusCode.RESOURCE_EXHAUSTED)
        self._under_way += 1
        self._idle.clear()
        try:
            while True:
                try:
                    return await self._opened().answer(message, retry.remaining_s(time.monotonic()))
                except WeftError as error:
                    await asyncio.sleep(retry.pause_s(error, time.monotonic()))
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    async def close(self) -> None:
        """Waits for the requests under way, and ends the stream. Takes no further ones meanwhile."""
        self._closing = True
        try:
            await self._idle.wait()
            if self._call is not None:
                await self._call.finish()
        finally:
            await self._end()

    async def _end(self) -> None:
        """Ends the stream, and the requests under way with RuntimeError."""
        self._closing = self._closed = True
        if self._call is not None:
            await self._call.cancel()

    def _opened(self) -> "_Call":
        """The call that takes requests: another one if the last has ended."""
        if self._closed:
            raise _closed()
        if self._call is None or self._call.ended:
            self._call = _Call(self._open_call())
        return self._call


class _Call:
    """One call of EmbedStream. Its end is that of the requests that have no response."""

    def __init__(self, rpc: RpcCall) -> None:
        self.ended = False
        self._broken = False
        """A request could not be sent."""
        self._rpc = rpc
        self._responses: dict[int, asyncio.Future[api.EmbedStreamResponse]] = {}
        """The responses that the stream has not received, by number. A task that stops waiting cancels its response."""
        self._unsent: asyncio.Queue[api.EmbedStreamRequest | None] = asyncio.Queue()
        """None: half-close the stream."""
        self._reading = asyncio.create_task(self._read())

    async def answer(self, message: api.EmbedStreamRequest, timeout_s: float | None) -> api.EmbedResponse:
        """Sends a request -> its vectors. Raises WeftError: the request's, the stream's, or DEADLINE_EXCEEDED."""
        response: asyncio.Future[api.EmbedStreamResponse] = asyncio.get_running_loop().create_future()
        self._responses[message.number] = response
        self._unsent.put_nowait(message)
        try:
            async with asyncio.timeout(timeout_s):
                received = await response
        except TimeoutError:
            raise made_by_grpc(grpc.StatusCode.DEADLINE_EXCEEDED) from None
        if received.HasField("response"):
            return received.response
        raise from_response(received.error)

    async def finish(self) -> None:
        """Half-closes the stream. To be called when no task waits for a response."""
        if self._responses:  # The gateway still computes some.
            self._rpc.cancel()
        self._unsent.put_nowait(None)
        await asyncio.wait((self._reading,))

    async def cancel(self) -> None:
        """Ends the stream at once."""
        self._rpc.cancel()
        await asyncio.wait((self._reading,))

    async def _write(self) -> None:
        """Sends the requests, in one task for all: gRPC cancels a call if a task is cancelled while it writes to it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TAKEN_S):
                await self._rpc.initial_metadata()
        try:
            while (message := await self._unsent.get()) is not None:
                response = self._responses.get(message.number)
                if response is not None and not response.cancelled():
                    await self._rpc.write(message)
                else:
                    self._responses.pop(message.number, None)
            await self._rpc.done_writing()
        except (aio.AioRpcError, asyncio.InvalidStateError):
            self._broken = True

    async def _read(self) -> None:
        """Hands out the responses, and at the end of the stream its error."""
        writing = asyncio.create_task(self._write())
        error: Callable[[], Exception] = _closed  # It is cancelled, by `cancel` or the end of the client.
        try:
            async for received in self._rpc:
                response = self._responses.pop(received.number, None)
                if response is not None and not response.done():
                    response.set_result(received)
            error = _unanswered
        except aio.AioRpcError as failed:
            # gRPC replaces the error of a stream that ends during a write by INTERNAL. Another stream will show it.
            unknown = self._broken and failed.code() is grpc.StatusCode.INTERNAL
            error = partial(made_by_grpc, grpc.StatusCode.UNAVAILABLE) if unknown else partial(from_rpc, failed)
        finally:
            self.ended = True
            writing.cancel()
            for response in self._responses.values():
                if not response.done():
                    response.set_exception(error())


def _closed() -> RuntimeError:
    return RuntimeError("the stream is closed")


def _unanswered() -> WeftError:
    return WeftError(grpc.StatusCode.DATA_LOSS, "the stream ended without a response")
