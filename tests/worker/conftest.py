"""Engines that the worker's tests share."""

import io
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from services.worker.engine.generation import GenerationEngine
from tests.checkpoints import checkpoint
from tests.worker.drive import open_engine

__all__ = ["checkpoint"]

EngineMaker = Callable[..., GenerationEngine]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """One thread for torch: on a busy machine a barrier of two threads waits for the other core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    """What the test's process logs, from INFO on."""
    root, text = logging.getLogger(), io.StringIO()
    handler, level = logging.StreamHandler(text), root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield text
    root.setLevel(level)
    root.removeHandler(handler)


@pytest.fixture(scope="session")
def engine(checkpoint: Callable[[str], Path]) -> EngineMaker:
    """A function engine(shape, **options) that opens a small engine."""

    def make(shape: str = "llama", **options: object) -> GenerationEngine:
        settings: dict[str, Any] = {"kv_blocks": 256, "max_batch_size": 64, **options}
        return open_engine(checkpoint(shape), **settings)

    return make
