"""Names that flags and methods share."""

from enum import StrEnum


class Granularity(StrEnum):
    """What shares a scale in FP8: an output, the whole weight, or a block of 128 x 128."""

    CHANNEL = "channel"
    TENSOR = "tensor"
    BLOCK = "block"


class Pattern(StrEnum):
    """Which weights pruning may take: the least of each output, or two of any four neighbours."""

    UNSTRUCTURED = "unstructured"
    TWO_OF_FOUR = "2:4"
