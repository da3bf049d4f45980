"""The engine as the rest of a worker sees it. Knows no implementation."""

import threading
from collections.abc import Callable
from typing import Protocol

from services.worker.engine.profiling import Profiler
from services.worker.job import Job, Stats, StepOutput
from services.worker.kvcache.tiers import BlockStore
from services.worker.options import MemoryPlan


class Engine(Protocol):
    """What a worker needs of an engine. `run_forever` has a thread of its own, the rest may be called from any."""

    @property
    def memory(self) -> MemoryPlan:
        """Where the memory goes."""

    @property
    def parameters(self) -> int:
        """Numbers in the checkpoint."""

    @property
    def max_seq_length(self) -> int:
        """Most tokens of prompt and answer."""

    @property
    def block_layout(self) -> str:
        """What contents of blocks look like; empty: its blocks have none."""

    @property
    def block_bytes(self) -> int:
        """Bytes of the contents of a block."""

    @property
    def profiler(self) -> Profiler:
        """Observes steps, if asked to."""

    def use_fingerprint(self, fingerprint: bytes) -> None:
        """Name blocks after this model. To be called before the engine runs."""

    def use_remote(self, store: BlockStore) -> None:
        """Share blocks of prompts through this tier."""

    def submit(self, job: Job) -> None:
        """Run this job."""

    def cancel(self, key: int, position: int | None = None) -> None:
        """End a job of whose answer `position` tokens count (None: all)."""

    def stats(self) -> Stats:
        """Counters and gauges."""

    def take_block_events(self) -> tuple[list[bytes], list[bytes]]:
        """Keys that were stored, and keys that were evicted, since the last call."""

    def run_forever(
        self,
        on_output: Callable[[StepOutput], None],
        on_launch: Callable[[float], None],
        on_soon: Callable[[list[int]], None],
        stop: threading.Event,
    ) -> None:
        """Run steps until `stop` is set."""

    def wake(self) -> None:
        """Let `run_forever` look at its stop event now."""
