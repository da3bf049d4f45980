"""Captured steps: which sizes have a CUDA graph, and which graph serves which step. Knows sizes, never rows.

A replay is one launch instead of hundreds, but it computes all rows and tokens of the graph, padding included.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from kernels import linear
from kernels.attention.short_prefill import serves_short_prefill
from kernels.device import is_hopper
from services.worker.models.decoder import Decoder
from services.worker.runners.cuda.forward import Computed
from services.worker.runners.cuda.ops import TritonOps
from services.worker.runners.cuda.step_words import Kind, Sizes

GRAPH_ROWS = (1, 2, 4, 8, *range(16, 257, 8))
"""Answers of the steps that are captured; a step is padded to the next of these sizes."""
GRAPH_TOKENS = (16, 32, *range(64, 385, 64), *range(512, 2049, 128))
"""Tokens of the steps with prompts that are captured, where launching their kernels one by one may take longer. Not
448: an 8B step of 448 tokens takes longer than one of 512."""
RAGGED_ROWS, FEW_TOKENS, FEW_ROWS = (8, 64, 256), 384, 24
"""Most rows of steps with prompts; each size of tokens is captured for each of these, and up to `FEW_TOKENS` for
`FEW_ROWS`, too: attention has a faster kernel for the answers among so many rows."""
GUESS_ROWS, GUESSES, MOST_GUESS_TOKENS = (1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 7, 8), 320
"""Rows, and guesses of each, of the steps that are captured, and most tokens of such a step. Products of up to 8 tokens
are faster than those of 9."""
SHORT_CONTEXT_TOKENS = (16, 32, 64, 128)
"""Tokens of the steps with prompts that are captured once more for the fewest rows, with short prefill attention."""
EAGER_BYTES = 8e11
"""A step whose tokens times the bytes of a layer's weights exceed this keeps the GPU busy longer than the launches
take, even while another thread reads a burst of jobs: about 1 ms a layer."""
LARGE_TOKENS, FP8_EAGER, LEAST_FILLED = (1024, 2048), 2, 7 / 8
"""Steps of these sizes are captured, too, where a busy interpreter would delay their launches. Products in fp8 take
half the time, but as many launches: sizes up to `FP8_EAGER` times larger than others. A rank waits for the launches of
all ranks: all sizes. They serve steps that fill `LEAST_FILLED` of them."""


def most_guesses(rows: int, guesses: int) -> int:
    """How many guesses each of `rows` rows may have, so that a captured step serves them; `guesses` at most."""
    held = next((held for held in GUESS_ROWS if rows <= held), 0)
    counts = (min(count, guesses) for count in GUESSES)
    return max((count for count in counts if held and held * (count + 1) <= MOST_GUESS_TOKENS), default=0)


@dataclass(frozen=True, slots=True)
class Graph:
    """A captured step."""

    sizes: Sizes
    replay: Callable[[], None]
    computed: Computed | None
    longest: int = 1
    """Most tokens of a row, of a step with guesses."""


class Graphs:
    """The captured steps of a runner."""

    def __init__(
        self, model: Decoder, ops: TritonOps, stored: torch.dtype, slots: int, step_tokens: int, guesses: int = 0
    ) -> None:
        """slots, step_tokens: most rows and tokens of a step; stored: the format of keys and values; guesses: most of a
        row."""
        self._guesses = guesses
        self._model, self._ops, self._stored = model, ops, stored
        self._slots, self._step_tokens = slots, step_tokens
        self._eager_tokens = _eager_tokens(model)
        self.captured: dict[Kind, list[Graph]] = {kind: [] for kind in Kind}
        """For each kind, the smallest first."""

    def find(self, tokens: int, rows: int, kind: Kind) -> Graph | None:
        """The smallest graph that holds such a step; None if launching it kernel by kernel is faster."""
        graphs = self.captured[kind]
        graph = next((graph for graph in graphs if tokens <= graph.sizes[0] and rows <= graph.sizes[1]), None)
        if graph is None and kind is Kind.SHORT_CONTEXT:
            return self.find(tokens, rows, Kind.ANY)
        if graph is None or kind is Kind.ANSWERS or graph.sizes[0] <= self._eager_tokens:
            return graph
        return graph if tokens >= LEAST_FILLED * graph.sizes[0] else None

    def find_guesses(self, rows: int, guesses: int) -> Graph | None:
        """The smallest graph that holds a step of `rows` rows with up to `guesses` guesses each."""
        graphs = self.captured[Kind.GUESSES]
        fitting = [graph for graph in graphs if rows <= graph.sizes[1] and guesses < graph.longest]
        return min(fitting, key=lambda graph: graph.sizes, default=None)

    def wanted_guesses(self) -> list[tuple[Sizes, int]]:
        """Sizes of the graphs of steps with guesses and the most tokens of their rows; the largest first."""
        lengths = sorted({min(count, self._guesses) + 1 for count in GUESSES}) if self._guesses else []
        found = [
            ((rows * length, rows, rows * length), length)
            for rows in sorted({min(rows, self._slots) for rows in GUESS_ROWS})
            for length in lengths
            if rows * length <= min(MOST_GUESS_TOKENS, self._step_tokens)
        ]
        return sorted(found, reverse=True)

    def capture(
        self,
        sizes: Sizes,
        kind: Kind,
        compute: Callable[[Sizes, Kind, int], Computed | None],
        pool: Any,
        longest: int | None = None,
    ) -> Computed | None:
        """Capture a step that is smaller than those of its kind before it, with memory from this pool. `compute` is
        `GpuForward.run`; the words on the device are those of a step without rows. longest: tokens of a row, of a step
        with guesses. -> what it computes."""
        most = long_tokens(sizes, kind) if longest is None else longest
        compute(sizes, kind, most)  # compiles, and lets libraries make what they need
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            computed = compute(sizes, kind, most)
        self.captured[kind].insert(0, Graph(sizes, graph.replay, computed, longest or 1))
        return computed

    def wanted(self) -> list[tuple[Sizes, Kind]]:
        """Sizes and kinds of all graphs; the largest of each kind first."""
        rows = sorted({*(rows for rows in GRAPH_ROWS if rows < self._slots), min(self._slots, GRAPH_ROWS[-1])})
        tokens = [count for count in self._tokens() if count <= self._step_tokens]
        most = sorted({min(count, self._slots) for count in RAGGED_ROWS})
        few = sorted({*most, min(FEW_ROWS, self._slots)})
        ragged = [
            (count, held, held) for count in tokens for held in (few if count <= FEW_TOKENS else most) if held <= count
        ]
        short = [(count, held, held) for count, held, _ in ragged if count in SHORT_CONTEXT_TOKENS and held == most[0]]
        answers = [(count, count, count) for count in rows]
        found = (
            (ragged, Kind.ANY),
            (short if self._has_short_context else [], Kind.SHORT_CONTEXT),
            (answers, Kind.ANSWERS),
        )
        return [(sizes, kind) for some, kind in found for sizes in reversed(some)]

    def _tokens(self) -> list[int]:
        """Numbers of tokens for which steps with prompts are captured."""
        most, model = self._eager_tokens, self._model
        tokens = [count for count in GRAPH_TOKENS if count <= most]
        rows = model.embedding.new_empty(128, 1)  # A part of a model may have no row of the embedding.
        if self._ops.waits_for_ranks:
            tokens += [count for count in LARGE_TOKENS if most < count]
        elif linear.rounds_to_fp8(rows, model.layers[0].attention.output.weight):
            tokens += [count for count in LARGE_TOKENS if most < count <= FP8_EAGER * most]
        return tokens

    @property
    def _has_short_context(self) -> bool:
        """Whether short prefill attention serves this model. It was measured on a Hopper."""
        config, embedding = self._model.config, self._model.embedding
        numbers = config.heads, config.kv_heads, config.head_dim, embedding.dtype, self._stored, set(config.windows)
        return is_hopper(embedding.device) and not self._ops.invariant and serves_short_prefill(*numbers)


def long_tokens(sizes: Sizes, kind: Kind) -> int:
    """Tokens of prompts that a captured step of these sizes may hold."""
    return 0 if kind is Kind.ANSWERS else sizes[0] - 1  # one less: there may also be answers


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Collect garbage before the block, not within: a capture fails if the graphs of an engine that is gone are
    destroyed meanwhile."""
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _eager_tokens(model: Decoder) -> float:
    """Tokens of a step from which on the GPU is busy longer than the launches take."""
    config = model.config
    layer = 12 * config.hidden_size * (config.hidden_size + config.active_neurons / 4) * 2
    return EAGER_BYTES / layer
