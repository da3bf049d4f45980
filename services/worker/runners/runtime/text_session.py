"""What a runtime offers for texts: one call from tokens to hidden states or scores. Knows names, no runtime.

The inputs are those of the models' authors and of other exporters (Optimum, sentence-transformers): `input_ids`,
`attention_mask` and, where the model has segments, `token_type_ids`. The output is `last_hidden_state`, or
`token_embeddings`, or `logits` of a model with a head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from services.worker.errors import CheckpointError
from services.worker.models.encoders.config import EncoderConfig
from services.worker.runners.runtime.session import Dimension, check_shape

TOKENS, MASK, SEGMENTS = "input_ids", "attention_mask", "token_type_ids"
HIDDEN = ("last_hidden_state", "token_embeddings")
"""Names of hidden states, the first of those that exist is taken."""
SCORES = "logits"


@dataclass(frozen=True, slots=True)
class TextCall:
    """B texts of S tokens each: all of one length, so that none is padded. All int64 [B, S], contiguous."""

    input_ids: Tensor
    attention_mask: Tensor
    """Ones."""
    segments: Tensor
    """0, or 1 in the second part of a pair."""


class TextSession(Protocol):
    """An encoder that is loaded in a runtime."""

    def compute(self, call: TextCall, /) -> Tensor:
        """-> float32: hidden states [B, S, hidden], or scores [B, labels]; they may lie in memory that the next call
        writes to. Raises what the runtime raises."""


@dataclass(frozen=True, slots=True)
class TextSignature:
    """The inputs and the output of a file's encoder."""

    inputs: Sequence[str]
    output: str

    def arguments(self, call: TextCall) -> list[Tensor]:
        """The tensors of a call in the order of `inputs`."""
        tensors = {TOKENS: call.input_ids, MASK: call.attention_mask, SEGMENTS: call.segments}
        return [tensors[name] for name in self.inputs]


def signature_of(config: EncoderConfig) -> TextSignature:
    """That of what `weft export` writes."""
    inputs = (TOKENS, MASK, SEGMENTS) if config.segments > 1 else (TOKENS, MASK)
    return TextSignature(inputs, SCORES if config.head else HIDDEN[0])


def read_text_signature(
    name: str,
    inputs: Mapping[str, Sequence[Dimension]],
    outputs: Mapping[str, Sequence[Dimension]],
    config: EncoderConfig,
) -> TextSignature:
    """The signature of a file's encoder, by the shapes of its inputs and outputs; () is an output's that is not known.
    Raises CheckpointError for one that the runner cannot call."""
    if TOKENS not in inputs:
        raise CheckpointError(f"{name} has no input {TOKENS}: an encoder needs it")
    for unknown in sorted(inputs.keys() - {TOKENS, MASK, SEGMENTS}):
        raise CheckpointError(f"{name} has an input {unknown} that nothing feeds")
    for each, shape in inputs.items():
        check_shape(name, each, shape, (None, None))
    wanted = (SCORES,) if config.head else HIDDEN
    output = next((each for each in wanted if each in outputs), None)
    if output is None:
        raise CheckpointError(f"{name} has no output {' or '.join(wanted)}: an encoder needs it")
    width = len(config.head.labels) if config.head else config.hidden_size
    if outputs[output] and outputs[output][-1] not in (None, width):
        raise CheckpointError(f"{name}: output {output} has {outputs[output][-1]} numbers, config.json says {width}")
    return TextSignature(list(inputs), output)
