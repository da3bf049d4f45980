"""Programmatic dependent launch: a kernel's programs start, and fetch what does not depend on its predecessor, while
the predecessor still runs. Knows one flag and one wait; every kernel of a chain takes part.

A kernel says `begin(PDL)` before it touches anything that another kernel writes or reads. What it does before that line
may use weights only, and what lay there before some kernel began that lets nobody start early: one without dependent
launch, or one that says `settle(PDL)` instead.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait(PDL: tl.constexpr):
    """Let the next kernel start, then wait until the previous one has ended and its writes are visible."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def wait_exclusive(PDL: tl.constexpr):
    """Wait as `begin` does, and let nobody start before the end: whoever comes later may read at once what this kernel
    or those before it wrote."""
    if PDL:
        gdc_wait()


@triton.jit
def prefetch(pointers):
    """Fetch the 128-byte lines of `pointers` into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@cache
def _supported(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(device: torch.device) -> dict[str, Any]:
    """Keyword arguments of a launch: dependent launch where the device has it (compute capability 9.0 and newer)."""
    return {"PDL": True, "launch_pdl": True} if _supported(device) else {"PDL": False}
