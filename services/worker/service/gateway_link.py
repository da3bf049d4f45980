"""The worker's side of a gateway's Run stream: its subscriptions and its unsent messages. Knows no engine."""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import Generic, TypeVar

import structlog

from protos import mesh_pb2 as mesh
from services.worker.job import PromptScores, TokenOut

log = structlog.get_logger("worker.link")
Subscribed = TypeVar("Subscribed")

MOST_ENTRIES = 16_384
"""Tokens of one message: keeps it well below gRPC's limit, even with the most log-probabilities."""
_MOST_SCORES = 4
"""Parts of prompts in one message: each may have some thousand tokens with their most likely ones."""
_MOST_VECTOR_BYTES = 4 << 20
"""Vectors of one message, but for those of a single job."""
MOST_MESSAGES = 256
"""Unsent messages after which the gateway counts as stalled, and its link is closed."""


class Columns:
    """An unsent message: one entry for each token, in columns, and the ends of jobs."""

    __slots__ = (
        "ends", "heartbeat", "logprobs", "positions", "scores", "stream_ids", "token_ids", "tops", "vector_bytes",
    )  # fmt: skip

    def __init__(self) -> None:
        self.stream_ids: list[int] = []
        self.positions: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        """Empty if none was requested; otherwise as long as the columns up to the last requested one, NaN elsewhere."""
        self.tops: list[mesh.TopTokens] = []
        self.ends: list[mesh.JobEnd] = []
        self.heartbeat: mesh.WorkerHeartbeat | None = None
        self.scores: list[mesh.PromptScores] = []
        self.vector_bytes = 0
        """Bytes of all vectors in `ends`."""

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
            heartbeat=self.heartbeat,
            scores=self.scores,
        )

    def add_logprob(self, logprob: float, top: list[tuple[int, float]] | None) -> None:
        """Appends the log-probabilities of the next entry."""
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
        self.received = 0
        """Messages that the gateway has sent after its hello."""
        self.streams: dict[int, Subscribed] = {}
        """The jobs that it subscribes to, by stream id."""
        self._unsent: deque[Columns] = deque()
        self._changed: asyncio.Future[None] | None = None
        self.closed = False
        """The iteration ends once every message is sent."""
        self.overrun = False
        """The link was closed because the gateway does not read: messages were dropped."""

    def send_token(self, stream_id: int, token: TokenOut) -> None:
        """Queues one token of a stream."""
        unsent = self._unsent
        if not unsent or len(unsent[-1].stream_ids) >= MOST_ENTRIES:
            self._begin_message()
        columns = unsent[-1]
        if token.logprob is not None:
            columns.add_logprob(token.logprob, token.top)
        columns.stream_ids.append(stream_id)
        columns.positions.append(token.position)
        columns.token_ids.append(token.token_id)

    def send_tokens(self, stream_id: int, tokens: Iterable[TokenOut]) -> None:
        """Queues the tokens that precede the subscription."""
        for token in tokens:
            self.send_token(stream_id, token)

    def send_scores(self, stream_id: int, scores: PromptScores) -> None:
        """Queues log-probabilities of a prompt, in a message that no tokens precede."""
        if not self._unsent or self._unsent[-1].stream_ids or len(self._unsent[-1].scores) >= _MOST_SCORES:
            self._begin_message()
        message = mesh.PromptScores(stream_id=stream_id, position=scores.position, logprobs=scores.logprobs)
        for entry, top in enumerate(scores.tops):
            if top:
                ids, logprobs = [i for i, _ in top], [value for _, value in top]
                message.tops.append(mesh.TopTokens(entry=entry, token_ids=ids, logprobs=logprobs))
        self._unsent[-1].scores.append(message)

    def send_end(self, end: mesh.JobEnd) -> None:
        """Queues the end of a stream, behind its last token."""
        size = len(end.vectors.data)
        if not self._unsent or (size and self._unsent[-1].vector_bytes + size > _MOST_VECTOR_BYTES):
            self._begin_message()
        self._unsent[-1].ends.append(end)
        self._unsent[-1].vector_bytes += size

    def send_heartbeat(self, heartbeat: mesh.WorkerHeartbeat) -> None:
        """Queues a heartbeat. While messages wait, it joins the last of them and replaces its heartbeat."""
        if not self._unsent:
            self._begin_message()
        self._unsent[-1].heartbeat = heartbeat

    def close(self) -> None:
        """Ends the iteration once every message is sent."""
        self.closed = True
        self._wake()

    async def __aiter__(self) -> AsyncIterator[mesh.RunResponse]:
        while True:
            while self._unsent:
                yield self._unsent.popleft().message()
            if self.closed:
                return
            self._changed = asyncio.get_running_loop().create_future()
            await self._changed

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    def _begin_message(self) -> None:
        if len(self._unsent) == MOST_MESSAGES:
            log.warning("link closed: the gateway reads too slowly", gateway=self.gateway_id)
            self._unsent.clear()
            self.overrun = True
            self.close()
        self._unsent.append(Columns())
        self._wake()
