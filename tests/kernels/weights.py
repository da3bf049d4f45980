"""Quantized weights of all kinds and shapes for tests, and products with them against the definition."""

import random
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kernels import linear, quantized_weights
from kernels.linear import dense, fp8, nf4, packed, packed_gemm
from kernels.linear.dense_hopper import Shape
from kernels.linear.split_k import Tile
from kernels.operands import Norm
from kernels.quantized_weights import Fp8Weight, Int4Weight, Int8Weight
from kernels.reference import layers as reference
from tests.kernels.cases import DEVICE, close, error, poison, rand

TILES = [Tile(64, 128, 1, 2, 4, 0), Tile(64, 128, 2, 3, 4, 2), Tile(128, 128, 3, 2, 4, 2)]


def weights(n: int, k: int, group: int, dtype: torch.dtype) -> Iterator[Int4Weight | Int8Weight | Fp8Weight]:
    """One of each kind that lies in words. group divides k."""
    w = rand(n, k, dtype=torch.float32) / k**0.5
    yield quantized_weights.quantize_int4(w.to(dtype), group)
    plain = quantized_weights.quantize_int4(w, group)
    zero = torch.randint(0, 16, plain.scale.shape, dtype=torch.uint8, device=DEVICE)
    yield replace(plain, zero=zero)
    yield replace(plain, zero=zero, order=torch.randperm(k, device=DEVICE).int())
    whole = quantized_weights.quantize_int8(w)
    yield whole
    if group % 64 == 0:
        yield Int8Weight(whole.values, whole.scale * (torch.rand(n, k // group, device=DEVICE) + 0.5))
    rows = quantized_weights.quantize_fp8(w)
    yield rows
    octets = torch.randperm(n * k, device=DEVICE).to(torch.uint8)  # every value in random order: no row repeats
    every = torch.where(octets % 128 == 127, 0, octets).to(torch.uint8).view(quantized_weights.FP8).view(n, k)
    yield Fp8Weight(every, torch.full((1, 1), 1e-3, device=DEVICE))
    blocks = (torch.rand(-(-n // 128), -(-k // 128), device=DEVICE) + 0.5) * 1e-3
    yield Fp8Weight(every, blocks)


def check_packed(rows: int, n: int, k: int, group: int, dtype: torch.dtype, served: bool = False) -> None:
    """Products and dequantization of every kind of weight, n even; by the served kernel or that for any device."""
    x = rand(rows, k, dtype=dtype)
    residual, bias = rand(rows, n, dtype=dtype), rand(n, dtype=dtype)
    for weight in weights(n, k, group, dtype):
        laid = packed.pack_weight(weight)
        want = quantized_weights.linear(x.double(), weight)
        out, tile = poison(rows, n, dtype=dtype), None if served else random.choice(TILES)
        close(packed_gemm.linear_packed(x, laid, bias, out=out, tile=tile), want + bias.double())
        added = residual.clone()
        close(packed_gemm.linear_packed(x, laid, residual=added, out=added, tile=tile), want + residual.double())
        out = poison(rows, n // 2, dtype=dtype)
        close(packed_gemm.linear_packed(x, laid, gated=True, out=out, tile=tile), reference.silu_and_mul(want))
        stored = weight.stored(torch.float64) if isinstance(weight, Int4Weight) else None
        close(packed.dequantize(laid, dtype), weight.dequantize(torch.float64) if stored is None else stored)
        assert laid.nbytes <= 1.1 * weight.nbytes + 200 * (k + n)


def check_rounding(rows: int, n: int, dtype: torch.dtype) -> None:
    """Rows rounded to fp8, plain, normalized and gated."""
    x, norm, wide = rand(rows, n, dtype=dtype), rand(n, dtype=dtype), rand(rows, 2 * n, dtype=dtype)
    for got, want in (
        (fp8.round_rows(x), x.float()),
        (fp8.round_rows(x, norm=norm, eps=1e-5), reference.rms_norm(x.float(), norm.float(), 1e-5)),
        (fp8.round_rows(wide, gated=True), reference.silu_and_mul(wide.float())),
        (fp8.round_rows(x, given=torch.full((), 0.5, device=DEVICE)), x.float()),
    ):
        values, scale = got
        columns = torch.arange(values.shape[1], device=DEVICE).view(-1, 2, 32, 2).permute(0, 2, 3, 1).flatten()
        back = torch.zeros(values.shape, device=DEVICE)
        back[:, columns] = values.float() * scale
        assert not back[:, n:].any()
        if DEVICE == "cpu":  # Triton's interpreter loses the carry where a number rounds up to a power of two.
            assert error(back[:, :n], want) < 0.2
            continue
        # Rounding keeps three bits: an eighth of a number's power of two, half of it either way.
        step = (want.abs() / scale).clamp_min(2**-6).log2().floor().exp2() / 16 * scale
        assert ((back[:, :n] - want).abs() <= step * 1.05).all()


def check_nf4(n: int, k: int, dtype: torch.dtype) -> None:
    """Dequantization by the kernel against the definition."""
    weight = quantized_weights.quantize_nf4(rand(n, k, dtype=torch.float32))
    close(nf4.dequantize_nf4(weight, dtype), weight.dequantize(torch.float64))


def check_linear(rows: int, n: int, k: int, dtype: torch.dtype, group: int = 64) -> None:
    """`products.linear` with every kind of weight, prepared for the device."""
    x, gamma = rand(rows, k, dtype=dtype), rand(k, dtype=dtype)
    residual, bias = rand(rows, n, dtype=dtype), rand(n, dtype=dtype)
    w = rand(n, k, dtype=torch.float32) / k**0.5
    kinds: list[quantized_weights.Weight] = [*weights(n, k, group, dtype), w, quantized_weights.quantize_nf4(w)]
    mixed = quantized_weights.concat([quantized_weights.quantize_int8(w[:64]), w[64:].to(torch.float16)])
    kinds += [quantized_weights.quantize_int4(w, 16), mixed]
    if k % 32 == 0:  # groups that no kernel takes
        whole = quantized_weights.quantize_int8(w)
        kinds += [Int8Weight(whole.values, whole.scale.expand(n, k // 32).contiguous())]
    norm, wide = Norm(gamma, 1e-5), rand(rows, 2 * k, dtype=dtype)
    normed = reference.rms_norm(x.double(), gamma.double(), 1e-5)
    for weight in kinds:
        laid = linear.prepare(weight, dtype)
        rounds_to_fp8 = linear.rounds_to_fp8(x, laid)
        for got, want in (
            (linear.linear(x, laid, norm=norm), quantized_weights.linear(normed, weight)),
            (
                linear.linear(x, laid, bias, residual=residual),
                quantized_weights.linear(x.double(), weight) + bias.double() + residual.double(),
            ),
            (linear.linear(x, laid, gated=True), _gated(quantized_weights.linear(x.double(), weight))),
            (_gate(linear.gate(x, laid, norm), n), _gated(quantized_weights.linear(normed, weight))),
            (linear.linear(wide, laid), quantized_weights.linear(_gated(wide.double()), weight)),
        ):
            if rounds_to_fp8:
                assert error(got, want) < 0.05
            else:
                close(got, want)


def _gate(gate: Tensor, n: int) -> Tensor:
    """What `products.gate` left, gated if it is not yet."""
    return _gated(gate) if gate.shape[1] == n else gate


def _gated(product: Tensor) -> Tensor:
    return reference.silu_and_mul(product)


def check_parts(rows: int, n: int, k: int, dtype: torch.dtype, tile: Tile | Shape | None = None) -> None:
    """The parts of a product, which are float32, against the product."""
    x, w = rand(rows, k, dtype=dtype), rand(n, k, dtype=dtype) / k**0.5
    parts = dense.parts(x, w, tile)
    assert parts is not None
    assert parts.dtype == torch.float32
    close(parts.sum(0).to(dtype), x.double() @ w.double().T)
