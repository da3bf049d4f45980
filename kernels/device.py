"""Properties of a GPU that decide which kernels run on it and in which shapes. Knows no kernel."""

import os
from functools import cache
from pathlib import Path

import torch
import triton

_MPS_VARIABLES = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
_MPS_PIPE = Path("/tmp/nvidia-mps/control")
"""Where its daemon is found unless a variable names another folder."""


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


@cache
def under_mps() -> bool:
    """Whether kernels of other processes may run beside this one's, by NVIDIA's MPS. Then a kernel must not be used
    whose programs wait for others that may begin after them: two such kernels would wait for ever."""
    return any(map(os.environ.get, _MPS_VARIABLES)) or _MPS_PIPE.exists()
