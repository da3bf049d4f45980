"""What a device gives to the kernels that run on it."""

from functools import cache

import torch
import triton


@cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may have; without a GPU, what a Hopper gives."""
    if device.type != "cuda":
        return 232_448
    return int(triton.runtime.driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"])


def has_asm(device: torch.device) -> bool:
    """Whether kernels can speak the device's own language; Triton's interpreter cannot."""
    return device.type == "cuda"


@cache
def is_hopper(device: torch.device) -> bool:
    """Compute capability 9.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count
