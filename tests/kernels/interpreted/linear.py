"""Products of a matrix and any weight."""

import pytest
import torch

from kernels.linear import dense
from kernels.linear.split_k import Tile
from kernels.reference import layers as reference
from tests.kernels.cases import close, rand
from tests.kernels.interpreted import FULL, HALF
from tests.kernels.weights import check_linear, check_nf4, check_packed, check_parts, check_rounding


@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("dtype", [HALF, FULL], ids=str)
def test_split_k_products_with_all_fused_operations(dtype: torch.dtype, split: int) -> None:
    tile = Tile(16, 32, split, 2)
    for rows, n, k in ((1, 40, 72), (5, 33, 200), (33, 16, 64)):
        x, w, w2 = rand(rows, k, dtype=dtype), rand(n, k, dtype=dtype) / 8, rand(2 * n, k, dtype=dtype) / 8
        bias, residual = rand(n, dtype=dtype), rand(rows, n, dtype=dtype)
        close(dense.linear(x, w, bias, tile=tile), x.double() @ w.double().T + bias)
        gated = dense.linear(x, w2, gated=True, tile=tile)
        close(gated, reference.silu_and_mul(x.double() @ w2.double().T))
        expected = x.double() @ w.double().T + residual.double()
        close(dense.linear(x, w, residual=residual, out=residual, tile=tile), expected)


@pytest.mark.parametrize("split", [2, 3])
def test_parts_of_products(split: int) -> None:
    for rows, n, k in ((1, 40, 72), (5, 33, 200)):
        check_parts(rows, n, k, HALF, Tile(16, 32, split, 2))


def test_invariant_products_have_the_same_bits_in_any_batch() -> None:
    x, w, bias = rand(70, 100, dtype=FULL), rand(50, 100, dtype=FULL), rand(50, dtype=FULL)
    whole = dense.matmul_invariant(x, w, bias)
    close(whole, x.double() @ w.double().T + bias)
    assert torch.equal(dense.matmul_invariant(x[:3], w, bias), whole[:3])


@pytest.mark.parametrize(("rows", "n", "k", "group"), [(1, 100, 128, 32), (140, 66, 192, 64), (5, 64, 256, 256)])
def test_packed_weights(rows: int, n: int, k: int, group: int) -> None:
    check_packed(rows, n, k, group, HALF)


def test_rows_rounded_to_fp8() -> None:
    check_rounding(3, 100, HALF)
    check_rounding(1, 256, FULL)


@pytest.mark.parametrize("dtype", [HALF, FULL], ids=str)
def test_products_of_any_weight(dtype: torch.dtype) -> None:
    check_nf4(6, 192, dtype)
    check_linear(3, 128, 192, dtype)
