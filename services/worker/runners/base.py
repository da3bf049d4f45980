"""What executes packed steps, as the engine sees it. Knows the interfaces, no device and no tensor.

Legend: R rows of a step, S of them sample, T tokens, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from services.worker.job import Adapter
from services.worker.kvcache.pool import KvPool
from services.worker.runners.step import Words

Masks = npt.NDArray[np.int32]
"""[M, W]: bit v % 32 of word v // 32 of a line is 1 if token v may be drawn."""
Top = list[tuple[int, float]]
"""The most likely tokens and their log-probabilities, the most likely first."""


class Sampled(NamedTuple):
    """What the S rows that sample drew, in their order; each list has an entry for each token that its row drew."""

    tokens: list[list[int]]
    """[S]: usually one token; several where a row was speculative; none if the row drew nothing, so that its last token
    is to be computed again."""
    logprobs: list[list[float]] | None
    """[S]: the tokens' log-probabilities, of value in rows that asked; None when no row did."""
    tops: list[list[Top]] | None
    """[S]: the most likely tokens at each token; None when no row asked."""


NOTHING_SAMPLED = Sampled([], None, None)


Scores = tuple[list[float], list[Top]]
"""Log-probabilities of tokens, and at each the most likely tokens."""
NO_SCORES: Mapping[int, Scores] = {}


class StepResult(NamedTuple):
    """The results of a step."""

    finite: list[bool]
    """[R]: whether all numbers of a row are finite. If not, its tokens mean nothing and its blocks must be scrubbed."""
    sampled: Sampled
    """What the rows that sample drew."""
    scores: Mapping[int, Scores] = NO_SCORES
    """By index of the row: the log-probabilities that an edit SCORE asked for."""


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
    tokens as the slot's blocks have room for. A step with guesses is collected before another one is launched. A row of
    guesses whose numbers are not all finite draws none and leaves no such number in its blocks: without the guesses it
    may be finite.
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

    def draw(self, step: Step, masks: Masks, /) -> None:
        """Draw the tokens of a step's rows that sample and whose slots have masks (`Edit.MASK`), in the order of the
        rows. masks: a line for each of these rows' M samples. The log-probabilities of these are after the mask. The
        masks are read before it returns. Called once for each step with such rows, after all earlier steps were
        collected, before this one is collected and before the next one is launched; of a step whose launch failed, all
        parts are launched, then all are drawn."""

    def done(self, step: Step, /) -> bool:
        """Whether `collect` would return at once."""

    def collect(self, step: Step, /) -> StepResult:
        """Wait for a launched step and return its results. Steps are collected in the order of their launch."""

    def run(self, words: Words, /) -> StepResult:
        """Launch a step and collect it."""

    def inspect(self, token_ids: Sequence[int], /) -> Inspection:
        """Open up the model for one sequence of T tokens. Uses the first blocks of the pool: not beside jobs."""


class AdapterPages(Protocol):
    """The adapters in a runner's device memory: a fixed number of slots, from 1."""

    @property
    def slots(self) -> int:
        """How many adapters there is room for."""

    def load(self, slot: int, adapter: Adapter, /) -> None:
        """Begin to copy an adapter to a slot that no later step reads until it is loaded. Steps run meanwhile."""

    def loaded(self, slot: int, /) -> bool:
        """Whether the copy is complete."""


class PreparedPages(AdapterPages, Protocol):
    """Pages that make the host copies of adapters themselves."""

    def prepare(self, stored: Mapping[str, tuple[Any, Any]], /) -> tuple[Any, int]:
        """The host copy of an adapter, and its bytes: A and scaled B of each module of the base, by its name.
        Any thread may call it. Raises CheckpointError."""


class TextTokens(NamedTuple):
    """The tokens of a text, or of a pair of texts."""

    token_ids: Sequence[int]
    """At least one."""
    second: int = 0
    """Where the second text of a pair begins; 0: there is none."""


Vectors = npt.NDArray[np.float32]
"""[B, width]: one for each text."""
Batch = TypeVar("Batch")
"""A runner's own handle for a launched batch."""


class EncoderRunner(Protocol[Batch]):
    """Executes batches of an encoder, which keeps nothing between them."""

    @property
    def depth(self) -> int:
        """Batches that may be in flight; with 1 a batch is over when it has been launched."""

    @property
    def most_tokens(self) -> int:
        """Most tokens of a batch, over all its texts."""

    @property
    def width(self) -> int:
        """Numbers of each vector."""

    def launch(self, batch: Sequence[TextTokens], /) -> Batch:
        """Begin to compute a vector for each text: pooled and not normalized, or the scores of a head's labels. Raises
        ValueError for too many tokens."""

    def collect(self, launched: Batch, /) -> Vectors:
        """Wait for any launched batch and return its vectors, which stay valid until `depth` more are launched."""
