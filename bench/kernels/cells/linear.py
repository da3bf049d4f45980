"""Measures the linear layers of a decoder layer, with 16-bit and with quantized weights."""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.cells import Row, Shape
from bench.kernels.timing import DTYPE, ROTATED_BYTES, copies, rand, timed
from kernels import rope_kv
from kernels.linear import dense, fp8, linear, qkv_rope
from kernels.linear.packed import PackedWeight


def layer_products(shape: Shape) -> Iterator[tuple[str, int, int, bool, bool]]:
    """(name, outputs, inputs, gated, residual added) of the linear layers of one decoder layer, and of the head."""
    width = (shape.heads + 2 * shape.kv_heads) * shape.dim
    yield "qkv", width, shape.hidden, False, False
    yield "o", shape.hidden, shape.heads * shape.dim, False, True
    yield "gate-up", shape.ffn, shape.hidden, True, False
    yield "down", shape.hidden, shape.ffn, False, True
    yield "head", shape.vocab, shape.hidden, False, False


def product_row(shape: Shape, name: str, n: int, k: int, gated: bool, added: bool, rows: int) -> Row:
    """A 16-bit linear layer with its fused operations, against the matrix product alone in cuBLAS."""
    outputs = 2 * n if gated else n
    weights = copies(lambda: rand(outputs, k))
    x = rand(rows, k)
    residual = rand(rows, n) if added else None
    out = torch.empty(rows, n, dtype=DTYPE, device="cuda")
    plain = torch.empty(rows, outputs, dtype=DTYPE, device="cuda")
    seconds = timed([partial(dense.linear, x, w, residual=residual, gated=gated, out=out) for w in weights])
    cublas = timed([partial(torch.mm, x, w.t(), out=plain) for w in weights])
    moved = 2.0 * (outputs * k + rows * k + rows * n)
    return Row(
        f"{shape.name} {name} M={rows}", seconds * 1e6, moved, 2.0 * rows * outputs * k, {"cublas": cublas * 1e6}
    )


def rotated_row(shape: Shape, rows: int) -> Row:
    """Fused projection, rotation and KV write, against the same in two kernels."""
    width, dim = (shape.heads + 2 * shape.kv_heads) * shape.dim, shape.dim
    weights, x, pool = copies(lambda: rand(width, shape.hidden)), rand(rows, shape.hidden), rand(64, 16, 2, 8, dim)
    cos, sin, at = rand(1024, 1, dim), rand(1024, 1, dim), torch.arange(rows, device="cuda")
    tile = qkv_rope.tile_for(x, width, dim)
    assert tile is not None

    def apart(w: Tensor) -> Tensor:
        product = dense.linear(x, w).view(rows, -1, dim)
        return rope_kv.rope_and_store(product, cos, sin, pool, at, shape.heads, shape.kv_heads, at)

    seconds = timed(
        [partial(qkv_rope.rotated_qkv, x, w, None, cos, sin, at, pool, at, shape.heads, tile) for w in weights]
    )
    two = timed([partial(apart, w) for w in weights])
    moved = 2.0 * (width * shape.hidden + rows * (shape.hidden + width))
    name, flop = f"{shape.name} qkv+rope M={rows}", 2.0 * rows * width * shape.hidden
    return Row(name, seconds * 1e6, moved, flop, {"two kernels": two * 1e6})


def random_packed(kind: str, n: int, k: int) -> PackedWeight:
    """A packed weight of random bits (no NaN) with a scale per output, or per 128 inputs in int4."""
    scale = torch.rand(n // 64, k // 128 if kind == "int4" else 1, 64, device="cuda") / 64 + 1e-3
    shape = (n // 64, k // 128, 64, 16) if kind == "int4" else (n, k // 4)
    packed = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device="cuda")
    if kind == "int4":
        return PackedWeight(kind, packed, scale.to(DTYPE), None, 128, None, torch.Size((n, k)))
    return PackedWeight(kind, packed & ~0x40404040, scale, None, 0, None, torch.Size((n, k)))


def quantized_row(shape: Shape, kind: str, name: str, n: int, k: int, gated: bool, added: bool, rows: int) -> Row:
    """A quantized linear layer with its fused operations, against the 16-bit matrix product alone in cuBLAS and the
    library's product of this format."""
    outputs = 2 * n if gated else n
    first = random_packed(kind, outputs, k)
    weights = [first, *(random_packed(kind, outputs, k) for _ in range(min(63, ROTATED_BYTES // first.nbytes)))]
    x, residual = rand(rows, k), rand(rows, n) if added else None
    out = torch.empty(rows, n, dtype=DTYPE, device="cuda")
    seconds = timed([partial(linear, x, w, residual=residual, gated=gated, out=out) for w in weights])
    plain = torch.empty(rows, outputs, dtype=DTYPE, device="cuda")
    against = {"cublas bf16": timed([partial(torch.mm, x, w.t(), out=plain) for w in copies(lambda: rand(outputs, k))])}
    if kind == "fp8":
        rounded = fp8.round_rows(x)
        against["scaled_mm"] = timed([partial(fp8.multiply, rounded, w, DTYPE) for w in weights])
    elif rows <= 64:
        packed = [torch._convert_weight_to_int4pack(w.packed.view(torch.uint8).view(outputs, -1), 8) for w in weights]
        scales = rand(k // 128, outputs, 2)
        against["torch int4"] = timed([partial(torch._weight_int4pack_mm, x, w, 128, scales) for w in packed])
    moved = first.nbytes + 2.0 * rows * (k + n)
    micro = {peer: peer_s * 1e6 for peer, peer_s in against.items()}
    rate = "fp8" if kind == "fp8" else "matmul"
    flop = 2.0 * rows * outputs * k
    return Row(f"{shape.name} {kind} {name} M={rows}", seconds * 1e6, moved, flop, micro, rate=rate)


def invariant_row(shape: Shape, rows: int) -> Row:
    n, k = 2 * shape.ffn, shape.hidden
    weights, x = copies(lambda: rand(n, k)), rand(rows, k)
    ours = timed([partial(dense.matmul_invariant, x, w) for w in weights])
    cublas = timed([partial(F.linear, x, w) for w in weights])
    moved = 2.0 * (n * k + rows * (n + k))
    return Row(
        f"{shape.name} invariant gate-up M={rows}", ours * 1e6, moved, 2.0 * rows * n * k, {"cublas": cublas * 1e6}
    )
