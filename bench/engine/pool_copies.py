"""KV blocks of the 8B shape out of another process's GPU: gigabytes a second, beside a plain copy between the GPUs.

    python -m bench.engine.pool_copies [--blocks 1 8 32 125 250]

The other process has the second GPU, or the same one where there is only one. A prompt of 2,000 tokens has 125 blocks
of 2 MiB. "gather" is the copy from the other pool to this GPU, "with its writing" also that to the own pool's blocks;
both of random blocks. One line of JSON for each row.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from bench.engine.pool_process import held, make_pool
from report import machine
from services.worker.kvcache.shared_memory import MappedPool
from services.worker.runners.cuda.kv_pool import GpuPool
from services.worker.runners.cuda.sharing.pool import SharedGpuPool

POOL_BLOCKS = 2048
ROUNDS, WARM = 12, 3


def seconds(copy: Callable[[], object]) -> float:
    """Median time of a copy, complete on the device."""
    taken = []
    for _ in range(WARM + ROUNDS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        copy()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[WARM:])


def plain(size: int, other: int) -> float:
    """Bytes a second of a plain copy of this size to the first GPU from another one."""
    source = torch.empty(size, dtype=torch.uint8, device=f"cuda:{other}")
    target = torch.empty(size, dtype=torch.uint8, device="cuda:0")
    return size / seconds(lambda: target.copy_(source))


def fetch(pool: GpuPool, mapped: MappedPool, theirs: list[int], own: list[int]) -> None:
    """Copy blocks to blocks of the own pool."""
    pool.write(own, mapped.copy(theirs))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 8, 32, 125, 250])
    sizes = parser.parse_args().blocks
    machine.need_gpu()
    other = 1 if torch.cuda.device_count() > 1 else 0
    print(json.dumps({"row": "machine", "gpus": machine.gpu(), "other": other}), flush=True)
    pool = make_pool(POOL_BLOCKS)
    each = pool.block_bytes
    for count in (max(sizes), 512):
        print(json.dumps({"row": f"plain copy {count} blocks", "GB/s": plain(count * each, other) / 1e9}), flush=True)
    with held(POOL_BLOCKS, 7, {"CUDA_VISIBLE_DEVICES": f"{other},{1 - other}" if other else "0"}) as process:
        description = process.ask("describe")
        began = time.perf_counter()
        mapped = SharedGpuPool(pool).map(description)
        print(json.dumps({"row": "map", "ms": 1e3 * (time.perf_counter() - began)}), flush=True)
        source = random.Random(1)
        for count in sizes:
            theirs, own = (source.sample(range(1, POOL_BLOCKS), count) for _ in range(2))
            gathered = seconds(partial(mapped.copy, theirs))
            whole = seconds(partial(fetch, pool, mapped, theirs, own))
            equal = pool.read(own) == process.ask("read", theirs)
            row = {
                "row": f"{count} blocks", "gather GB/s": count * each / gathered / 1e9, "gather ms": 1e3 * gathered,
                "with its writing ms": 1e3 * whole, "equal": equal,
            }  # fmt: skip
            print(json.dumps(row), flush=True)
        mapped.close()


if __name__ == "__main__":
    main()
