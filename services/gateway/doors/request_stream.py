"""What streams of requests have in common at all doors of gRPC: a bound, refusal under load, and how they end. Knows no
messages of a door."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from grpc import aio

from services.calls.streams import answer_side_by_side
from services.errors import WeftError
from services.gateway.access.authorizer import Refusal
from services.gateway.answers.deadline import Deadline
from services.gateway.answers.receipt import Phase, Timeline
from services.gateway.doors.grpc_gate import credentials_of

MOST_REQUESTS = 256
"""Most requests of a stream that are under way; further ones are read when one of them is answered."""
Request = TypeVar("Request")


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """What holds for all streams of requests of a door."""

    refusal: Refusal
    """Refuses a request of a stream as the port refuses a call."""
    stall_s: float
    """Longest time for which a client reads nothing; then its stream ends."""
    stopping: "asyncio.Future[None]"
    """Done once the gateway stops: a stream then ends when its requests are answered."""


class RequestStream:
    """A call whose client sends requests, which are answered side by side."""

    def __init__(self, context: "aio.ServicerContext[Any, Any]", limits: StreamLimits) -> None:
        self.context = context
        self.credentials = credentials_of(context.invocation_metadata())
        self._limits = limits
        self._writing = asyncio.Lock()
        self._timeline = Timeline()
        """Its phase is DELIVER while a response is written."""

    async def run(
        self, requests: AsyncIterator[Request], answer: Callable[[Request], Coroutine[Any, Any, None]]
    ) -> None:
        """Calls `answer` for each request. Raises WeftError when the gateway stops, when the client reads nothing for
        too long, and what `answer` raises."""
        await self.context.send_initial_metadata(())
        with Deadline(self._timeline, None, self._limits.stall_s):
            await answer_side_by_side(requests, answer, MOST_REQUESTS, self._limits.stopping)

    def refusal(self) -> WeftError | None:
        """Why the gateway refuses another request now, or None."""
        return self._limits.refusal(self.credentials)

    async def write(self, response: Any) -> None:
        """Sends a response. gRPC writes one message at a time."""
        async with self._writing:
            self._timeline.enter(Phase.DELIVER)
            await self.context.write(response)
            self._timeline.enter(Phase.OWN)
