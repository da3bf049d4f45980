"""An account of a step on two tensor ranks: what each kernel adds to its time, on both GPUs.

    python -m bench.engine.rank_account [--model 8b] [--quantize fp8] [--steps 1 32 1950] [--eager] [--out FOLDER]

A step is 1 to 256 answers, each with about CONTEXT tokens, or a prompt alone (more), as a CUDA graph or kernel by
kernel. A kernel's `us` is the time from the end of the kernel before it to its own end, whatever of it ran before;
`wait` is the part of this in which it had not begun. A file for each step and rank.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from bench.engine.grids import MODELS
from bench.engine.loop import CONTEXT
from bench.kernels.on_ranks import on_ranks
from bench.kernels.timing import elapsed
from services.worker.build.ranks.grid import Orders, load_rank
from services.worker.build.weights import open_source
from services.worker.loader import presets
from services.worker.options import EngineOptions
from services.worker.runners.cuda import graphs
from services.worker.runners.cuda.runner import GpuRunner
from services.worker.runners.cuda.step_words import Kind, StepRows
from services.worker.runners.step import Rows

MOST_ANSWERS = 256
_PARTS = ("us", "wait", "duration")
_REPLAYS, _TRIES, _PROFILED = 8, 9, 6


def runner_of(rank: int, meeting: str, model: str, quantize: str | None) -> GpuRunner:
    """A rank's runner, with no graph."""
    torch.cuda.set_device(rank)
    graphs.GRAPH_TOKENS, graphs.LARGE_TOKENS, graphs.GRAPH_ROWS = (), (), (1,)  # type: ignore[assignment]
    GpuRunner.warm_up_eager_kernels = lambda self: None  # type: ignore[method-assign]
    GpuRunner.capture = lambda self, progress: None  # type: ignore[method-assign]
    options = EngineOptions(
        engine="gpu", max_batch_size=256, step_tokens=8192, chunk_tokens=200, max_seq_length=8192, quantize=quantize,
        kv_dtype="fp8" if quantize == "fp8" else "auto", tensor_parallel=2, dtype="bfloat16",
    )  # fmt: skip
    folder = presets.folder_of(MODELS[model])
    orders = Orders(rank, str(folder), {}, meeting, 0, 8192, 4, [])
    own, _ = load_rank(open_source(folder, options), None, options, orders, lambda *_: None)
    assert isinstance(own.runner, GpuRunner)
    return own.runner


class Step:
    """A step that is computed again and again."""

    def __init__(self, runner: GpuRunner, size: int, eager: bool) -> None:
        """Of `size` answers, or of a prompt of this many tokens. eager: its kernels are launched one by one."""
        self._runner, answers = runner, size <= MOST_ANSWERS
        rows, length = (size, 1) if answers else (1, size)
        self.sizes, self.kind = (rows * length, rows, rows), Kind.ANSWERS if answers else Kind.ANY
        self._long = 0 if answers else length
        contexts = [CONTEXT] * rows if answers else [length]
        ids = np.random.default_rng(1).integers(100, 30000, rows * length).astype(np.int32)
        blocks = -(-contexts[0] // runner.block_size)
        tables = torch.arange(1, rows * blocks + 1, dtype=torch.int32, device="cuda").view(rows, blocks)
        runner._tables[:rows, :blocks] = tables
        step = StepRows(Rows(list(range(rows)), [length] * rows, [1] * rows, ids), contexts)
        runner._send_alone(step, self.sizes)
        self.launch: Callable[[], object] = self._compute
        self._compute()
        torch.cuda.synchronize()
        if not eager:
            graph = torch.cuda.CUDAGraph()
            with graphs.nothing_collected(), torch.cuda.graph(graph):
                self._compute()
            self.launch = graph.replay

    def _compute(self) -> None:
        self._runner.forward.run(self.sizes, self.kind, self._long)

    @torch.inference_mode()
    def seconds(self) -> float:
        """The median time of a step among others."""
        times = []
        for _ in range(_TRIES):
            self._together()
            times.append(elapsed(lambda: [self.launch() for _ in range(_REPLAYS)]) / _REPLAYS)
        return statistics.median(times)

    @torch.inference_mode()
    def account(self) -> list[dict[str, Any]]:
        """Its kernels in their order: name, us, wait, duration, each the median of some steps."""
        self._together()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(_PROFILED):
                self.launch()
            torch.cuda.synchronize()
        events: list[Any] = [event for event in seen.events() if event.device_type.name == "CUDA"]
        events.sort(key=lambda event: event.time_range.start)
        each = len(events) // _PROFILED
        steps = [events[at * each : (at + 1) * each] for at in range(1, _PROFILED)]
        return [_line([step[place] for step in steps], steps, place) for place in range(1, each)]

    def _together(self) -> None:
        torch.cuda.synchronize()
        self._runner.ops._others.least(1)  # type: ignore[attr-defined]


def _line(found: list[Any], steps: list[list[Any]], place: int) -> dict[str, Any]:
    ends = [step[place - 1].time_range.end for step in steps]
    spans = [each.time_range for each in found]
    return {
        "name": found[0].name,
        "us": statistics.median(span.end - end for span, end in zip(spans, ends, strict=True)),
        "wait": statistics.median(max(0.0, span.start - end) for span, end in zip(spans, ends, strict=True)),
        "duration": statistics.median(span.end - span.start for span in spans),
    }


def summary(lines: list[dict[str, Any]]) -> list[str]:
    """Lines of text: the sums of each kernel, then the kernels at the begin, around the middle and at the end."""
    totals: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        totals.setdefault(line["name"], []).append(line)
    added = [
        {"name": f"{len(some):3d} x {name}", **{part: sum(line[part] for line in some) for part in _PARTS}}
        for name, some in totals.items()
    ]
    added.sort(key=lambda line: -line["us"])
    middle = len(lines) // 2
    return [_text(line) for line in [*added, *lines[:16], *lines[middle : middle + 30], *lines[-16:]]]


def _text(line: dict[str, Any]) -> str:
    return f"{line['name'][:80]:80s} " + " ".join(f"{part} {line[part]:9.2f}" for part in _PARTS)


def run(rank: int, meeting: str, wanted: argparse.Namespace) -> None:
    """One rank."""
    with torch.inference_mode():
        runner = runner_of(rank, meeting, wanted.model, wanted.quantize)
        for size in wanted.steps:
            step = Step(runner, size, wanted.eager)
            seconds = step.seconds()
            lines = step.account()
            out = wanted.out / f"account-{wanted.model}-{wanted.quantize or 'bf16'}-{size}-{rank}.txt"
            total = sum(line["us"] for line in lines)
            head = f"{size}: rank {rank}: step {seconds * 1e3:.3f} ms, under the profiler {total / 1e3:.3f} ms"
            print(head, flush=True)
            out.write_text("\n".join([head, *summary(lines)]) + "\n")


def main() -> None:
    """Start a process for each rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b", choices=MODELS)
    parser.add_argument("--quantize", choices=["fp8", "int8", "int4"])
    parser.add_argument("--steps", type=int, nargs="*", default=[1, 32, 1950])
    parser.add_argument("--eager", action="store_true", help="launch kernels one by one")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    wanted = parser.parse_args()
    wanted.out.mkdir(parents=True, exist_ok=True)
    on_ranks(2, run, wanted)


if __name__ == "__main__":
    main()
