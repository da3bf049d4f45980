"""A gateway process that shares its ports with others: its link to the process that supervises it. Knows no requests.

The link is a pair of connected sockets. A member reports on it that it listens, and each end may ask the other for
metrics: the supervisor for those of the member, a member for those of all. When the link ends, the member drains and
ends, too, so that no member outlives its supervisor for longer than its drain.
"""

import asyncio
import contextlib
import itertools
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence

FLAG = "--member"
"""First argument of a member; its number and the descriptors of its link and of the shared usage follow."""
_LISTENS, _ASK, _REPLY = 0, 1, 2
_FRAME = struct.Struct("!BIQ")
"""Kind of a frame, number of the question, and bytes that follow."""
_ASK_ALL_S = 4.0
"""Seconds for the metrics of all: more than the supervisor waits for a member."""


def arguments(number: int, link: int, usage: int) -> list[str]:
    """What `from_arguments` reads. `number` is from 0, and different for all members that live."""
    return [FLAG, str(number), str(link), str(usage)]


class Link:
    """One end of a link. `follow` has to run for all else to work."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.listens = asyncio.Event()
        """The other end has reported that it listens."""
        self._reader, self._writer = reader, writer
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._replying: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(cls, end: socket.socket) -> "Link":
        """The link over this socket."""
        return cls(*await asyncio.open_unix_connection(sock=end))

    def report_listening(self) -> None:
        """Reports that this end listens."""
        self._send(_LISTENS, 0)

    async def ask(self, seconds: float) -> bytes:
        """The metrics of the other end; empty if it does not answer in time."""
        number = next(self._numbers) % (1 << 32)
        reply = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(_ASK, number)
            return await asyncio.wait_for(reply, seconds)
        except (OSError, TimeoutError):
            return b""
        finally:
            del self._asked[number]

    async def follow(
        self, answer: Callable[[], Awaitable[bytes]], on_listening: Callable[[], None] = lambda: None
    ) -> None:
        """Answers questions until the link ends. `on_listening` is called when the other end listens."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                kind, number, size = _FRAME.unpack(await self._reader.readexactly(_FRAME.size))
                body = await self._reader.readexactly(size)
                if kind == _LISTENS:
                    self.listens.set()
                    on_listening()
                elif kind == _ASK:
                    task = asyncio.create_task(self._reply(number, answer))
                    self._replying.add(task)
                    task.add_done_callback(self._replying.discard)
                elif (asked := self._asked.get(number)) is not None and not asked.done():
                    asked.set_result(body)
        self.listens.clear()

    def close(self) -> None:
        """Closes this end."""
        self._writer.close()

    async def _reply(self, number: int, answer: Callable[[], Awaitable[bytes]]) -> None:
        body = await answer()
        with contextlib.suppress(OSError):
            self._send(_REPLY, number, body)

    def _send(self, kind: int, number: int, body: bytes = b"") -> None:
        self._writer.write(_FRAME.pack(kind, number, len(body)) + body)


class Member:
    """One of several processes of a gateway."""

    def __init__(self, number: int, link: socket.socket, usage: int, stop: asyncio.Event) -> None:
        """`usage`: descriptor of the table of limits in use; `stop` is set when the supervisor is gone."""
        self.number = number
        self.usage = usage
        self._socket = link
        self._link: Link | None = None
        self._stop = stop

    @classmethod
    def from_arguments(cls, given: Sequence[str], stop: asyncio.Event) -> "Member | None":
        """The member that a process is started as; None for a gateway of one process."""
        if not given or given[0] != FLAG:
            return None
        number, link, usage = map(int, given[1:])
        return cls(number, socket.socket(fileno=link), usage, stop)

    async def follow(self, rendered: Callable[[], Awaitable[bytes]]) -> None:
        """Reports that the member listens, then serves its metrics until the supervisor is gone."""
        link = self._link = await Link.open(self._socket)
        try:
            link.report_listening()
            await link.follow(rendered)
            self._stop.set()
        finally:
            link.close()

    async def scrape(self) -> bytes:
        """The metrics of all members; empty if the supervisor does not answer."""
        return await self._link.ask(_ASK_ALL_S) if self._link is not None else b""
