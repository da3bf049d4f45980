"""A bounded queue of messages to be written to one link. Knows no gRPC and no messages."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

Message = TypeVar("Message")


class SendQueueFull(Exception):
    """The reader of a link is too slow: the link must be closed."""


class SendQueue(Generic[Message]):
    """Messages in order. `put` never waits, so a reader that stalls delays no other; one task may iterate."""

    def __init__(self, limit: int = 4096) -> None:
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
                yield self._messages.popleft()
            if self._closed:
                return
            self._changed = asyncio.get_running_loop().create_future()
            await self._changed

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)
