"""Answers the requests of a stream side by side. Knows no messages and no services."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from services.errors import WeftError, unavailable

Request = TypeVar("Request")


async def answer_side_by_side(
    requests: AsyncIterator[Request],
    answer: Callable[[Request], Coroutine[Any, Any, None]],
    most: int,
    stopping: "asyncio.Future[None]",
) -> None:
    """Answers each request as soon as it is read. Returns when the caller has sent the last one and all are answered.

    While `most` requests are under way, none is read. None is read once `stopping` is done, either: then WeftError is
    raised, UNAVAILABLE, behind the answers to those that were read. A WeftError of reading is raised behind them, too.
    What an answer raises cancels the others and is raised at once.
    """
    room = asyncio.Semaphore(most)

    async def read() -> WeftError | None:
        """Reads all requests -> the error that ended it, if one did: raised in here it would cancel the answers."""
        try:
            await room.acquire()
            async for request in requests:
                answering.create_task(answer(request)).add_done_callback(lambda _: room.release())
                await room.acquire()
        except WeftError as error:
            return error
        return None

    try:
        async with asyncio.TaskGroup() as answering:
            reading = answering.create_task(read())
            await asyncio.wait((reading, stopping), return_when=asyncio.FIRST_COMPLETED)
            stopped = reading.cancel()
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    error = unavailable("SHUTTING_DOWN", "the server is stopping") if stopped else reading.result()
    if error is not None:
        raise error
