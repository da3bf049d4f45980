"""Readers of server-sent events for benchmarks: count or time the chunks of completions. Knows no figures."""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

_MARK = b"data: {"
_END = b"0\r\n\r\n"


class _Reader(asyncio.Protocol):
    """Counts the chunks of one answer."""

    def __init__(self, request: bytes, on_chunk: Callable[[int, float], None]) -> None:
        """`on_chunk` is called with the number of chunks that arrived together, and the time."""
        self._request = request
        self._on_chunk = on_chunk
        self._rest = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sends the request."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Counts the chunks that have begun in these bytes."""
        seen = self._rest + data
        count = seen.count(_MARK)
        self._rest = seen[-len(_MARK) + 1 :]  # A mark or the end may be split.
        if count:
            self._on_chunk(count, time.monotonic())
        if seen.endswith(_END):
            self._transport.close()
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        """An answer without its end is an error."""
        if not self.done.done():
            self.done.set_exception(ConnectionError("the stream broke off"))


async def stream(address: str, body: dict[str, Any], on_chunk: Callable[[int, float], None]) -> None:
    """Streams one completion from host:port to its end."""
    data = json.dumps({**body, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n".encode()
    head += f"content-length: {len(data)}\r\n\r\n".encode()
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    _, reader = await loop.create_connection(lambda: _Reader(head + data, on_chunk), host, int(port))
    await reader.done
