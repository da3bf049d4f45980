"""Executes packed steps on the CPU: slots, forward, sampling. Knows slots and blocks, never jobs."""

from dataclasses import dataclass
from typing import Any, Protocol

from services.worker.kvcache.pool import KvPool
from services.worker.models.decoder import Decoder
from services.worker.runners.step import Words


@dataclass(frozen=True, slots=True)
class Sampled:
    """What S rows brought."""

    tokens: list[int]
    logprobs: list[float] | None
    """Of the tokens, in rows that asked; None when no row did."""
    tops: list[list[tuple[int, float]]] | None
    """The most likely tokens and their log-probabilities; None when no row asked."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought."""

    finite: list[bool]
    """For each row, whether all its numbers are; if not, its token means nothing and its blocks must be scrubbed."""
    sampled: Sampled
    """For each row that samples, in order."""


class Runner(Protocol):
    """The device side of the engine: executes packed steps in the order of their launch."""

    model: Decoder

    @property
    def pool(self) -> KvPool:
        """Where its steps keep keys and values."""

    @property
    def depth(self) -> int:
        """Steps that may be in flight; with 1 a step is over when it has been launched."""

    def run(self, words: Words, /) -> StepResult:
        """Launch a step and collect it."""

    def launch(self, words: Words, /) -> Any:
        """Apply the edits, begin to compute the rows. After an exception no row has advanced, the edits are applied."""

    def over(self, step: Any, /) -> bool:
        """Whether `collect` would not wait."""

    def collect(self, step: Any, /) -> StepResult:
        """Wait for a launched step and tell what it brought; the oldest first."""
