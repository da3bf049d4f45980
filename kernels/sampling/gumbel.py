"""Gumbel noise for sampling: a pure function of seed, position, sample index and token id; the maximum is exact.

Knows values and ids, neither settings nor cuts.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl


@triton.jit
def uniform(seed, ids, position, sample, BLOCK: tl.constexpr):
    """u of `reference.sampling.gumbel_noise` for BLOCK consecutive ids, the first a multiple of 4. Exact in float32."""
    lanes = tl.min(ids) // 4 + tl.arange(0, BLOCK // 4)
    a, b, c, d = tl.philox(seed, lanes, lanes * 0 + position, lanes * 0 + sample, lanes * 0)
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [BLOCK])
    return ((words >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit
def _rough_gumbel(u):
    """-log(-log(u)) to about 1e-5: the fast logarithm, and a series for u near 1, where that logarithm is
    inaccurate."""
    v = 1.0 - u
    series = v * (1.0 + v * (0.5 + v * (0.33333333 + v * (0.25 + v * (0.2 + v * 0.16666667)))))
    return -tl.log(tl.where(v < 0.0625, series, -tl.log(u)))


@triton.jit
def best_of(x, u, ids, drawn, best, best_id, best_x):
    """The better of the best so far and the best of x + noise; the lowest id among equals.

    All candidates are ranked with approximate noise; exact noise in float64 is computed for those that could win.
    """
    rough = x
    if drawn:
        rough = x + _rough_gumbel(u)
    top = tl.max(rough)
    margin = tl.where(drawn, 1e-4 + 1e-6 * tl.abs(top), 0.0)
    while (top > float("-inf")) & (top + margin > best):
        id = tl.min(tl.where(rough == top, ids, 0x7FFFFFFF))
        chosen = ids == id
        own = tl.sum(tl.where(chosen, x, 0.0))
        score = own
        if drawn:
            exact = tl.sum(tl.where(chosen, u, 0.0)).to(tl.float64)
            score = own + (-tl.log(-tl.log(exact))).to(tl.float32)
        better = (score > best) | ((score == best) & (id < best_id))
        best_id = tl.where(better, id, best_id)
        best_x = tl.where(better, own, best_x)
        best = tl.where(better, score, best)
        rough = tl.where(chosen, float("-inf"), rough)
        top = tl.max(rough)
    return best, best_id, best_x
