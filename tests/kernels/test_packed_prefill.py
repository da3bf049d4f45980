"""The distribution of tiles over programs in products with many rows."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import triton
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.linear import packed_prefill_kernel
from kernels.linear.packed_prefill import BAND, share


@contextmanager
def language() -> Iterator[mock.Mock]:
    """Replaces Gluon's functions by plain Python; yields the mock of `program_id`."""
    packed = "triton.experimental.gluon.language."
    with (
        mock.patch(packed + "minimum", min),
        mock.patch(packed + "maximum", max),
        mock.patch(packed + "where", lambda which, yes, no: yes if which else no),
        mock.patch(packed + "num_programs", return_value=132),
        mock.patch(packed + "program_id") as program_id,
    ):
        yield program_id


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
    assert share(132 + 92, 32, 132) == (132, 23)
    assert share(2 * 132 + 40, 32, 132) == (132, 42)


def test_each_program_has_a_part_of_one_tile_where_that_is_not_much_longer() -> None:
    assert share(48, 32, 132) == (0, 16)
    assert share(132 + 12, 32, 132) == (132, 4)
    assert share(48, 64, 132) == (0, 24)


@given(across=st.integers(1, 20), down=st.integers(1, 30))
def test_tiles_are_ordered_in_bands_that_share_rows_of_x(across: int, down: int) -> None:
    band = min(BAND, down)
    with language():
        places = [packed_prefill_kernel._place.fn(tile, (down, band, across)) for tile in range(across * down)]
    assert sorted(places) == [(column, line) for column in range(across) for line in range(down)]
    assert [line // band for _, line in places] == sorted(line // band for _, line in places)


@settings(deadline=None, max_examples=30)
@given(tiles=st.integers(1, 400), chunks=st.integers(1, 128), slices=st.sampled_from([2, 3, 4]))
def test_each_slice_of_a_tile_is_stored_once_when_all_of_its_chunks_are_summed(
    tiles: int, chunks: int, slices: int
) -> None:
    alone, span = share(tiles, chunks, 132)
    plan = alone, span, (tiles - alone) * chunks, chunks
    summed, stored = Counter[int](), Counter[tuple[int, int]]()
    with language() as program_id:
        for program in range(132):
            program_id.return_value = program
            pieces = [
                packed_prefill_kernel._piece.fn(index, plan) for index in range(packed_prefill_kernel._pieces.fn(plan))
            ]
            kept = 0
            for place, (tile, shared, low, high) in enumerate(pieces):
                summed[tile] += high - low
                first, last = (
                    (program, program) if shared < 0 else packed_prefill_kernel._sharers.fn(shared, span, chunks)
                )
                owners = [packed_prefill_kernel._owner.fn(which, first, last, span, chunks) for which in range(slices)]
                stored.update((tile, which) for which, owner in enumerate(owners) if owner == program)
                kept += any(owner != program for owner in owners)
                if first < last and program in owners:
                    assert place == len(pieces) - 1, "other programs wait for a part that this one has not computed"
            assert kept <= 1, "a program stores one part at most"
    assert summed == Counter(dict.fromkeys(range(tiles), chunks))
    assert stored == Counter({(tile, which): 1 for tile in range(tiles) for which in range(slices)})
