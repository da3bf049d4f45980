"""The choice of a token's experts within the programs that multiply with them, in Gluon. Each program makes it anew, so
that no kernel has to make it before them.

A key has the bits of a score, in an order as of integers, and below them those of the expert, the lower number first:
the maximum of integers is found in one instruction of a warp. What is no number comes last.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_LEAST = gl.constexpr(-2147483648)


@gluon.constexpr_function
def _block(experts):
    return 1 << (experts - 1).bit_length()


@gluon.constexpr_function
def _lanes(experts, warps):
    """How threads hold the scores of experts."""
    return gl.BlockedLayout([max(1, _block(experts) // (32 * warps))], [32], [warps], [0])


@gluon.jit
def chosen_keys(logits, E: gl.constexpr, CHOSEN: gl.constexpr, WARPS: gl.constexpr):
    """The keys of the CHOSEN likeliest of E experts, in their order."""
    lanes = gl.arange(0, _block(E), _lanes(E, WARPS))
    scores = gl.load(logits + lanes, mask=lanes < E, other=0.0, cache_modifier=".cg")
    bits = scores.to(gl.int16, bitcast=True).to(gl.int32)
    bits = gl.where(scores == scores, bits ^ ((bits >> 31) & 0x7FFF), -32767)
    keys = gl.where(lanes < E, (bits << 16) + (65535 - lanes), _LEAST)
    best = gl.max(keys, 0)
    found = (best,)
    for _ in gl.static_range(1, CHOSEN):
        keys = gl.where(keys == best, _LEAST, keys)
        best = gl.max(keys, 0)
        found = found + (best,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit
def key_at(keys, place, CHOSEN: gl.constexpr):
    """The key at a place that is known when the program runs."""
    found = keys[0]
    for index in gl.static_range(1, CHOSEN):
        found += (place == index).to(gl.int32) * (keys[index] - keys[0])
    return found


@gluon.jit
def expert_of(key):
    """The expert of a key."""
    return 65535 - (key & 0xFFFF)


@gluon.jit
def score_of(key, half: gl.constexpr):
    """The score of a key, whose dtype is `half`."""
    upper = key >> 16
    return (upper ^ ((upper >> 31) & 0x7FFF)).to(gl.int16).to(half, bitcast=True).to(gl.float32)


@gluon.jit
def divisor_of(logits, keys, E: gl.constexpr, CHOSEN: gl.constexpr, NORMALIZED: gl.constexpr, WARPS: gl.constexpr):
    """What exp(score - best score) is divided by to weight an expert's result."""
    half: gl.constexpr = logits.dtype.element_ty
    top = score_of(keys[0], half)
    if NORMALIZED:
        divisor = 1.0
        for index in gl.static_range(1, CHOSEN):
            divisor += gl.exp(score_of(keys[index], half) - top)
    else:
        lanes = gl.arange(0, _block(E), _lanes(E, WARPS))
        scores = gl.load(logits + lanes, mask=lanes < E, other=float("-inf"), cache_modifier=".cg").to(gl.float32)
        divisor = gl.sum(gl.exp(scores - top), 0)
    return divisor
