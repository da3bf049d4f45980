"""Which tiles the vendor's library is told to take; the products themselves are tested on a GPU."""

import torch

from kernels.products import vendor_tiles


def test_tiles_fill_the_chip_and_hold_all_rows() -> None:
    for rows in range(65, 289):
        for outputs, rounds in ((2048, 1), (4096, 1), (6144, 1), (8192, 1), (28672, 4)):
            tile = vendor_tiles.tile_for(rows, outputs)
            if tile is not None:
                down = -(-rows // tile.rows)
                assert rounds * 126 <= down * outputs // tile.outputs <= rounds * 132
        assert vendor_tiles.tile_for(rows, 4096) is not None


def test_other_shapes_are_left_to_torch() -> None:
    for rows, outputs in ((64, 4096), (289, 4096), (128, 6144), (200, 28672), (256, 128256), (128, 4100), (128, 48)):
        assert vendor_tiles.tile_for(rows, outputs) is None


def test_nothing_is_done_on_a_cpu() -> None:
    x, weight = torch.ones(128, 16, dtype=torch.bfloat16), torch.ones(4096, 16, dtype=torch.bfloat16)
    assert not vendor_tiles.multiply(x, weight, None, torch.empty(128, 4096, dtype=torch.bfloat16))
