"""Which engine a worker runs, by name. Knows how to open each, and imports only the one that was asked for."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from services.worker.config import CheckpointError
from services.worker.job import EngineOptions, Job, Stats, StepOutput
from services.worker.memory import MemoryPlan
from services.worker.profiling import Profiler
from services.worker.settings import WorkerSettings
from services.worker.tiers import BlockStore


class WorkerEngine(Protocol):
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


_GPU_DEFAULTS: Mapping[str, object] = {
    "max_batch_size": 256,
    "step_tokens": 8192,
    "chunk_tokens": 200,
    "dtype": "bfloat16",
}


def suited(settings: WorkerSettings) -> WorkerSettings:
    """The settings with the engine chosen, and with its own defaults for what nobody set. Raises CheckpointError."""
    if settings.engine not in ("auto", "gpu"):
        return settings
    import torch

    if not torch.cuda.is_available():
        if settings.engine == "gpu":
            raise CheckpointError("ENGINE=gpu needs a GPU that torch can use")
        return settings.model_copy(update={"engine": "torch"})
    unset = {name: value for name, value in _GPU_DEFAULTS.items() if name not in settings.model_fields_set}
    if settings.dtype == "auto":
        unset["dtype"] = _GPU_DEFAULTS["dtype"]
    return settings.model_copy(update={"engine": "gpu", **unset})


def open_engine(
    settings: WorkerSettings, folder: Path, options: EngineOptions, progress: Callable[[str, int, int], None]
) -> WorkerEngine:
    """The engine that the settings name, ready to run. Raises CheckpointError."""
    if settings.engine == "paced":
        from services.worker.paced import PacedEngine, Tempo

        return PacedEngine(folder, options, Tempo(settings.paced_step_ms / 1e3, settings.paced_prefill_rate))
    from services.worker.engine import Engine

    return Engine(folder, options, progress)
