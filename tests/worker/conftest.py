"""Checkpoints, engines and the oracle that the worker's tests share."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers

from services.worker.engine.generation import GenerationEngine
from services.worker.options import EngineOptions
from tests.checkpoints import checkpoint

__all__ = ["checkpoint"]

EngineMaker = Callable[..., GenerationEngine]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tests share the machine: a barrier of two threads waits for whoever has the other core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def engine(checkpoint: Callable[[str], Path]) -> EngineMaker:
    """engine(shape, **options): a small engine."""

    def make(shape: str = "llama", **options: object) -> GenerationEngine:
        settings: dict[str, object] = {"kv_blocks": 256, "max_batch_size": 64, **options}
        return GenerationEngine(checkpoint(shape), EngineOptions(**settings), lambda phase, done, total: None)  # type: ignore[arg-type]

    return make
