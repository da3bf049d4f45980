"""Finds the thresholds of top-k, top-p and min-p by counting in sections of the value range, without a sort."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from kernels.sampling.shaping import shaped


@triton.jit
def cut_of(row, V, top, mass, top_k, top_p, min_p, BLOCK: tl.constexpr):
    """-> (threshold, tie value, id limit): tokens survive if x >= threshold and, where x equals the tie value, id <
    limit.

    top: the largest value; mass: the sum of exp(x - top) over the row, needed by top-p only.
    """
    threshold = float("-inf")
    last = float("-inf")  # top-p's own threshold
    limit = V
    if (top_k > 0) & (top_k < V):
        threshold = search(row, V, top, top - 1e4, top_k.to(tl.float32), False, BLOCK)
        if top_p < 1:
            mass = mass_from(row, V, top, threshold, BLOCK)
    if top_p < 1:
        low = tl.maximum(threshold, top - 90.0)  # below it exp(x - top) is 0
        last = search(row, V, top, low, top_p * mass, True, BLOCK)
        limit = tie_limit(row, V, top, last, top_p * mass, BLOCK)
        threshold = tl.maximum(threshold, last)
    if min_p > 0:
        threshold = tl.maximum(threshold, top + tl.log(min_p))
    return threshold, last, limit


@triton.jit
def mass_from(row, V, top, threshold, BLOCK: tl.constexpr):
    """The sum of exp(x - top) over values of at least the threshold."""
    kept = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, V, BLOCK, num_stages=3):
        _, x = shaped(row, start + tl.arange(0, BLOCK))
        kept += tl.where(x >= threshold, tl.exp(x - top), 0.0)
    return tl.sum(kept)


@triton.jit
def search(
    row, V, top, low, target, MASS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest value t such that at least `target` tokens have x >= t (MASS: weighted by exp(x - top)).

    Each pass counts in five sections of the range and continues in the one that holds t, until one value is left.
    """
    high = top
    answer = low
    closed = True  # the section includes its upper end
    searching = True
    while searching:
        width = high - low
        t1, t2, t3, t4 = low + 0.2 * width, low + 0.4 * width, low + 0.6 * width, low + 0.8 * width
        if closed:  # t is usually close to the top
            t1, t2, t3, t4 = high - width / 2, high - width / 8, high - width / 32, high - width / 128
        n1 = tl.zeros([BLOCK], tl.float32)
        n2, n3, n4, n5 = n1, n1, n1, n1
        least = tl.full([BLOCK], float("inf"), tl.float32)
        most = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in tl.range(0, V, BLOCK, num_stages=3):
            ids = start + tl.arange(0, BLOCK)
            _, x = shaped(row, ids)
            weight = tl.exp(x - top) if MASS else tl.where(x > float("-inf"), 1.0, 0.0)
            n1 += tl.where(x >= t1, weight, 0.0)
            n2 += tl.where(x >= t2, weight, 0.0)
            n3 += tl.where(x >= t3, weight, 0.0)
            n4 += tl.where(x >= t4, weight, 0.0)
            n5 += tl.where(x >= high, weight, 0.0)
            inside = (x >= low) & ((x < high) | (closed & (x == high)))
            least = tl.minimum(least, tl.where(inside, x, float("inf")))
            most = tl.maximum(most, tl.where(inside, x, float("-inf")))
        smallest, largest = tl.min(least), tl.max(most)
        if smallest >= largest:
            answer = tl.where(smallest < float("inf"), smallest, low)
            searching = False
        elif closed & (tl.sum(n5) >= target):
            answer = high
            searching = False
        else:
            c1, c2, c3, c4 = tl.sum(n1) >= target, tl.sum(n2) >= target, tl.sum(n3) >= target, tl.sum(n4) >= target
            new_low = tl.where(c4, t4, tl.where(c3, t3, tl.where(c2, t2, tl.where(c1, t1, low))))
            new_high = tl.where(c4, high, tl.where(c3, t4, tl.where(c2, t3, tl.where(c1, t2, t1))))
            closed = closed & c4
            # The section may be too small to divide in float32; its ends are then adjacent values.
            searching = (new_low > low) | (new_high < high)
            low, high, answer = new_low, new_high, new_low
    return answer


@triton.jit
def tie_limit(
    row, V, top, threshold, mass, BLOCK: tl.constexpr,
):  # fmt: skip
    """Tokens equal to the threshold are kept in order of their ids: the first id that is not needed to reach `mass`."""
    above = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, V, BLOCK, num_stages=3):
        ids = start + tl.arange(0, BLOCK)
        _, x = shaped(row, ids)
        above += tl.where(x > threshold, tl.exp(x - top), 0.0)
    kept = tl.maximum(tl.ceil((mass - tl.sum(above)) / tl.exp(threshold - top)), 1.0).to(tl.int32)
    limit = V
    ties = 0
    start = 0
    while (start < V) & (ties <= kept):
        ids = start + tl.arange(0, BLOCK)
        _, x = shaped(row, ids)
        tie = (x == threshold).to(tl.int32)
        rank = ties + tl.cumsum(tie, 0)
        limit = tl.minimum(limit, tl.min(tl.where((tie == 1) & (rank > kept), ids, V)))
        ties += tl.sum(tie)
        start += BLOCK
    return limit
