"""The inner loop of the split kernel for few queries over an 8-bit pool, with keys as rows of the matrix product.

Converting 8 bits to 16 takes about as many instructions as the rest of the loop, so the rest is kept small: tensor
cores take rows in multiples of 16 and columns in multiples of 8, and a key/value head seldom has more than 8 queries in
a decode step. Values are loaded in pairs, because only 16-bit elements can be transposed between shared memory and the
tensor cores' registers; the first and the second elements of the pairs have a product each. Names as in
`kernels.attention`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from kernels.attention.scores import cap_scores

FLOOR = tl.constexpr(-1e30)  # below every score, yet finite: exp2(FLOOR - FLOOR) is 1 and not NaN


@triton.jit
def attend_8bit(
    q,  # [D, M]
    kv,  # [N, ROWS, 2, K, D]
    table,  # int32 [B]
    newest,  # [M]: the last key that each query sees
    low, high, context, head, scale, window,
    K: tl.constexpr, D: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, IEEE: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Keys low to high, in tiles: maximum [M], sum [M], weighted values [M, D]."""
    BLOCK_D: tl.constexpr = q.shape[0]
    M: tl.constexpr = q.shape[1]
    HALF: tl.constexpr = BLOCK_D // 2
    SCALED: tl.constexpr = kv.dtype.element_ty == tl.int8
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    top = tl.full([M], FLOOR, tl.float32)
    sums = tl.zeros([TILE, M], tl.float32)  # by position in a tile: reduced once, after the loop
    first = tl.zeros([HALF, M], tl.float32)
    second = tl.zeros([HALF, M], tl.float32)
    lanes = tl.arange(0, BLOCK_D)
    pair_lanes = tl.arange(0, HALF)
    offsets = tl.arange(0, TILE)
    heads = kv + head * D
    pairs = heads.to(tl.pointer_type(tl.int16), bitcast=True) + K * D // 2
    scales = kv.to(tl.pointer_type(tl.float32), bitcast=True) + head  # int8: after the values of each page
    for start in tl.range(low, high, TILE, num_stages=STAGES):
        keys = start + offsets
        # Memory after the context may hold anything, even NaN: load the last key again and mask it.
        known = tl.minimum(keys, context - 1).to(tl.uint32)
        page = tl.load(table + known // P)
        inner = (known % P).to(tl.int32)
        line = (page * ROWS + inner).to(tl.int64) * (2 * K)
        source = heads + (line * D)[:, None] + lanes[None, :]
        pair_source = pairs + (line * (D // 2))[None, :] + pair_lanes[:, None]
        if D == BLOCK_D:
            k, v = tl.load(source), tl.load(pair_source)
        else:
            k = tl.load(source, mask=(lanes < D)[None, :], other=0.0)
            v = tl.load(pair_source, mask=(pair_lanes < D // 2)[:, None], other=0)
        scores = tl.dot(_floats(k, q.dtype, ASM), q, input_precision=precision) * scale
        if SCALED:
            beside = scales + page.to(tl.int64) * (ROWS * K * D // 2) + (P * K * D // 2 + inner * 2 * K)
            scores *= tl.load(beside)[:, None]
        if CAP is not None:
            scores = cap_scores(scores, CAP)
        seen = keys[:, None] <= newest[None, :]
        if WINDOW:
            seen &= keys[:, None] > newest[None, :] - window
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 0))
        weights = tl.exp2(scores - new_top[None, :])
        fade = tl.exp2(top - new_top)
        sums = sums * fade[None, :] + weights
        if SCALED:
            weights *= tl.load(beside + K)[:, None]
        weights = weights.to(q.dtype)
        v_first, v_second = _split(v, kv.dtype.element_ty, q.dtype, ASM)
        first = tl.dot(v_first, weights, first * fade[None, :], input_precision=precision)
        second = tl.dot(v_second, weights, second * fade[None, :], input_precision=precision)
        top = new_top
    mixed = tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), [BLOCK_D, M])
    return top, tl.sum(sums, 0), tl.trans(mixed)


@triton.jit
def _floats(x, kind: tl.constexpr, ASM: tl.constexpr):
    """Pool elements in the dtype of the products; e4m3 is converted to float16 four elements at a time."""
    if ASM and x.dtype == tl.float8e4nv and kind == tl.float16:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }",
            "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    return x.to(kind)


@triton.jit
def _split(pairs, stored: tl.constexpr, kind: tl.constexpr, ASM: tl.constexpr):
    """The first and the second bytes of pairs (int16), in the dtype of the products."""
    if ASM and stored == tl.float8e4nv and kind == tl.float16:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 l, h; prmt.b32 t, $2, 0, 0x3120; mov.b32 {l, h}, t;"
            " cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }",
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    first = pairs.to(tl.int8).to(stored, bitcast=True)
    second = (pairs >> 8).to(tl.int8).to(stored, bitcast=True)
    return first.to(kind), second.to(kind)
