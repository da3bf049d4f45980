"""The packed layout of 4-bit and 8-bit weights: 32-bit words that a few instructions convert to pairs of 16-bit floats.

The pairs are created in the registers from which tensor cores read them, so no data moves between threads (as in
Marlin, Frantar et al. 2024). A tile of 64 rows and 128 columns is contiguous.

    N outputs    K inputs    T tiles of 64 outputs    C chunks of 128 inputs    W words of a row in a chunk: 16 or 32
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import launch_options, wait
from kernels.device import has_asm
from kernels.quantized_weights import FP8_BLOCK, Fp8Weight, Int4Weight, Int8Weight

ROWS, CHUNK = 64, 128
"""Rows and columns of a tile."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A quantized weight in the packed layout.

    int4: bits 4p to 4p + 3 of half h of word j are column 32p + 2j + h of a chunk. int8 and fp8: byte p of half h of
    word j is column 64p + 2j + h.
    """

    kind: str
    """int4, int8 or fp8."""
    packed: Tensor
    """int32: int4 [T, C, 64, 16]; int8 and fp8 [N, C * 32], a layout that cuBLAS can read, too."""
    scale: Tensor
    """[T, groups, 64] of any float dtype."""
    zero: Tensor | None
    """uint8 [T, groups, 64], of int4; None: 8 everywhere."""
    group: int
    """Inputs that share a scale: 32 (int4 alone), 64 or a multiple of 128; 0: all inputs of a row."""
    order: Tensor | None
    """int64 [K]: the input of each stored column (act-order); None: the inputs' own order."""
    shape: torch.Size
    """(N, K)."""
    input_scale: Tensor | None = None
    """float32 []: the static scale of fp8 inputs; None: each row has its own scale."""

    @property
    def chunks(self) -> int:
        """C."""
        return -(-self.shape[1] // CHUNK)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        parts = (self.packed, self.scale, self.zero, self.order, self.input_scale)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def device(self) -> torch.device:
        """Device of the weight."""
        return self.packed.device


def can_pack(weight: Int4Weight | Int8Weight) -> bool:
    """Whether a scale covers all columns that a kernel converts at a time: 32 columns of int4, 64 of int8."""
    return weight.group == 64 or weight.group % CHUNK == 0 or (isinstance(weight, Int4Weight) and weight.group == 32)


def pack_weight(weight: Int4Weight | Int8Weight | Fp8Weight) -> PackedWeight:
    """Convert a weight from the canonical to the packed layout."""
    n, k = weight.shape
    tiles, chunks = triton.cdiv(n, ROWS), triton.cdiv(k, CHUNK)
    if isinstance(weight, Int4Weight):
        assert can_pack(weight), weight.group
        groups = triton.cdiv(chunks * CHUNK, weight.group)
        zero = None if weight.zero is None else _by_tile(weight.zero, tiles, groups)
        order = None if weight.order is None else weight.order.long()
        packed, scale = _pack_nibbles(weight.packed), _by_tile(weight.scale, tiles, groups)
        return PackedWeight("int4", packed, scale, zero, weight.group, order, weight.shape)
    packed = _pack_bytes(weight.values.view(torch.uint8))
    if isinstance(weight, Int8Weight):
        assert can_pack(weight), weight.group
        groups = triton.cdiv(chunks * CHUNK, weight.group) if weight.group else 1
        scale = _by_tile(weight.scale, tiles, groups)
        return PackedWeight("int8", packed, scale, None, weight.group, None, weight.shape)
    if weight.blockwise:
        scale = _by_tile(weight.scale.repeat_interleave(FP8_BLOCK, 0)[:n], tiles, chunks)
        return PackedWeight("fp8", packed, scale, None, FP8_BLOCK, None, weight.shape, weight.input_scale)
    scale = _by_tile(weight.scale.expand(n, 1), tiles, 1)
    return PackedWeight("fp8", packed, scale, None, 0, None, weight.shape, weight.input_scale)


_STEP = 2048
"""Rows that are packed at a time: temporaries take several times their memory."""


def _pack_nibbles(nibbles: Tensor) -> Tensor:
    """Canonical bytes [N, K / 2] -> int32 [T, C, 64, 16]."""
    rows, half = nibbles.shape
    tiles, chunks = triton.cdiv(rows, ROWS), triton.cdiv(half, CHUNK // 2)
    packed = torch.empty(tiles, chunks, ROWS, CHUNK // 8, dtype=torch.int32, device=nibbles.device)
    for first in range(0, rows, _STEP):
        part = nibbles[first : first + _STEP]
        count = triton.cdiv(len(part), ROWS)
        padded = F.pad(part, (0, chunks * CHUNK // 2 - half, 0, count * ROWS - len(part)))
        padded = padded.view(count, ROWS, chunks, CHUNK // 2)
        q = torch.stack((padded & 15, padded >> 4), -1).view(count, ROWS, chunks, 2, 2, 16, 2)  # p / 2, p % 2, j, h
        pairs = q[:, :, :, :, 0] | q[:, :, :, :, 1] << 4  # p / 2, j, h
        ordered = pairs.permute(0, 2, 1, 4, 5, 3).flatten(3)
        packed[first // ROWS : first // ROWS + count] = ordered.view(torch.int32)
    return packed


def _pack_bytes(values: Tensor) -> Tensor:
    """Canonical bytes [N, K] -> int32 [N, C * 32]."""
    rows, k = values.shape
    chunks = triton.cdiv(k, CHUNK)
    packed = torch.empty(rows, chunks * CHUNK, dtype=torch.uint8, device=values.device)
    for first in range(0, rows, _STEP):
        part = F.pad(values[first : first + _STEP], (0, chunks * CHUNK - k)).view(-1, chunks, 2, 32, 2)
        packed[first : first + _STEP] = part.permute(0, 1, 3, 4, 2).flatten(1)
    return packed.view(torch.int32)


def _by_tile(values: Tensor, tiles: int, groups: int) -> Tensor:
    """[N, groups] -> [T, groups, 64], padded with zeros."""
    rows, known = values.shape
    padded = F.pad(values, (0, groups - known, 0, tiles * ROWS - rows))
    return padded.view(tiles, ROWS, groups).transpose(1, 2).contiguous()


# ---- from words to floats ----


@triton.jit
def _pick_nibbles(packed, SHIFT: tl.constexpr, minus, half: tl.constexpr, ASM: tl.constexpr):
    """Elements SHIFT / 4 of both halves less their zeros, as pairs of floats in words: with q in its mantissa a float
    is 2^m + q; `minus` is a pair of -(2^m + zero)."""
    BF: tl.constexpr = half == tl.bfloat16
    magic: tl.constexpr = "0x43004300" if BF else "0x64006400"
    one: tl.constexpr = "0x3F803F80" if BF else "0x3C003C00"
    pair: tl.constexpr = "bf16x2" if BF else "f16x2"
    if ASM:
        text: tl.constexpr = (
            "{ .reg .b32 t, o, m; mov.b32 m, " + magic + "; mov.b32 o, " + one
            + "; lop3.b32 t, $1, 0x000F000F, m, 0xEA; fma.rn." + pair + " $0, t, o, $2; }"
        )  # fmt: skip
        found = tl.inline_asm_elementwise(
            text, "=r,r,r", [packed >> SHIFT, minus], dtype=tl.int32, is_pure=True, pack=1
        )  # fmt: skip
    else:
        q = ((packed >> SHIFT) & 0x000F000F) | (0x43004300 if BF else 0x64006400)
        found = _add_pairs(q, minus, half)
    return found


@triton.jit
def _pick_int8(packed, SHIFT: tl.constexpr, half: tl.constexpr, ASM: tl.constexpr):
    """Bytes SHIFT / 8 of both halves as pairs of floats in words: (2^m + low seven bits) - (2^m + 128 if negative)."""
    BF: tl.constexpr = half == tl.bfloat16
    magic: tl.constexpr = "0x43004300" if BF else "0x64006400"
    minus: tl.constexpr = "0xBF80BF80" if BF else "0xBC00BC00"
    pair: tl.constexpr = "bf16x2" if BF else "f16x2"
    if ASM:
        text: tl.constexpr = (
            "{ .reg .b32 t, s, o, m; mov.b32 m, " + magic + "; mov.b32 o, " + minus
            + "; lop3.b32 t, $1, 0x007F007F, m, 0xEA; lop3.b32 s, $1, 0x00800080, m, 0xEA; fma.rn." + pair
            + " $0, s, o, t; }"
        )  # fmt: skip
        return tl.inline_asm_elementwise(text, "=r,r", [packed >> SHIFT], dtype=tl.int32, is_pure=True, pack=1)
    base: tl.constexpr = 0x43004300 if BF else 0x64006400
    low, sign = (packed >> SHIFT) & 0x007F007F | base, (packed >> SHIFT) & 0x00800080 | base
    return _add_pairs(low, sign ^ -2147450880, half)  # both signs turned


@triton.jit
def _pick_fp8(packed, SHIFT: tl.constexpr, half: tl.constexpr, ASM: tl.constexpr):
    """Bytes SHIFT / 8 of both halves, e4m3, as pairs of floats in words: shifted to the exponent and mantissa of the
    wider float, then multiplied by the difference of the exponents' biases. Exact for subnormal numbers, too."""
    BF: tl.constexpr = half == tl.bfloat16
    move: tl.constexpr = "4" if BF else "1"
    mask: tl.constexpr = "0x07F007F0" if BF else "0x3F803F80"
    factor: tl.constexpr = "0x7B807B80" if BF else "0x5C005C00"
    pair: tl.constexpr = "bf16x2" if BF else "f16x2"
    if ASM:
        text: tl.constexpr = (
            "{ .reg .b32 t, f, z; mov.b32 f, " + factor + "; mov.b32 z, 0x80008000; shr.u32 t, $1, " + move
            + "; and.b32 t, t, " + mask + "; lop3.b32 t, $1, 0x80008000, t, 0xEA; fma.rn." + pair + " $0, t, f, z; }"
        )  # fmt: skip
        return tl.inline_asm_elementwise(text, "=r,r", [packed << (8 - SHIFT)], dtype=tl.int32, is_pure=True, pack=1)
    raw = packed << (8 - SHIFT)
    moved = (raw >> (4 if BF else 1)) & (0x07F007F0 if BF else 0x3F803F80) | raw & -2147450880
    low, high = _halves(moved, half)
    # The interpreter would flush subnormal halves to zero, so it multiplies in float32.
    scale: tl.constexpr = 2.0**120 if BF else 256.0
    return _pack(low.to(tl.float32) * scale, high.to(tl.float32) * scale, half)


@triton.jit
def _halves(packed, half: tl.constexpr):
    """The two 16-bit floats of each word."""
    return packed.to(tl.int16).to(half, bitcast=True), (packed >> 16).to(tl.int16).to(half, bitcast=True)


@triton.jit
def _pack(low, high, half: tl.constexpr):
    """Words of two 16-bit floats."""
    first = low.to(half).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return first | high.to(half).to(tl.int16, bitcast=True).to(tl.int32) << 16


@triton.jit
def _add_pairs(a, b, half: tl.constexpr):
    a_low, a_high = _halves(a, half)
    b_low, b_high = _halves(b, half)
    return _pack(a_low + b_low, a_high + b_high, half)


@triton.jit
def _pairs(packed, PLACE: tl.constexpr, minus, half: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr):
    """The PLACE-th element of both halves of all words: [rows, W] -> [rows, 2 W]."""
    if KIND == "int4":
        both = _pick_nibbles(packed, 4 * PLACE, minus, half, ASM)
    elif KIND == "int8":
        both = _pick_int8(packed, 8 * PLACE, half, ASM)
    else:
        both = _pick_fp8(packed, 8 * PLACE, half, ASM)
    low, high = _halves(both, half)
    return tl.reshape(tl.join(low, high), [packed.shape[0], 2 * packed.shape[1]])


@triton.jit
def numbers(
    packed, PART: tl.constexpr, PARTS: tl.constexpr, minus, half: tl.constexpr, KIND: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Part PART of PARTS of a chunk's columns, zeros subtracted, not scaled: [rows, 128 / PARTS] of type `half`."""
    rows: tl.constexpr = packed.shape[0]
    PLACES: tl.constexpr = (4 if KIND == "int4" else 2) // PARTS
    if PLACES == 1:
        found = _pairs(packed, PART, minus, half, KIND, ASM)
    elif PLACES == 2:
        a = _pairs(packed, 2 * PART, minus, half, KIND, ASM)
        b = _pairs(packed, 2 * PART + 1, minus, half, KIND, ASM)
        found = tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), [rows, 2 * a.shape[1]])
    else:
        even = tl.join(_pairs(packed, 0, minus, half, KIND, ASM), _pairs(packed, 2, minus, half, KIND, ASM))
        odd = tl.join(_pairs(packed, 1, minus, half, KIND, ASM), _pairs(packed, 3, minus, half, KIND, ASM))
        four = tl.permute(tl.reshape(tl.join(even, odd), [rows, 32, 4]), (0, 2, 1))
        found = tl.reshape(four, [rows, 128])
    return found


@triton.jit
def minus_zero(zeros, place, half: tl.constexpr):
    """The `minus` of `numbers` for int4: -(2^m + zero) of these rows, twice in a word: [rows, 1]."""
    base: tl.constexpr = 0xC300 if half == tl.bfloat16 else 0xE400
    both = tl.zeros_like(place) + 8 if zeros is None else tl.load(zeros + place).to(tl.int32)
    return ((both | base) * 0x10001).to(tl.int32)[:, None]


@triton.jit
def packed_rows(packed, rows, C, KIND: tl.constexpr):
    """Pointers to the first word of these rows."""
    if KIND == "int4":
        return packed + (rows // 64 * C * 1024 + rows % 64 * 16)
    return packed + rows.to(tl.int64) * (C * 32)


@triton.jit
def dequantize_kernel(
    packed,  # int32: `Words.packed`
    scales,  # [T, groups, 64]
    zeros,  # uint8 [T, groups, 64] or None
    out,  # [last - first, K]
    first, last, K, C, groups,
    KIND: tl.constexpr, GROUP: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Dequantize one tile and chunk to 16-bit floats."""
    wait(PDL)
    tile, chunk = tl.program_id(0) + first // 64, tl.program_id(1)
    half: tl.constexpr = out.dtype.element_ty
    W: tl.constexpr = 16 if KIND == "int4" else 32
    rows, inner = tl.arange(0, 64), tl.arange(0, 2 * W)
    row = (tile * 64 - first + rows).to(tl.int64)
    place = packed_rows(packed, tl.minimum(tile * 64 + rows, last - 1), C, KIND) + chunk * (1024 if W == 16 else 32)
    a = tl.load(place[:, None] + tl.arange(0, W)[None, :])
    for part in tl.static_range(64 // W):  # columns that are adjacent in the words of a thread
        column = chunk * 128 + part * 2 * W
        where = (tile * groups + (column // GROUP if GROUP > 0 else 0)) * 64 + rows
        minus = tl.broadcast_to(minus_zero(zeros, where, half), [64, W])
        found = _pairs(a, part, minus, half, KIND, ASM).to(tl.float32) * tl.load(scales + where)[:, None]
        valid = (row + first < last)[:, None] & (column + inner < K)[None, :]
        tl.store(out + row[:, None] * K + (column + inner)[None, :], found.to(half), mask=valid)


def dequantize(weight: PackedWeight, dtype: torch.dtype, first: int = 0, last: int | None = None) -> Tensor:
    """Dequantize outputs `first` (a multiple of 64) to `last`, columns in stored order: [outputs, K] of 16-bit
    dtype."""
    n, k = weight.shape
    last = n if last is None else last
    out = torch.empty(last - first, k, dtype=dtype, device=weight.device)
    dequantize_kernel[(triton.cdiv(last - first, ROWS), weight.chunks)](
        weight.packed, weight.scale, weight.zero, out, first, last, k, weight.chunks, weight.scale.shape[1],
        KIND=weight.kind, GROUP=weight.group, ASM=has_asm(out.device), num_warps=4,
        **launch_options(out.device),
    )  # fmt: skip
    return out
