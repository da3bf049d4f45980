"""Look-ups of vectors at the cache service, all on one stream. Every failure is a miss. Knows keys and bytes.

A look-up by a unary call takes 0.35 ms longer than one by a message on a stream.
"""

import asyncio
import itertools
from collections.abc import Sequence

import structlog
from grpc import aio

from protos import cache_pb2 as cache
from services.gateway.links.cache_link import CacheLink
from services.send_queue import SendQueue, SendQueueFull

log = structlog.get_logger("cache")


class VectorLookUps:
    """Look-ups through a link. The stream is opened by the first one, and by the first one after a break."""

    def __init__(self, link: CacheLink) -> None:
        self._link = link
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Sequence[bytes]]] = {}
        """The look-ups that have no answer yet, by number."""
        self._unsent: SendQueue[cache.LookUpVectorsRequest] | None = None
        """The requests of the stream; None: none is open."""
        self._session: asyncio.Task[None] | None = None

    async def find(self, parts: Sequence[Sequence[bytes]], traceparent: str) -> list[Sequence[bytes]]:
        """Sends a request for each list of keys -> for each request a vector for each key, empty for a miss; no vectors
        if it fails or is not answered within the link's budget."""
        if not parts or not self._link.enabled:
            return [()] * len(parts)
        sent = [self._send(keys, traceparent) for keys in parts]
        try:
            await asyncio.wait([answer for _, answer in sent], timeout=self._link.budget_s)
        finally:
            for number, _ in sent:
                del self._waiting[number]
        return [answer.result() if answer.done() else () for _, answer in sent]

    def _send(self, keys: Sequence[bytes], traceparent: str) -> tuple[int, "asyncio.Future[Sequence[bytes]]"]:
        """-> the number of the request, and its answer."""
        request = cache.LookUpVectorsRequest(keys=keys, number=next(self._numbers), traceparent=traceparent)
        answer: asyncio.Future[Sequence[bytes]] = asyncio.get_running_loop().create_future()
        self._waiting[request.number] = answer
        try:
            self._open().put(request)
        except SendQueueFull:
            answer.set_result(())
        return request.number, answer

    def _open(self) -> SendQueue[cache.LookUpVectorsRequest]:
        """The requests of the stream, which is opened if there is none."""
        if self._unsent is None:
            self._unsent = SendQueue()
            self._session = asyncio.create_task(self._run(self._unsent))
        return self._unsent

    async def _run(self, unsent: SendQueue[cache.LookUpVectorsRequest]) -> None:
        try:
            async for response in self._link.stream(lambda stub: stub.LookUpVectors, aiter(unsent)):
                answer = self._waiting.get(response.number)
                if answer is not None and not answer.done():
                    answer.set_result(response.vectors)
        except aio.AioRpcError as error:
            log.debug("look-ups failed", code=error.code().name)
        finally:
            unsent.close()  # gRPC's task that reads it does not end with the call.
            self._unsent = None
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_result(())
