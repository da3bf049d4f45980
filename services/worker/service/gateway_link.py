"""The worker's side of a gateway's Run stream: its subscriptions and its unsent messages. Knows no engine."""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import Generic, TypeVar

import structlog

from protos import mesh_pb2 as mesh
from services.worker.job import TokenOut

log = structlog.get_logger("worker.link")
Subscribed = TypeVar("Subscribed")

MOST_ENTRIES = 16_384
"""Tokens of one message: keeps it well below gRPC's limit, even with the most log-probabilities."""
MOST_MESSAGES = 256
"""Unsent messages after which the gateway counts as stalled, and its link is closed."""


class Columns:
    """An unsent message: one entry for each token, in columns, and the ends of jobs."""

    __slots__ = ("ends", "logprobs", "positions", "stream_ids", "token_ids", "tops")

    def __init__(self) -> None:
        self.stream_ids: list[int] = []
        self.positions: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        """Empty if none was requested; otherwise as long as the columns up to the last requested one, NaN elsewhere."""
        self.tops: list[mesh.TopTokens] = []
        self.ends: list[mesh.JobEnd] = []

    def add(self, stream_id: int, token: TokenOut) -> None:
        """Appends a token."""
        if token.logprob is not None:
            self._add_logprob(token.logprob, token.top)
        self.stream_ids.append(stream_id)
        self.positions.append(token.position)
        self.token_ids.append(token.token_id)

    def message(self) -> mesh.RunResponse:
        """The protobuf message of all entries."""
        missing = len(self.stream_ids) - len(self.logprobs)
        logprobs = self.logprobs + [math.nan] * missing if self.logprobs else ()
        return mesh.RunResponse(
            stream_ids=self.stream_ids,
            positions=self.positions,
            token_ids=self.token_ids,
            logprobs=logprobs,
            tops=self.tops,
            ends=self.ends,
        )

    def _add_logprob(self, logprob: float, top: list[tuple[int, float]] | None) -> None:
        entry = len(self.stream_ids)
        self.logprobs += [math.nan] * (entry - len(self.logprobs))
        self.logprobs.append(logprob)
        if top is not None:
            ids, logprobs = [i for i, _ in top], [value for _, value in top]
            self.tops.append(mesh.TopTokens(entry=entry, token_ids=ids, logprobs=logprobs))


class GatewayLink(Generic[Subscribed]):
    """The stream to one gateway. Iterating it gives the messages to send.

    Each engine step is a message of its own while the gateway keeps up. Steps that complete while a message is being
    written share the next message.
    """

    def __init__(self, gateway_id: str) -> None:
        self.gateway_id = gateway_id
        self.streams: dict[int, Subscribed] = {}
        """The jobs that it subscribes to, by stream id."""
        self._unsent: deque[Columns] = deque()
        self._wake = asyncio.Event()
        self.closed = False
        """The iteration ends once every message is sent."""
        self.overrun = False
        """The link was closed because the gateway does not read: messages were dropped."""

    def send_token(self, stream_id: int, token: TokenOut) -> None:
        """Queues one token of a stream."""
        unsent = self._unsent
        if not unsent or len(unsent[-1].stream_ids) >= MOST_ENTRIES:
            self._begin_message()
        unsent[-1].add(stream_id, token)

    def send_tokens(self, stream_id: int, tokens: Iterable[TokenOut]) -> None:
        """Queues the tokens that precede the subscription."""
        for token in tokens:
            self.send_token(stream_id, token)

    def send_end(self, end: mesh.JobEnd) -> None:
        """Queues the end of a stream, behind its last token."""
        if not self._unsent:
            self._begin_message()
        self._unsent[-1].ends.append(end)

    def close(self) -> None:
        """Ends the iteration once every message is sent."""
        self.closed = True
        self._wake.set()

    async def __aiter__(self) -> AsyncIterator[mesh.RunResponse]:
        while True:
            while self._unsent:
                yield self._unsent.popleft().message()
            if self.closed:
                return
            self._wake.clear()
            await self._wake.wait()

    def _begin_message(self) -> None:
        if len(self._unsent) == MOST_MESSAGES:
            log.warning("link closed: the gateway reads too slowly", gateway=self.gateway_id)
            self._unsent.clear()
            self.overrun = True
            self.close()
        self._unsent.append(Columns())
        self._wake.set()
