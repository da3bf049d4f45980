"""The pools of blocks for CPU and GPU (here on a CPU): contents move between them, and host memory is taken late."""

import resource
from pathlib import Path

import pytest
import torch

from kernels import kv_pages
from services.worker.runners.cpu.kv_pool import CpuPool
from services.worker.runners.cuda.kv_pool import GpuPool
from tests.tiny_config import tiny_config

CONFIG = tiny_config(layers=3, head_dim=64)


@pytest.mark.parametrize("stored", [torch.bfloat16, kv_pages.FP8, kv_pages.INT8], ids=str)
def test_blocks_move_from_one_devices_pool_to_the_others(stored: torch.dtype) -> None:
    gpu, cpu = GpuPool(CONFIG, 16, stored, torch.device("cpu")), CpuPool(CONFIG, 5, 16, stored)
    gpu.allocate(5)
    assert gpu.block_bytes == cpu.block_bytes
    for layer in gpu.layers:
        kv_pages.bytes_of(layer).random_(1, 255)
    contents = gpu.read([4, 2])
    assert {len(block) for block in contents} == {gpu.block_bytes}
    parts = gpu.read_layers([4, 2], 0, 1), gpu.read_layers([4, 2], 1, 3)
    assert [first + rest for first, rest in zip(*parts, strict=True)] == contents
    cpu.write([1, 5], contents)
    assert cpu.read_layers([1, 5], 1, 3) == parts[1]
    assert cpu.read([1, 2, 5]) == [contents[0], bytes(cpu.block_bytes), contents[1]]
    gpu.write([3, 1], cpu.read([5, 1]))
    assert gpu.read([1, 2, 3, 4]) == [contents[0], contents[1], contents[1], contents[0]]
    for pool, mine in ((gpu, [4, 2]), (cpu, [1, 5])):
        pool.scrub(mine[:1])
        assert pool.read(mine) == [bytes(pool.block_bytes), contents[1]], "only the cleared block is zero"


def test_host_memory_is_taken_as_blocks_are_used() -> None:
    one = CpuPool(CONFIG, 1, 16, torch.float32).block_bytes
    count, before = (256 << 20) // one, resident()
    pool = CpuPool(CONFIG, count, 16, torch.float32)
    assert resident() - before < 64 << 20
    used = list(range(count // 2, count))
    pool.write(used, [bytes([7]) * one] * len(used))
    assert resident() - before > 96 << 20
    assert pool.read([1, count // 2 - 1, count]) == [bytes(one)] * 3
    assert pool.read([count - 1]) == [bytes([7]) * one]
    assert all(layer.data_ptr() % 64 == 0 for layer in pool.layers)


def resident() -> int:
    """Bytes of this process's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
