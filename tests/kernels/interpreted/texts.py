"""Encoders: packed attention, both ends, whole batches."""

import random
from typing import Any

import pytest
import torch

from kernels.attention.packed_texts import TileShape
from kernels.operands import Pooling
from tests.kernels.interpreted import FULL, HALF
from tests.kernels.texts import (
    BATCHES,
    POOLINGS,
    check_add_layer_norm,
    check_batches,
    check_decoder_texts,
    check_embedded_texts,
    check_packed_attention,
    check_pooled_texts,
)
from tests.tiny_config import gpt2_settings


@pytest.mark.parametrize("dtype", [HALF, FULL], ids=str)
def test_attention_of_packed_texts(dtype: torch.dtype) -> None:
    for heads, dim, shape in ((2, 32, TileShape(32, 16, 4, 2)), (3, 24, TileShape(16, 16, 4, 2)), (1, 128, None)):
        check_packed_attention([1, 40, random.randint(2, 50), 32, 64, 5], heads, dim, dtype, shape)
    check_packed_attention([1], 2, 8, dtype)


@pytest.mark.parametrize("dtype", [HALF, FULL], ids=str)
def test_both_ends_of_an_encoder_and_norms_of_sums(dtype: torch.dtype) -> None:
    check_embedded_texts(13, 100, dtype)
    check_pooled_texts([1, 40, 33, 64], 150, dtype)
    check_add_layer_norm(9, 384, dtype)
    check_add_layer_norm(1, 70, dtype)


def test_batches_of_texts_in_the_gpu_runner() -> None:
    check_batches(HALF, layers=1, heads=2, hidden=40)


@pytest.mark.parametrize(
    ("model", "pooling"),
    [
        ({"layers": 1}, POOLINGS[0]),
        ({"windows": (24, None), "qk_norm": True}, POOLINGS[1]),
        ({"layers": 1, **gpt2_settings(128)}, POOLINGS[2]),
    ],
    ids=["llama", "windows", "gpt2"],
)
def test_texts_in_a_decoder(model: dict[str, Any], pooling: tuple[Pooling, int]) -> None:
    check_decoder_texts(FULL, BATCHES[1:2], [pooling], **model)
