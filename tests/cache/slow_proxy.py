"""A TCP proxy that stands between a client and a server and makes the answers late, or replaces them."""

import asyncio
import contextlib
from types import TracebackType


class SlowProxy:
    """Forwards to a loopback port. `delay_s` and `garbage` may be changed while it runs."""

    def __init__(self, target: int) -> None:
        self.delay_s = 0.0
        self.garbage = b""
        """Sent instead of every answer, if not empty."""
        self.port = 0
        self._target = target
        self._pumps: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "SlowProxy":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, requests = await asyncio.open_connection("127.0.0.1", self._target)
        for pump in (self._pump(reader, requests, False), self._pump(answers, writer, True)):
            task = asyncio.create_task(pump)
            self._pumps.add(task)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, answers: bool) -> None:
        with contextlib.closing(sink), contextlib.suppress(OSError):
            while data := await source.read(65536):
                if answers:
                    await asyncio.sleep(self.delay_s)
                    data = self.garbage or data
                sink.write(data)
                await sink.drain()
