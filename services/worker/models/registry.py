"""The families that Weft serves, by the names of their architectures. Imports no torch."""

from collections.abc import Sequence

from services.worker.errors import CheckpointError
from services.worker.models.encoders.registry import ENCODER_KINDS
from services.worker.models.families import gemma2, gemma3, gpt2, llama, mixtral, phi3
from services.worker.models.family import Family

FAMILIES: Sequence[Family] = [
    llama.FAMILY,
    gpt2.FAMILY,
    phi3.FAMILY,
    gemma2.FAMILY,
    gemma3.FAMILY,
    mixtral.MIXTRAL,
    mixtral.QWEN3_MOE,
]
_BY_ARCHITECTURE = {architecture: family for family in FAMILIES for architecture in family.architectures}


def family_of(architecture: str) -> Family:
    """The family of an architecture. Raises CheckpointError."""
    if architecture not in _BY_ARCHITECTURE:
        supported, encoders = ", ".join(_BY_ARCHITECTURE), ", ".join(ENCODER_KINDS)
        raise CheckpointError(
            f"architecture {architecture} is not supported; supported are {supported}, and encoders: {encoders}"
        )
    return _BY_ARCHITECTURE[architecture]


_HEADS = ("ForCausalLM", "LMHeadModel")
_OTHERS = ("Model", "TextModel", "ForSequenceClassification", "TextForSequenceClassification")


def causal_name(architecture: str) -> str | None:
    """What the decoder of an architecture is called with a head over the vocabulary: Qwen3ForCausalLM of Qwen3Model and
    of Qwen3ForSequenceClassification; None: it is no decoder that Weft serves."""
    if architecture in _BY_ARCHITECTURE:
        return architecture
    stems = [architecture.removesuffix(end) for end in _OTHERS if architecture.endswith(end)]
    names = (f"{stem}{head}" for stem in stems for head in _HEADS)
    return next((name for name in names if name in _BY_ARCHITECTURE), None)
