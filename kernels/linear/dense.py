"""16-bit and float32 linear layers: y = x W^T of few rows, bound by reading W once, and a batch-invariant product.

M rows of x, N rows of W (outputs), K columns of both. The bias, the residual addition and the gate of the MLP are fused
into the kernel. Under dependent launch a program prefetches its first weights before the previous kernel has ended.
cuBLAS serves all other shapes.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.activation import silu_and_mul
from kernels.dependent_launch import launch_options, prefetch, wait
from kernels.linear import cublaslt, dense_hopper
from kernels.linear.dense_hopper import Shape
from kernels.linear.gemv import dense as dense_gemv
from kernels.linear.split_k import Tile, finish, workspace


@triton.jit
def multiply(
    x,  # [M, K], rows x_stride apart
    w,  # [.., K]
    first,  # [BLOCK_N]: rows of W
    offset,  # TWO: to the rows of the second product
    here,  # [BLOCK_N]: which of them exist
    low, high,  # columns of W
    rows, M, K, x_stride,
    BLOCK_K: tl.constexpr, TWO: tl.constexpr, IEEE: tl.constexpr, STAGES: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """W[first] x^T and W[first + offset] x^T over columns low to high: [BLOCK_N, BLOCK_M]. Waits for the previous
    kernel before it reads x."""
    weights = w + first.to(tl.int64)[:, None] * K
    others = weights + tl.cast(offset, tl.int64) * K
    if PDL and AHEAD > 0:
        lines = low + tl.arange(0, AHEAD)[None, :] * 64  # 128 bytes of a 16-bit dtype
        prefetch(tl.where(here[:, None] & (lines < high), weights + lines, w))
        if TWO:
            prefetch(tl.where(here[:, None] & (lines < high), others + lines, w))
    wait(PDL)
    some = rows < M
    inputs = x + rows[:, None] * x_stride
    product = tl.zeros([first.shape[0], rows.shape[0]], tl.float32)
    up = tl.zeros([first.shape[0], rows.shape[0]], tl.float32)
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    for start in tl.range(low, high, BLOCK_K, num_stages=STAGES):
        inner = start + tl.arange(0, BLOCK_K)
        inside = here[:, None] & (inner < high)[None, :]
        a = tl.load(weights + inner[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        b = tl.load(inputs + inner[None, :], mask=some[:, None] & (inner < high)[None, :], other=0.0)
        b = tl.trans(b)
        product = tl.dot(a, b, product, input_precision=precision)
        if TWO:
            c = tl.load(others + inner[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
            up = tl.dot(c, b, up, input_precision=precision)
    return product, up


@triton.jit(do_not_specialize=["M"])
def split_k_kernel(
    x,  # [M, K], rows x_stride apart
    w,  # [N, K]; GATED: [2N, K], the gates and then the ups
    bias,  # [N] or None
    residual,  # [M, N] or None: added
    out,  # [M, N]
    parts,  # float32 [2 or 1, SPLIT, M, N]
    arrived,  # int32 [cdiv(N, BLOCK_N)], zero between launches
    M, N, K, x_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, GATED: tl.constexpr,
    IEEE: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile, split) multiplies BLOCK_N rows of W, a SPLIT-th of their columns, with all rows of x."""
    tile, split = tl.program_id(0), tl.program_id(1)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_M)
    span = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT) * BLOCK_K
    low, high = split * span, tl.minimum(split * span + span, K)
    product, up = multiply(
        x, w, columns, N, columns < N, low, high, rows, M, K, x_stride, BLOCK_K, GATED, IEEE, STAGES, AHEAD, PDL
    )
    finish(product, up, bias, residual, out, parts, arrived, tile, split, columns, rows, M, N, SPLIT, GATED)


@triton.jit(do_not_specialize=["M"])
def split_parts_kernel(
    x,  # [M, K], rows x_stride apart
    w,  # [N, K]
    out,  # float32 [SPLIT, M, N]
    M, N, K, x_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `split_k_kernel`; the parts are not added up."""
    tile, split = tl.program_id(0), tl.program_id(1)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_M)
    span = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT) * BLOCK_K
    low, high = split * span, tl.minimum(split * span + span, K)
    product, _ = multiply(
        x, w, columns, 0, columns < N, low, high, rows, M, K, x_stride, BLOCK_K, False, False, STAGES, AHEAD, PDL
    )
    valid = (columns < N)[:, None] & (rows < M)[None, :]
    tl.store(out + split * M * N + rows[None, :] * N + columns[:, None], product, mask=valid)


@triton.jit(do_not_specialize=["M"])
def invariant_kernel(
    x,  # [M, K]
    w,  # [N, K]
    bias,  # [N] or None
    out,  # [M, N]
    M, N, K, x_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, IEEE: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One [BLOCK_M, BLOCK_N] tile; each element is one sum over K in steps of BLOCK_K, never split."""
    wait(PDL)
    down, across = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    band = tl.program_id(0) // (GROUP * across)
    height = tl.minimum(down - band * GROUP, GROUP)
    rows = (band * GROUP + tl.program_id(0) % (GROUP * across) % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (tl.program_id(0) % (GROUP * across) // height) * BLOCK_N + tl.arange(0, BLOCK_N)
    inputs = x + rows.to(tl.int64)[:, None] * x_stride
    weights = w + columns.to(tl.int64)[:, None] * K
    product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        inner = start + tl.arange(0, BLOCK_K)
        a = tl.load(inputs + inner[None, :], mask=(rows < M)[:, None] & (inner < K)[None, :], other=0.0)
        b = tl.load(weights + inner[None, :], mask=(columns < N)[:, None] & (inner < K)[None, :], other=0.0)
        product = tl.dot(a, tl.trans(b), product, input_precision="ieee" if IEEE else "tf32")
    if bias is not None:
        product += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    target = out + rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(target, product.to(out.dtype.element_ty), mask=(rows < M)[:, None] & (columns < N)[None, :])


# ---- shapes and launch ----

MAX_ROWS, MAX_GATED_ROWS = 64, 128
"""cuBLAS serves more rows than this."""


def tile_for(rows: int, n: int, k: int, gated: bool, dtype: torch.dtype) -> Tile | None:
    """The tile for x [rows, k] times W [n, k], or None where cuBLAS is as fast. Measured on one H200."""
    if gated and MAX_ROWS < rows <= MAX_GATED_ROWS and n >= 12800 and dtype != torch.float32:
        return Tile(128, 64, stages=4, warps=8)
    if dtype == torch.float32 or rows > MAX_ROWS:
        return None
    tiles = triton.cdiv(n, 64)
    if gated or tiles >= 200:  # enough programs to fill the chip
        return Tile(128, 128, stages=3, warps=8) if rows > 32 and not gated else Tile(64, 128)
    if k >= 8192:
        stages = 6 if rows <= 32 else 4
        return Tile(64, 128, 2, 8 if rows <= 16 else stages) if tiles > 32 else Tile(64, 128, 4, stages)
    if tiles <= 64 and (k > 2048 or (k == 2048 and rows <= 32)):
        return Tile(64, 128, 4 if tiles <= 32 else 2, 6 if rows <= 32 else 4)
    if tiles <= 32 and rows <= 32:
        return Tile(64, 128, 4, 6)
    if rows <= 16 and k <= 2048:
        return Tile(32, 128, 4, 6)
    return Tile(64, 64, 4, 6) if rows <= 8 else None


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    gated: bool = False,
    out: Tensor | None = None,
    tile: Tile | Shape | None = None,
) -> Tensor:
    """x @ weight.T + bias + residual; gated: silu(first half) * second half of the product.

    x [M, K], weight [N, K] (gated: [2N, K]) -> [M, N]. residual [M, N] is added; pass it as `out` too to add in place.
    All 2-dimensional, unit stride in the last, out and residual contiguous. If no tile is given and cuBLAS is as fast,
    cuBLAS computes the product. The kernel reads the weight before earlier kernels in the stream have ended, so none of
    them may write it; use `cublas` for a weight that was just written.
    """
    rows, k = x.shape
    n = weight.shape[0] // 2 if gated else weight.shape[0]
    if out is None:
        out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    if tile is None and dense_hopper.serves(x):
        alone = rows == 1 and weight.is_contiguous() and not (gated and bias is not None)
        if alone and (shape := dense_gemv.shape_for(n, k, gated)):
            return dense_gemv.linear(x, weight, bias, residual, gated, out, shape)
        tile = dense_hopper.shape_for(rows, n, k, gated)
    tile = tile or tile_for(rows, n, k, gated, x.dtype)
    if tile is None:
        return cublas(x, weight, bias, residual, gated, out)
    if isinstance(tile, Shape):
        return dense_hopper.linear(x, weight, bias, residual, gated, out, tile)
    space = workspace(x.device, (1 + gated) * tile.split * rows * n if tile.split > 1 else 0)
    split_k_kernel[(triton.cdiv(n, tile.n), tile.split)](
        x, weight, bias, residual, out, space.parts, space.arrived, rows, n, k, x.stride(0),
        BLOCK_M=max(16, triton.next_power_of_2(rows)), BLOCK_N=tile.n, BLOCK_K=tile.k, SPLIT=tile.split, GATED=gated,
        IEEE=x.dtype == torch.float32, STAGES=tile.stages_on(x.device), AHEAD=tile.ahead, num_warps=tile.warps,
        **launch_options(x.device),
    )  # fmt: skip
    return out


def parts(x: Tensor, weight: Tensor, tile: Tile | Shape | None = None) -> Tensor | None:
    """x @ weight.T as float32 parts [S, M, N], whose sum over S the caller takes: no program waits for another one's
    part. None where the kernel of the product does not divide K, or cuBLAS is as fast. x and weight as in `linear`."""
    (rows, k), n = x.shape, len(weight)
    if tile is None and dense_hopper.serves(x):
        tile = dense_hopper.shape_for(rows, n, k, False)
    tile = tile or tile_for(rows, n, k, False, x.dtype)
    if isinstance(tile, Shape):
        return dense_hopper.parts(x, weight, tile)
    if tile is None or tile.split == 1:
        return None
    out = torch.empty(tile.split, rows, n, dtype=torch.float32, device=x.device)
    split_parts_kernel[(triton.cdiv(n, tile.n), tile.split)](
        x, weight, out, rows, n, k, x.stride(0), BLOCK_M=max(16, triton.next_power_of_2(rows)), BLOCK_N=tile.n,
        BLOCK_K=tile.k, SPLIT=tile.split, STAGES=tile.stages_on(x.device), AHEAD=tile.ahead, num_warps=tile.warps,
        **launch_options(x.device),
    )  # fmt: skip
    return out


def cublas(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, gated: bool, out: Tensor | None
) -> Tensor:
    """As `linear`, by cuBLAS, after all earlier kernels in the stream."""
    if out is None:
        out = x.new_empty(x.shape[0], weight.shape[0] // (2 if gated else 1))
    if gated:
        return silu_and_mul(cublas(x, weight, bias, None, False, None), out)
    if bias is None and cublaslt.multiply(x, weight, residual, out):
        return out
    if residual is None:
        return torch.addmm(bias, x, weight.t(), out=out) if bias is not None else torch.mm(x, weight.t(), out=out)
    torch.addmm(residual, x, weight.t(), out=out)
    return out if bias is None else out.add_(bias)


@dataclass(frozen=True, slots=True)
class InvariantTile:
    """Shape of the programs of an invariant product. All shapes of one dtype sum in the same order."""

    m: int
    n: int
    warps: int
    stages: int


INVARIANT_K = 64
NARROW, WIDE = InvariantTile(64, 32, 4, 6), InvariantTile(128, 128, 8, 3)
INVARIANT_EXACT = InvariantTile(32, 32, 4, 2)


def matmul_invariant(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, tile: InvariantTile | None = None
) -> Tensor:
    """x @ weight.T + bias: [M, K] -> [M, N]; a row's bits do not depend on the other rows or their number."""
    rows, k = x.shape
    n = weight.shape[0]
    exact = x.dtype == torch.float32
    tile = tile or (INVARIANT_EXACT if exact else NARROW if rows <= 64 else WIDE)
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    if rows:
        invariant_kernel[(triton.cdiv(rows, tile.m) * triton.cdiv(n, tile.n),)](
            x, weight, bias, out, rows, n, k, x.stride(0), BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=INVARIANT_K,
            GROUP=8, IEEE=exact, STAGES=tile.stages, num_warps=tile.warps, **launch_options(x.device),
        )  # fmt: skip
    return out
