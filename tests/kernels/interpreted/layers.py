"""Norms, activations, rotation, and keys and values as they are stored."""

import pytest
import torch

from kernels import activation, kv_pages, norm, rope_kv
from kernels.reference import layers as reference
from tests.kernels.cases import check_gelu, check_layer_norm, close, rand
from tests.kernels.interpreted import FULL, HALF


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
