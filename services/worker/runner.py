"""Executes packed steps on the CPU: slots, KV pools, forward, sampling. Knows slots and blocks, never jobs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kernels import kv
from kernels.reference import finite_rows
from services.worker.inputs import Edit, Rows, SlotState, Words, unpack
from services.worker.layers import StepTensors
from services.worker.model import Model
from services.worker.ops import ReferenceOps, Rotation
from services.worker.sampler import Sampled, Sampler
from services.worker.tiers import Contents


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought."""

    finite: list[bool]
    """For each row, whether all its numbers are; if not, its token means nothing and its blocks must be scrubbed."""
    sampled: Sampled
    """For each row that samples, in order."""


class Runner(Protocol):
    """The device side of the engine: executes packed steps in the order of their launch."""

    model: Model
    pools: list[torch.Tensor]

    @property
    def depth(self) -> int:
        """Steps that may be in flight; with 1 a step is over when it has been launched."""

    def run(self, words: Words, /) -> StepResult:
        """Launch a step and collect it."""

    def launch(self, words: Words, /) -> Any:
        """Apply the edits, begin to compute the rows. After an exception no row has advanced, the edits are applied."""

    def over(self, step: Any, /) -> bool:
        """Whether `collect` would not wait."""

    def collect(self, step: Any, /) -> StepResult:
        """Wait for a launched step and tell what it brought; the oldest first."""

    def scrub(self, blocks: list[int], /) -> None:
        """Zero blocks that may hold NaN, after all launched steps."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's keys and values, all layers."""

    def read_blocks(self, blocks: list[int], /) -> list[bytes]:
        """The contents of blocks that are computed: keys and values, layer after layer."""

    @property
    def host_block_s(self) -> float:
        """Seconds that a block takes to host memory and back, as measured; 0: it is there already."""

    def keep_blocks(self, blocks: list[int], /) -> Sequence[Contents]:
        """The same, to be kept in host memory; fewer if there is no room. Steps launched later may overwrite them."""

    def write_blocks(self, blocks: list[int], payloads: Sequence[Contents], /) -> None:
        """Fill blocks that no job uses with what `read_blocks` or `keep_blocks` gave, after all launched steps."""


class CpuRunner:
    """The device side of the engine. It reads the packed step that a GPU would read, and owns all tensors."""

    depth = 1
    """A step is over when it has been launched."""

    def __init__(
        self,
        model: Model,
        ops: ReferenceOps,
        blocks: int,
        block_size: int,
        slots: int,
        max_length: int,
        stored: torch.dtype,
    ) -> None:
        config = model.config
        self.ops = ops
        self.model, self.block_size = model, block_size
        shape = (blocks + 1, block_size, config.kv_heads, config.head_dim)  # block 0 is nobody's
        self.pools = [kv.make_pool(*shape, stored) for _ in range(config.layers)]
        # The same memory as bytes: [blocks + 1, bytes of one block in one layer].
        self._contents = [kv.bytes_of(pool).numpy() for pool in self.pools]
        self.sampler = Sampler(slots, config.vocab_size)
        self._windows = set(config.windows)
        self._tables = np.zeros((slots, -(-max_length // block_size)), np.int64)
        self._computed = np.zeros(slots, np.int64)
        self._last_token = np.zeros(slots, np.int64)

    def launch(self, words: Words) -> StepResult:
        """Compute the step at once."""
        return self.run(words)

    def over(self, step: StepResult) -> bool:
        """It was computed when it was launched."""
        return True

    def collect(self, step: StepResult) -> StepResult:
        """What a launched step brought."""
        return step

    def run(self, words: Words) -> StepResult:
        """Apply the edits, compute the rows. After an exception no row has advanced, and the edits are applied."""
        edits, rows = unpack(words)
        for edit, slot, data in edits:
            self._apply(edit, slot, data)
        slots, lengths = np.array(rows.slots, np.int64), np.array(rows.lengths, np.int64)
        contexts = self._computed[slots] + lengths
        with torch.inference_mode():
            step = self._prepare(rows, slots, lengths, contexts)
            x, seen = self.model.forward(step, self.pools)
            finite = finite_rows(seen, rows.lengths)
            chosen = np.flatnonzero(rows.samples)
            sampled = Sampled([], None, None)
            if len(chosen):
                logits = self.model.logits(x).float()
                for row, good in zip(chosen.tolist(), finite_rows(logits, [1] * len(chosen)), strict=True):
                    finite[row] &= good
                sampled = self.sampler.sample(logits, slots[chosen], contexts[chosen])
        self._computed[slots] = contexts
        self._last_token[slots[chosen]] = sampled.tokens
        return StepResult(finite, sampled)

    def scrub(self, blocks: list[int]) -> None:
        """Zero blocks that may hold NaN: a masked key still meets its value as 0 * NaN."""
        for contents in self._contents:
            contents[blocks] = 0

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's keys and values, all layers."""
        return sum(contents.shape[1] for contents in self._contents)

    def read_blocks(self, blocks: list[int]) -> list[bytes]:
        """The contents of blocks: keys and values, layer after layer, in the pool's own order and number format."""
        layers = np.stack([contents[blocks] for contents in self._contents], axis=1)
        return [block.tobytes() for block in layers]

    host_block_s = 0.0

    def keep_blocks(self, blocks: list[int]) -> list[bytes]:
        """The same: the pool is in host memory already."""
        return self.read_blocks(blocks)

    def write_blocks(self, blocks: list[int], payloads: Sequence[Any]) -> None:
        """Fill blocks that no job uses with what `read_blocks` gave, `block_bytes` for each."""
        assert all(len(payload) == self.block_bytes for payload in payloads), "contents of another layout"
        received = np.frombuffer(b"".join(payloads), np.uint8).reshape(len(blocks), len(self.pools), -1)
        for layer, contents in enumerate(self._contents):
            contents[blocks] = received[:, layer]

    def _apply(self, edit: Edit, slot: int, words: Words) -> None:
        if edit is Edit.BLOCKS:
            first = int(words[0])
            self._tables[slot, first : first + len(words) - 1] = words[1:]
        elif edit is Edit.ADMIT:
            state = SlotState.read(words)
            self._computed[slot] = state.computed
            self.sampler.admit(slot, state)
        elif edit is Edit.HISTORY:
            self.sampler.remember(slot, int(words[0]), words[1:])
        elif edit is Edit.BIAS:
            ids, values = np.split(words, 2)
            self.sampler.bias(slot, ids, values.view(np.float32))
        elif edit is Edit.BAN:
            self.sampler.ban(slot, int(words[0]), words[1:])
        else:
            self._computed[slot] = 0

    def _prepare(
        self,
        rows: Rows,
        slots: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64],
        contexts: npt.NDArray[np.int64],
    ) -> StepTensors:
        """What the layers share, for T tokens of R rows."""
        ends = np.cumsum(lengths)
        row_of = np.repeat(np.arange(len(slots)), lengths)
        positions = np.arange(len(row_of)) + (contexts - ends)[row_of]
        token_ids = np.where(rows.ids < 0, self._last_token[slots][row_of], rows.ids)
        tables = self._tables[slots, : -(-int(contexts.max()) // self.block_size)]
        places = tables[row_of, positions // self.block_size] * self.block_size + positions % self.block_size
        at, model = torch.from_numpy(positions), self.model
        plan, dtype = self.ops.plan_attention, model.embedding.dtype
        last = ends[np.flatnonzero(rows.samples)] - 1
        return StepTensors(
            token_ids=torch.from_numpy(token_ids),
            rotation=Rotation(model.cos[at], model.sin[at]),
            places=torch.from_numpy(places),
            plans={w: plan(lengths, contexts, tables, self.block_size, w, dtype) for w in self._windows},
            sampled=None if len(last) == len(positions) else torch.from_numpy(last),
        )
