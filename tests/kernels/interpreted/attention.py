"""Attention over pages: ragged steps, served configurations, shared prefixes, pools of 8 bits, caps and sinks."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from kernels import attention, kv_pages
from kernels.operands import Scores
from tests.kernels.cases import Batch, close
from tests.kernels.interpreted import FULL, HALF


@pytest.mark.parametrize("dtype", [HALF, FULL], ids=str)
def test_attention_of_ragged_steps(dtype: torch.dtype) -> None:
    for heads, block, window, short in (
        ((4, 2, 16), 16, None, 1), ((4, 2, 32), 16, 20, 5), ((7, 1, 24), 32, None, 1), ((3, 3, 24), 8, 7, 1),
    ):  # fmt: skip
        lengths = [1, random.randint(2, 6), 1, random.randint(17, 40)]
        contexts = [random.randint(1, 90), lengths[1], 64, lengths[3] + random.randint(0, 30)]
        batch = Batch(lengths, contexts, *heads, block, dtype)
        apart = replace(attention.TINY, split_by_head=True, split_programs=51)
        for config in (attention.TINY, apart):
            close(batch.run(window, short, config), batch.want(window))


def test_attention_in_the_served_configurations() -> None:
    for dim, dtype in ((64, HALF), (128, HALF), (128, FULL)):
        batch = Batch([1, 40, 1], [70, 150, 0], 8, 2, dim, 16, dtype)
        config = replace(attention.config_for(dim, dtype, 3), split_programs=4)
        close(batch.run(None, 1, config), batch.want(None))


@pytest.mark.parametrize("programs", [24, 132])
def test_programs_of_few_rows_on_a_hopper_take_each_key_once(monkeypatch: pytest.MonkeyPatch, programs: int) -> None:
    monkeypatch.setattr(attention, "is_hopper", lambda device: True)
    lengths, contexts = [1, 0, 40, 1, 1, 1], [1900, 0, 70, 0, 17, 641]
    batch, decode = Batch(lengths, contexts, 8, 2, 64, 16, HALF), attention.DecodePrograms(64, 2, 4, programs)
    plan = batch.plan(None, 1, replace(attention.config_for(64, HALF, 6), decode=decode, pieces=None))
    assert plan.decode == decode
    rows = [(row, int(batch.starts[row]), 1, contexts[row], row, contexts[row] - 1) for row in (0, 3, 4, 5)]
    assert_each_key_once(plan.records, rows)


@pytest.mark.parametrize("rows", [6, 90])
def test_programs_of_pieces_take_each_key_once(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Few rows are all cut; of many rows those of one token are not."""
    monkeypatch.setattr(attention, "is_hopper", lambda device: True)
    lengths, contexts = [1, 0, 40, 1, 9, 33] + [1] * (rows - 6), [1900, 0, 70, 5, 641, 2000] + [7] * (rows - 6)
    batch, wanted = Batch(lengths, contexts, 8, 2, 64, 16, HALF), list[tuple[int, ...]]()
    cut = batch.plan(None, 1).pieces
    assert cut is not None
    assert (cut.tokens, cut.beyond) == (16, int(rows > 6))
    for row, (length, context) in enumerate(zip(lengths, contexts, strict=True)):
        for done in range(0, length if length > cut.beyond else 0, 16):
            size, old = min(16, length - done), context - length
            wanted.append((len(wanted), int(batch.starts[row]) + done, size, old + done + size, row, old))
    assert_each_key_once(cut.records, wanted)


def assert_each_key_once(records: torch.Tensor, wanted: Sequence[tuple[int, ...]]) -> None:
    """wanted: of each row or piece its number, first token, tokens, context, row of its block table, and the first key
    of the step. Neighbouring programs take neighbouring keys of it, 64 and more at a time, once for each of two
    heads."""
    taken: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
    for program, record in enumerate(records.tolist()):
        row, _, units, start, length, context, share, stop, _, here, source, old = record
        if here >= stop:
            continue
        head, within = divmod(here, units // 2)
        assert within % share == 0, record
        low = within * 16
        found = (row, start, length, context, source, old, head)
        taken.setdefault(found, []).append((program, low, min(low + share * 16, context)))
    assert sorted(taken) == [(*row, head) for row in wanted for head in (0, 1)]
    for (*_, context, _, _, _), pieces in taken.items():
        first, lows, highs = pieces[0][0], [low for _, low, _ in pieces], [high for _, _, high in pieces]
        assert [program for program, _, _ in pieces] == list(range(first, first + len(pieces)))
        assert [*lows, context] == [0, *highs]
        assert all(high - low >= 64 for _, low, high in pieces[:-1])


def test_attention_of_rows_with_few_keys() -> None:
    for heads, lengths, contexts in (
        ((8, 2, 64), [1, 20, 0, 3, 1, 1], [128, 20, 0, 113, 1, 70]),
        ((7, 1, 64), [128], [128]),
        ((4, 2, 128), [17, 2, 33], [17, 90, 128]),
    ):
        for block in (16, 64):
            batch = Batch(lengths, contexts, *heads, block, HALF)
            close(batch.run_short_prefill(), batch.want(None))


def test_attention_of_rows_with_a_shared_prefix() -> None:
    lengths = [1, 1, 30, 1, 1, 1, 1, 0, *[1] * 6]
    for heads, dtype, stored, least, shared, found in (
        ((14, 2, 24), HALF, None, 97, [0, 6, 6, 6, 6, 6, 6, 0, 0, 4, 4, 4, 4, 4], [[96, 0], [64, 8]]),
        ((5, 1, 16), FULL, None, 96, [0, 6, 6, 6, 6, 6, 6, 0, 0, 4, 4, 3, 4, 4], [[80, 0], [0, 8]]),
        ((8, 1, 32), HALF, kv_pages.FP8, 97, [0, 0, 6, 5, 6, 6, 6, 0, 0, 4, 4, 4, 4, 2], [[80, 1], [64, 8]]),
    ):
        contexts = [130, 97, 150, least, 200, 111, 140, 0, 100, 70, 90, 70, 99, 70]
        batch = Batch(lengths, contexts, *heads, 16, dtype, stored, shared)
        plan = batch.plan(None, 1, attention.TINY)
        assert plan.shared is not None
        assert plan.shared.groups[:, :2].tolist() == found
        close(batch.run(None, 1, attention.TINY), batch.want(None))


def test_invariant_attention_cuts_sums_at_fixed_keys() -> None:
    tiny = replace(attention.config_for(32, FULL, 1, invariant=True), split_programs=3, span=64)
    for window in (None, 70):
        batch = Batch([1, 21, 1], [200, 150, 0], 4, 2, 32, 16, FULL)
        close(batch.run(window, 1, tiny), batch.want(window))
    served = replace(attention.config_for(128, HALF, 1, invariant=True), split_programs=4)
    batch = Batch([1, 20], [530, 90], 8, 2, 128, 16, HALF)
    close(batch.run(None, 1, served), batch.want(None))


@pytest.mark.parametrize("stored", [kv_pages.FP8, kv_pages.INT8], ids=str)
def test_attention_over_pools_of_8_bits(stored: torch.dtype) -> None:
    for dtype, dim, invariant, window in (
        (HALF, 64, False, 30), (HALF, 128, False, None), (HALF, 24, True, None), (FULL, 24, False, None),
    ):  # fmt: skip
        batch = Batch([1, 18, 3, 1], [70, 40, 150, 0], 4, 2, dim, 16, dtype, stored)
        for rows in (4, 9):
            config = replace(attention.config_for(dim, dtype, rows, invariant, stored), split_programs=4)
            close(batch.run(window, 3, config), batch.want(window))


@pytest.mark.parametrize("sinks", [False, True], ids=["cap", "sinks"])
def test_capped_scores_and_sinks(sinks: bool) -> None:
    """In every kernel: of short and of long rows, in spans, over 8 bits, behind shared prefixes, of few keys."""
    spans = replace(attention.config_for(32, FULL, 1, invariant=True), split_programs=3, span=64)
    octets = replace(attention.config_for(24, HALF, 4, stored=kv_pages.INT8), split_programs=4)
    for dim, dtype, stored, window, config in (
        (24, HALF, None, 20, attention.TINY), (32, FULL, None, None, spans), (24, HALF, kv_pages.INT8, None, octets),
        (64, HALF, None, None, None),
    ):  # fmt: skip
        contexts = [120, 90, 0, 70] if config else [120, 90, 30, 128]
        batch = Batch([1, 21, 1, 1], contexts, 4, 2, dim, 16, dtype, stored)
        batch.scores = Scores(dim**-0.5, soft_cap=None if sinks else 1.5, sinks=torch.randn(4) if sinks else None)
        close(batch.run(window, 1, config) if config else batch.run_short_prefill(), batch.want(window))
    shared = Batch([1] * 4, [130, 97, 111, 140], 7, 1, 16, 16, HALF, None, [0, 6, 6, 6])
    shared.scores = batch.scores if not sinks else Scores(0.25, 1.0, torch.randn(7))
    assert shared.plan(None, 1, attention.TINY).shared is not None
    close(shared.run(None, 1, attention.TINY), shared.want(None))
