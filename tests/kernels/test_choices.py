"""The rules that choose a kernel for rows; no GPU is needed."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from kernels import attention, device, kv_pages
from kernels.attention import decode_hopper
from kernels.attention.short_prefill import serves_short_prefill
from kernels.linear import fp8, packed_gemm, packed_hopper, packed_prefill, resident_hopper, resident_norm_hopper
from kernels.linear.gemv import dense as dense_gemv
from kernels.linear.gemv import packed as packed_gemv
from kernels.linear.gemv.kernel import _octet
from kernels.linear.packed import PackedWeight, pack_weight
from kernels.lora import AdapterStack, fused
from kernels.moe import grouped, grouped_fp8
from kernels.moe.reference import Routes
from kernels.moe.weights import ExpertStack
from kernels.operands import Scores
from kernels.quantized_weights import Int4Weight, quantize_fp8
from services.worker.runners.cuda.encoders.decoder_network import LAYER_WORK
from services.worker.runners.cuda.encoders.encoder_network import LAUNCH_WORK
from services.worker.runners.cuda.encoders.runner import captured_sizes, is_padded

BF16 = torch.bfloat16


# ---- attention ----


@pytest.mark.parametrize(
    ("stored", "programs"),
    [(BF16, {1: 132, 2: 264, 3: 264, 4: 396, 16: 396, 17: None}), (kv_pages.FP8, {1: 132, 4: 132, 5: None}),
     (kv_pages.INT8, {1: None})],
    ids=str,
)  # fmt: skip
def test_few_rows_have_their_own_decode_programs(stored: torch.dtype, programs: dict[int, int | None]) -> None:
    for rows, wanted in programs.items():
        decode = attention.config_for(128, BF16, rows, stored=stored).decode
        assert (decode and decode.programs) == wanted


def test_more_answers_beside_prompts_use_the_decode_kernel() -> None:
    for rows in (17, 24):
        assert attention.config_for(128, BF16, rows).decode is None
        assert attention.config_for(128, BF16, rows, long_tokens=40).decode == attention.HOPPER_DECODE[16]
    assert attention.config_for(128, BF16, 25, long_tokens=40).decode is None


def test_which_few_rows_use_the_general_kernel() -> None:
    assert attention.config_for(64, BF16, 1).decode is not None
    assert attention.config_for(64, BF16, 1, stored=kv_pages.FP8).decode is None
    assert attention.config_for(128, torch.float32, 1).decode is None
    assert attention.config_for(128, BF16, 1, invariant=True).decode is None


def planned(
    rows: int = 4, heads: int = 32, kv_heads: int = 8, dim: int = 128, block: int = 16, window: int | None = None,
    short: int = 1, hopper: bool = True, longer: int = 0,
) -> attention.AttentionPlan:  # fmt: skip
    """The plan of a step whose rows may share prefixes, on a Hopper or another device."""
    starts, contexts, tables = (torch.zeros(shape, dtype=torch.int32) for shape in ((rows + 1,), (rows,), (rows, 8)))
    config = replace(attention.config_for(dim, BF16, rows, short_tokens=short), shared_rows=1)
    with mock.patch.object(attention, "is_hopper", return_value=hopper), mock.patch.object(attention, "schedule"):
        return attention.plan_attention(
            starts, contexts, tables, heads, kv_heads, dim, block, BF16, window, short, longer, config
        )


@pytest.mark.parametrize(("short", "programs"), [(1, 396), (2, 264), (9, 264)])
def test_a_hopper_uses_the_decode_kernel_for_few_rows_of_few_tokens(short: int, programs: int) -> None:
    plan = planned(short=short)
    assert plan.decode == (attention.HOPPER_DECODE if short == 1 else attention.HOPPER_GUESSES)[16]
    assert len(plan.records) == programs
    assert plan.shared is None
    assert planned(rows=16, heads=12, kv_heads=12).decode is not None


@pytest.mark.parametrize(
    "other",
    [{"hopper": False}, {"rows": 17}, {"window": 99}, {"short": 17}, {"dim": 96}, {"block": 8},
     {"rows": 16, "heads": 13, "kv_heads": 13}],
    ids=str,
)  # fmt: skip
def test_shapes_without_the_decode_kernel_use_the_general_plan(other: dict[str, Any]) -> None:
    plan = planned(**other)
    assert plan.decode is None
    assert len(plan.records) == plan.config.split_programs
    assert (plan.shared is None) == ("window" in other or "short" in other)


@pytest.mark.parametrize(
    ("rows", "longer", "pieces", "beyond"),
    [(8, 63, 16, 0), (8, 127, 16, 0), (24, 63, 32, 1), (64, 63, 64, 1), (256, 128, 128, 1)],
)
def test_rows_of_few_tokens_are_cut_into_pieces(rows: int, longer: int, pieces: int, beyond: int) -> None:
    """All rows if they are few; otherwise answers keep their kernel."""
    cut = planned(rows=rows, longer=longer).pieces
    assert cut is not None
    assert (cut.tokens, cut.beyond, len(cut.arrived)) == (16, beyond, 8 * pieces)
    alone = planned(rows=2, heads=8, longer=99).pieces
    assert alone is not None
    assert alone.tokens == 64


@pytest.mark.parametrize(
    "other",
    [{"hopper": False}, {"window": 99}, {"dim": 96}, {"block": 8}, {"longer": 129}, {"longer": 0}, {"short": 17}],
    ids=str,
)
def test_other_rows_are_not_cut(other: dict[str, Any]) -> None:
    assert planned(**{"longer": 63, **other}).pieces is None


@pytest.mark.parametrize("windows", [(None,), (128, None, 4096)], ids=str)
def test_rows_with_few_keys_use_the_short_kernel(windows: tuple[int | None, ...]) -> None:
    assert serves_short_prefill(32, 8, 128, BF16, BF16, windows)
    assert serves_short_prefill(28, 4, 64, torch.float16, torch.float16, windows)


@pytest.mark.parametrize(
    "numbers",
    [(32, 8, 96, BF16, BF16, [None]), (32, 8, 128, BF16, kv_pages.FP8, [None]),
     (32, 8, 128, BF16, torch.float16, [None]),
     (32, 8, 128, torch.float32, torch.float32, [None]), (65, 1, 128, BF16, BF16, [None]),
     (32, 8, 128, BF16, BF16, [None, 127])],
    ids=str,
)  # fmt: skip
def test_which_rows_do_not_use_the_short_kernel(numbers: Any) -> None:
    assert not serves_short_prefill(*numbers)


def test_int8_pools_do_not_use_the_short_kernel() -> None:
    q, pool, plan = torch.zeros(4, 32, 128, dtype=BF16), kv_pages.make_pool(8, 16, 8, 128, kv_pages.INT8), planned()
    with pytest.raises(AssertionError, match="int8"):
        attention.attention(q, pool, plan, Scores(1.0))


@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("lines", [1, 2, 4, 8, 16, 32, 64])
def test_threads_that_merge_parts_cover_a_head(lines: int, dim: int, warps: int) -> None:
    layout = decode_hopper._merge_layout(lines, dim, warps)
    each, threads, across = (layout.size_per_thread, layout.threads_per_warp, layout.warps_per_cta)
    assert each[2] * threads[2] * across[2] == dim
    assert threads[1] * threads[2] == 32
    assert across[1] * across[2] == warps


# ---- products with quantized weights ----


def weight(kind: str = "int4", n: int = 4096, k: int = 4096, group: int | None = None) -> PackedWeight:
    """A weight with only the attributes that the rules read."""
    size = (128 if kind == "int4" else 0) if group is None else group
    return PackedWeight(kind, torch.empty(0), torch.empty(0), None, size, None, torch.Size((n, k)))


def kernel(weight: PackedWeight, rows: int, gated: bool = False) -> str | None:
    """The name of the Hopper kernel for this weight and number of rows; None for no such kernel."""
    shape = packed_hopper.shape_for(weight, rows, gated)
    names = {packed_gemv.Shape: "row", packed_hopper.Shape: "packed", packed_prefill.Shape: "prompts"}
    return None if shape is None else names[type(shape)]


def test_one_row_uses_gemv_if_warps_read_whole_chunks() -> None:
    for one in (weight(), weight("fp8"), weight("int8"), weight("fp8", group=128), weight(k=28672), weight(n=16)):
        assert kernel(one, 1) == "row"
        assert kernel(one, 1, gated=True) == "row"
    for other in (weight(k=1280), weight(n=4104), weight(group=256), weight(k=29696), weight("fp8", k=512)):
        assert kernel(other, 1) == "packed"


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_a_warp_has_the_scales_of_the_experts_that_it_multiplies(kind: str) -> None:
    """With one scale for each output a warp loads those of one expert, and multiplies every eighth chunk of a step."""
    for n, k, chosen in ((4096, 14336, 2), (2048, 768, 8), (4096, 4096, 1), (2048, 1024, 4)):
        one = replace(weight(kind, n, k, group=0), scale=torch.empty(0, dtype=BF16))
        shape = packed_gemv.experts_shape_for(one, False, chosen)
        chunks = range(shape.chunks if shape else 0)
        warps = shape.warps if shape else 0
        experts = [chunk // (len(chunks) // chosen) for chunk in chunks]
        assert experts == [chunk % warps // (warps // chosen) for chunk in chunks], (n, k, chosen)


def test_one_row_of_experts_uses_gemv() -> None:
    for kind, group, served in (("int4", 128, True), ("int4", 0, False), ("int8", 0, True), ("fp8", 0, True)):
        one = replace(weight(kind, 4096, 14336, group), scale=torch.empty(0, dtype=BF16))
        assert (packed_gemv.experts_shape_for(one, False, 2) is not None) == served, (kind, group)
    for k, shape in ((4096, packed_gemv.Shape(16, 2, 2, 120, 4)), (3072, packed_gemv.Shape(8, 3))):
        four_bits = replace(weight(k=k), scale=torch.empty(0, dtype=BF16))
        assert packed_gemv.experts_shape_for(four_bits, True, 2) == shape, k


def test_the_kernel_of_several_rows_depends_on_the_format() -> None:
    assert [kernel(weight(), rows) for rows in (9, 64, 65, 9000)] == ["packed", "packed", "prompts", "prompts"]
    assert [kernel(weight("fp8"), rows) for rows in (9, 64, 512, 513)] == ["packed", "packed", "packed", None]
    for rows in (9, 65):
        assert kernel(weight(group=64), rows) is None
        assert kernel(weight(n=192), rows, gated=True) is None
        assert kernel(weight(k=1284), rows) is None
    for rows in (1, 2):
        assert kernel(weight(group=64), rows) is None


def test_eight_rows_are_the_fewest_of_a_block() -> None:
    for rows, block in ((2, 8), (8, 8), (9, 16), (17, 32), (33, 64)):
        shape = packed_hopper.shape_for(weight(n=28672), rows, False)
        assert isinstance(shape, packed_hopper.Shape)
        assert shape.block_m == block


def test_a_few_rows_use_gemv_where_all_their_inputs_fit_and_tiles_are_few() -> None:
    for one, rows in (
        (weight(n=6144), 4),
        (weight(n=2048, k=8192), 2),
        (weight("fp8", n=4096, k=14336), 2),
        (weight(n=3072, k=2048), 8),
        (weight("fp8", n=28672), 4),
    ):
        assert [kernel(one, count) for count in range(2, 10)] == ["row"] * (rows - 1) + ["packed"] * (9 - rows)
    assert kernel(weight(n=28672), 2) == "packed", "many tiles of 4 bits"
    assert kernel(weight(n=4096, k=14336), 2) == "packed", "many inputs of 4 bits"
    assert kernel(weight("fp8", n=28672, k=3072), 2) == "packed", "many tiles of few inputs"


def test_queries_keys_and_values_are_rotated_in_heads_of_64_and_128() -> None:
    rotated = packed_hopper.rotated_shape_for
    for dim in (64, 128):
        assert isinstance(rotated(weight(n=6144), 1, dim), packed_gemv.Shape)
        assert isinstance(rotated(weight(n=6144), 4, dim), packed_gemv.Shape)
    assert rotated(weight(n=6144), 4, 96) is None
    assert isinstance(rotated(weight(), 64, 128), packed_hopper.Shape)
    assert rotated(weight(), 64, 64) is None
    assert rotated(weight(), 65, 128) is None
    assert rotated(replace(weight(), order=torch.arange(4096)), 1, 128) is None


def test_programs_of_one_row() -> None:
    shape, other = packed_gemv.shape_for, packed_gemv.Shape
    assert shape(weight(), 1) == other(16, 3)
    assert shape(weight(k=3072), 1) == other(8, 6)
    assert shape(weight(n=6144), 1) == other(16, 3, 3, 56)
    assert shape(weight(n=6144, k=12288), 1) == other(16, 3)
    assert [(shape(weight("fp8", k=k), 1) or other(0, 0)).stages for k in (7168, 8192, 16384, 17408)] == [2, 5, 5, 3]
    assert [shape(weight("fp8", n=n), 1) for n in (6336, 6400)] == [other(8, 2, 3, 56), other(8, 4)]
    assert shape(weight("fp8", k=15360, group=128), 1) == other(8, 3)


def test_programs_of_one_row_with_weights_of_16_bits() -> None:
    shape, other = dense_gemv.shape_for, packed_gemv.Shape
    assert shape(2048, 4096, False) == other(16, 4, 1, 96), "a tile for each program, which has a multiprocessor alone"
    assert shape(2048, 2048, False) == other(16, 2, 1, 96)
    assert shape(6144, 4096, False) == shape(14336, 4096, True) == other(16, 3)
    assert shape(2560, 2560, False) == shape(9728, 2560, True) == other(8, 6)
    assert shape(16384, 16384, False) == other(16, 6, 1, 96), "two programs' inputs would not fit"
    for n, k, gated in ((4096, 14336, False), (4096, 4160, False), (4104, 4096, False), (32768, 32768, True)):
        assert shape(n, k, gated) is None, (n, k)


def test_programs_of_experts_with_weights_of_16_bits() -> None:
    shape, other = dense_gemv.experts_shape_for, packed_gemv.Shape
    assert shape(1536, 2048, True, 8) == other(16, 6, 1, 96)
    assert shape(2048, 768, False, 8) == other(32, 3, 1, 96)
    assert shape(4096, 14336, False, 2) == other(16, 5, 1, 96), "fewer chunks beside the neurons of two experts"
    assert shape(2880, 2880, True, 4) is None
    assert shape(2048, 768, False, 3) is None


@pytest.mark.parametrize(("gated", "head", "gap"), [(False, 0, 8), (True, 0, 192), (False, 128, 64), (False, 64, 32)])
def test_octets_of_all_tiles_are_all_rows_of_a_weight(gated: bool, head: int, gap: int) -> None:
    n = 3 * 128
    first = [_octet.fn(tile, n // 2 if gated else n, octet, gated, head) for tile in range(n // 16) for octet in (0, 1)]
    assert sorted(first) == list(range(0, n, 8))
    assert {second - one for one, second in zip(first[::2], first[1::2], strict=True)} == {gap}


def test_a_gated_product_has_nothing_added() -> None:
    x, added = torch.zeros(1, 4096, dtype=BF16), torch.zeros(1, 2048, dtype=BF16)
    with pytest.raises(AssertionError):
        packed_gemm.linear_packed(x, weight(), residual=added, gated=True)
    with pytest.raises(AssertionError):
        packed_gemm.linear_packed(x, weight(), added[0], gated=True)


def tiles(rows: int, n: int, k: int) -> str:
    """The name of the chosen tile shape."""
    names = {getattr(packed_prefill, name): name for name in ("NARROW", "MIDDLE", "WIDE", "TALL")}
    return names[packed_prefill.shape_for(rows, n, k)]


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [((65, 128), "NARROW"), ((129, 192, 321, 384, 513, 576), "MIDDLE"), ((257, 320, 577, 640), "TALL"),
     ((193, 256, 385, 512, 641, 768, 769, 1024, 1152, 1280, 2048, 8192), "WIDE")],
    ids=str,
)  # fmt: skip
def test_many_rows_use_the_tiles_that_they_fill(rows: tuple[int, ...], wanted: str) -> None:
    assert {tiles(count, 28672, 4096) for count in rows} == {wanted}


@pytest.mark.parametrize(
    ("n", "k", "wanted"),
    [(2048, 2048, {192: "NARROW", 256: "NARROW", 320: "NARROW", 1024: "NARROW"}),
     (3072, 2048, {256: "NARROW", 384: "MIDDLE", 512: "NARROW", 640: "NARROW", 1024: "WIDE"}),
     (4096, 4096, {192: "MIDDLE", 256: "NARROW", 320: "MIDDLE", 512: "WIDE", 640: "TALL"}),
     (6144, 4096, {256: "WIDE", 320: "MIDDLE", 384: "MIDDLE", 640: "TALL"})],
    ids=str,
)  # fmt: skip
def test_products_of_few_chunks_use_tiles_of_few_rows(n: int, k: int, wanted: dict[int, str]) -> None:
    assert {rows: tiles(rows, n, k) for rows in wanted} == wanted


# ---- batches of encoders ----

MINILM, BERT_BASE = 10.6e6, 85e6
"""Weights that a token is multiplied with."""


def test_batches_of_small_encoders_are_captured_in_all_sizes() -> None:
    sizes = captured_sizes(MINILM, LAUNCH_WORK, 32768)
    assert sizes[-3:] == [28672, 30720, 32768]
    assert all(is_padded(MINILM, LAUNCH_WORK, below + 1, size) for below, size in pairwise(sizes))


def test_batches_of_larger_encoders_are_captured_if_they_are_small_or_full() -> None:
    sizes = captured_sizes(BERT_BASE, LAUNCH_WORK, 32768)
    assert sizes[-2:] == [1024, 32768]
    assert is_padded(BERT_BASE, LAUNCH_WORK, 513, 768)
    assert is_padded(BERT_BASE, LAUNCH_WORK, 32768 - 200, 32768)
    assert not is_padded(BERT_BASE, LAUNCH_WORK, 1025, 32768)
    assert captured_sizes(BERT_BASE, LAUNCH_WORK, 100) == [16, 32, 64, 96, 100]


def test_batches_of_decoders_that_keep_the_gpu_busy_are_not_captured() -> None:
    layers, weights = 28, 0.44e9  # of Qwen3-Embedding-0.6B
    assert captured_sizes(weights, layers * LAYER_WORK, 32768)[-3:] == [6144, 8192, 32768]
    assert captured_sizes(7e9, 32 * LAYER_WORK, 8192)[-3:] == [384, 512, 8192]


# ---- processes beside this one ----


@pytest.fixture
def no_mps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """No trace of MPS. The path is where its daemon's pipe would be."""
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(device, "_MPS_PIPE", tmp_path / "control")
    device.under_mps.cache_clear()
    yield tmp_path / "control"
    device.under_mps.cache_clear()


@pytest.mark.parametrize("trace", ["CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "pipe"])
def test_no_program_waits_for_another_under_mps(trace: str, no_mps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident_hopper, "serves", lambda *_: True)
    x, weight = torch.empty(8, 384, dtype=BF16), torch.empty(384, 384, dtype=BF16)
    stack = AdapterStack.empty(1, 16, 384, (384,), BF16)
    words = Int4Weight(torch.zeros(512, 512, dtype=torch.uint8), torch.ones(512, 8, dtype=BF16), None, 128)
    rows, out = torch.empty(384, 1024, dtype=BF16), torch.empty(384, 512, dtype=BF16)
    product = (rows, pack_weight(words), None, None, False, out)
    assert not device.under_mps()
    _, given = packed_prefill.launch(*product, packed_prefill.NARROW, 132)
    assert given["units"] > 0
    assert resident_norm_hopper.serves(x, weight)
    assert fused.tile_for(x, stack, False)
    device.under_mps.cache_clear()
    if trace == "pipe":
        no_mps.touch()
    else:
        monkeypatch.setenv(trace, "50")
    assert device.under_mps()
    _, given = packed_prefill.launch(*product, packed_prefill.NARROW, 132)
    assert (given["alone"], given["units"]) == (12, 0)
    assert not resident_norm_hopper.serves(x, weight)
    assert fused.tile_for(x, stack, False) is None


@pytest.mark.usefixtures("no_mps")
@pytest.mark.parametrize(("processors", "lines"), [(132, 128), (108, 64), (224, 64)])
def test_gated_products_with_adapters_run_at_once_where_tiles_of_128_lines_fit(
    processors: int, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "_processors", lambda _: processors)
    x = torch.empty(64, 4096, dtype=BF16, device="meta")
    with torch.device("meta"):
        stack = AdapterStack.empty(1, 16, 4096, (14336, 14336), BF16)
    tile = fused.tile_for(x, stack, True)
    assert tile is not None
    assert tile.n == lines, "14,336 lines are 112 tiles of 128, or 224 of 64"


@pytest.mark.parametrize(("mean", "rows"), [(1, 16), (12, 16), (13, 32), (24, 32), (25, 64), (64, 64), (65, 128)])
def test_quantized_experts_have_tiles_for_more_rows_than_the_mean(mean: int, rows: int) -> None:
    x = torch.empty(1, 64, dtype=BF16)
    assert grouped.tile_for(mean * 8, 8, x, packed=True, invariant=False).rows == rows
    assert len({grouped.tile_for(mean * 8, 8, x, packed=True, invariant=True) for mean in (1, 30, 300)}) == 1


@pytest.mark.parametrize(("mean", "rows"), [(24, 64), (96, 64), (97, 128), (999, 128)])
def test_rows_of_fp8_experts_are_rounded_if_they_are_many(
    mean: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = ExpertStack(8, 16, 64, BF16)
    stack.keep(0, quantize_fp8(torch.ones(16, 64)))

    def routes(entries: int, experts: int) -> Routes:
        return Routes(torch.empty(entries // 2, 2), torch.empty(entries), torch.empty(9), experts)

    x = torch.empty(1, 64, dtype=BF16)
    assert not grouped_fp8.serves(x, stack, routes(mean * 8, 8)), "no fp8 tensor cores"
    monkeypatch.setattr(fp8, "multiplies", lambda _: True)
    assert grouped_fp8.serves(x, stack, routes(mean * 8, 8))
    assert grouped_fp8.serves(x, stack, routes(mean * 64, 64)), "8 of 64 experts are own"
    assert not grouped_fp8.serves(x, stack, routes(23 * 8, 8))
    assert grouped_fp8.tile_for(routes(mean * 8, 8), x.device).rows == rows
