"""The bare engine loop on one GPU: decode, prefill and mixed steps of the 8B and 1B shapes with random weights.

    python -m bench.engine [--models 8b 1b "8b int4" "70b fp8"] [--only WORD ...] [--fresh] [--out bench/results]

A row's floor is max(bytes / read bandwidth, FLOP / matrix rate), both measured in the same run. Cells already in the
results are not measured again unless --fresh is given. No network and no client take part: see `bench.gpu` for these.
"""

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench import machine
from bench.load.distribution import Distribution
from bench.timing import ceilings, sustained
from services.worker import presets, streaming
from services.worker.config import ModelConfig
from services.worker.engine import Engine
from services.worker.gpu_runner import GpuRunner, GpuStep
from services.worker.job import EngineOptions, Job, SamplingParams
from services.worker.weights import open_checkpoint

MODELS = {"8b": "llama-3.1-8b", "1b": "llama-3.2-1b", "70b": "llama-3.1-70b"}
# A variant is a model, or a model and the bits of its weights; with fp8 weights keys and values are fp8, too.
VARIANTS = ("8b", "1b", "8b fp8", "8b int4", "1b fp8", "1b int4", "70b fp8", "70b int4")
BATCHES = (1, 8, 32, 128, 256)
CONTEXT, SHORT, STEPS = 2100, 128, 96
SPAN, SETTLED = 600, 16
SECONDS = 40.0
# What one H200 has shown: a run that measures less on its own ceilings is still held to these.
LEAST = {"read": 0.95 * 4.3e12, "matmul": 0.95 * 790e12, "fp8": 0.95 * 1580e12}

Cell = dict[str, float]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine can do, as measured in this run, and what the model needs of it."""

    config: ModelConfig
    read: float
    matmul: float
    linear: float
    """FLOP per second of the products in the layers: fp8's if their weights are fp8."""
    weights: float
    """Bytes of weights that a step reads."""
    kv_token: float
    """Bytes of a token's keys and values."""
    sustained: float
    """FLOP per second of bf16 products that go on for a second: the power limit has lowered the clocks by then."""

    @property
    def matrix_numbers(self) -> int:
        """Weights that a step multiplies with, the head included."""
        config = self.config
        return presets.parameters(config) - (0 if config.tied_embeddings else config.vocab_size * config.hidden_size)

    def decode_s(self, batch: int, context: float) -> float:
        """The floor of a step of `batch` answers."""
        config = self.config
        moved = self.weights + batch * context * self.kv_token
        attended = 4 * batch * context * config.layers * config.heads * config.head_dim
        return max(moved / self.read, self._busy_s(batch, batch, attended))

    def prefill_s(self, tokens: int) -> float:
        """The floor of a prompt alone."""
        config = self.config
        attended = 2 * config.layers * config.heads * config.head_dim * tokens**2
        return max(self.weights / self.read, self._busy_s(tokens, 1, attended))

    def _busy_s(self, tokens: int, sampled: int, attended: float) -> float:
        """Seconds of the matrix units."""
        head = self.config.vocab_size * self.config.hidden_size
        layers = 2 * tokens * (self.matrix_numbers - head)
        return layers / self.linear + (2 * sampled * head + attended) / self.matmul


class Loop:
    """An engine and what its steps took."""

    def __init__(self, engine: Engine, limits: Limits) -> None:
        self.engine, self.limits = engine, limits
        assert isinstance(engine.runner, GpuRunner)
        self.runner: GpuRunner = engine.runner
        self.runner.measure_gaps = True
        self.steps: list[GpuStep] = []
        collect = self.runner.collect

        def noted(step: GpuStep) -> Any:
            self.steps.append(step)
            return collect(step)

        self.runner.collect = noted  # type: ignore[method-assign]
        self._keys = iter(range(1 << 30))

    def submit(self, prompt: int, answer: int, prefix: Sequence[int] = ()) -> int:
        """A job with a fresh random prompt, but for its prefix."""
        key = next(self._keys)
        tokens = [*prefix, *random.choices(range(100, self.limits.config.vocab_size - 300), k=prompt - len(prefix))]
        params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
        self.engine.submit(Job(key, tokens, prompt, params))
        return key

    def drain(self) -> None:
        """Until nothing is left to do."""
        while self.engine.has_work():
            self.engine.step()

    def gaps_us(self) -> list[float]:
        """Microseconds that the device idled before each noted step but the first."""
        pairs = zip(self.steps, self.steps[1:], strict=False)
        return [self.runner.gap_s(before, after) * 1e6 for before, after in pairs]


def decode(loop: Loop, batch: int, context: int = CONTEXT) -> Cell:
    """Steps of `batch` answers at about this context."""
    for _ in range(batch):
        loop.submit(context - STEPS // 2 - 16, STEPS + 512)
    stats = loop.engine.stats()
    while (stats := loop.engine.stats()).running < batch or stats.prefill_backlog > batch:
        loop.engine.step()
    for _ in range(16):
        loop.engine.step()
    loop.steps.clear()
    ends = [time.perf_counter()]
    for _ in range(STEPS):
        loop.engine.step()
        ends.append(time.perf_counter())
    seconds = (ends[-1] - ends[0]) / STEPS
    gaps = loop.gaps_us()
    seen = statistics.mean(s.total for s in loop.engine.batch.running) - STEPS / 2
    alone = _replays(loop, batch)
    for sequence in list(loop.engine.batch.running):
        loop.engine.cancel(sequence.job.key)
    loop.drain()
    floor = loop.limits.decode_s(batch, seen)
    return {
        "step ms": seconds * 1e3,
        "tok/s": batch / seconds,
        "graph ms": alone * 1e3,
        "idle us p50": statistics.median(gaps),
        "idle us p99": sorted(gaps)[int(len(gaps) * 0.99)],
        "floor ms": floor * 1e3,
        "share": floor / seconds,
        "context": seen,
    }


def _replays(loop: Loop, batch: int) -> float:
    """Seconds of a replay when the host does nothing else."""
    found = loop.runner.graph_for(batch, batch, True)
    assert found is not None
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(20):
        found.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 20e3


def prefill(loop: Loop, tokens: int, rest_s: float = 0.1, prompts: int = 12) -> Cell:
    """A prompt alone, from its arrival to its first token. Its answer goes on for so long before the next one comes: at
    full power the chip lowers its clocks within some tenths of a second, and in its sleep it lowers them, too."""
    times = []
    for _ in range(prompts):
        began = time.perf_counter()
        key = loop.submit(tokens, 512)
        while not loop.engine.step().tokens:
            pass
        times.append(time.perf_counter() - began)
        while time.perf_counter() - began < times[-1] + rest_s:
            loop.engine.step()
        loop.engine.cancel(key)
        loop.drain()
    times = times[prompts // 2 :]
    seconds = statistics.median(times)
    floor = loop.limits.prefill_s(tokens)
    return {
        "ttft ms": seconds * 1e3,
        "ttft ms max": max(times) * 1e3,
        "tok/s": tokens / seconds,
        "floor ms": floor * 1e3,
        "share": floor / seconds,
    }


def prefill_on_and_on(loop: Loop, tokens: int) -> Cell:
    """Prompts one after the other for more than a second, also against what the chip sustains for as long."""
    cell = prefill(loop, tokens, rest_s=0.0, prompts=36)
    limits = loop.limits
    floor = replace(limits, matmul=limits.sustained, linear=limits.sustained).prefill_s(tokens)
    return {**cell, "sustained floor ms": floor * 1e3, "sustained share": floor * 1e3 / cell["ttft ms"]}


def mixed(loop: Loop, streams: int, prompt: int, seconds: float) -> Cell:
    """Running answers alone, and while one long prompt after the other is computed beside them.

    Their contexts are the same in both, SPAN tokens around CONTEXT: at the end of these they begin anew, with prompts
    that are found in the cache. What happens between two such rounds counts for nothing.
    """
    texts = [random.choices(range(100, 30_000), k=CONTEXT - SPAN // 2) for _ in range(streams)]
    quiet = _round(loop, texts, 0).gaps
    busy, computed, passed = list[float](), 0, 0.0
    while passed < seconds:
        done = _round(loop, texts, prompt)
        busy, computed, passed = busy + done.gaps, computed + done.computed, passed + done.seconds
    return {
        "quiet itl ms p50": _percentile(quiet, 50),
        "quiet itl ms p99": _percentile(quiet, 99),
        "busy itl ms p50": _percentile(busy, 50),
        "busy itl ms p99": _percentile(busy, 99),
        "ratio p99": _percentile(busy, 99) / _percentile(quiet, 99),
        "prefill tok/s": computed / passed,
        "busy s": passed,
    }


@dataclass
class _Round:
    """What answers saw while others were computed beside them."""

    gaps: list[float]
    """Milliseconds between an answer's tokens."""
    computed: int = 0
    """Tokens of prompts beside."""
    seconds: float = 0.0


def _round(loop: Loop, texts: Sequence[Sequence[int]], prompt: int) -> _Round:
    """Answers of SPAN tokens to these texts; a prompt of `prompt` tokens, unless 0, is always computed beside them."""
    keys = {loop.submit(len(text) + 1, SPAN, text) for text in texts}
    told, last = dict.fromkeys(keys, 0), dict[int, float]()
    done, beside = 0, loop.submit(prompt, 1) if prompt else -1
    seen, began, before, over = _Round([]), 0.0, 0, False
    while not over:
        output = loop.engine.step()
        now = time.perf_counter()
        for ended in output.ended:
            over |= ended.key in keys
            if ended.key == beside:
                done, beside = done + 1, loop.submit(prompt, 1)
        for token in output.tokens:
            if token.key in keys:
                told[token.key] += 1
                if began:
                    seen.gaps.append((now - last[token.key]) * 1e3)
                last[token.key] = now
        under_way = sum(s.computed for s in loop.engine.batch.running if s.job.key == beside)
        seen.computed, seen.seconds = done * prompt + under_way - before, now - began
        if not began and min(told.values()) >= SETTLED:
            began, before = now, done * prompt + under_way
    for sequence in [*loop.engine.batch.running, *loop.engine.batch.waiting]:
        loop.engine.cancel(sequence.job.key)
    loop.drain()
    return seen


def closed(loop: Loop, prompt: int, answer: int, width: int, shared: int = 0) -> Cell:
    """`width` requests at once, each that ended replaced until 3 * width (at least 16) are sent or SECONDS have passed:
    what `bench.gpu` does, without a mesh. A step's tokens count when the step is over."""
    prefix = random.choices(range(100, 30_000), k=shared)
    left, began = max(3 * width, 16), time.perf_counter()
    sent: dict[int, float] = {}
    last: dict[int, float] = {}
    first, gaps, tokens, now = Distribution(), Distribution(), 0, began
    for _ in range(width):
        sent[loop.submit(prompt, answer, prefix)] = began
    left -= width
    while loop.engine.has_work():
        output = loop.engine.step()
        now = time.perf_counter()
        for token in output.tokens:
            before = last.get(token.key)
            (first if before is None else gaps).add((now - (sent[token.key] if before is None else before)) * 1e3)
            last[token.key] = now
        tokens += len(output.tokens)
        for _ in output.ended:
            if left and now - began < SECONDS:
                left -= 1
                sent[loop.submit(prompt, answer, prefix)] = now
    return {
        "tok/s": tokens / (now - began),
        "ttft p50": first.percentile(50),
        "ttft p99": first.percentile(99),
        "itl p50": gaps.percentile(50),
        "itl p99": gaps.percentile(99),
        "requests": float(len(sent)),
    }


def _percentile(values: list[float], percent: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * percent / 100))]


def cells(loop: Loop, seconds: float, model: str) -> Iterator[tuple[str, Callable[[], Cell]]]:
    """Name and measurement of each cell of a model, of a variant those that its bits matter for."""
    for tokens in (128, 1950):
        yield f"prefill {tokens}", lambda tokens=tokens: prefill(loop, tokens)  # type: ignore[misc]
    for batch in BATCHES:
        if batch * (CONTEXT + STEPS + 512) > loop.engine.memory.kv_tokens:
            break  # a 70B model's keys and values of so many do not fit beside its weights
        yield f"decode {batch}", lambda batch=batch: decode(loop, batch)  # type: ignore[misc]
    yield "decode 1, short", lambda: decode(loop, 1, SHORT)
    if " " in model:
        return
    yield "prefill 1950, back to back", lambda: prefill_on_and_on(loop, 1950)
    yield "mixed 32 + 8k", lambda: mixed(loop, 32, 8000, seconds)
    for width in BATCHES:
        yield f"loop 1950/200 {width}", lambda width=width: closed(loop, 1950, 200, width)  # type: ignore[misc]
    yield "loop 1950/200 256, 1800 shared", lambda: closed(loop, 1950, 200, 256, 1800)
    for width in (32, 256):
        yield f"loop 128/128 {width}", lambda width=width: closed(loop, 128, 128, width)  # type: ignore[misc]
    yield "loading", lambda: loading(loop)


def held(loop: Loop) -> Cell:
    """What the weights take, the products in the layers alone and all, against 16 bits; tokens that the pool holds."""
    model = loop.runner.model
    layers = [each.linear for each in model.projections() if each.modules != ("lm_head",)]
    products, numbers = sum(x.weight.nbytes for x in layers), sum(x.inputs * x.outputs for x in layers)
    return {
        "weights GiB": model.nbytes / 2**30,
        "of 16 bits": model.nbytes / (2 * presets.parameters(model.config)),
        "products of 16 bits": products / (2 * numbers),
        "KV tokens": float(loop.engine.memory.kv_tokens),
    }


def returning(model: str, prompt: int) -> Cell:
    """A prompt whose blocks were evicted to host memory, until its first token; and as it was computed."""
    options = EngineOptions(
        device="cuda", dtype="bfloat16", max_batch_size=8, step_tokens=8192, max_seq_length=16384, kv_blocks=1100,
        host_kv_bytes=8 << 30,
    )  # fmt: skip
    engine = Engine(presets.folder_of(MODELS[model]), options, lambda *_: None)
    prompts = [random.choices(range(100, 30_000), k=prompt) for _ in range(12)]
    times: list[float] = []
    fetched = 0
    for key, tokens in enumerate(prompts * 2):
        began = time.perf_counter()
        engine.submit(Job(key, tokens, prompt, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)))
        while engine.has_work():
            fetched += sum(ended.cost.fetched_tokens for ended in engine.step().ended)
        times.append(time.perf_counter() - began)
    half = len(prompts)
    return {
        "computed ms": statistics.median(times[2:half]) * 1e3,
        "back from host ms": statistics.median(times[half:]) * 1e3,
        "fetched": fetched / half / prompt,
    }


def loading(loop: Loop) -> Cell:
    """The model's weights as a checkpoint of four shards: how fast its files can be read, and how fast it loads."""
    model = loop.runner.model
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as home:
        folder = Path(home)
        tensors = {name: views[0].cpu() for name, views in model.destinations().items()}
        names = list(tensors)
        owners = {name: f"model-{place * 4 // len(names)}.safetensors" for place, name in enumerate(names)}
        for shard in sorted(set(owners.values())):
            save_file({name: tensors[name] for name in names if owners[name] == shard}, folder / shard)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": owners}))
        checkpoint = open_checkpoint(folder)
        size = sum(path.stat().st_size for path in checkpoint.shards)
        read = min(_seconds(lambda: streaming.read_through(checkpoint)) for _ in range(2))
        load = min(_seconds(lambda: streaming.stream_weights(model, checkpoint, lambda *_: None)) for _ in range(2))
    return {
        "GiB": size / 2**30,
        "read GiB/s": size / 2**30 / read,
        "load GiB/s": size / 2**30 / load,
        "share": read / load,
    }


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def start(model: str, limits: dict[str, float]) -> tuple[Loop, Cell]:
    """An engine of random weights, and what its start took by phase."""
    phases: dict[str, float] = {}
    began = last = time.perf_counter()
    current = "checkpoint"

    def progress(phase: str, done: int, total: int) -> None:
        nonlocal last, current
        now = time.perf_counter()
        phases[f"{current} s"] = phases.get(f"{current} s", 0.0) + now - last
        last, current = now, phase

    options = EngineOptions(
        device="cuda", dtype="bfloat16", max_batch_size=256, step_tokens=8192, chunk_tokens=200, max_seq_length=16384
    )
    name, _, bits = model.partition(" ")
    if bits:
        options = replace(options, quantize=bits, kv_dtype="fp8" if bits == "fp8" else "auto")
    engine = Engine(presets.folder_of(MODELS[name]), options, progress)
    progress("end", 0, 0)
    print(f"{model}: {engine.memory}", flush=True)
    loop = Loop(engine, limits_of(engine, limits, bits == "fp8"))
    return loop, {**phases, "start s": time.perf_counter() - began}


def limits_of(engine: Engine, ceilings: dict[str, float], fp8: bool) -> Limits:
    """What the machine can do for this engine's model. Of an embedding of its own a step reads some rows only."""
    assert isinstance(engine.runner, GpuRunner)
    model, config = engine.runner.model, engine.config
    weights = model.nbytes - (0 if config.tied_embeddings else model.embedding.nbytes)
    return Limits(
        config,
        ceilings["read"],
        ceilings["matmul"],
        ceilings["fp8" if fp8 else "matmul"],
        weights,
        config.kv_bytes_per_token(1 if fp8 else 2),
        ceilings.get("sustained", ceilings["matmul"]),
    )


def main() -> None:
    """Measures what is missing, writes JSON and a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["8b", "1b"], choices=VARIANTS)
    parser.add_argument("--only", nargs="*", help="only cells whose name holds one of these")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the mixed cell")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    wanted = parser.parse_args()
    file = wanted.out / "engine.json"
    found = json.loads(file.read_text()) if file.exists() and not wanted.fresh else {"cells": {}}
    measured = {name: max(value, LEAST.get(name, 0.0)) for name, value in ceilings().items()}
    measured["sustained"] = sustained()
    torch.cuda.empty_cache()
    found |= {"machine": machine.describe(), "ceilings": measured}
    wanted.out.mkdir(parents=True, exist_ok=True)

    def note(name: str, measure: Callable[[], Cell]) -> None:
        if name in found["cells"] or (wanted.only and not any(word in name for word in wanted.only)):
            return
        found["cells"][name] = measure()
        found.setdefault("commits", {})[name] = found["machine"].get("commit", "")
        print(name, _line(found["cells"][name]), flush=True)
        file.write_text(json.dumps(found, indent=1) + "\n")
        (wanted.out / "engine.md").write_text(page(found))

    for model in wanted.models:
        gc.collect()
        torch.cuda.empty_cache()
        loop, phases = start(model, measured)
        note(f"{model} start", lambda phases=phases: phases)  # type: ignore[misc]
        note(f"{model} memory", partial(held, loop))
        for name, measure in cells(loop, wanted.seconds, model):
            note(f"{model} {name}", measure)
        loop.engine.runner.pools.clear()
        del loop
        gc.collect()
        torch.cuda.empty_cache()
        if model in MODELS:
            note(f"{model} prefix of 1950 evicted to host memory", lambda model=model: returning(model, 1950))  # type: ignore[misc]


def page(found: dict[str, Any]) -> str:
    """The cells as Markdown, one table for each kind."""
    lines = ["# The bare engine loop", ""]
    lines += [f"- {name}: {value}" for name, value in found["machine"].items()]
    lines.append(
        f"- ceilings of the run: read {found['ceilings']['read'] / 1e12:.2f} TB/s, "
        f"bf16 product {found['ceilings']['matmul'] / 1e12:.0f} TFLOP/s, "
        f"{found['ceilings']['sustained'] / 1e12:.0f} TFLOP/s when it goes on for a second"
    )
    earlier: dict[str, list[str]] = {}
    for name, commit in found.get("commits", {}).items():
        if commit != found["machine"].get("commit", ""):
            earlier.setdefault(commit, []).append(name)
    lines += [f"- measured earlier, at commit {commit}: {'; '.join(names)}" for commit, names in earlier.items()]
    kinds: dict[tuple[str, ...], list[tuple[str, Cell]]] = {}
    for name, cell in found["cells"].items():
        kinds.setdefault(tuple(cell), []).append((name, cell))
    for columns, rows in kinds.items():
        lines += ["", "| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
        lines += [f"| {name} | " + " | ".join(map(_number, cell.values())) + " |" for name, cell in rows]
    return "\n".join(lines) + "\n"


def _line(cell: Cell) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in cell.items())


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    main()
