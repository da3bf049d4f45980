"""What executes packed steps, as the engine sees it. Knows the interfaces, no device and no tensor.

Legend: R rows of a step, S of them sample, T tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from services.worker.kvcache.pool import KvPool
from services.worker.runners.step import Words

Top = list[tuple[int, float]]
"""The most likely tokens and their log-probabilities, the most likely first."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the S rows that sample drew, in their order; each list has an entry for each token that its row drew."""

    tokens: list[list[int]]
    """[S]: usually one token; several where a row was speculative; none if the row drew nothing, so that its last token
    is to be computed again."""
    logprobs: list[list[float]] | None
    """[S]: the tokens' log-probabilities, of value in rows that asked; None when no row did."""
    tops: list[list[Top]] | None
    """[S]: the most likely tokens at each token; None when no row asked."""


NOTHING_SAMPLED = Sampled([], None, None)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of a step."""

    finite: list[bool]
    """[R]: whether all numbers of a row are finite. If not, its tokens mean nothing and its blocks must be scrubbed."""
    sampled: Sampled
    """What the rows that sample drew."""


class Inspection(Protocol):
    """One sequence in a runner's model, opened up for tools. Runners of a torch model return more than this."""

    def logits(self) -> npt.NDArray[np.float32]:
        """The logits [T, V] at each of the sequence's tokens."""


Step = TypeVar("Step")
"""A runner's own handle for a launched step."""


class Runner(Protocol[Step]):
    """The device side of the engine: executes packed steps in the order of their launch.

    It keeps each slot's position itself: a row that drew several tokens has moved its slot past all but the last of
    them, and a row that drew none leaves its slot before its last token. A runner with blocks draws at most as many
    tokens as the slot's blocks have room for.
    """

    @property
    def depth(self) -> int:
        """Steps that may be in flight; with 1 a step is over when it has been launched."""

    @property
    def kv(self) -> KvPool | None:
        """The contents of blocks; None: blocks have no contents."""

    def launch(self, words: Words, /) -> Step:
        """Apply the edits and begin to compute the rows. After an exception no row has advanced; edits may be applied,
        and may be sent again."""

    def done(self, step: Step, /) -> bool:
        """Whether `collect` would return at once."""

    def collect(self, step: Step, /) -> StepResult:
        """Wait for a launched step and return its results. Steps are collected in the order of their launch."""

    def run(self, words: Words, /) -> StepResult:
        """Launch a step and collect it."""

    def inspect(self, token_ids: Sequence[int], /) -> Inspection:
        """Open up the model for one sequence of T tokens. Uses the first blocks of the pool: not beside jobs."""


class EncoderRunner(Protocol):
    """Executes batches of an encoder, which keeps nothing between them."""

    @property
    def most_tokens(self) -> int:
        """Most tokens of a batch, over all its sequences."""

    def encode(self, batch: Sequence[Sequence[int]], /) -> npt.NDArray[np.float32]:
        """The token ids of B sequences -> a vector for each [B, width]. Raises ValueError for too many tokens."""
