"""Executes packed steps on a grid of ranks: rank 0 sends each step to all others. Ranks know shards, never jobs.

All ranks compute the same steps in the same order. The ranks of the last stage have the same logits and draw the same
tokens; where that stage is not rank 0's, one of them sends its results back. A rank that fails ends the whole grid.
"""

import contextlib
import json
import queue
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from services.worker.kvcache.pool import KvPool
from services.worker.parallel.channel import Channel, ChannelClosed, Kind
from services.worker.parallel.topology import Grid
from services.worker.runners.base import Inspection, Masks, PreparedPages, Runner, Sampled, StepResult
from services.worker.runners.rank_adapters import HeldAdapters
from services.worker.runners.stage_words import with_tokens, without_draws
from services.worker.runners.step import Rows, Words, unpack

_COUNT = struct.Struct("=i")


class RanksLost(Exception):
    """A rank is gone or has failed: the grid cannot go on."""


@dataclass(slots=True)
class GridStep:
    """A launched step, as rank 0 has it."""

    rows: Rows
    own: Any
    """As this rank's runner has it."""


class Rank:
    """What every rank does with a step, on its own part of the model."""

    def __init__(
        self, runner: Runner[Any], nbytes: int, grid: Grid, rank: int, adapters: PreparedPages | None = None
    ) -> None:
        """nbytes: of its weights; adapters: of its model; None: it serves none."""
        assert runner.kv is not None
        self.adapters = adapters
        self.runner, self.kv, self.nbytes = runner, runner.kv, nbytes
        self._draws = grid.is_last(rank)
        self._strips = not self._draws and runner.depth == 1
        """Whether it leaves out what only draws need. On a GPU all stages pad a step alike, which its draws decide."""
        self.reports = rank == grid.drawing_rank
        """Whether it is the rank whose results count."""
        self._launched: deque[Any] = deque()

    def launch(self, words: Words) -> Any:
        """Begin to compute the step, and note that steps are over which no one collects."""
        while self._launched and self._launched[-1].has_guesses:
            self.runner.collect(self._launched.popleft())
        step = self.runner.launch(without_draws(words) if self._strips else words)
        if not self.reports:
            self._launched.append(step)
            while len(self._launched) > self.runner.depth:
                self.runner.collect(self._launched.popleft())
        return step

    def draw(self, step: Any, masks: Masks) -> None:
        """Draw the tokens of a step with masks."""
        if self._draws:
            self.runner.draw(step, masks)


def serve(rank: Rank, receive: Callable[[], tuple[Kind, bytes]], channel: Channel) -> None:
    """Compute what rank 0 orders. Returns when the channel ends; raises whatever a step raises."""
    kv, reporting = rank.kv, _Reports(rank, channel) if rank.reports else None
    adapters = HeldAdapters(rank.adapters) if rank.adapters is not None else None
    step: Any = None
    while True:
        try:
            kind, content = receive()
        except ChannelClosed:
            return
        if kind is Kind.STEP:
            step = rank.launch(np.frombuffer(content, np.int32))
        elif kind is Kind.DRAW:
            rank.draw(step, _read_masks(content))
        elif kind is Kind.SCRUB:
            kv.scrub(np.frombuffer(content, np.int32).tolist())
        elif kind is Kind.READ:
            channel.send(Kind.CONTENTS, *kv.read(np.frombuffer(content, np.int32).tolist()))
        elif kind is Kind.WRITE:
            blocks, contents = _read_blocks(content)
            kv.write(blocks, [contents[at : at + kv.block_bytes] for at in range(0, len(contents), kv.block_bytes)])
        elif adapters is not None:
            adapters.obey(kind, content)
        if reporting is not None and (
            kind is Kind.DRAW or (kind is Kind.STEP and step is not None and not step.undrawn)
        ):
            reporting.send(step)


class _Reports:
    """Sends the results of steps to rank 0, in their order, in a thread that waits for them: the next step is launched
    meanwhile."""

    def __init__(self, rank: Rank, channel: Channel) -> None:
        self._rank, self._channel = rank, channel
        self._steps: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="results", daemon=True).start()

    def send(self, step: Any) -> None:
        """Send the results of a step, whose tokens are drawn, when it is over."""
        self._steps.put(step)

    def _run(self) -> None:
        with contextlib.closing(self._channel), contextlib.suppress(ChannelClosed):
            while True:
                self._channel.send(Kind.RESULT, write_result(self._rank.runner.collect(self._steps.get())))


class RanksRunner:
    """A `Runner` on a grid of ranks, of which this process is rank 0."""

    def __init__(
        self,
        rank: Rank,
        channels: Sequence[Channel],
        block_bytes: Sequence[int],
        grid: Grid,
        slots: int,
        on_lost: Callable[[str], object],
    ) -> None:
        """channels: to ranks 1, 2, ...; block_bytes: of one block on each rank, rank 0 first. on_lost: called once with
        the reason when the grid cannot go on."""
        self.depth = grid.pipeline if grid.pipeline > 1 else rank.runner.depth
        self.grid, self._rank, self._channels, self._on_lost = grid, rank, channels, on_lost
        self.kv = RanksPool(self, rank.kv, block_bytes)
        self._results: deque[StepResult] = deque()
        """Results of steps that were not collected yet, where another rank reports."""
        self._reporter = channels[grid.drawing_rank - 1] if grid.drawing_rank else None
        self._last_tokens: npt.NDArray[np.int64] = np.zeros(slots, np.int64)

    def launch(self, words: Words) -> GridStep:
        """Send the step to all ranks and compute this rank's part. Raises RanksLost."""
        if self._reporter is not None:
            words = with_tokens(words, self._last_tokens)
        rows = unpack(words)[1]
        self.order(Kind.STEP, words.tobytes())
        try:
            return GridStep(rows, self._rank.launch(words))
        except Exception as error:
            self._lose(f"rank 0 failed: {type(error).__name__}: {error}")

    def draw(self, step: GridStep, masks: Masks) -> None:
        """Draw all tokens of a step that has rows with masks."""
        self.order(Kind.DRAW, _COUNT.pack(len(masks)), masks.astype(np.int32).tobytes())
        self._rank.draw(step.own, masks)

    def done(self, step: GridStep) -> bool:
        """Whether `collect` would return at once."""
        if self._reporter is None:
            return self._rank.runner.done(step.own)
        return bool(self._results) or self._reporter.waiting()

    def collect(self, step: GridStep) -> StepResult:
        """Wait for the oldest launched step and return its results. Raises RanksLost."""
        if self._reporter is None:
            return self._rank.runner.collect(step.own)
        if not self._results:
            self._results.append(read_result(self._answer(self._reporter, Kind.RESULT)))
        result = self._results.popleft()
        chosen = [slot for slot, samples in zip(step.rows.slots, step.rows.samples, strict=True) if samples]
        for slot, drawn in zip(chosen, result.sampled.tokens, strict=True):
            self._last_tokens[slot] = drawn[-1]
        return result

    def run(self, words: Words) -> StepResult:
        """Launch a step and collect it."""
        return self.collect(self.launch(words))

    def inspect(self, token_ids: Sequence[int]) -> Inspection:
        """Not on a grid: tools that open up a model load it into one process."""
        raise NotImplementedError("a model on several ranks cannot be opened up")

    def close(self) -> None:
        """End the other ranks."""
        for channel in self._channels:
            channel.close()

    # ---- orders to all ranks ----

    def order(self, kind: Kind, *parts: bytes) -> None:
        """Send the same message to all ranks. Raises RanksLost."""
        for number in range(len(self._channels)):
            self.order_one(number, kind, *parts)

    def order_one(self, number: int, kind: Kind, *parts: bytes) -> None:
        """Send a message through one channel. Any thread may call it. Raises RanksLost."""
        try:
            self._channels[number].send(kind, *parts)
        except ChannelClosed:
            self._lose(f"rank {number + 1} is gone")

    def order_living(self, kind: Kind, *parts: bytes) -> None:
        """Send the same message to all ranks that are still there. Any thread may call it."""
        for channel in self._channels:
            with contextlib.suppress(ChannelClosed):
                channel.send(kind, *parts)

    def answers(self, kind: Kind) -> list[bytes]:
        """The next answer of this kind of each rank. Raises RanksLost."""
        return [self._answer(channel, kind) for channel in self._channels]

    def _answer(self, channel: Channel, kind: Kind) -> bytes:
        while True:
            try:
                found, content = channel.receive()
            except ChannelClosed:
                self._lose("a rank is gone")
            if found is kind:
                return content
            assert found is Kind.RESULT, f"{found.name} instead of {kind.name}"
            self._results.append(read_result(content))

    def _lose(self, reason: str) -> NoReturn:
        self._on_lost(reason)
        raise RanksLost(reason)


class RanksPool:
    """A `KvPool` of whose blocks each rank has a part: their contents are these parts in the order of the ranks."""

    host_block_s = 0.0
    """No host memory is kept for blocks: those of ranks on CPUs are there already."""

    def __init__(self, ranks: RanksRunner, own: KvPool, block_bytes: Sequence[int]) -> None:
        self._ranks, self._own, self._sizes = ranks, own, block_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's keys and values, all layers and heads."""
        return sum(self._sizes)

    def scrub(self, blocks: list[int]) -> None:
        """Zero blocks that may hold NaN."""
        self._ranks.order(Kind.SCRUB, np.array(blocks, np.int32).tobytes())
        self._own.scrub(blocks)

    def read(self, blocks: list[int]) -> list[bytes]:
        """The contents of blocks."""
        self._ranks.order(Kind.READ, np.array(blocks, np.int32).tobytes())
        parts = [self._own.read(blocks)]
        for content, size in zip(self._ranks.answers(Kind.CONTENTS), self._sizes[1:], strict=True):
            parts.append([content[at : at + size] for at in range(0, len(content), size)])
        return [b"".join(pieces) for pieces in zip(*parts, strict=True)]

    def keep(self, blocks: list[int]) -> list[bytes]:
        """The same as `read`."""
        return self.read(blocks)

    def write(self, blocks: list[int], payloads: Sequence[Any]) -> None:
        """Fill blocks that no job uses with what `read` returned, `block_bytes` for each."""
        assert all(len(payload) == self.block_bytes for payload in payloads), "contents of another layout"
        header = np.array([len(blocks), *blocks], np.int32).tobytes()
        begin = self._sizes[0]
        for number, size in enumerate(self._sizes[1:]):
            self._ranks.order_one(number, Kind.WRITE, header, *(bytes(p[begin : begin + size]) for p in payloads))
            begin += size
        self._own.write(blocks, [payload[: self._sizes[0]] for payload in payloads])


# ---- messages ----


def write_result(result: StepResult) -> bytes:
    """The results of a step as JSON, in which floats keep all their bits."""
    scores = [[row, *scores] for row, scores in result.scores.items()]
    return json.dumps([result.finite, result.sampled, scores]).encode()


def read_result(content: bytes) -> StepResult:
    """The inverse of `write_result`."""
    finite, (tokens, logprobs, tops), scores = json.loads(content)
    if tops is not None:
        tops = [[_tuples(top) for top in row] for row in tops]
    found = {row: (values, [_tuples(top) for top in likely]) for row, values, likely in scores}
    return StepResult(finite, Sampled(tokens, logprobs, tops), found)


def _tuples(top: list[list[Any]]) -> list[tuple[int, float]]:
    return [(token, logprob) for token, logprob in top]


def _read_masks(content: bytes) -> Masks:
    (lines,) = _COUNT.unpack_from(content)
    return np.frombuffer(content, np.int32, offset=_COUNT.size).reshape(lines, -1).copy()


def _read_blocks(content: bytes) -> tuple[list[int], bytes]:
    (count,) = _COUNT.unpack_from(content)
    end = _COUNT.size * (1 + count)
    return np.frombuffer(content[_COUNT.size : end], np.int32).tolist(), content[end:]
