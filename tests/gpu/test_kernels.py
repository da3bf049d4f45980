"""Every kernel on the device against its reference: random shapes, fresh data, poisoned outputs."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from kernels import activation, attention, block_copy, kv_pages, norm, rope_kv
from kernels.device import is_hopper
from kernels.linear import cublaslt, dense, dense_hopper
from kernels.linear.dense_hopper import Shape
from kernels.linear.gemv import dense as dense_gemv
from kernels.linear.gemv import packed as packed_gemv
from kernels.linear.split_k import Tile
from kernels.operands import Scores
from kernels.reference import layers as reference
from tests.kernels.cases import (
    DTYPES,
    Batch,
    check_draft_pass,
    check_edits,
    check_gelu,
    check_layer_norm,
    check_masks,
    check_parallel_pass,
    check_pass_behind_a_step,
    check_sampling,
    check_step_lists,
    close,
    poison,
    rand,
)
from tests.kernels.fused import check_rotated_qkv


@pytest.fixture(autouse=True)
def _exact_reference() -> Iterator[None]:
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.cuda.synchronize()


SHAPES = [(32, 8, 128), (32, 8, 64), (28, 4, 128), (8, 8, 80), (6, 2, 96), (4, 1, 32), (5, 5, 64)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_attention_over_random_ragged_steps(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    for block, window, short in [(16, None, 1), (32, None, 5), (64, 100, 1), (128, 1000, 1)]:
        lengths = [1, 1, 3, random.randint(2, 400), 1, random.randint(100, 700), 5]
        contexts = [length + random.choice([0, 0, 17, random.randint(0, 2000)]) for length in lengths]
        contexts[4] = random.choice([1, 15, 16, 17, 3000])
        batch = Batch(lengths, contexts, *heads, block, dtype)
        close(batch.run(window, short), batch.want(window))


@pytest.mark.parametrize("heads", [(32, 8, 128), (32, 8, 64), (8, 4, 256)], ids=str)
def test_capped_scores_and_sinks(heads: tuple[int, int, int]) -> None:
    for soft_cap, sinks, window in ((2.0, False, None), (None, True, 100), (1.5, True, None)):
        lengths, contexts = [1, 3, 300, 1], [2000, 70, 900, 1]
        batch = Batch(lengths, contexts, *heads, 16, torch.bfloat16)
        batch.scores = Scores(heads[2] ** -0.5, soft_cap, torch.randn(heads[0], device="cuda") if sinks else None)
        for config in (None, attention.config_for(heads[2], torch.bfloat16, 4, invariant=True)):
            close(batch.run(window, 1, config), batch.want(window))


@pytest.mark.parametrize("stored", [kv_pages.FP8, kv_pages.INT8], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(32, 8, 128), (28, 4, 128), (32, 8, 64), (8, 8, 80), (4, 1, 32)], ids=str)
def test_attention_over_pools_of_8_bits(heads: tuple[int, int, int], dtype: torch.dtype, stored: torch.dtype) -> None:
    for block, window, short in [(16, None, 1), (32, 100, 5)]:
        lengths = [1, 1, 3, random.randint(2, 400), 1]
        contexts = [length + random.choice([0, 17, random.randint(0, 2000)]) for length in lengths]
        batch = Batch(lengths, contexts, *heads, block, dtype, stored)
        for config in (None, attention.config_for(heads[2], dtype, len(lengths), invariant=True)):
            close(batch.run(window, short, config), batch.want(window))


@pytest.mark.parametrize("stored", [kv_pages.FP8, kv_pages.INT8], ids=str)
def test_keys_and_values_are_rounded_as_the_reference_rounds_them(stored: torch.dtype) -> None:
    scales = torch.rand(2, 8, device="cuda") + 0.5
    qkv, angles = rand(300, 48, 128, dtype=torch.bfloat16), rand(300, 1, 128, dtype=torch.bfloat16)
    places = torch.randperm(640, device="cuda")[:300]
    mine, its = (kv_pages.make_pool(40, 16, 8, 128, stored, "cuda") for _ in range(2))
    copy = qkv.clone()
    rope_kv.rope_and_store(qkv, angles, angles, mine, places, 32, 8, kv_scales=scales)
    reference.rope_and_store(copy, angles, angles, its, places, 32, 8, scales)
    every = torch.arange(40, device="cuda")
    got, want = (kv_pages.load(pool, every, scales, torch.float32) for pool in (mine, its))
    # The rotation rounds otherwise here and there. In int8 all numbers of a row follow the largest.
    assert float((got != want).float().mean()) < (0.1 if stored == kv_pages.INT8 else 0.05)
    if stored == kv_pages.INT8:
        steps = want.abs().amax(-1, keepdim=True) / 127
        assert ((got - want).abs() <= 2 * steps + 2**-5).all()
    assert float((got - want).norm() / want.norm()) < 0.02


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    ("dtype", "stored"),
    [*((dtype, None) for dtype in DTYPES), (torch.bfloat16, kv_pages.FP8), (torch.float16, kv_pages.INT8)],
    ids=str,
)  # fmt: skip
def test_attention_over_long_contexts_and_skewed_batches(
    dim: int, dtype: torch.dtype, stored: torch.dtype | None
) -> None:
    for lengths, contexts in (
        ([1], [32768]),
        ([1] * 40, [random.randint(1, 300) for _ in range(39)] + [20001]),
        ([37], [32700]),
        ([1900, 1, 300], [3900, 70, 300]),
        ([1] * 3, [0, 5, 0]),
    ):
        batch = Batch(lengths, contexts, 8, 2, dim, 16, dtype, stored)
        close(batch.run(None, 1), batch.want(None))


@pytest.mark.parametrize("stored", [None, kv_pages.FP8], ids=str)
@pytest.mark.parametrize("heads", [(32, 8, 128), (28, 4, 128), (4, 4, 96)], ids=str)
def test_attention_of_rows_with_a_shared_prefix(heads: tuple[int, int, int], stored: torch.dtype | None) -> None:
    lengths = [1] * 70
    lengths[5], lengths[33], lengths[60] = 0, 200, 7
    shared = [0, *[100] * 69]
    shared[5] = shared[6] = shared[40] = 0
    shared[50] = 30
    contexts = [1600 + length + random.randint(0, 300) for length in lengths]
    contexts[5], contexts[6], contexts[7] = 0, 2300, 1601
    batch = Batch(lengths, contexts, *heads, 16, torch.bfloat16, stored, shared)
    config = attention.config_for(heads[2], torch.bfloat16, 70, stored=stored)
    plan = batch.plan(None, 1, config)
    assert plan.shared is not None
    assert plan.shared.groups[:, 0].amax() >= 1536
    close(batch.run(None, 1, config), batch.want(None))


@pytest.mark.parametrize("stored", [None, kv_pages.FP8], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [(32, 8, 128), (28, 4, 128), (8, 8, 128), (32, 8, 64), (4, 2, 64)], ids=str)
def test_attention_of_few_answers(heads: tuple[int, int, int], dtype: torch.dtype, stored: torch.dtype | None) -> None:
    for block, contexts in (
        (16, [2100]), (32, [0, 1, 17, 5000]), (16, [random.randint(1, 4000) for _ in range(8)]), (64, [700] * 16),
    ):  # fmt: skip
        batch = Batch([1] * len(contexts), contexts, *heads, block, dtype, stored)
        close(batch.run(None, 1), batch.want(None))


@pytest.mark.parametrize("stored", [None, kv_pages.FP8], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [(32, 8, 128), (28, 4, 128), (8, 8, 128), (32, 8, 64), (6, 2, 64)], ids=str)
def test_attention_of_few_rows_with_guesses(
    heads: tuple[int, int, int], dtype: torch.dtype, stored: torch.dtype | None
) -> None:
    for most in (2, 3, 5, 9):
        for rows in (1, 4, 13):
            lengths = [most, *(random.randint(0, most) for _ in range(rows - 1))]
            contexts = [
                length + random.choice([0, random.randint(0, 70), random.randint(0, 4000)]) for length in lengths
            ]
            batch = Batch(lengths, contexts, *heads, random.choice([16, 64]), dtype, stored)
            close(batch.run(None, most), batch.want(None))


@pytest.mark.parametrize("stored", [None, kv_pages.FP8], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [(32, 8, 128), (28, 4, 128), (8, 8, 128), (32, 8, 64), (6, 2, 64)], ids=str)
def test_attention_of_rows_in_pieces(
    heads: tuple[int, int, int], dtype: torch.dtype, stored: torch.dtype | None
) -> None:
    """Few tokens behind long contexts, alone and beside answers and empty rows."""
    for lengths in (
        [8], [33], [127], [2] * 40, [40, 1, 0, 7, 1, 19], [1] * 15 + [9], [1] * 22 + [2, 29], [1] * 60 + [0, 50, 3],
        [1] * 200 + [64, 64],
    ):  # fmt: skip
        contexts = [length + random.choice([0, random.randint(0, 70), random.randint(0, 4000)]) for length in lengths]
        batch = Batch(lengths, contexts, *heads, random.choice([16, 64]), dtype, stored)
        assert (batch.plan(None, 1).pieces is not None) == (stored is None or heads[2] > 64)
        close(batch.run(None, 1), batch.want(None))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [(32, 8, 128), (28, 4, 128), (8, 8, 128), (32, 8, 64), (6, 2, 64)], ids=str)
def test_attention_of_rows_with_few_keys(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    few = [random.randint(1, 60) for _ in range(8)]
    for block, lengths, contexts in (
        (16, [128], [128]), (16, [103] + [0] * 7, [103] + [0] * 7), (32, [1, 0, 70, 5], [128, 0, 70, 117]),
        (64, few, [length + random.randint(0, 128 - length) for length in few]),
    ):  # fmt: skip
        batch = Batch(lengths, contexts, *heads, block, dtype)
        close(batch.run_short_prefill(), batch.want(None))


def test_a_context_shorter_than_its_row_ends_and_gives_zeros() -> None:
    """Such a row is invalid, but must not hang the device."""
    for stored in (None, kv_pages.FP8):
        batch = Batch([300, 40], [300, 40], 32, 8, 128, 16, torch.bfloat16, stored)
        batch.contexts = [300, -500]
        out = batch.run(None, 1)
        batch.contexts = [300, 40]
        close(out[:300], batch.want(None)[:300])
        assert not out[300:].any()


def invariant(
    lengths: list[int], batch: Batch, rows: list[int], contexts: list[int], window: int | None
) -> torch.Tensor:
    """Attention of the last tokens of these rows of a batch, with an invariant plan."""
    dim, dtype = batch.q.shape[2], batch.q.dtype
    starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device="cuda")
    first = [sum(batch.lengths[:row]) for row in rows]
    places = [
        torch.arange(at + context - length, at + context)
        for at, context, length in zip(first, contexts, lengths, strict=True)
    ]
    plan = attention.plan_attention(
        starts, torch.tensor(contexts, dtype=torch.int32, device="cuda"), batch.tables[rows].contiguous(), batch.heads,
        batch.kv_heads, dim, batch.block, dtype, window, 1, sum(n for n in lengths if n > 1),
        attention.config_for(dim, dtype, len(rows), invariant=True),
    )  # fmt: skip
    return attention.attention(batch.q[torch.cat(places).cuda()], batch.pool, plan, Scores(dim**-0.5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(32, 8, 128), (32, 8, 64), (28, 4, 128), (8, 8, 80)], ids=str)
def test_invariant_attention_has_the_same_bits_in_any_step(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    lengths = [1500, 600, 1100]
    for window in (None, 700):
        batch = Batch(lengths, lengths, *heads, 16, dtype)
        whole = invariant(lengths, batch, [0, 1, 2], lengths, window)
        close(whole, batch.want(window))
        ends = np.cumsum(lengths)
        for context in (1, 511, 512, 513, 1025, 1437, 1500):  # as an answer's token, alone and beside others
            line = whole[context - 1]
            assert torch.equal(invariant([1], batch, [0], [context], window)[0], line), context
            beside = invariant([1, 5, 1], batch, [1, 2, 0], [600, 1000, context], window)
            assert torch.equal(beside[-1], line), context
            assert torch.equal(beside[0], whole[ends[1] - 1])
            assert torch.equal(beside[1:6], whole[ends[1] + 995 : ends[1] + 1000])
        for length, context in ((2, 513), (17, 1000), (301, 1301)):  # as a chunk
            chunk = invariant([length], batch, [0], [context], window)
            assert torch.equal(chunk, whole[context - length : context]), (length, context)


@pytest.mark.parametrize("lengths", [[1, 1, 1], [1, 40, 9], [1] * 20 + [40, 9]], ids=["answers", "few", "many"])
def test_attention_in_a_graph_follows_its_plan(lengths: list[int]) -> None:
    rows, tokens = len(lengths), sum(lengths)
    batch = Batch(lengths, [random.choice([70, 1300]) for _ in lengths], 32, 8, 128, 16, torch.bfloat16)
    starts = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
    contexts = torch.full((rows,), 5, dtype=torch.int32, device="cuda")
    longer = 0 if tokens == rows else tokens - 1
    plan = attention.plan_attention(
        starts, contexts, batch.tables, 32, 8, 128, 16, torch.bfloat16, long_tokens=longer
    )  # fmt: skip
    assert (plan.pieces is not None) == bool(longer)
    out = poison(tokens, 4096, dtype=torch.bfloat16)

    def step() -> None:
        attention.schedule(plan)
        attention.attention(batch.q, batch.pool, plan, Scores(128**-0.5), out=out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    starts.copy_(batch.starts)
    contexts.copy_(torch.tensor(batch.contexts))
    out.fill_(float("nan"))
    graph.replay()
    close(out, batch.want(None))


# ---- the rest of a layer ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_and_gate(dtype: torch.dtype) -> None:
    for rows, n in ((1, 4096), (7, 2048), (300, 80), (33, 1000)):
        x, weight = rand(rows, n, dtype=dtype), rand(n, dtype=dtype)
        close(norm.rms_norm(x, weight, 1e-5), reference.rms_norm(x.double(), weight.double(), 1e-5))
        wide = rand(rows, 2 * n, dtype=dtype)
        close(activation.silu_and_mul(wide), reference.silu_and_mul(wide.double()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_norm_and_gelu(dtype: torch.dtype) -> None:
    for rows, n in ((1, 768), (7, 1600), (300, 80), (33, 1000), (random.randint(2, 99), random.randint(2, 9000))):
        check_layer_norm(rows, n, dtype)
        check_gelu(rows, n, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_rope_and_store(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    h, k, dim = heads
    for tokens, normed in ((1, True), (37, False), (500, True)):
        qkv, pool = rand(tokens, h + 2 * k, dim, dtype=dtype), rand(64, 16, 2, k, dim, dtype=dtype)
        cos, sin = rand(900, 1, dim, dtype=dtype), rand(900, 1, dim, dtype=dtype)
        positions = torch.randint(0, 900, (tokens,), device="cuda")
        places = torch.randperm(1024, device="cuda")[:tokens]
        weight = rand(h + k, dim, dtype=dtype) if normed else None
        wide = qkv.double()
        if weight is not None:
            wide[:, : h + k] = reference.rms_norm(qkv[:, : h + k].double(), weight.double(), 1e-6).to(dtype)
        expected_pool = pool.double()
        expected = reference.rope_and_store(
            wide, cos[positions].double(), sin[positions].double(), expected_pool, places, h, k
        )
        close(rope_kv.rope_and_store(qkv, cos, sin, pool, places, h, k, positions, weight, 1e-6), expected)
        close(pool, expected_pool)


def test_blocks_are_copied_to_the_host_and_back_unchanged() -> None:
    pools = [rand(40, 16, 2, 8, 128, dtype=torch.bfloat16) for _ in range(5)]
    before = [pool.clone() for pool in pools]
    addresses = block_copy.pool_addresses(pools)
    ids = torch.randperm(40, device="cuda")[:13]
    for pinned in (False, True):
        staging = torch.empty(13, 5, 16, 2, 8, 128, dtype=torch.bfloat16, pin_memory=True)
        staging = staging if pinned else staging.cuda()
        block_copy.gather_blocks(addresses, pools[0], ids, staging)
        for pool in pools:
            pool[ids] = float("nan")
        block_copy.scatter_blocks(addresses, pools[0], ids, staging)
        torch.cuda.synchronize()
        assert all(torch.equal(pool, old) for pool, old in zip(pools, before, strict=True))


# ---- products ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_split_k_products_with_all_fused_operations(dtype: torch.dtype) -> None:
    for rows in (1, 2, 7, 16, 33, 64):
        for n, k in ((6144, 4096), (1000, 2048), (77, 264)):
            for split in (1, 4):
                tile = Tile(16, 32, split, 2) if dtype == torch.float32 else Tile(64, 128, split, 3)
                x, w, w2 = (rand(*shape, dtype=dtype) for shape in ((rows, k), (n, k), (2 * n, k)))
                w, w2 = w / k**0.5, w2 / k**0.5
                bias, residual = rand(n, dtype=dtype), rand(rows, n, dtype=dtype)
                wide = x.double()
                close(dense.linear(x, w, bias, tile=tile), wide @ w.double().T + bias)
                close(dense.linear(x, w2, gated=True, tile=tile),
                      reference.silu_and_mul(x.double() @ w2.double().T))  # fmt: skip
                expected = wide @ w.double().T + residual.double()
                close(dense.linear(x, w, residual=residual, out=residual, tile=tile), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_queries_keys_and_values_of_few_rows(dtype: torch.dtype) -> None:
    for rows, heads, kv_heads, dim in ((1, 32, 8, 128), (7, 32, 8, 64), (33, 28, 4, 128), (64, 9, 3, 80)):
        for tile in (Tile(32, 64, 4, 6), Tile(64, 64, 1, 3)):
            check_rotated_qkv(rows, heads, kv_heads, dim, 2048, tile, dtype)
        shape = dense_hopper.rotated_shape_for(rows, dim)
        if shape is not None and is_hopper(torch.device("cuda", 0)):
            check_rotated_qkv(rows, heads, kv_heads, dim, 1096, shape, dtype)
            check_rotated_qkv(rows, heads, kv_heads, dim, 1096, shape, dtype, normed=True)
        if rows <= packed_gemv.MAX_ROWS and is_hopper(torch.device("cuda", 0)):
            check_rotated_qkv(rows, heads, kv_heads, dim, 1536, packed_gemv.Shape(8, 2), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_on_a_hopper(dtype: torch.dtype) -> None:
    if not is_hopper(torch.device("cuda", 0)):
        pytest.skip("needs a Hopper")
    for rows, n, k, shape in (
        (1, 4096, 14336, Shape(8, 10, 2)), (7, 1000, 2048, Shape(8, 4, 2)), (8, 40, 264, Shape(8, 6, 2)),
        (30, 6144, 1096, Shape(32, 9, 1)), (5, 96, 64, Shape(8, 4, 2)),
    ):  # fmt: skip
        x, w, bias, residual = (rand(*s, dtype=dtype) for s in ((rows, k), (n, k), (n,), (rows, n)))
        out = poison(rows, n, dtype=dtype)
        exact = x.double() @ (w / k**0.5).double().T
        close(dense.linear(x, w / k**0.5, bias, out=out, tile=shape), exact + bias)
        expected = exact + residual.double()
        close(dense.linear(x, w / k**0.5, residual=residual, out=residual, tile=shape), expected)
        if shape.stages * shape.panels > 12:
            continue  # the gated weight would not fit into shared memory
        wide = rand(2 * n, k, dtype=dtype) / k**0.5
        close(dense.linear(x, wide, gated=True, tile=shape), reference.silu_and_mul(x.double() @ wide.double().T))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_of_one_row_on_a_hopper(dtype: torch.dtype) -> None:
    if not is_hopper(torch.device("cuda", 0)):
        pytest.skip("needs a Hopper")
    for rows, n, k in (
        (1, 2048, 4096), (1, 28672, 4096), (1, 4096, 2560), (1, 8192, 8192), (1, 16384, 16384), (1, 48, 512),
        (3, 272, 1536), (8, 1040, 2048),
    ):  # fmt: skip
        x, w, bias, residual = (rand(*s, dtype=dtype) for s in ((rows, k), (n, k), (n,), (rows, n)))
        w /= k**0.5
        shape = dense_gemv.shape_for(n, k, False) if rows == 1 else packed_gemv.Shape(8, 2)
        assert shape is not None or k > 2 * n
        shape = shape or packed_gemv.Shape(8, 4)
        exact, half = x.double() @ w.double().T, n // 2
        for _ in range(2):
            close(dense_gemv.linear(x, w, bias, None, False, poison(rows, n, dtype=dtype), shape), exact + bias)
            gated = reference.silu_and_mul(exact)
            close(dense_gemv.linear(x, w, None, None, True, poison(rows, half, dtype=dtype), shape), gated)
        expected = exact + residual.double()
        close(dense_gemv.linear(x, w, None, residual, False, residual, shape), expected)
        if rows == 1:
            close(dense.linear(x, w, bias), exact + bias)


def test_cublaslt_products_with_chosen_tiles() -> None:
    if not is_hopper(torch.device("cuda", 0)) or not (torch.version.cuda or "").startswith("13."):
        pytest.skip("needs a Hopper and cuBLAS 13")
    for rows, n, k in (
        (65, 4096, 4096),
        (150, 4096, 14336),
        (200, 4096, 1032),
        (128, 2048, 8192),
        (240, 6144, 4096),
        (256, 28672, 520),
    ):
        x, w = rand(rows, k + 64, dtype=torch.bfloat16)[:, :k], rand(n, k, dtype=torch.bfloat16) / k**0.5
        residual, out = rand(rows, n, dtype=torch.bfloat16), poison(rows, n, dtype=torch.bfloat16)
        exact = x.double() @ w.double().T
        assert cublaslt.multiply(x, w, None, out)
        close(out, exact)
        out.fill_(float("nan"))
        expected = exact + residual.double()
        assert cublaslt.multiply(x, w, residual, out)
        close(out, expected)
        assert cublaslt.multiply(x, w, residual, residual)
        close(residual, expected)
        assert not cublaslt.multiply(x.half(), w.half(), None, out.half())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_invariant_products_have_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    for n, k in ((6144, 4096), (1000, 2048)):
        x, w = rand(700, k, dtype=dtype), rand(n, k, dtype=dtype) / k**0.5
        whole = dense.matmul_invariant(x, w)
        close(whole, x.double() @ w.double().T)
        for rows in (1, 5, 64, 65, 300):
            assert torch.equal(dense.matmul_invariant(x[:rows], w), whole[:rows]), rows


# ---- sampling ----


def test_edits_of_slots() -> None:
    check_edits(5, 7, [], 1)
    check_edits(9, 40, [(0, 30), (5, 1)], 0)
    check_edits(257, 1024, [(17, 1000), (0, 1024), (3, 1), (8, 128)], 200)
    check_edits(257, 1024, [(17, 1000), (0, 1024)], 3, room=1100)


def test_ends_of_passes_of_a_draft_model() -> None:
    for held, wanted in ((1, [3]), (64, [4, 1] * 30), (131, [2, 1, 0, 8] * 25)):
        check_draft_pass(held, wanted)


def test_passes_behind_a_step() -> None:
    some = [(5, 5), (5, 2), (1, 1), (3, 0), (9, 9), (2, 1)]
    for held, drawn in ((1, [(5, 5)]), (4, [(2, 2), (2, 1), (3, 3)]), (8, some), (64, some * 10)):
        for redo in (False, True):
            check_pass_behind_a_step(held, drawn, redo)


def test_passes_of_a_parallel_draft_model() -> None:
    some = [(5, 5), (5, 2), (1, 1), (3, 0), (9, 9), (2, 1)]
    for held, drawn, depth in ((1, [(5, 5)], 4), (1, [(5, 1)], 8), (4, [(2, 2), (2, 1)], 1), (64, some * 10, 8)):
        check_parallel_pass(held, drawn, depth)
        check_parallel_pass(held, drawn, depth, all_of=depth)


def test_lists_of_a_step() -> None:
    prompt, chunk, answer = (128, 128, True, True), (500, 620, True, False), (1, 600, False, True)
    for rows, sizes in (
        ([prompt], (128, 8, 8)),
        ([answer], (1, 1, 1)),
        ([answer, chunk, (1, 1, True, True)], (502, 3, 2)),
        ([chunk, *[answer] * 250], (768, 256, 256)),
    ):
        check_step_lists(rows, sizes, 16)


def test_sampling_follows_the_reference() -> None:
    for vocab, rounded in ((128256, False), (128256, True), (1000, True), (32000, False)):
        check_sampling(48, 64, vocab, rounded, 20, None, 4096)
        check_sampling(3, 64, vocab, rounded, 20, None, 4096)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masks_forbid_tokens(dtype: torch.dtype) -> None:
    for samples, masks, vocab, words in ((1, 1, 50, 2), (40, 31, 3001, 94), (8, 8, 4096, 128), (3, 2, 1000, 20)):
        check_masks(samples, masks, vocab, words, dtype)
