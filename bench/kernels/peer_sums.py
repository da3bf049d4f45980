"""A sum over the ranks of two or more GPUs: our kernel over peer memory beside NCCL, both in CUDA graphs.

    python -m bench.kernels.peer_sums [--ranks 2]

Each rank is a process with a GPU of its own. Sums are checked against those of one process before anything is timed.
A line of JSON for each size; microseconds of a sum of [T, 4096] in bfloat16 that is added to a residual.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.kernels.on_ranks import on_ranks
from bench.kernels.timing import elapsed
from kernels.peers import sums as peer_sums
from services.worker.parallel.collectives import dist
from services.worker.parallel.gpu_collectives import GpuCollectives, PeerWords
from services.worker.parallel.topology import Grid

HIDDEN = 4096
_LAUNCHES, _TRIES = 64, 15
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 2048)


def run(rank: int, meeting: str, ranks: int) -> None:
    """One rank."""
    torch.cuda.set_device(rank)
    words = ROWS[-1] * HIDDEN // 2
    others = GpuCollectives(Grid(tensor=ranks), rank, Path(meeting), PeerWords(words, words))
    nccl = dist.ProcessGroupNCCL(dist.FileStore(f"{meeting}-nccl", ranks), rank, ranks)
    for rows in ROWS:
        line = measure(others, nccl, rank, ranks, rows)
        if rank == 0:
            print(json.dumps(line), flush=True)


def measure(others: GpuCollectives, nccl: Any, rank: int, ranks: int, rows: int) -> dict[str, float]:
    """Check, then time, one size."""
    generator = torch.Generator("cuda").manual_seed(rows)
    parts = torch.randn(ranks, rows, HIDDEN, generator=generator, device="cuda").bfloat16()
    residual = torch.randn(rows, HIDDEN, generator=generator, device="cuda").bfloat16()
    expected = (parts.float().sum(0) + residual.float()).bfloat16()
    own = parts[rank].contiguous()
    for _ in range(50):
        found = residual.clone()
        others.add_sum(found, own)
        assert torch.equal(found, expected) or (found.float() - expected.float()).abs().max() < 0.07, rows
    reduced = own.clone()

    def ours() -> None:
        others.add_sum(residual, own)

    def theirs() -> None:
        nccl.allreduce([reduced], dist.ReduceOp.SUM).wait()

    assert peer_sums.serves(own)
    size = rows * HIDDEN * 2
    return {"bytes": size, "ours us": timed(ours) * 1e6, "nccl us": timed(theirs) * 1e6}


def timed(launch: Callable[[], object]) -> float:
    """Seconds of a launch: the median of some replays of a graph of many: as many on all ranks."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_LAUNCHES):
            launch()
    graph.replay()
    return statistics.median(elapsed(graph.replay) for _ in range(_TRIES)) / _LAUNCHES


def main() -> None:
    """Start a process for each rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    ranks = parser.parse_args().ranks
    on_ranks(ranks, run, ranks)


if __name__ == "__main__":
    main()
