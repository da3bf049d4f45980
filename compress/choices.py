"""Enumerations that command-line flags and methods share. Imports nothing heavy."""

from enum import StrEnum


class Granularity(StrEnum):
    """What has one scale in FP8: an output, the whole weight, or a block of 128 x 128."""

    CHANNEL = "channel"
    TENSOR = "tensor"
    BLOCK = "block"


class Pattern(StrEnum):
    """Which weights pruning removes: the least important of each output, or two of every four adjacent ones."""

    UNSTRUCTURED = "unstructured"
    TWO_OF_FOUR = "2:4"
