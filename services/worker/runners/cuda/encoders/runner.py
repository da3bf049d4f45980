"""Runs batches of texts on a GPU: one copy up, the network, one copy down, and no host that waits in between.

Texts are packed one behind another, without padding; where little is lost by it, batches are replayed as CUDA graphs,
padded with tokens of no text. Two batches are in flight: the host packs one while the device computes the other. Knows
no jobs and no network.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.worker.runners.base import TextTokens, Vectors
from services.worker.runners.cuda.graphs import nothing_collected
from services.worker.runners.packed_ids import PackedIds, pack

GRAPH_TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192,
                *range(10240, 32769, 2048))  # fmt: skip
"""Tokens of the batches that may be captured; a batch is padded to the next of these sizes."""
PADDING = 0.2
"""The most that padding may cost a batch, as a share of the time that the host needs to launch its kernels: it has jobs
to read meanwhile. A batch that the GPU computes in less than all of that time is padded whatever that costs."""
STAGED_WORDS = 16384
"""The least words of a batch that are staged: copied to the device while the batch before is computed, and from there
to where the network reads them. A copy of fewer words from the host should take no longer than that second copy and
the wait between two streams; this number was not varied."""


class Sizes(Protocol):
    """What a batch has room for."""

    @property
    def tokens(self) -> int:
        """Tokens of all texts."""

    @property
    def words(self) -> int:
        """int32 numbers that describe it on the device."""


Room = TypeVar("Room", bound=Sizes)


class TextNetwork(Protocol[Room]):
    """A network of texts on a device: how its batches are described there, and what it makes of them."""

    device: torch.device
    width: int
    """Numbers of each vector."""
    work: float
    """Weights that a token is multiplied with."""
    launch_work: float
    """Tokens times weights that the GPU computes in about the time that launching the kernels of a batch takes."""
    first_position: int
    """Of a text's first token."""
    longest: int
    """Most tokens of a text."""

    def sizes(self, tokens: int, texts: int, /) -> Room:
        """Room for any texts of at most this number of tokens."""

    def sizes_of(self, packed: PackedIds, /) -> Room:
        """Room for these texts."""

    def lay_out(self, packed: PackedIds, sizes: Room, into: npt.NDArray[np.int32], /) -> None:
        """Write the words of a batch. What its sizes have room for beyond it are tokens and texts of nothing."""

    def forward(self, words: Tensor, sizes: Room, /) -> Tensor:
        """The vectors [texts, width] of the batch with these words on the device."""


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
class Graph(Generic[Room]):
    """A captured batch."""

    sizes: Room
    replay: Callable[[], None]
    vectors: Tensor


class GpuTextRunner(Generic[Room]):
    """An `EncoderRunner` by the GPU's kernels; under Triton's interpreter, without graphs."""

    depth = 2

    def __init__(self, network: TextNetwork[Room], most_tokens: int, most_texts: int) -> None:
        """Of a batch."""
        self.network, self.most_tokens, self.most_texts = network, most_tokens, most_texts
        self.computed_tokens = 0
        """Tokens of texts that the network computed since the start."""
        counts = [tokens for tokens in (*GRAPH_TOKENS, most_tokens) if tokens <= most_tokens]
        words = max(network.sizes(tokens, most_texts).words for tokens in counts)
        device = network.device
        self._uploads: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.words = torch.zeros(words, dtype=torch.int32, device=device)
        """Of the batch that is computed next."""
        self._free = deque(self._new_buffer(words) for _ in range(self.depth + 1))
        """Of no batch in flight; the one that was collected last is the last to be used again."""
        self._graphs: list[Graph[Room]] = []
        """The smallest first."""

    @property
    def width(self) -> int:
        """Numbers of each vector."""
        return self.network.width

    @torch.inference_mode()
    def launch(self, batch: Sequence[TextTokens], /) -> LaunchedBatch:
        """Put a batch into the stream. Raises ValueError for too many tokens or texts."""
        tokens = sum(len(text.token_ids) for text in batch)
        if tokens > self.most_tokens or len(batch) > self.most_texts:
            raise ValueError(f"{tokens} tokens in {len(batch)} texts, most are {self.most_tokens} in {self.most_texts}")
        network, buffer = self.network, self._free[0]
        packed = pack(batch, network.first_position)
        graph = next((graph for graph in self._graphs if tokens <= graph.sizes.tokens), None)
        if graph and not is_padded(network.work, network.launch_work, tokens, graph.sizes.tokens):
            graph = None
        sizes = graph.sizes if graph else network.sizes_of(packed)
        network.lay_out(packed, sizes, buffer.words.numpy()[: sizes.words])
        self._upload(buffer, sizes.words)
        if graph:
            graph.replay()
        vectors = graph.vectors if graph else network.forward(self.words, sizes)
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
        longest = min(self.network.longest, self.most_tokens)
        count = min(self.most_texts, self.most_tokens // longest)
        self.collect(self.launch([TextTokens([0] * longest)] * count))
        if self.words.is_cuda:
            self._capture(progress)

    def _new_buffer(self, words: int) -> Buffer:
        on_gpu = self.words.is_cuda
        return Buffer(
            torch.zeros(words, dtype=torch.int32, pin_memory=on_gpu),
            torch.zeros(words, dtype=torch.int32, device=self.words.device),
            torch.zeros(self.most_texts, self.width, pin_memory=on_gpu),
            torch.cuda.Event() if on_gpu else None,  # type: ignore[no-untyped-call]
        )

    @torch.inference_mode()
    def _capture(self, progress: Callable[[int, int], None]) -> None:
        """Capture the batches that may be padded, and compute one of each other size, which compiles its kernels."""
        network = self.network
        captured = captured_sizes(network.work, network.launch_work, self.most_tokens)
        counts = sorted({*captured, *(size for size in GRAPH_TOKENS if size < self.most_tokens)}, reverse=True)
        self.words.zero_()  # no text
        pool = torch.cuda.graph_pool_handle()
        with nothing_collected():
            for done, tokens in enumerate(counts):
                progress(done, len(counts))
                sizes = network.sizes(tokens, min(tokens, self.most_texts))
                network.forward(self.words, sizes)
                torch.cuda.synchronize()
                if tokens not in captured:
                    continue
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    vectors = network.forward(self.words, sizes)
                self._graphs.insert(0, Graph(sizes, graph.replay, vectors))
        progress(len(counts), len(counts))


def is_padded(work: float, launch_work: float, tokens: int, size: int) -> bool:
    """Whether a batch is padded to this size. work, launch_work: as in `TextNetwork`."""
    return size * work <= launch_work or (size - tokens) * work <= PADDING * launch_work


def captured_sizes(work: float, launch_work: float, most_tokens: int) -> list[int]:
    """Tokens of the batches that are captured: sizes to which any batch above the next smaller one is padded, and the
    largest batch, since under load most are full."""
    sizes = [size for size in GRAPH_TOKENS if size < most_tokens]
    served = [size for below, size in pairwise((0, *sizes)) if is_padded(work, launch_work, below + 1, size)]
    return [*served, most_tokens]
