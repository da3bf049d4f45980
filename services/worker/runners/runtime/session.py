"""What a runtime offers the runner: one call from tokens and past to logits and new past. Knows names, no runtime.

Two signatures are understood. Both have the inputs `input_ids`, `attention_mask`, `position_ids` and for each layer
`past_key_values.N.key` and `.value`, and the outputs `logits` and `present.N.key` and `.value`. That of `weft export`
has the input `logits_at`, too: logits are computed for those tokens alone, and `present` holds the new tokens alone.
That of other exporters (Optimum) returns logits of all tokens, and the past together with the new tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from services.worker.errors import CheckpointError
from services.worker.models.config import ModelConfig

TOKENS = ("input_ids", "attention_mask", "position_ids")
"""Inputs that are about tokens, int64."""
LOGITS_AT = "logits_at"
LOGITS = "logits"
Dimension = int | None
"""A fixed size, or None where any size is accepted."""


def past_inputs(layers: int) -> list[str]:
    """Names of the inputs of keys and values, layer by layer."""
    return [f"past_key_values.{layer}.{kind}" for layer in range(layers) for kind in ("key", "value")]


def past_outputs(layers: int) -> list[str]:
    """Names of the outputs of keys and values, layer by layer."""
    return [f"present.{layer}.{kind}" for layer in range(layers) for kind in ("key", "value")]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a decoder with past: B rows of S tokens each, P places of past, N wanted tokens."""

    input_ids: Tensor
    """int64 [B, S]."""
    attention_mask: Tensor
    """int64 [B, P + S]: 1 for tokens, 0 for places without one."""
    position_ids: Tensor
    """int64 [B, S]."""
    logits_at: Tensor
    """int64 [N]: places among the flattened B * S tokens."""
    past: Sequence[Tensor]
    """Keys and values [B, K, P, D] of each layer in turn, contiguous."""

    @property
    def tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs about tokens, in the order of `TOKENS`."""
        return self.input_ids, self.attention_mask, self.position_ids


@dataclass(frozen=True, slots=True)
class Computed:
    """What a call returns; it may lie in memory that the next call writes to."""

    logits: Tensor
    """float32 [N, V]."""
    new: Tensor | Sequence[Tensor]
    """Keys and values [B, K, S, D] of the new tokens, of each layer in turn."""

    def stacked(self) -> Tensor:
        """The keys and values as one tensor [2L, B, K, S, D]."""
        return self.new if isinstance(self.new, Tensor) else torch.stack(list(self.new))

    def copied(self) -> "Computed":
        """A copy, which the next call does not overwrite."""
        return Computed(self.logits.clone(), self.stacked().clone())


class DecoderSession(Protocol):
    """A decoder that is loaded in a runtime."""

    def compute(self, call: Call, /) -> Computed:
        """Compute the tokens of a call. Raises what the runtime raises."""


@dataclass(frozen=True, slots=True)
class Signature:
    """Which of the two signatures a loaded decoder has."""

    layers: int
    picks_logits: bool
    """It is that of `weft export`."""

    @property
    def inputs(self) -> list[str]:
        """Names of the inputs, those about tokens first."""
        return [*TOKENS, *((LOGITS_AT,) if self.picks_logits else ()), *past_inputs(self.layers)]

    @property
    def outputs(self) -> list[str]:
        """Names of the outputs."""
        return [LOGITS, *past_outputs(self.layers)]

    def arguments(self, call: Call) -> list[Tensor]:
        """The tensors of a call in the order of `inputs`."""
        return [*call.tokens, *((call.logits_at,) if self.picks_logits else ()), *call.past]

    def computed(self, call: Call, outputs: Sequence[Tensor]) -> Computed:
        """What a call computed, from its outputs in the order of `outputs`."""
        logits, *past = outputs
        if not self.picks_logits:
            tokens = call.input_ids.shape[1]
            logits, past = logits.flatten(0, 1)[call.logits_at], [each[:, :, -tokens:] for each in past]
        return Computed(logits.float(), past)


def read_signature(
    name: str, inputs: Mapping[str, Sequence[Dimension]], outputs: Iterable[str], config: ModelConfig, max_length: int
) -> Signature:
    """The signature of a file's decoder, by the shapes of its inputs and the names of its outputs. Raises
    CheckpointError for one that the runner cannot call."""
    found = Signature(config.layers, LOGITS_AT in inputs)
    for missing in (each for each in found.inputs if each not in inputs):
        raise CheckpointError(f"{name} has no input {missing}: a decoder with past needs it")
    for unknown in sorted(inputs.keys() - set(found.inputs)):
        raise CheckpointError(f"{name} has an input {unknown} that nothing feeds, or config.json is of another model")
    for missing in (each for each in found.outputs if each not in set(outputs)):
        raise CheckpointError(f"{name} has no output {missing}: a decoder with past needs it")
    _check_shapes(name, inputs, config)
    if not found.picks_logits:
        narrow = min((window for window in config.windows if window is not None), default=max_length)
        if narrow < max_length:  # It counts the padding of a past among the last tokens.
            raise CheckpointError(
                f"{name} was not written by weft export: set MAX_SEQ_LENGTH to its window of {narrow}"
            )
    return found


def _check_shapes(name: str, inputs: Mapping[str, Sequence[Dimension]], config: ModelConfig) -> None:
    for token_input in TOKENS:
        check_shape(name, token_input, inputs[token_input], (None, None))
    for past in past_inputs(config.layers):
        check_shape(name, past, inputs[past], (None, config.kv_heads, None, config.head_dim))


def check_shape(name: str, what: str, shape: Sequence[Dimension], expected: Sequence[Dimension]) -> None:
    """Raises CheckpointError unless the input `what` of a file has this shape. None in `expected` is a size that has to
    be free; a fixed one may also be free in the file."""
    fits = len(shape) == len(expected) and all(
        found is None or found == wanted for found, wanted in zip(shape, expected, strict=True)
    )
    if not fits:
        found, wanted = (["any" if size is None else size for size in sizes] for sizes in (shape, expected))
        raise CheckpointError(f"{name}: input {what} has shape {found}, {wanted} is needed")
