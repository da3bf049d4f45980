"""Runs batches of an encoder on a GPU: one copy up, the network, one copy down, and no host that waits in between.

Texts are packed one behind another, without padding; where little is lost by it, batches are replayed as CUDA graphs,
padded with tokens of no text. Two batches are in flight: the host packs one while the device computes the other. Knows
no jobs.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.attention.packed_texts import TILE_WORDS, TilePlan, TileShape, most_tiles, shape_for, tiles_of
from services.worker.models.encoders.encoder import Encoder
from services.worker.models.encoders.ops import PackedTexts
from services.worker.runners.base import TextTokens, Vectors
from services.worker.runners.cuda.graphs import nothing_collected
from services.worker.runners.packed_ids import PackedIds, pack

GRAPH_TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192,
                *range(10240, 32769, 2048))  # fmt: skip
"""Tokens of the batches that may be captured; a batch is padded to the next of these sizes."""
EAGER_WORK = 1.25e11
"""A batch whose tokens times the weights that each is multiplied with exceed this keeps the GPU busy for about 0.5 ms.
Smaller ones are padded whatever that costs: it is less than the launches of their kernels."""
PADDING_WORK = 2.5e10
"""The most that padding may cost a larger batch: about 0.1 ms. The launches of its kernels take the host several times
as long, which has jobs to read meanwhile."""
STAGED_WORDS = 16384
"""The least words of a batch that are staged: copied to the device while the batch before is computed, and from there
to where the network reads them. A copy of fewer words from the host should take no longer than that second copy and
the wait between two streams; this number was not varied."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a batch has room for, and where its parts are in its words: tokens, positions, segments, starts, tiles."""

    tokens: int
    texts: int
    tiles: int
    shape: TileShape
    """Of attention's programs."""

    @property
    def parts(self) -> tuple[slice, ...]:
        """The parts, which begin at multiples of 16 bytes: kernels are compiled for such alignment."""
        found, begin = [], 0
        for size in (self.tokens, self.tokens, self.tokens, self.texts + 1, TILE_WORDS * self.tiles):
            found.append(slice(begin, begin + size))
            begin += -(-size // 4) * 4
        return tuple(found)

    @property
    def words(self) -> int:
        """Words of the batch."""
        return int(self.parts[-1].stop)


@dataclass(slots=True)
class Buffer:
    """Memory of a batch in flight, on the host but for `staged`."""

    words: Tensor
    staged: Tensor
    """Room for the words on the device, from `STAGED_WORDS` on; on the host if there is no GPU."""
    vectors: Tensor
    """float32 [texts, width]."""
    over: Any
    """An event behind its last copy; None: there is no GPU."""


@dataclass(frozen=True, slots=True)
class LaunchedBatch:
    """A batch in flight."""

    buffer: Buffer
    texts: int


@dataclass(frozen=True, slots=True)
class Graph:
    """A captured batch."""

    sizes: Sizes
    replay: Callable[[], None]
    vectors: Tensor


class GpuEncoderRunner:
    """An `EncoderRunner` by the GPU's kernels; under Triton's interpreter, without graphs."""

    depth = 2

    def __init__(self, model: Encoder, most_tokens: int, most_texts: int) -> None:
        """Of a batch."""
        self.model, self.most_tokens, self.most_texts = model, most_tokens, most_texts
        self.computed_tokens = 0
        """Tokens of texts that the network computed since the start."""
        device = model.embedding.device
        weights = sum(each.linear.inputs * each.linear.outputs for each in model.projections())
        self._work = weights * model.config.layers / model.config.unique_layers
        """Weights that a token is multiplied with."""
        counts = [tokens for tokens in (*GRAPH_TOKENS, most_tokens) if tokens <= most_tokens]
        words = max(self.sizes(tokens, most_texts).words for tokens in counts)
        self._uploads: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.words = torch.zeros(words, dtype=torch.int32, device=device)
        """Of the batch that is computed next."""
        self._free = deque(self._new_buffer(words) for _ in range(self.depth + 1))
        """Of no batch in flight; the one that was collected last is the last to be used again."""
        self._graphs: list[Graph] = []
        """The smallest first."""

    @property
    def width(self) -> int:
        """Numbers of each vector."""
        return self.model.width

    @torch.inference_mode()
    def launch(self, batch: Sequence[TextTokens], /) -> LaunchedBatch:
        """Put a batch into the stream. Raises ValueError for too many tokens or texts."""
        tokens = sum(len(text.token_ids) for text in batch)
        if tokens > self.most_tokens or len(batch) > self.most_texts:
            raise ValueError(f"{tokens} tokens in {len(batch)} texts, most are {self.most_tokens} in {self.most_texts}")
        packed = pack(batch, self.model.config.first_position)
        buffer = self._free[0]
        graph = next((graph for graph in self._graphs if tokens <= graph.sizes.tokens), None)
        if graph and not is_padded(self._work, tokens, graph.sizes.tokens):
            graph = None
        sizes = graph.sizes if graph else self._sizes_of(packed)
        lay_out(packed, sizes, buffer.words.numpy())
        self._upload(buffer, sizes.words)
        if graph:
            graph.replay()
        vectors = graph.vectors if graph else self.forward(sizes)
        buffer.vectors[: len(batch)].copy_(vectors[: len(batch)], non_blocking=True)
        if buffer.over is not None:
            buffer.over.record()
        self._free.popleft()  # Not if the launch fails.
        self.computed_tokens += tokens
        return LaunchedBatch(buffer, len(batch))

    def _upload(self, buffer: Buffer, words: int) -> None:
        """Copy the words of a batch to where the network reads them; see `STAGED_WORDS`."""
        given = buffer.words[:words]
        if self._uploads is not None and words >= STAGED_WORDS:
            with torch.cuda.stream(self._uploads):
                given = buffer.staged[:words].copy_(given, non_blocking=True)
            torch.cuda.current_stream().wait_stream(self._uploads)
        self.words[:words].copy_(given, non_blocking=True)

    def collect(self, launched: LaunchedBatch, /) -> Vectors:
        """Wait for any batch in flight. Its vectors stay valid until two more are launched."""
        self._free.append(launched.buffer)
        if launched.buffer.over is not None:
            launched.buffer.over.synchronize()
        vectors: Vectors = launched.buffer.vectors[: launched.texts].numpy()
        return vectors

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Compute the largest batch, which compiles kernels and reserves memory, then capture the small ones."""
        longest = min(self.model.config.context_length, self.most_tokens)
        count = min(self.most_texts, self.most_tokens // longest)
        self.collect(self.launch([TextTokens([0] * longest)] * count))
        if self.words.is_cuda:
            self._capture(progress)

    # ---- sizes ----

    def sizes(self, tokens: int, texts: int) -> Sizes:
        """Room for any texts of at most this number of tokens."""
        shape = self._shape(tokens)
        return Sizes(tokens, texts, most_tiles(tokens, texts, shape.queries), shape)

    def _sizes_of(self, packed: PackedIds) -> Sizes:
        tokens, texts = len(packed.token_ids), len(packed.starts) - 1
        shape = self._shape(tokens)
        return Sizes(tokens, texts, int((-(-np.diff(packed.starts) // shape.queries)).sum()), shape)

    def _shape(self, tokens: int) -> TileShape:
        return shape_for(tokens, self.model.config.head_dim, self.model.embedding.dtype)

    def _new_buffer(self, words: int) -> Buffer:
        on_gpu = self.model.embedding.is_cuda
        return Buffer(
            torch.zeros(words, dtype=torch.int32, pin_memory=on_gpu),
            torch.zeros(words, dtype=torch.int32, device=self.words.device),
            torch.zeros(self.most_texts, self.width, pin_memory=on_gpu),
            torch.cuda.Event() if on_gpu else None,  # type: ignore[no-untyped-call]
        )

    # ---- the network ----

    @torch.inference_mode()
    def forward(self, sizes: Sizes) -> Tensor:
        """The vectors of the batch whose words are on the device."""
        token_ids, positions, segments, starts, tiles = (self.words[part] for part in sizes.parts)
        plan = TilePlan(tiles.view(-1, TILE_WORDS), sizes.shape)
        has_segments = self.model.config.segments > 1
        return self.model.forward(PackedTexts(token_ids, positions, segments if has_segments else None, starts, plan))

    def _capture(self, progress: Callable[[int, int], None]) -> None:
        counts = captured_sizes(self._work, self.most_tokens)
        wanted = [self.sizes(tokens, min(tokens, self.most_texts)) for tokens in counts]
        self.words.zero_()  # no text
        pool = torch.cuda.graph_pool_handle()
        with nothing_collected():
            for done, sizes in enumerate(reversed(wanted)):
                progress(done, len(wanted))
                self.forward(sizes)  # compiles, and lets libraries make what they need
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    vectors = self.forward(sizes)
                self._graphs.insert(0, Graph(sizes, graph.replay, vectors))
        progress(len(wanted), len(wanted))


def is_padded(work: float, tokens: int, size: int) -> bool:
    """Whether a batch is padded to this size. work: weights that a token is multiplied with."""
    return size * work <= EAGER_WORK or (size - tokens) * work <= PADDING_WORK


def captured_sizes(work: float, most_tokens: int) -> list[int]:
    """Tokens of the batches that are captured: sizes to which any batch above the next smaller one is padded, and the
    largest batch, since under load most are full."""
    sizes = [size for size in GRAPH_TOKENS if size < most_tokens]
    served = [size for below, size in pairwise((0, *sizes)) if is_padded(work, below + 1, size)]
    return [*served, most_tokens]


def lay_out(packed: PackedIds, sizes: Sizes, into: npt.NDArray[np.int32]) -> None:
    """Write the words of a batch. What its sizes have room for beyond it are tokens and texts of nothing."""
    token_ids, positions, segments, starts, tiles = (into[part] for part in sizes.parts)
    into[: sizes.words] = 0
    token_ids[: len(packed.token_ids)] = packed.token_ids
    positions[: len(packed.token_ids)] = packed.positions
    if packed.segments is not None:
        segments[: len(packed.token_ids)] = packed.segments
    starts[:] = len(packed.token_ids)
    starts[: len(packed.starts)] = packed.starts
    real = tiles_of(packed.starts, sizes.shape.queries).reshape(-1)
    tiles[: len(real)] = real
