"""Products with adapters, whose rows have the same bits in any batch."""

import numpy as np
import pytest
import torch

from kernels.linear.split_k import Tile
from kernels.lora.tiles import lay_out, places_of
from tests.kernels.adapters import check_adapted_product, check_adapters, check_adapters_are_invariant
from tests.kernels.interpreted import FULL, HALF


@pytest.mark.parametrize("dtype", [HALF, FULL], ids=str)
def test_adapters_of_odd_shapes(dtype: torch.dtype) -> None:
    check_adapters(30, 1100, (100, 30, 33), 9, dtype)
    check_adapters(1, 64, (200,), 16, dtype)
    check_adapters(40, 33, (129, 129), 32, dtype, padding=0)


def test_a_row_with_an_adapter_has_the_same_bits_in_any_batch() -> None:
    check_adapters_are_invariant(19, 2100, (40, 24), HALF)


def test_products_with_adapters() -> None:
    check_adapted_product(9, 200, (64, 32, 32), 9, HALF, tile=Tile(32, 64, 2))
    check_adapted_product(17, 136, (72,), 32, HALF, tile=Tile(32, 64))
    check_adapted_product(5, 1100, (90, 90), 16, HALF, tile=Tile(64, 128), gated=True)
    check_adapted_product(3, 64, (64,), 64, HALF, tile=Tile(64, 64), owned=0.0)


def test_a_kind_of_module_lists_the_adapters_that_change_it() -> None:
    changes = np.array([[False, True, True, False], [False, False, True, True]])
    words, places = lay_out(np.array([3, 1, 0, 1, 2]), 6, changes), places_of(6, 3, 2)
    chosen = words[places.chosen : places.owners].reshape(2, -1)
    owners = words[places.owners :].reshape(2, -1)[:, :6]
    assert chosen.tolist() == [[2, 1, 2, 0], [2, 2, 3, 0]]
    assert owners.tolist() == [[-1, 0, -1, 0, 1, -1], [1, -1, -1, -1, 0, -1]]
