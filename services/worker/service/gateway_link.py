"""A gateway's Run stream at the worker: who listens to what, and what is still to be written. Knows no engine."""

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

# Of one message: well below what gRPC carries, even with the most log-probabilities.
MOST_ENTRIES = 16_384
# A reader that is so many messages behind reads no more.
MOST_MESSAGES = 256


class Columns:
    """A message on its way: an entry for each token, in columns, ends, and what comes soon."""

    __slots__ = ("ends", "logprobs", "positions", "rows", "soon", "token_ids", "tops")

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.positions: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        """Empty, or with NaN where none was asked for up to the last that was."""
        self.tops: list[mesh.TopTokens] = []
        self.ends: list[mesh.JobEnd] = []
        self.soon: list[int] = []

    def add(self, row: int, token: TokenOut) -> None:
        """Appends a token."""
        if token.logprob is not None:
            self._add_logprob(token.logprob, token.top)
        self.rows.append(row)
        self.positions.append(token.position)
        self.token_ids.append(token.token_id)

    def message(self) -> mesh.RunResponse:
        """All of it, as it is written."""
        missing = len(self.rows) - len(self.logprobs)
        logprobs = self.logprobs + [math.nan] * missing if self.logprobs else ()
        return mesh.RunResponse(
            rows=self.rows,
            positions=self.positions,
            token_ids=self.token_ids,
            logprobs=logprobs,
            tops=self.tops,
            ends=self.ends,
            soon=self.soon,
        )

    def _add_logprob(self, logprob: float, top: list[tuple[int, float]] | None) -> None:
        entry = len(self.rows)
        self.logprobs += [math.nan] * (entry - len(self.logprobs))
        self.logprobs.append(logprob)
        if top is not None:
            ids, logprobs = [i for i, _ in top], [value for _, value in top]
            self.tops.append(mesh.TopTokens(entry=entry, token_ids=ids, logprobs=logprobs))


class GatewayLink(Generic[Subscribed]):
    """The stream to one gateway. Iterate it for what is to be written: each engine step is a message of its own where
    the stream keeps up, and steps that come while one is being written share the next."""

    def __init__(self, gateway_id: str) -> None:
        self.gateway_id = gateway_id
        self.rows: dict[int, Subscribed] = {}
        """What it listens to."""
        self._unwritten: deque[Columns] = deque()
        self._news = asyncio.Event()
        self.closed = False
        """Whether it ends once everything is written."""
        self.overrun = False
        """Whether it was closed because its reader is hopelessly behind: something is lost."""

    def tell(self, row: int, token: TokenOut) -> None:
        """A token for a row."""
        unwritten = self._unwritten
        if not unwritten or len(unwritten[-1].rows) >= MOST_ENTRIES:
            self._begin_message()
        unwritten[-1].add(row, token)

    def end(self, end: mesh.JobEnd) -> None:
        """The end of a row, after its last token."""
        if not self._unwritten:
            self._begin_message()
        self._unwritten[-1].ends.append(end)

    def announce(self, row: int) -> None:
        """A token for a row comes soon."""
        if not self._unwritten:
            self._begin_message()
        self._unwritten[-1].soon.append(row)

    def tell_all(self, row: int, tokens: Iterable[TokenOut]) -> None:
        """What was said before the row began to listen."""
        for token in tokens:
            self.tell(row, token)

    def close(self) -> None:
        """Ends the iteration once everything is written."""
        self.closed = True
        self._news.set()

    async def __aiter__(self) -> AsyncIterator[mesh.RunResponse]:
        while True:
            while self._unwritten:
                yield self._unwritten.popleft().message()
            if self.closed:
                return
            self._news.clear()
            await self._news.wait()

    def _begin_message(self) -> None:
        if len(self._unwritten) == MOST_MESSAGES:
            log.warning("gateway too slow: its link is closed", gateway=self.gateway_id)
            self._unwritten.clear()
            self.overrun = True
            self.close()
        self._unwritten.append(Columns())
        self._news.set()
