"""Shared by the Gluon linear kernels: exchange of partial sums through memory, epilogues, tensor descriptors."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.quantized_weights import FP8


@gluon.jit
def scaled(numbers, by):
    """numbers * by, two at a time."""
    text: gl.constexpr = ("mul.rn.bf16x2" if numbers.dtype == gl.bfloat16 else "mul.rn.f16x2") + " $0, $1, $2;"
    return gl.inline_asm_elementwise(text, "=r,r,r", [numbers, by], dtype=numbers.dtype, is_pure=True, pack=2)


@gluon.jit
def flattened(product):
    """[64, BLOCK_M] flattened so that each thread's elements are adjacent."""
    BLOCK_M: gl.constexpr = product.shape[1]
    six = product.reshape([4, 2, 8, BLOCK_M // 8, 4, 2])
    return six.permute([3, 0, 2, 4, 1, 5]).reshape([64 * BLOCK_M])


@gluon.jit
def unflattened(flat, BLOCK_M: gl.constexpr, layout: gl.constexpr):
    """The inverse of `flattened`."""
    both = flat.reshape([BLOCK_M // 8, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5]).reshape([64, BLOCK_M])
    return gl.convert_layout(both, layout, assert_trivial=True)


@gluon.constexpr_function
def parts_at_once(block_m):
    """Partial sums that a thread loads at a time."""
    return max(1, 64 // block_m)


@gluon.jit
def joined(product, parts, arrived, first, last, STRIDE: gl.constexpr, layout: gl.constexpr):
    """-> whether this program is the last to arrive of programs `first` to `last`, which all have a part of a tile, and
    in that case the sum of their parts, always in the same order. A program has buffers for two parts of STRIDE numbers
    each; `arrived` counts the tile's arrivals and is zero between launches."""
    BLOCK_M: gl.constexpr = product.shape[1]
    AT_ONCE: gl.constexpr = parts_at_once(BLOCK_M)
    worker = gl.program_id(0)
    flat = flattened(product)
    offsets = gl.arange(0, 64 * BLOCK_M, flat.type.layout)
    gl.store(parts + (worker * 2 + (worker == first).to(gl.int32)) * STRIDE + offsets, flat)
    gl.thread_barrier()
    done = gl.atomic_add(arrived, 1, sem="acq_rel") == last - first
    if done:
        gl.store(arrived, 0)
        flat = gl.zeros_like(flat)
        for start in range(first, last + 1, AT_ONCE):
            for which in gl.static_range(AT_ONCE):
                other = start + which
                place = parts + (other * 2 + (other == first).to(gl.int32)) * STRIDE + offsets
                flat += gl.load(
                    place, mask=offsets < (last - other + 1) * 64 * BLOCK_M, other=0.0, cache_modifier=".cg"
                )
        product = unflattened(flat, BLOCK_M, layout)
    return done, product


@gluon.jit
def angles_of(cos, sin, positions, slot_mapping, rows, lanes, M, HEAD: gl.constexpr):
    """Cosines and sines [lanes, rows] of pairs of a head of HEAD numbers, and the rows' slots in the KV pool [rows]."""
    some = rows < M
    angle = gl.load(positions + rows, mask=some, other=0)[None, :] * HEAD + lanes[:, None]
    place = gl.load(slot_mapping + rows, mask=some, other=-1)
    return gl.load(cos + angle).to(gl.float32), gl.load(sin + angle).to(gl.float32), place


@gluon.jit
def store_rotated(left, right, cosine, sine, place, bias, kv, out, head, rows, lanes, M, H, G,
                  HEAD: gl.constexpr):  # fmt: skip
    """Rotate pairs `lanes` of the head, [lanes, rows]; store queries in `out`, keys and values in the pool."""
    if bias is not None:
        left += gl.load(bias + head * HEAD + lanes).to(gl.float32)[:, None]
        right += gl.load(bias + head * HEAD + HEAD // 2 + lanes).to(gl.float32)[:, None]
    half: gl.constexpr = out.dtype.element_ty
    turns = (head < H + G).to(gl.float32)
    cosine, sine = cosine * turns + (1.0 - turns), sine * turns
    low, high = (left * cosine + right * sine).to(half), (right * cosine - left * sine).to(half)
    if head < H:
        query = out + (rows * H + head)[None, :] * HEAD + lanes[:, None]
        gl.store(query, low, mask=(rows < M)[None, :])
        gl.store(query + HEAD // 2, high, mask=(rows < M)[None, :])
    else:
        page = kv + (place * (2 * G) + (head - H))[None, :] * HEAD + lanes[:, None]
        gl.store(page, _as_stored(low, kv.dtype.element_ty), mask=(place >= 0)[None, :])
        gl.store(page + HEAD // 2, _as_stored(high, kv.dtype.element_ty), mask=(place >= 0)[None, :])


@gluon.jit
def _as_stored(numbers, stored: gl.constexpr):
    """Numbers of the model's dtype converted to the pool's dtype, saturated for fp8."""
    if stored == gl.float8e4nv:
        numbers = gl.minimum(gl.maximum(numbers.to(gl.float32), -448.0), 448.0)
    return numbers.to(stored)


@gluon.jit
def added_lines(bias, residual, columns, rows, M, N):
    """bias + residual at these columns and rows, float32 [columns, rows]; at least one of them is given."""
    valid = (columns < N)[:, None] & (rows < M)[None, :]
    if residual is None:
        found = gl.load(bias + columns, mask=columns < N, other=0.0).to(gl.float32)[:, None]
        found, _ = gl.broadcast(found, valid)
    else:
        where = rows.to(gl.int64)[None, :] * N + columns[:, None]
        found = gl.load(residual + where, mask=valid, other=0.0).to(gl.float32)
        if bias is not None:
            found += gl.load(bias + columns, mask=columns < N, other=0.0).to(gl.float32)[:, None]
    return found


@gluon.jit
def store_lines(product, added, out, columns, rows, M, N, memory: gl.constexpr):
    """product + added -> out [M, N], at these columns and rows; `memory` is the layout to write in, which `added` has
    if it is not None."""
    valid = (columns < N)[:, None] & (rows < M)[None, :]
    where = rows.to(gl.int64)[None, :] * N + columns[:, None]
    if added is None:
        result = gl.convert_layout(product.to(out.dtype.element_ty), memory)
    else:
        result = (gl.convert_layout(product, memory) + added).to(out.dtype.element_ty)
    gl.store(out + where, result, mask=valid)


NO_POOL: dict[str, Any] = {
    "cos": None,
    "sin": None,
    "positions": None,
    "kv": None,
    "slot_mapping": None,
    "H": 0,
    "G": 0,
}
"""Arguments of a launch that stores its product without rotation: there is no KV pool."""
NO_EXPERTS: dict[str, Any] = {"logits": None, "each": 1, "EXPERTS": 1, "CHOSEN": 1, "NORMALIZED": True}
"""Arguments of a launch whose weight is not that of experts."""


def pool_arguments(
    cos: Tensor, sin: Tensor, positions_M: Tensor, kv_NP2GD: Tensor, slot_mapping_M: Tensor, heads: int
) -> dict[str, Any]:
    """Arguments of a launch that rotates queries and keys, and writes keys and values to the pool."""
    pool = {"cos": cos, "sin": sin, "positions": positions_M, "kv": kv_NP2GD, "slot_mapping": slot_mapping_M}
    return {**pool, "H": heads, "G": kv_NP2GD.shape[3]}


@cache
def _layout(box: tuple[int, ...], dtype: torch.dtype) -> Any:
    """The shared memory layout of boxes."""
    kinds = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32, torch.int32: gl.int32,
             FP8: gl.float8e4nv}  # fmt: skip
    return gl.NVMMASharedLayout.get_default_for(list(box), kinds[dtype])


def descriptor(tensor: Tensor, *box: int) -> Any:
    """A descriptor of a tensor for the bulk copy engine (TMA), with boxes of this shape."""
    return TensorDescriptor.from_tensor(tensor, list(box), _layout(box, tensor.dtype))
