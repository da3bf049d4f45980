"""Steps of few rows, in fused kernels: queries, keys and values, whole models."""

import random
from typing import Any

import pytest

from kernels.linear import dense, qkv_rope
from kernels.linear.split_k import Tile
from services.worker.runners.cuda.ops import InvariantTritonOps, TritonOps
from tests.kernels.cases import close
from tests.kernels.fused import check_rotated_qkv, step_of_answers
from tests.kernels.interpreted import HALF
from tests.tiny_config import gpt2_settings, moe_settings, tiny_config


@pytest.mark.parametrize("split", [1, 2])
def test_queries_keys_and_values_of_few_rows(split: int) -> None:
    for rows, heads, kv_heads, dim in ((1, 4, 2, 16), (5, 3, 1, 32), (20, 4, 2, 24)):
        check_rotated_qkv(rows, heads, kv_heads, dim, 96, Tile(16, 32, split, 2), HALF)


@pytest.mark.parametrize(
    ("model", "adapted"),
    [
        ({"qkv_bias": True}, False),
        ({"qk_norm": True, "windows": (20, 20)}, False),
        (gpt2_settings(64), False),
        (moe_settings(), False),
        ({"qkv_bias": True}, True),
    ],
    ids=["bias", "norm and window", "gpt2", "moe", "adapters"],
)
def test_a_step_of_few_rows_in_fused_kernels_is_one_in_plain_kernels(
    monkeypatch: pytest.MonkeyPatch, model: dict[str, Any], adapted: bool
) -> None:
    config = tiny_config(context_length=64, **model)
    monkeypatch.setattr(dense, "tile_for", lambda *_: Tile(16, 32, 2, 2))
    monkeypatch.setattr(qkv_rope, "tile_for", lambda *_: Tile(16, 32, 2, 2))
    weights = random.randrange(1 << 30)
    got, pools = step_of_answers(config, TritonOps(), weights, adapted)
    expected, expected_pools = step_of_answers(config, InvariantTritonOps(), weights, adapted)
    close(got, expected)
    for pool, expected_pool in zip(pools, expected_pools, strict=True):
        close(pool, expected_pool)
