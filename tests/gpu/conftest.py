"""Engines on the GPU and on the CPU for the same checkpoints."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from services.worker.engine.generation import GenerationEngine
from services.worker.options import EngineOptions
from tests.checkpoints import checkpoint

__all__ = ["checkpoint"]

EngineMaker = Callable[..., GenerationEngine]


@pytest.fixture(scope="session")
def engine(checkpoint: Callable[[str], Path]) -> EngineMaker:
    """engine(shape, **options): a small engine, on the GPU unless device says otherwise."""

    def make(shape: str = "llama", **options: object) -> GenerationEngine:
        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")
        settings: dict[str, object] = {"kv_blocks": 1024, "max_batch_size": 64, "device": "cuda", **options}
        return GenerationEngine(checkpoint(shape), EngineOptions(**settings), lambda phase, done, total: None)  # type: ignore[arg-type]

    return make


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several processes (-n N --dist loadgroup) all tests of one model meet in one: they share its engines."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            shape = getattr(item, "callspec", None) and item.callspec.params.get("shape")  # type: ignore[attr-defined]
            item.add_marker(pytest.mark.xdist_group(shape or item.name))
