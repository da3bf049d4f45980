"""What waits to be written to one link, bounded. Knows no gRPC and no messages."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

Message = TypeVar("Message")


class SendQueueFull(Exception):
    """The reader of a link is too slow: the link must be closed."""


class SendQueue(Generic[Message]):
    """What waits to be written to one link. Putting never waits, so a stalled reader delays nobody else."""

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._messages: deque[Message] = deque()
        self._closed = False
        self._news: asyncio.Future[None] | None = None

    def put(self, message: Message) -> None:
        """Adds a message; after `close` nobody reads it. Raises OutboxFull when the link is `limit` messages behind."""
        if self._closed:
            return
        if len(self._messages) >= self._limit:
            raise SendQueueFull
        self._messages.append(message)
        self._tell()

    def close(self) -> None:
        """Ends the iteration once what is queued has been taken."""
        self._closed = True
        self._tell()

    async def __aiter__(self) -> AsyncIterator[Message]:
        while True:
            while self._messages:
                yield self._messages.popleft()
            if self._closed:
                return
            self._news = asyncio.get_running_loop().create_future()
            await self._news

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)
