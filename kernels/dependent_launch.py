"""Programmatic dependent launch: a kernel's programs start, and load what does not depend on the previous kernel, while
the previous kernel still runs. Knows one flag and two waits; every kernel of a chain takes part.

A kernel calls `wait(PDL)` before it reads or writes anything that another kernel writes or reads. Before this call it
may read only weights, and data written before a kernel that no later kernel overlaps: one launched without dependent
launch, or one that calls `wait_exclusive(PDL)` instead; or data written before the previous kernel, if that one waits
before it allows this one to start.
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
    """Allow the next kernel to start, then wait until the previous one has ended and its writes are visible."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def wait_exclusive(PDL: tl.constexpr):
    """Wait as `wait` does, and do not allow the next kernel to start before this one ends: later kernels may then read
    what this kernel or earlier ones wrote without waiting."""
    if PDL:
        gdc_wait()


@triton.jit
def prefetch(pointers):
    """Prefetch the 128-byte lines at `pointers` into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@cache
def _supported(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(device: torch.device) -> dict[str, Any]:
    """Keyword arguments of a launch: dependent launch where the device has it (compute capability 9.0 and newer)."""
    return {"PDL": True, "launch_pdl": True} if _supported(device) else {"PDL": False}
