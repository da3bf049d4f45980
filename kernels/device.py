"""Properties of a GPU that decide which kernels run on it and in which shapes. Knows no kernel."""

from functools import cache

import torch
import triton


@cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory available to one program; without a GPU, that of a Hopper."""
    if device.type != "cuda":
        return 232_448
    return int(triton.runtime.driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"])


def has_asm(device: torch.device) -> bool:
    """Whether kernels may contain inline PTX; Triton's interpreter does not run it."""
    return device.type == "cuda"


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether the device has compute capability 9.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def processors(device: torch.device) -> int:
    """Number of multiprocessors of the device."""
    return torch.cuda.get_device_properties(device).multi_processor_count
