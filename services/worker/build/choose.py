"""Which engine a worker runs, by name. Knows how to open each, and imports only the one that was asked for."""

from collections.abc import Callable, Mapping
from pathlib import Path

from services.worker.engine.base import Engine
from services.worker.errors import CheckpointError
from services.worker.options import EngineOptions
from services.worker.settings import WorkerSettings

_GPU_DEFAULTS: Mapping[str, object] = {
    "max_batch_size": 256,
    "step_tokens": 8192,
    "chunk_tokens": 200,
    "dtype": "bfloat16",
}


def resolve_engine(settings: WorkerSettings) -> WorkerSettings:
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
) -> Engine:
    """The engine that the settings name, ready to run. Raises CheckpointError."""
    if settings.engine == "paced":
        from services.worker.runners.paced import PacedEngine, PacedTiming

        return PacedEngine(folder, options, PacedTiming(settings.paced_step_ms / 1e3, settings.paced_prefill_rate))
    from services.worker.engine.generation import GenerationEngine

    return GenerationEngine(folder, options, progress)
