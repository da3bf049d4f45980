"""A bounded queue of messages to be written to one link. Knows no gRPC and no content."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, TypeVar

Message = TypeVar("Message")

_MOST_JOINED = 64
_MOST_JOINED_BYTES = 1 << 20
"""Of a message with those that follow it."""
_IN_A_TURN = 8
"""Messages that are read in a turn of the event loop."""


class SendQueueFull(Exception):
    """The reader of a link is too slow: the link must be closed."""


class SendQueue(Generic[Message]):
    """Messages in order. `put` never waits, so a reader that stalls delays no other; one task may iterate."""

    def __init__(self, limit: int = 4096) -> None:
        self.joins = False
        """Messages that wait are sent in the field `more` of the one before them: to send and to receive one costs gRPC
        more than its content. Set once the peer is known to read that field."""
        self._limit = limit
        self._messages: deque[Message] = deque()
        self._closed = False
        self._changed: asyncio.Future[None] | None = None

    def put(self, message: Message) -> None:
        """Adds a message; after `close` the message is discarded. Raises SendQueueFull if `limit` messages wait."""
        if self._closed:
            return
        if len(self._messages) >= self._limit:
            raise SendQueueFull
        self._messages.append(message)
        self._wake()

    def close(self) -> None:
        """Ends the iteration after the queued messages."""
        self._closed = True
        self._wake()

    async def __aiter__(self) -> AsyncIterator[Message]:
        while True:
            while self._messages:
                message = self._messages.popleft()
                if self.joins and self._messages:
                    _join(message, self._messages)
                yield message
            if self._closed:
                return
            self._changed = asyncio.get_running_loop().create_future()
            await self._changed

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)


def _join(message: Any, waiting: deque[Any]) -> None:
    """Moves messages that wait into `more` of the one before them."""
    room = _MOST_JOINED_BYTES - message.ByteSize()
    while waiting and len(message.more) < _MOST_JOINED and (room := room - waiting[0].ByteSize()) >= 0:
        message.more.append(waiting.popleft())


async def unjoin(message: Any, receive: Callable[[Any], None]) -> None:
    """Calls `receive` with a message that was received, and with those that follow it in its field `more`.

    After a few of them the event loop has a turn: each may wake a task, and what else arrives would wait for all.
    """
    receive(message)
    for count, each in enumerate(message.more, 1):
        if count % _IN_A_TURN == 0:
            await asyncio.sleep(0)
        receive(each)
