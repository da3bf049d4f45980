"""A TCP proxy in user space that cuts, refuses, delays or narrows a link between two processes. Knows no protocol."""

import asyncio
import enum
import socket
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeAlias

_PIECE = 65_536
_MOST_PIECES = 128
"""Pieces that wait for a delay or a cut to end; then the proxy stops reading, as a network would."""

_MOST_NARROW_PIECES = 2
"""The same on a narrow link, which holds little; `narrow` is to be called before the connection is opened."""
_NARROW_BUFFER = 1 << 17


class Way(enum.Enum):
    """A direction of a link. The client is the process that opens the connection."""

    REQUESTS = "requests"
    ANSWERS = "answers"


BOTH = frozenset(Way)
Pieces: TypeAlias = "asyncio.Queue[tuple[float, bytes]]"


@dataclass(slots=True)
class Counts:
    """Proof that a fault happened: the counts since it began."""

    forwarded: int = 0
    """Bytes that were forwarded, in both directions."""
    held: int = 0
    """Bytes that arrived during a cut of their direction."""
    delayed: int = 0
    """Bytes that were forwarded late."""
    refused: int = 0
    """Connections that were refused or reset."""


class Proxy:
    """Forwards connections to a port of the loopback interface. The faults may change while it runs."""

    def __init__(self, port: int, target: int) -> None:
        self.port = port
        self.counts = Counts()
        self._target = target
        self._open = {way: asyncio.Event() for way in Way}
        self._delayed: frozenset[Way] = frozenset()
        self._delay_s = 0.0
        self._bytes_per_s = 0.0
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._serving: set[asyncio.Task[None]] = set()
        for event in self._open.values():
            event.set()

    @property
    def address(self) -> str:
        """host:port that clients connect to."""
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self._listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_listening()
        for connection in list(self._connections):
            connection.reset()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def cut(self, ways: frozenset[Way] = BOTH) -> None:
        """Holds all bytes of these directions until `heal`: a network that drops packets has the same effect, because
        TCP sends them again. New connections are accepted and get no answer."""
        self.counts = Counts()
        for way in ways:
            self._open[way].clear()

    def refuse(self) -> None:
        """Resets all connections and refuses new ones."""
        self._stop_listening()
        self.counts = Counts()
        self.counts.refused += len(self._connections)
        for connection in list(self._connections):
            connection.reset()

    def delay(self, seconds: float, ways: frozenset[Way] = BOTH) -> None:
        """Forwards the bytes of these directions `seconds` late."""
        self.counts = Counts()
        self._delay_s, self._delayed = seconds, ways

    def narrow(self, bytes_per_s: float) -> None:
        """Forwards at most this number of bytes per second in each direction of a connection; 0: any number."""
        self._bytes_per_s = bytes_per_s

    @property
    def narrowed(self) -> bool:
        """Whether the link has a limit."""
        return self._bytes_per_s > 0

    async def heal(self) -> None:
        """Ends the fault."""
        self._delayed, self._delay_s, self._bytes_per_s = frozenset(), 0.0, 0.0
        for event in self._open.values():
            event.set()
        if self._server is None:
            await self._listen()

    def due_in(self, way: Way) -> float:
        """Seconds by which the bytes of this direction are late now."""
        return self._delay_s if way in self._delayed else 0.0

    async def forward(self, pieces: Pieces, sink: asyncio.StreamWriter, way: Way) -> None:
        """Writes the pieces of one direction of a connection when they are due."""
        opened, loop = self._open[way], asyncio.get_running_loop()
        free_at = 0.0
        while True:
            due, data = await pieces.get()
            if (left := due - loop.time()) > 0:
                self.counts.delayed += len(data)
                await asyncio.sleep(left)
            if not opened.is_set():
                self.counts.held += len(data)
                await opened.wait()
            if not data:
                sink.close()
                return
            if self._bytes_per_s:  # The link is busy with these bytes for so long.
                free_at = max(free_at, loop.time()) + len(data) / self._bytes_per_s
                await asyncio.sleep(free_at - loop.time())
            self.counts.forwarded += len(data)
            sink.write(data)
            await sink.drain()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        try:
            answers, requests = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:  # The target does not listen: its client receives a reset, too.
            self.counts.refused += 1
            writer.transport.abort()
            return
        if self.narrowed:
            for each in (writer, requests):
                each.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _NARROW_BUFFER)
        connection = _Connection(self, (reader, writer), (answers, requests))
        self._connections.add(connection)
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)


class _Connection:
    """One connection through the proxy: two directions, each with a reader and a writer."""

    def __init__(
        self,
        proxy: Proxy,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        server: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self._proxy = proxy
        self._writers = (client[1], server[1])
        directions = ((client[0], server[1], Way.REQUESTS), (server[0], client[1], Way.ANSWERS))
        self._tasks = [asyncio.create_task(self._pump(*direction)) for direction in directions]

    async def run(self) -> None:
        """Returns when both sides have closed the connection, or after a reset."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()

    def reset(self) -> None:
        """Resets both sides at once."""
        for task in self._tasks:
            task.cancel()
        for writer in self._writers:
            writer.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, way: Way) -> None:
        pieces: Pieces = asyncio.Queue(_MOST_PIECES if not self._proxy.narrowed else _MOST_NARROW_PIECES)
        writing = asyncio.create_task(self._proxy.forward(pieces, sink, way))
        loop = asyncio.get_running_loop()
        try:
            data = b"-"
            while data:  # The empty piece is the end of the connection.
                data = await source.read(_PIECE)
                await pieces.put((loop.time() + self._proxy.due_in(way), data))
            await writing
        except OSError:  # One side was reset, as by the death of its process: so is the other one.
            for writer in self._writers:
                writer.transport.abort()
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
