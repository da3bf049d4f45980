"""Soft caps and sinks of attention's scores in device code, in powers of two. Names as in `kernels.attention`."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from kernels.operands import Scores

LOG2E = 1.4426950408889634
_LOG2E = tl.constexpr(LOG2E)


def cap_of(scores: Scores) -> float | None:
    """The constant CAP of kernels: the soft cap of scores times log2(e); None: there is none and no code for it."""
    return None if scores.soft_cap is None else scores.soft_cap * LOG2E


@triton.jit
def cap_scores(scores, CAP: tl.constexpr):
    """CAP * tanh(scores / CAP); exp2 goes to 0 or infinity where tanh goes to -1 or 1."""
    return CAP - 2 * CAP / (1 + tl.exp2(scores * (2 * _LOG2E / CAP)))


@triton.jit
def add_sinks(top, total, sinks, heads):
    """The sums of weights with those of the sinks of these query heads."""
    return total + tl.exp2(tl.load(sinks + heads) * _LOG2E - top)
