"""The families of encoders that Weft serves, by the names of their architectures. Imports no torch."""

from services.worker.models.encoders.family import EncoderFamily
from services.worker.models.families import albert, bert, distilbert, roberta

ENCODERS: tuple[EncoderFamily, ...] = (bert.FAMILY, roberta.FAMILY, distilbert.FAMILY, albert.FAMILY)
ENCODER_KINDS = tuple(
    name.removesuffix("Model") for family in ENCODERS for name in family.architectures if name.endswith("Model")
)
"""What the names of architectures begin with, for people."""
_BY_ARCHITECTURE = {architecture: family for family in ENCODERS for architecture in family.architectures}


def encoder_family(architecture: str) -> EncoderFamily | None:
    """The family of an architecture; None: it is no encoder that Weft serves."""
    return _BY_ARCHITECTURE.get(architecture)
