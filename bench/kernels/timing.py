"""Times kernel launches on one GPU, and measures the GPU's ceilings: read bandwidth, matrix rates."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

DTYPE = torch.bfloat16
ROTATED_BYTES = 300 << 20
Launch = Callable[[], object]


def elapsed(launch: Launch) -> float:
    """Seconds of the work that `launch` puts on the stream, by CUDA events."""
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    begin.record()
    launch()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def timed(launches: Sequence[Launch], target_ms: float = 4.0, tries: int = 7) -> float:
    """Seconds per launch: the median replay of a CUDA graph that contains all launches several times."""
    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    repeats = max(1, 24 // len(launches))
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for launch in launches:
                launch()

    def replay(times: int) -> float:
        def replays() -> None:
            for _ in range(times):
                graph.replay()

        return elapsed(replays) / times

    times = max(1, int(target_ms / 1e3 / replay(1)))
    median = statistics.median(replay(times) for _ in range(tries))
    return median / (repeats * len(launches))


def rand(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    """A tensor of normal random numbers on the GPU."""
    return torch.randn(shape, device="cuda", dtype=dtype)


def copies(make: Callable[[], Tensor]) -> list[Tensor]:
    """Enough tensors to exceed the L2 cache when they are used in turn."""
    first = make()
    count = max(1, -(-ROTATED_BYTES // (first.numel() * first.element_size())))
    return [first, *(make() for _ in range(min(count, 64) - 1))]


def ceilings() -> dict[str, float]:
    """Bytes per second copied (read + written) and read, bf16 and fp8 FLOP per second."""
    source = torch.empty(1 << 30, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    copy = timed([lambda: target.copy_(source)], 30)
    big, vector = source.view(torch.bfloat16).view(-1, 8192), rand(8192)
    read = min(timed([lambda: source.sum()], 30), timed([lambda: torch.mv(big, vector)], 30))
    x, w = rand(8192, 8192), rand(8192, 8192)
    product = timed([lambda: x @ w], 60)
    small, other = x[:4096, :4096].contiguous(), w[:4096, :4096].contiguous()
    product_small = timed([lambda: small @ other], 60)
    octets, scale = (x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)), torch.ones((), device="cuda")
    scaled = partial(torch._scaled_mm, scale_a=scale, scale_b=scale, out_dtype=DTYPE, use_fast_accum=True)
    product_fp8 = timed([lambda: scaled(octets[0], octets[1].t())], 60)
    size = source.numel() * 4
    return {
        "copy": 2 * size / copy,
        "read": size / read,
        "matmul": max(2 * 8192**3 / product, 2 * 4096**3 / product_small),
        "fp8": 2 * 8192**3 / product_fp8,
    }


def sustained(seconds: float = 1.0) -> float:
    """bf16 FLOP per second of products over `seconds`, after the power limit has lowered the clocks."""
    x, w = rand(8192, 8192), rand(8192, 8192)
    out = torch.empty_like(x)
    count = int(seconds / timed([partial(torch.mm, x, w, out=out)], 20))

    def go_on() -> None:
        for _ in range(count):
            torch.mm(x, w, out=out)

    go_on()
    return 2 * 8192**3 * count / elapsed(go_on)
