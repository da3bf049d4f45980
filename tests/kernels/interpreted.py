"""Every kernel on a CPU, under Triton's interpreter, in its served configuration over odd shapes.

`test_kernels.py` runs this file in separate processes: the interpreter must be chosen before Triton is imported.
float16 replaces bfloat16, whose products the interpreter computes wrongly.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from kernels import activation, attention, block_copy, kv_pages, norm, rope_kv
from kernels.attention.packed_texts import TileShape
from kernels.linear import dense, qkv_rope
from kernels.linear.split_k import Tile
from kernels.operands import Scores
from kernels.reference import layers as reference
from services.worker.runners.cuda.host_pages import PIECE_BLOCKS, HostPages
from services.worker.runners.cuda.ops import InvariantTritonOps, TritonOps
from services.worker.runners.cuda.sharing.staging import StagedPages, warm_up
from tests.kernels.adapters import check_adapted_product, check_adapters, check_adapters_are_invariant
from tests.kernels.cases import (
    Batch,
    check_edits,
    check_gelu,
    check_layer_norm,
    check_masks,
    check_padding_tokens,
    check_sampling,
    check_step_lists,
    close,
    poison,
    rand,
)
from tests.kernels.experts import check_experts, check_routing, check_split_experts, check_spread_experts
from tests.kernels.fused import check_rotated_qkv, step_of_answers
from tests.kernels.peers import check_exchanges
from tests.kernels.steps import (
    check_draft_guesses,
    check_guesses,
    check_heads_guesses,
    check_measured_scales,
    check_parts_of_a_step,
    check_steps,
    check_steps_with_adapters,
)
from tests.kernels.texts import (
    check_add_layer_norm,
    check_batches,
    check_embedded_texts,
    check_packed_attention,
    check_pooled_texts,
)
from tests.kernels.weights import check_linear, check_nf4, check_packed, check_rounding
from tests.tiny_config import gpt2_settings, moe_settings, tiny_config

HALF, FULL = torch.float16, torch.float32


class _Kept:
    """The scope of replaced functions that stay replaced."""

    def restore(self) -> None:
        """Restores nothing."""


@pytest.fixture(autouse=True, scope="module")
def replaced_once() -> None:
    """The interpreter's functions replace those of Triton's language once, instead of at each call of any function,
    which took a third of the time: nothing in this process compiles."""
    replace_functions: Callable[[Any], object] = interpreter._patch_lang
    done: set[tuple[object, ...]] = set()

    def replace_once(function: Any) -> _Kept:
        modules = tuple(module for module in (tl, tl.core) if module in function.__globals__.values())
        if modules not in done:
            replace_functions(function)
            done.add(modules)
        return _Kept()

    interpreter._patch_lang = replace_once


@pytest.fixture(autouse=True, scope="module")
def types_made_once() -> None:
    """The interpreter makes a table of numpy's types for each operation, and the type of each shape, which nothing
    reads: together a third of the time."""
    numpy_type: Callable[[Any], object] = interpreter._get_np_dtype
    found: dict[str, object] = {}

    def kept(kind: Any) -> object:
        name = kind.scalar.name
        if name not in found:
            found[name] = numpy_type(kind)
        return found[name]

    def begin(values: Any, args: Any, type: Any = None) -> None:
        values.values = list(args)
        if type is not None:
            values.type = type if isinstance(type, tl.core.tuple_type) else tl.core.tuple_type(type)

    when_read = cached_property(lambda values: tl.core._type_for_tuple_values(values.values))
    when_read.__set_name__(tl.core.tuple, "type")
    interpreter._get_np_dtype = kept
    tl.core.tuple.type, tl.core.tuple.__init__ = when_read, begin


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's 264 programs and more divide the keys of a step; of the keys of these steps most had none."""
    served = attention.config_for
    monkeypatch.setattr(attention, "config_for", lambda *of, **more: replace(served(*of, **more), split_programs=20))


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
    plan = batch.plan(None, 1, replace(attention.config_for(64, HALF, 6), decode=decode))
    assert plan.decode == decode
    taken: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for program, record in enumerate(plan.records.tolist()):
        row, _, units, start, _, context, share, stop, _, here = record
        if here >= stop:
            continue
        head, within = divmod(here, units // 2)
        assert (start, context, within % share) == (batch.starts[row], contexts[row], 0)
        low = within * 16
        taken.setdefault((row, head), []).append((program, low, min(low + share * 16, context)))
    assert sorted(taken) == [(row, head) for row in (0, 3, 4, 5) for head in (0, 1)]
    for (row, _), pieces in taken.items():
        first, lows, highs = pieces[0][0], [low for _, low, _ in pieces], [high for _, _, high in pieces]
        assert [program for program, _, _ in pieces] == list(range(first, first + len(pieces)))
        assert [*lows, contexts[row]] == [0, *highs]
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


def test_edits_of_slots() -> None:
    check_edits(5, 7, [], 1)
    check_edits(9, 300, [(0, 150), (7, 1), (20, 128)], 0)
    check_edits(140, 4, [(2, 2), (0, 4)], 133)
    check_edits(9, 40, [(5, 20), (0, 30)], 3, room=50)


def test_lists_of_a_step() -> None:
    prompt, chunk, answer = (37, 37, True, True), (130, 150, True, False), (1, 91, False, True)
    for rows, sizes in (
        ([prompt], (64, 8, 8)),
        ([answer] * 3, (3, 3, 3)),
        ([answer, chunk, (1, 1, True, True)], (132, 3, 2)),
        ([answer] * 150, (160, 160, 160)),
    ):
        check_step_lists(rows, sizes, 16)
    check_padding_tokens(150, (160, 3, 2), 16)


@pytest.mark.parametrize("dtype", [HALF, FULL], ids=str)
def test_adapters_of_odd_shapes(dtype: torch.dtype) -> None:
    check_adapters(30, 1100, (100, 30, 33), 9, dtype)
    check_adapters(1, 64, (200,), 16, dtype)
    check_adapters(40, 33, (129, 129), 32, dtype, padding=0)


def test_a_row_with_an_adapter_has_the_same_bits_in_any_batch() -> None:
    check_adapters_are_invariant(19, 2100, (40, 24), HALF)


@pytest.mark.parametrize("model", [{}, gpt2_settings(128)], ids=["llama", "gpt2"])
def test_whole_steps_of_the_runner(model: dict[str, Any]) -> None:
    check_steps(**model)


def test_products_with_adapters() -> None:
    check_adapted_product(9, 200, (64, 32, 32), 9, HALF, tile=Tile(32, 64, 2))
    check_adapted_product(17, 136, (72,), 32, HALF, tile=Tile(32, 64))
    check_adapted_product(5, 1100, (90, 90), 16, HALF, tile=Tile(64, 128), gated=True)
    check_adapted_product(3, 64, (64,), 64, HALF, tile=Tile(64, 64), owned=0.0)


def test_parts_of_a_step_with_masks() -> None:
    check_parts_of_a_step()


def test_steps_with_adapters() -> None:
    check_steps_with_adapters()


def test_steps_with_guesses() -> None:
    check_guesses()


def test_guesses_of_a_draft_model() -> None:
    check_draft_guesses()


def test_guesses_of_draft_heads() -> None:
    check_heads_guesses()


def test_scales_that_the_runner_measures() -> None:
    check_measured_scales()


@pytest.mark.parametrize("dtype", [HALF, FULL], ids=str)
def test_norms_and_gate(dtype: torch.dtype) -> None:
    for rows, n in ((1, 48), (5, 100)):
        x, weight = rand(rows, n, dtype=dtype), rand(n, dtype=dtype)
        close(norm.rms_norm(x, weight, 1e-5), reference.rms_norm(x.double(), weight.double(), 1e-5))
        wide = rand(rows, 2 * n, dtype=dtype)
        close(activation.silu_and_mul(wide), reference.silu_and_mul(wide.double()))
    heads = rand(3, 9, 24, dtype=dtype)[:, :7]
    weight = rand(7, 24, dtype=dtype)
    close(norm.rms_norm(heads, weight, 1e-6), reference.rms_norm(heads.double(), weight.double(), 1e-6))


@pytest.mark.parametrize("dtype", [HALF, FULL], ids=str)
def test_layer_norm_and_gelu(dtype: torch.dtype) -> None:
    for rows, n in ((1, 48), (5, 100), (3, 513)):
        check_layer_norm(rows, n, dtype)
        check_gelu(rows, n, dtype)
    check_gelu(2, 2500, dtype)  # wider than one program's block


@pytest.mark.parametrize("stored", [kv_pages.FP8, kv_pages.INT8], ids=str)
def test_keys_and_values_are_rounded_as_the_reference_rounds_them(stored: torch.dtype) -> None:
    for scales in (None, torch.tensor([[0.5, 1.0], [2.0, 0.01]])):
        qkv = rand(5, 8, 24, dtype=HALF)
        qkv[2, 4:] = 0
        cos, sin, places = rand(5, 1, 24, dtype=HALF), rand(5, 1, 24, dtype=HALF), torch.tensor([3, 40, 16, 31, 70])
        mine, its = (kv_pages.make_pool(5, 16, 2, 24, stored) for _ in range(2))
        copy = qkv.clone()
        q = rope_kv.rope_and_store(qkv, cos, sin, mine, places, 4, 2, kv_scales=scales)
        close(q, reference.rope_and_store(copy, cos, sin, its, places, 4, 2, scales))
        got, want = (kv_pages.load(pool, torch.arange(5), scales, FULL) for pool in (mine, its))
        coarsest = 1.0 if scales is None else float(scales.max())
        step = 16 * coarsest if stored == kv_pages.FP8 else float(want.abs().max()) / 100
        assert float((got - want).abs().max()) <= step  # another rounding of the product differs by one step
        assert float((got != want).float().mean()) < 0.02


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", [HALF, FULL], ids=str)
def test_rope_and_store(dtype: torch.dtype, normed: bool) -> None:
    heads, kv_heads, dim, tokens = 5, 2, 24, 6
    qkv, pool = rand(tokens, heads + 2 * kv_heads, dim, dtype=dtype), rand(5, 16, 2, kv_heads, dim, dtype=dtype)
    cos, sin = rand(40, 1, dim, dtype=dtype), rand(40, 1, dim, dtype=dtype)
    positions, places = torch.randint(0, 40, (tokens,)), torch.randperm(80)[:tokens]
    weight = rand(heads + kv_heads, dim, dtype=dtype) if normed else None
    wide = qkv.double()
    if weight is not None:
        rotated = qkv[:, : heads + kv_heads].double()
        wide[:, : heads + kv_heads] = reference.rms_norm(rotated, weight.double(), 1e-6).to(dtype)
    expected_pool = pool.double()
    expected = reference.rope_and_store(
        wide, cos[positions].double(), sin[positions].double(), expected_pool, places, heads, kv_heads
    )
    untouched = int(places[0])
    before = pool.view(-1, 2, kv_heads, dim)[untouched].clone()
    places[0] = -1
    close(rope_kv.rope_and_store(qkv, cos, sin, pool, places, heads, kv_heads, positions, weight, 1e-6), expected)
    assert torch.equal(pool.view(-1, 2, kv_heads, dim)[untouched], before)
    expected_pool.view(-1, 2, kv_heads, dim)[untouched] = before.double()
    close(pool, expected_pool)


def test_blocks_are_copied_out_and_in_unchanged() -> None:
    pools = [rand(6, 16, 2, 3, 8, dtype=HALF) for _ in range(3)]
    before = [pool.clone() for pool in pools]
    ids = torch.tensor([4, 1])
    staging = poison(2, 3, 16, 2, 3, 8, dtype=HALF)
    addresses = block_copy.pool_addresses(pools)
    block_copy.gather_blocks(addresses, pools[0], ids, staging)
    for pool in pools:
        pool[ids] = float("nan")
    block_copy.scatter_blocks(addresses, pools[0], ids, staging)
    assert all(torch.equal(pool, old) for pool, old in zip(pools, before, strict=True))


def test_blocks_of_another_pool_are_staged_and_written_unchanged() -> None:
    others, pools = ([rand(9, 16, 2, 3, 8, dtype=HALF) for _ in range(3)] for _ in range(2))
    theirs, ours = ([pool.clone() for pool in each] for each in (others, pools))
    warm_up(pools)
    staged = StagedPages(pools)
    staged._pages.fill_(-1)
    room = len(staged.free)
    addresses = block_copy.pool_addresses(others)
    first, second = staged.fill(addresses, [5, 2]), staged.fill(addresses, [7, 1, 8])
    assert [len(page) for page in first] == [3 * 16 * 2 * 3 * 8 * 2] * 2
    assert len(staged.free) == room - 5
    for other in others:
        other.fill_(float("nan"))
    staged.write([4, 3], first)
    staged.write([8, 1, 6], second[::-1])
    for pool, was, other in zip(pools, ours, theirs, strict=True):
        assert torch.equal(pool[[4, 3, 8, 1, 6]], other[[5, 2, 8, 1, 7]])
        assert torch.equal(pool[[0, 2, 5, 7]], was[[0, 2, 5, 7]]), "other blocks are as they were"
    del first, second
    assert len(staged.free) == room


def test_only_as_many_blocks_are_staged_as_there_are_pages() -> None:
    others, pools = ([rand(9, 16, 2, 3, 8, dtype=HALF) for _ in range(2)] for _ in range(2))
    staged = StagedPages(pools)
    kept = [staged.fill(block_copy.pool_addresses(others), [1] * 100) for _ in range(4)]
    assert [len(pages) for pages in kept] == [100, 100, len(staged._pages) - 200, 0]


def test_pages_are_copied_to_host_memory_and_back_unchanged() -> None:
    pools = [rand(9, 16, 2, 3, 8, dtype=HALF) for _ in range(2)]
    before = [pool.clone() for pool in pools]
    pages = HostPages(pools, 3 * 2 * 16 * 2 * 3 * 8 * 2)
    room = len(pages.free)
    assert room == 3 + PIECE_BLOCKS
    kept = pages.keep([5, 2, 7])
    assert [len(page) for page in kept] == [2 * 16 * 2 * 3 * 8 * 2] * 3
    for pool in pools:
        pool.zero_()
    pages.restore([1, 8, 3], kept)
    for pool, was in zip(pools, before, strict=True):
        assert torch.equal(pool[[1, 8, 3]], was[[5, 2, 7]])
        assert not pool[[0, 2, 4, 5, 6, 7]].any()
    more = pages.keep([1] * (room + 4))
    assert len(more) == room - 3, "the buffer has no room for more blocks"
    del kept, more
    assert sorted(pages.free) == list(range(room))
    for pool in pools:
        pool[0] = 0
    assert 0 < pages.measure() < 10
    assert sorted(pages.free) == list(range(room))
    assert not any(pool[0].any() for pool in pools)


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


def test_invariant_products_have_the_same_bits_in_any_batch() -> None:
    x, w, bias = rand(70, 100, dtype=FULL), rand(50, 100, dtype=FULL), rand(50, dtype=FULL)
    whole = dense.matmul_invariant(x, w, bias)
    close(whole, x.double() @ w.double().T + bias)
    assert torch.equal(dense.matmul_invariant(x[:3], w, bias), whole[:3])


def test_packed_weights() -> None:
    for rows, n, k, group in ((1, 100, 128, 32), (140, 66, 192, 64), (5, 64, 256, 256)):
        check_packed(rows, n, k, group, HALF)


def test_rows_rounded_to_fp8() -> None:
    check_rounding(3, 100, HALF)
    check_rounding(1, 256, FULL)


@pytest.mark.parametrize("dtype", [HALF, FULL], ids=str)
def test_products_of_any_weight(dtype: torch.dtype) -> None:
    check_nf4(6, 192, dtype)
    check_linear(3, 128, 192, dtype)


def test_routes_of_tokens_to_experts() -> None:
    check_routing(1, 4, 2, HALF)
    check_routing(5, 128, 8, FULL)
    check_routing(70, 6, 3, HALF)


@pytest.mark.parametrize("dtype", [HALF, FULL], ids=str)
def test_products_of_experts(dtype: torch.dtype) -> None:
    check_experts(1, 4, 2, 40, 64, 32, dtype)
    check_experts(11, 3, 2, 70, 128, 64, dtype)


def test_products_of_experts_in_parts() -> None:
    check_split_experts(HALF)


def test_products_of_experts_spread_over_ranks() -> None:
    check_spread_experts(2, 5, 2, 2, 2200, HALF)  # sums of quantized weights have parts
    for dtype in (HALF, FULL):
        check_spread_experts(9, 7, 3, 4, 64, dtype)


def test_masks_of_tokens() -> None:
    for samples, masks, vocab, words in ((1, 1, 50, 2), (5, 3, 1300, 41), (4, 4, 64, 2), (3, 2, 100, 2)):
        check_masks(samples, masks, vocab, words, HALF)


def test_sampling_follows_the_reference() -> None:
    for vocab, rounded in ((300, False), (130, True)):
        check_sampling(6, 8, vocab, rounded, 5, 64, 128)


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


def test_exchanges_of_ranks() -> None:
    check_exchanges()
