"""What happened to each stream, and the check that nothing was lost, repeated or wrong. Knows no processes."""

import itertools
import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from grpc import aio

from protos import inference_pb2 as api
from weft.client.api import Client
from weft.client.errors import WeftError, from_rpc

REFUSALS = {"UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}
"""Codes with which a mesh may refuse a request of which no token was delivered."""


@dataclass
class Stream:
    """One request and all that its client received."""

    name: str
    reference: Sequence[int]
    """The tokens of the undisturbed answer."""
    sent_at: float = 0.0
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """When each token arrived, on `time.monotonic`."""
    positions: list[int] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)
    finished: bool = False
    """The receipt arrived."""
    waited: int = 0
    """Messages which report that the answer waits for a worker."""
    code: str = ""
    reason: str = ""
    retry_after_s: float = 0.0
    ended_at: float = 0.0

    async def follow(self, call: "aio.UnaryStreamCall[api.GenerateRequest, api.GenerateResponse]") -> "Stream":
        """Records a call to its end; a failed call ends the record, too."""
        self.sent_at = time.monotonic()
        try:
            async for response in call:
                if response.HasField("receipt"):
                    self.finished = True
                else:
                    self._add(response.delta)
        except aio.AioRpcError as error:
            failure = from_rpc(error)
            self.code, self.reason, self.retry_after_s = error.code().name, failure.reason, failure.retry_after_s
        finally:
            self.ended_at = time.monotonic()
        return self

    async def follow_client(self, client: Client, request: api.GenerateRequest) -> "Stream":
        """Records an answer to our own client, which resumes broken streams."""
        self.sent_at = time.monotonic()
        answer = client.generate(request)
        try:
            async for delta in answer:
                self._add(delta)
            self.finished = answer.receipt is not None
        except WeftError as error:
            self.code, self.reason, self.retry_after_s = error.code.name, error.reason, error.retry_after_s
        finally:
            self.ended_at = time.monotonic()
        return self

    def _add(self, delta: api.Delta) -> None:
        now = time.monotonic()
        self.waited += delta.waiting
        self.tokens.extend(delta.token_ids)
        self.positions.extend(range(delta.position, delta.position + len(delta.token_ids)))
        self.attempts.extend([delta.attempt] * len(delta.token_ids))
        self.times.extend([now] * len(delta.token_ids))

    @property
    def outcome(self) -> str:
        """completed, refused (no token was delivered and the code allows a retry) or failed."""
        if self.finished and not self.code:
            return "completed"
        if not self.tokens and self.code in REFUSALS:
            return "refused"
        return "failed"

    @property
    def moved(self) -> bool:
        """More than one attempt produced its tokens."""
        return len(set(self.attempts)) > 1

    @property
    def flows(self) -> bool:
        """Tokens have arrived, and more will come."""
        return bool(self.tokens) and not self.ended_at

    def pause_s(self, since: float = 0.0) -> float:
        """The longest time between two tokens of which the second arrived after `since`."""
        ends = [at for at in self.times if at >= since]
        begins = [at for at in self.times if at < since][-1:] + ends
        return max((end - begin for begin, end in itertools.pairwise(begins)), default=0.0)

    def problems(self) -> list[str]:
        """What is wrong with the tokens that were delivered; empty if nothing is."""
        found = []
        expected = list(range(len(self.positions)))
        if self.positions != expected:
            repeated = [at for at, count in Counter(self.positions).items() if count > 1]
            found.append(f"repeated positions {repeated[:8]}" if repeated else "positions are not contiguous")
        length = len(self.tokens)
        if self.tokens != list(self.reference[:length]):
            found.append("tokens differ from the reference")
        if self.outcome == "completed" and length != len(self.reference):
            found.append(f"{length} tokens instead of {len(self.reference)}")
        return found


@dataclass
class History:
    """All streams of one run."""

    streams: list[Stream] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    """The longest pauses of streams that are not kept."""

    def add(self, stream: Stream) -> Stream:
        """Adds a stream that is about to be sent."""
        self.streams.append(stream)
        return stream

    def of(self, outcome: str) -> list[Stream]:
        """The streams with this outcome."""
        return [stream for stream in self.streams if stream.outcome == outcome]

    def wrong(self) -> list[Stream]:
        """Streams with repeated, missing or different tokens."""
        return [stream for stream in self.streams if stream.problems()]

    def summary(self) -> dict[str, int]:
        """Counts by outcome. sent = completed + refused + failed."""
        counts = {name: len(self.of(name)) for name in ("completed", "refused", "failed")}
        assert sum(counts.values()) == len(self.streams), counts
        repeated = sum(len(stream.positions) - len(set(stream.positions)) for stream in self.streams)
        moved = sum(stream.moved for stream in self.streams)
        return {"sent": len(self.streams), **counts, "wrong": len(self.wrong()), "repeated": repeated, "moved": moved}

    def keep_wrong(self, folder: Path, context: dict[str, Any]) -> list[Path]:
        """Writes every wrong or failed stream whole, with `context`, to a file of its own. -> the files."""
        bad = {id(stream): stream for stream in (*self.wrong(), *self.of("failed"))}
        paths = []
        for stream in bad.values():
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{context.get('row', 'stream')}-{context.get('seed', 0)}-{stream.name}.json"
            path.write_text(json.dumps({**context, "problems": stream.problems(), **_plain(stream)}, indent=1))
            paths.append(path)
        return paths

    def assert_whole(self, folder: Path) -> None:
        """Every stream was completed with the tokens of its reference; others are kept in `folder`."""
        kept = self.keep_wrong(folder, {})
        reasons = Counter(f"{stream.code}/{stream.reason}" for stream in self.streams if stream.code)
        assert not kept, (self.summary(), reasons, kept[0].read_text()[:2000])
        assert len(self.of("completed")) == len(self.streams), (self.summary(), reasons)


def percentile(values: Iterable[float], share: float) -> float:
    """The value below which this share of the values lies; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _plain(stream: Stream) -> dict[str, Any]:
    return {**asdict(stream), "outcome": stream.outcome, "reference": list(stream.reference)}


PLAIN_OPTIONS: list[tuple[str, int]] = [("grpc.use_local_subchannel_pool", 1)]
"""A plain client: gRPC's defaults, with a connection of its own."""
