"""What an engine of tokens is made of, whatever its devices."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from services.worker.kvcache.shared_memory import SharedMemory
from services.worker.models.config import ModelConfig
from services.worker.options import MemoryPlan
from services.worker.runners.base import PreparedPages, Runner


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an engine is made of."""

    config: ModelConfig
    parameters: int
    """Numbers in the checkpoint."""
    memory: MemoryPlan
    runner: Runner[Any]
    block_layout: str
    """The layout of the contents of blocks."""
    block_dtype: str
    """The format of their numbers."""
    draft_context: int = 0
    """Tokens of the context of the runner's draft model; 0: it has none."""
    redo_guesses: bool = False
    """Whether the draft model computes right guesses once more, as in `DraftProgress`."""
    adapters: PreparedPages | None = None
    """The runner's adapters; None: it serves none."""
    shared_memory: SharedMemory | None = None
    """The memory of the pool, for other processes of this host; None: it is not shared."""
    guess_limit: Callable[[int], int] | None = None
    """From the rows of a step to the most guesses of each; None: any number."""
