"""Mixtures of experts: routes and products."""

import pytest
import torch

from kernels.linear import fp8
from kernels.moe.tiles import Tile
from tests.kernels.experts import (
    check_experts,
    check_fp8_products,
    check_logits,
    check_rounded_experts,
    check_routing,
    check_split_experts,
    check_spread_experts,
)
from tests.kernels.interpreted import FULL, HALF


def test_routes_of_tokens_to_experts() -> None:
    check_routing(1, 4, 2, HALF)
    check_routing(5, 128, 8, FULL)
    check_routing(70, 6, 3, HALF)


@pytest.mark.parametrize("dtype", [HALF, FULL], ids=str)
def test_products_of_experts_of_one_token(dtype: torch.dtype) -> None:
    check_experts(1, 4, 2, 40, 64, 32, dtype)


@pytest.mark.parametrize("dtype", [HALF, FULL], ids=str)
def test_products_of_experts(dtype: torch.dtype) -> None:
    check_experts(11, 3, 2, 70, 128, 64, dtype)


def test_products_of_experts_in_parts() -> None:
    check_split_experts(HALF)


def test_products_of_experts_spread_over_ranks() -> None:
    check_spread_experts(2, 5, 2, 2, 2200, HALF)  # sums of quantized weights have parts
    for dtype in (HALF, FULL):
        check_spread_experts(9, 7, 3, 4, 64, dtype)


def test_products_of_rows_rounded_to_fp8() -> None:
    check_fp8_products(9, 5, 2, 70, 200, HALF, Tile(16, 32, 128, 2, 4))
    check_fp8_products(33, 3, 1, 36, 128, HALF)


def test_experts_of_many_rows_round_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "multiplies", lambda _: True)
    check_rounded_experts(40, 3, 2, 80, 136, HALF)


def test_logits_of_one_token() -> None:
    check_logits(8, 96, HALF)
    check_logits(70, 64, HALF)
