"""The engine as the rest of a worker sees it. Knows no implementation."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from services.worker.job import Job, Stats, StepOutput
from services.worker.kvcache.tiers import BlockStore, Peers

GENERATE = "generate"
"""The capability of continuing a prompt token by token."""
EMBED = "embed"
"""The capability of making a vector of a text."""
RANK = "rank"
"""The capability of scoring how well two texts belong together."""
CLASSIFY = "classify"
"""The capability of scoring the labels of a text."""


@dataclass(frozen=True, slots=True)
class BlockPart:
    """Contents of a block, or of some of its layers."""

    index: int
    """The block's place in the request."""
    offset: int
    """Bytes of the block's contents before these: earlier parts had them."""
    contents: bytes
    ends: bool
    """The block is whole now."""


class BlockRead:
    """A request of another worker for contents of blocks that the engine has, in order.

    The engine's thread reads a few blocks at a time, and only while little of what it read waits to be sent.
    """

    def __init__(
        self,
        keys: Sequence[bytes],
        follow: bool,
        answer: Callable[[Sequence[BlockPart] | None], object],
        in_parts: bool = False,
    ) -> None:
        """follow: wait for blocks that are not computed yet. in_parts: some contents may come while the rest of their
        block is computed. answer: called from the engine's thread with the next contents, and with None when no more
        will come."""
        self.keys, self.follow, self.answer, self.in_parts = keys, follow, answer, in_parts
        self.read_bytes = 0
        """Bytes of contents that were read. The engine's thread writes it."""
        self.sent_bytes = 0
        """Bytes that were sent since. Its caller writes it."""
        self.cancelled = False
        """No client waits for the answer any more. Its caller writes it."""


@dataclass(frozen=True, slots=True)
class LentBlocks:
    """The next blocks of a loan, or some layers of those that the running step computes."""

    blocks: Sequence[int]
    """Their numbers."""
    begin: int = 0
    """The first of the layers that may be copied now. Copies of those before it, which were named earlier, count."""
    end: int | None = None
    """The layer behind them. None: all layers are computed, and the blocks are lent."""


class BlockLoan:
    """A request of another worker to copy blocks itself: they stay unchanged where they are until it has.

    The engine's thread lends blocks as they are computed, and ends a loan that makes no progress.
    """

    def __init__(
        self,
        keys: Sequence[bytes],
        follow: bool,
        answer: Callable[[LentBlocks | None], object],
        in_parts: bool = False,
    ) -> None:
        """follow: wait for blocks that are not computed yet. in_parts: name layers of blocks while the rest of them is
        computed. answer: called from the engine's thread with the next blocks, and with None when the loan is over."""
        self.keys, self.follow, self.answer, self.in_parts = keys, follow, answer, in_parts
        self.lent = 0
        """Blocks that were lent. The engine's thread writes it."""
        self.returned = 0
        """The first of these, which were copied. Its caller writes it, unless the loan is over."""
        self.over = False
        """Blocks that were not returned may change from now on. The engine's thread writes it before they may."""
        self.cancelled = False
        """Nobody copies any more. Its caller writes it."""


class EngineEvents(Protocol):
    """What an engine reports while it runs. Called from its thread."""

    def launched(self, predicted_s: float, /) -> None:
        """A step begins. predicted_s: how long it is predicted to take, seconds."""

    def begun(self, output: StepOutput, /) -> None:
        """Answers have begun in a large step, whose other results follow with `stepped`."""

    def stepped(self, output: StepOutput, /) -> None:
        """A step is over, or jobs have ended without one."""


class StepProfile(Protocol):
    """Where the time of some steps went, in seconds over all of them."""

    @property
    def steps(self) -> int:
        """Number of steps."""

    @property
    def seconds(self) -> float:
        """From the beginning of the first step to the end of the last."""

    @property
    def host(self) -> Mapping[str, float]:
        """By phase of the step; they add up to `seconds`."""

    @property
    def families(self) -> Mapping[str, float]:
        """By family of kernels (on a CPU: of operators), the longest first."""

    @property
    def on_gpu(self) -> bool:
        """Whether the families are of a GPU's kernels."""

    @property
    def trace(self) -> bytes:
        """A trace in Chrome's format, compressed with gzip."""


class StepObservation(Protocol):
    """Steps that were observed."""

    def report(self) -> StepProfile:
        """Evaluate the observation. Takes seconds: not for the engine's thread or the event loop."""


class StepProfiler(Protocol):
    """Observes steps on request."""

    def order(self, steps: int) -> "Future[StepObservation] | None":
        """Observe the next `steps` steps. None while other steps are being observed; cancel the future to stop."""


class Engine(Protocol):
    """Runs jobs. `run` has a thread of its own; all other methods may be called from any thread."""

    @property
    def capabilities(self) -> frozenset[str]:
        """The kinds of jobs that it runs."""

    @property
    def block_layout(self) -> str:
        """The layout of blocks' contents, equal where they may be exchanged; empty: blocks have no contents."""

    @property
    def block_dtype(self) -> str:
        """The format of the numbers in blocks' contents, as torch names it; empty: blocks have no contents."""

    @property
    def block_bytes(self) -> int:
        """Bytes of the contents of a block."""

    @property
    def profiler(self) -> StepProfiler:
        """Observes steps on request."""

    def use_remote(self, store: BlockStore) -> None:
        """Share blocks of prompts through this tier. To be called before `run`."""

    def use_peers(self, peers: Peers) -> None:
        """Fetch blocks of prompts from other workers. To be called before `run`."""

    def prefetch(self, source: str, keys: Sequence[bytes]) -> None:
        """Fetch blocks that the worker at `source` computes for a job that will come here."""

    def read_blocks(self, read: BlockRead) -> None:
        """Answer another worker's request."""

    def lend_blocks(self, loan: BlockLoan) -> None:
        """Lend blocks to another worker."""

    def submit(self, job: Job) -> None:
        """Run this job."""

    def cancel(self, key: int, position: int | None = None) -> None:
        """End a job. Only the first `position` tokens of its answer stay in the prefix cache; None: all."""

    def stats(self) -> Stats:
        """Counters and gauges as of the last step."""

    def take_block_events(self) -> tuple[list[bytes], list[bytes]]:
        """Keys of blocks that were stored, and of blocks that were evicted, since the last call."""

    def run(self, events: EngineEvents, stop: threading.Event) -> None:
        """Run steps until `stop` is set and `wake` is called; sleep while there is no work."""

    def wake(self) -> None:
        """Make `run` look at its stop event now."""
