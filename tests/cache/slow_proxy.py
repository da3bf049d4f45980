"""A TCP proxy between a client and a server that delays answers, limits the bandwidth, or replaces answers."""

import asyncio
import contextlib
from types import TracebackType


class SlowProxy:
    """Forwards to a loopback port. `delay_s`, `bytes_per_s` and `garbage` may be changed while it runs."""

    def __init__(self, target: int) -> None:
        self.delay_s = 0.0
        self.bytes_per_s = 0.0
        """For each connection in each direction; 0 is unlimited."""
        self.answered_bytes = 0
        """Bytes sent to clients."""
        self.garbage = b""
        """Sent instead of every answer, if not empty."""
        self.port = 0
        self._target = target
        self._strandings = 0
        self._serving: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """The URL of Redis through the proxy."""
        return f"redis://127.0.0.1:{self.port}"

    async def __aenter__(self) -> "SlowProxy":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def strand(self) -> None:
        """Stops answering on all open connections, as after a network partition; new ones are answered."""
        self._strandings += 1

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            answers, requests = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        try:
            pumps = (self._pump(reader, requests, False), self._pump(answers, writer, True))
            await asyncio.gather(*pumps)
        except asyncio.CancelledError:
            # The end of the test; asyncio's streams would report it as an error of their callback.
            pass
        finally:
            for stream in (requests, writer):
                stream.close()
                with contextlib.suppress(OSError):
                    await stream.wait_closed()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, answers: bool) -> None:
        strandings = self._strandings
        with contextlib.closing(sink), contextlib.suppress(OSError):
            while data := await source.read(16384 if self.bytes_per_s else 65536):
                if answers and strandings != self._strandings:
                    continue
                if self.bytes_per_s:
                    await asyncio.sleep(len(data) / self.bytes_per_s)
                if answers:
                    await asyncio.sleep(self.delay_s)
                    data = self.garbage or data
                    self.answered_bytes += len(data)
                sink.write(data)
                await sink.drain()
