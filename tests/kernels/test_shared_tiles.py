"""How programs of a product of many rows share its tiles."""

from unittest import mock

import triton
from hypothesis import given
from hypothesis import strategies as st

from kernels.products import words_prompts
from kernels.products.matmul_words_prompts import BAND, share


@given(tiles=st.integers(1, 4000), chunks=st.integers(1, 256), processors=st.sampled_from([1, 78, 132]))
def test_shares_fit_the_device_and_never_take_longer_than_whole_tiles(tiles: int, chunks: int, processors: int) -> None:
    alone, span = share(tiles, chunks, processors)
    units = (tiles - alone) * chunks
    assert alone == tiles or alone % processors == 0
    assert triton.cdiv(units, span) <= processors
    longest = triton.cdiv(alone, processors) * chunks + (span if units else 0)
    assert longest <= triton.cdiv(tiles, processors) * chunks


def test_a_round_that_is_nearly_full_is_not_shared_and_a_thin_one_is_shared_with_the_one_before() -> None:
    assert share(2 * 132 - 8, 32, 132) == (2 * 132 - 8, 1)
    assert share(132 + 44, 32, 132) == (132, 11)
    assert share(2 * 132 + 24, 32, 132) == (132, 38)


@given(across=st.integers(1, 20), down=st.integers(1, 30))
def test_tiles_come_in_bands_that_share_rows_of_x(across: int, down: int) -> None:
    band = min(BAND, down)
    with mock.patch("triton.experimental.gluon.language.minimum", min):
        places = [words_prompts._place.fn(tile, (down, band, across)) for tile in range(across * down)]
    assert sorted(places) == [(column, line) for column in range(across) for line in range(down)]
    assert [line // band for _, line in places] == sorted(line // band for _, line in places)
