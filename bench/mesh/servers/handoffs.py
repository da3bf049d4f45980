"""A worker of `bench.mesh.disaggregated` that hands prompts off in another way than `python -m services.worker`.

HANDOFFS has words: "whole" sends no layers of blocks that are not whole, "patient" fetches all blocks, however slowly.
"""

import os

from services import process
from services.worker.engine.prefixes import Prefixes
from services.worker.runners.cuda.kv_pool import GpuPool

PATIENCE_S = 60.0


def change(words: str) -> None:
    """Changes the worker of this process."""
    if "whole" in words:
        GpuPool.on_layers = lambda self, call: None  # type: ignore[method-assign]
    if "patient" in words:
        Prefixes._budget = lambda self, blocks: PATIENCE_S  # type: ignore[method-assign]


if __name__ == "__main__":
    change(os.environ.get("HANDOFFS", ""))
    process.run("services.worker.main")
