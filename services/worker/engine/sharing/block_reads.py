"""Reads contents of blocks for other workers, a few at a time, also of prompts that are still being computed.

Layers of a block that are computed are read before the block is whole.

Runs on the engine's thread. Knows keys and bytes, not who asks or how they are sent.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from services.worker.engine.base import BlockPart, BlockRead
from services.worker.kvcache.pool import PARTS, KvPool, LayeredPool
from services.worker.planner.block_pool import BlockPool

FOLLOW_S = 5.0
"""Seconds that a request waits for its next block to be computed."""
_READ_BYTES = 2 << 20  # in one step and for one request: copying them takes about a millisecond
_AHEAD_BYTES = 4 << 20  # read for a request and not sent yet

Computing = Callable[[Sequence[bytes]], list[int]]
"""Keys of blocks -> the blocks that the running step computes for the first of them."""


@dataclass(slots=True)
class _Progress:
    """How far a request is answered."""

    until: float
    """How long it waits for its next block."""
    blocks: int = 0
    """Blocks that were read."""
    layers: dict[int, int] = field(default_factory=dict)
    """Layers that were read of the next blocks, by block."""


class BlockReads:
    """The requests of other workers. `add` may be called from any thread."""

    def __init__(
        self,
        pool: BlockPool,
        kv: KvPool | None,
        wake: Callable[[], None],
        computing: Computing = lambda keys: [],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """kv: None if blocks have no contents. wake() makes the engine call `serve`."""
        self._pool, self._kv, self._wake, self._clock = pool, kv, wake, clock
        self._computing = computing
        self._new: deque[BlockRead] = deque()
        self._reads: dict[BlockRead, _Progress] = {}
        self._layers = 1
        """Layers of the model, once some were computed alone."""

    def add(self, read: BlockRead) -> None:
        """Answer this request."""
        self._new.append(read)
        self._wake()

    @property
    def pending(self) -> bool:
        """Whether there are requests that `serve` has not seen."""
        return bool(self._new)

    def serve(self) -> bool:
        """Read some blocks for each request. -> whether there is more to read at once."""
        if not self._new and not self._reads:
            return False
        now = self._clock()
        self._take_new(now)
        more = False
        for read, progress in list(self._reads.items()):
            more |= self._serve(read, progress, now)
        return more

    def layers_computed(self, computed: int, layers: int) -> bool:
        """Read these layers of the blocks of the step for the requests that wait for them. -> whether there are any
        requests."""
        self._layers, now = layers, self._clock()
        self._take_new(now)
        for read, progress in self._reads.items():
            if read.in_parts and read.follow and not read.cancelled:
                self._read_layers(read, progress, computed, now)
        return bool(self._reads)

    def void_parts(self) -> None:
        """The step was computed, or failed: parts of blocks that it has not made whole are void."""
        for read, progress in self._reads.items():
            whole = self._pool.match(read.keys[progress.blocks :][: len(progress.layers)])
            progress.layers = {block: progress.layers[block] for block in whole if block in progress.layers}

    def _take_new(self, now: float) -> None:
        while self._new:
            self._reads[self._new.popleft()] = _Progress(now + FOLLOW_S)

    def _serve(self, read: BlockRead, progress: _Progress, now: float) -> bool:
        if self._kv is None or read.cancelled:
            self._end(read)
            return False
        size, ahead = self._kv.block_bytes, read.read_bytes - read.sent_bytes
        room = min(_READ_BYTES, _AHEAD_BYTES - ahead) // size
        if room <= 0 and ahead > 0:
            return False  # Its caller wakes the engine when some are sent.
        found = self._pool.match(read.keys[progress.blocks : progress.blocks + max(room, 1)])
        if found:
            self._pool.touch(found)
            progress.until = now + FOLLOW_S
            self._answer(read, progress, found, self._kv.read(found))
        if progress.blocks == len(read.keys) or (not found and (not read.follow or now > progress.until)):
            self._end(read)
            return False
        return bool(found)

    def _answer(self, read: BlockRead, progress: _Progress, found: list[int], contents: list[bytes]) -> None:
        """Pass on what was not read of these blocks."""
        parts = []
        for index, (block, whole) in enumerate(zip(found, contents, strict=True), progress.blocks):
            offset = len(whole) // self._layers * progress.layers.pop(block, 0)
            parts.append(BlockPart(index, offset, whole[offset:], ends=True))
        progress.blocks += len(found)
        self._pass_on(read, parts)

    def _read_layers(self, read: BlockRead, progress: _Progress, computed: int, now: float) -> None:
        assert isinstance(self._kv, LayeredPool), "its layers are not computed alone"
        layer_bytes, wanted = self._kv.block_bytes // self._layers, list[tuple[int, int, int]]()
        room = min(_READ_BYTES, _AHEAD_BYTES - (read.read_bytes - read.sent_bytes)) // layer_bytes
        for index, block in enumerate(self._computing(read.keys[progress.blocks :]), progress.blocks):
            progress.until = now + FOLLOW_S
            begun = progress.layers.get(block, 0)
            if computed - begun < max(self._layers // PARTS, 1):
                continue
            room -= computed - begun
            if room < 0:
                break
            wanted.append((begun, index, block))
        parts = []
        for begun, group in groupby(wanted, key=lambda each: each[0]):
            _, places, blocks = zip(*group, strict=True)
            progress.layers.update(dict.fromkeys(blocks, computed))
            contents = self._kv.read_layers(list(blocks), begun, computed)
            found = zip(places, contents, strict=True)
            parts += [BlockPart(index, begun * layer_bytes, part, ends=False) for index, part in found]
        if parts:
            self._pass_on(read, parts)

    def _pass_on(self, read: BlockRead, parts: list[BlockPart]) -> None:
        read.read_bytes += sum(len(part.contents) for part in parts)
        read.answer(parts)

    def _end(self, read: BlockRead) -> None:
        del self._reads[read]
        read.answer(None)
