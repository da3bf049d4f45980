"""Engines on the GPU and on the CPU for the same checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.engine.generation import GenerationEngine
from tests.checkpoints import checkpoint
from tests.worker.drive import open_engine

__all__ = ["checkpoint"]

FOLDER = Path(__file__).parent
EngineMaker = Callable[..., GenerationEngine]


@pytest.fixture(scope="session")
def engine(checkpoint: Callable[[str], Path]) -> EngineMaker:
    """A function engine(shape, **options) that opens a small engine, by default in float32 on the GPU."""

    def make(shape: str = "llama", **options: object) -> GenerationEngine:
        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")
        sizes = {"kv_blocks": 1024, "max_batch_size": 64}
        settings: dict[str, Any] = {**sizes, "engine": "gpu", "dtype": "float32", **options}
        return open_engine(checkpoint(shape), **settings)

    return make


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several processes (-n N --dist loadgroup) all tests of one model run in one: they share its engines.

    pytest passes the tests of all folders: only those of this folder are grouped by their model.
    """
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            if item.path.is_relative_to(FOLDER):
                shape = getattr(item, "callspec", None) and item.callspec.params.get("shape")  # type: ignore[attr-defined]
                item.add_marker(pytest.mark.xdist_group(shape or item.name))
