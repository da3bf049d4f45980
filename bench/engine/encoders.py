"""Encoders, and a decoder that embeds, on one GPU: vectors beside transformers' first, then throughput.

    python -m bench.engine.encoders [--shapes minilm bert-base qwen3-0.6b] [--quantize fp8] [--out FILE]

Random weights in the shapes of MiniLM-L6, BERT-base (BGE-base) and Qwen3-Embedding-0.6B, bfloat16. A share is that of
the rate of products of 8192 x 8192 x 8192: the network's multiplications and additions, attention's included, over
seconds and that rate. It is measured for as long as the batches, just before them, so that the clocks are those of
the batches. Batches pass through the runner from token ids to vectors on the host, two in flight. Latency is measured
through the engine: jobs as gateways send them arrive at random at 70% of the measured throughput. The exit code is 1 if
vectors differ.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from bench import table
from bench.kernels.timing import sustained
from bench.table import Figure
from services.worker.build.choose import resolve_engine
from services.worker.build.encoders.assemble import BuiltEncoder, build_encoder
from services.worker.job import EncodeTask, Job, SamplingParams, StepOutput
from services.worker.options import EngineOptions
from services.worker.runners.base import TextTokens
from services.worker.runners.cuda.encoders.runner import GpuTextRunner, LaunchedBatch

SHAPES: Mapping[str, Mapping[str, int]] = {
    "minilm": {
        "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 12,
    },
    "bert-base": {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    },
    "qwen3-0.6b": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151669,
    },
}  # fmt: skip
"""A shape with heads of keys and values is that of a decoder, whose last token's vector counts."""
LENGTH, QUERY = 256, 8
JOB_TEXTS = 16
BATCHES = (1, 8, 32, 256)
LOAD, GOAL = 0.7, 0.6
LEAST_COSINE = {"": 0.999, "fp8": 0.99, "int8": 0.99, "int4": 0.95, "nf4": 0.95}
MEASURED_S = 1.5
LOAD_S = 4.0
_KEY = 7


def texts(count: int, length: int) -> list[TextTokens]:
    """Random tokens."""
    return [TextTokens(array("i", random.choices(range(1000, 30000), k=length))) for _ in range(count)]


def operations(shape: Mapping[str, int], tokens: int, length: int) -> float:
    """Multiplications and additions of texts of one length."""
    hidden, inner, heads = shape["hidden_size"], shape["intermediate_size"], shape["num_attention_heads"]
    of_keys = shape.get("num_key_value_heads", heads)
    width = heads * shape.get("head_dim", hidden // heads)
    products = hidden * width * (2 + 2 * of_keys / heads) + (3 if is_decoder(shape) else 2) * hidden * inner
    seen = length / 2 if is_decoder(shape) else length
    return float(shape["num_hidden_layers"] * tokens * (2 * products + 4 * width * seen))


def is_decoder(shape: Mapping[str, int]) -> bool:
    """Whether its tokens see earlier ones alone."""
    return "num_key_value_heads" in shape


def make_model(shape: Mapping[str, int], folder: Path) -> Any:
    """A checkpoint with random weights -> transformers' model of it, in float32 on the CPU."""
    from transformers import BertConfig, BertModel, Qwen3Config, Qwen3Model

    torch.manual_seed(0)
    if not is_decoder(shape):
        make: Any = BertModel
        model = make(BertConfig(**shape), add_pooling_layer=False).eval()
        model.save_pretrained(folder)
        return model
    make = Qwen3Model
    model = make(Qwen3Config(**shape)).eval().bfloat16()
    model.save_pretrained(folder)
    modules = [
        {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for place, (path, kind) in enumerate([("", "Transformer"), ("1_Pooling", "Pooling")])
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    return model.float()


def pooled(model: Any, text: TextTokens) -> torch.Tensor:
    """What transformers makes of a text alone, pooled."""
    hidden: torch.Tensor = model(input_ids=torch.tensor([list(text.token_ids)])).last_hidden_state[0]
    return hidden[-1] if model.config.model_type == "qwen3" else hidden.mean(0)


def cosine(model: Any, runner: GpuTextRunner[Any]) -> float:
    """The least cosine of vectors and those of transformers, of texts of mixed lengths alone and in a full batch."""
    batch = texts(3, LENGTH) + texts(3, QUERY) + texts(1, 1) + texts(1, 500)
    left = runner.most_tokens - sum(len(text.token_ids) for text in batch)
    full = batch + texts(min(runner.most_texts - len(batch), left // LENGTH), LENGTH)
    got = torch.stack([torch.from_numpy(runner.collect(runner.launch(each))[: len(batch)].copy())
                       for each in (batch, full)])  # fmt: skip
    with torch.inference_mode():
        want = torch.stack([pooled(model, text) for text in batch])
    return float(torch.nn.functional.cosine_similarity(got, want, dim=2).min())


def throughput(runner: GpuTextRunner[Any], count: int, length: int) -> float:
    """Texts per second of batches of `count` texts, as many as fit into each of the runner's batches."""
    fit = max(1, min(count, runner.most_texts, runner.most_tokens // length))
    given = [texts(fit, length) for _ in range(4)]
    flying: list[LaunchedBatch] = []
    done, begin, end = 0, 0.0, float("inf")
    for turn in range(1 << 20):
        if turn == 4:
            while flying:
                runner.collect(flying.pop(0))
            begin = time.perf_counter()
            end, done = begin + MEASURED_S, 0
        flying.append(runner.launch(given[turn % 4]))
        if len(flying) == runner.depth:
            runner.collect(flying.pop(0))
            done += fit
            if time.perf_counter() >= end:
                break
    while flying:
        runner.collect(flying.pop(0))
        done += fit
    return done / (time.perf_counter() - begin)


def alone_ms(runner: GpuTextRunner[Any], length: int) -> list[float]:
    """Milliseconds of one text after another, from tokens to its vector."""
    (text,) = texts(1, length)
    times = []
    for _ in range(300):
        began = time.perf_counter()
        runner.collect(runner.launch([text]))
        times.append((time.perf_counter() - began) * 1e3)
    return times[50:]


class Arrivals:
    """An `EngineEvents` that keeps the moments of ends."""

    def __init__(self) -> None:
        self.ended: dict[int, float] = {}

    def launched(self, predicted_s: float, /) -> None:
        """Nothing is to be done."""

    def begun(self, output: StepOutput, /) -> None:
        """Texts have no first tokens."""

    def stepped(self, output: StepOutput, /) -> None:
        """Keep when each job ended."""
        now = time.perf_counter()
        assert not any(end.error for end in output.ended)
        self.ended.update({end.key: now for end in output.ended})


def latencies_ms(built: BuiltEncoder, rate: float) -> list[float]:
    """Milliseconds of jobs of 16 texts of 256 tokens that arrive at random, `rate` texts a second."""
    ends, stop, each = Arrivals(), threading.Event(), JOB_TEXTS
    engine, chance = built.engine, random.Random(5)
    thread = threading.Thread(target=engine.run, args=(ends, stop))
    tokens = array("i", chance.choices(range(1000, 30000), k=each * LENGTH))
    params, task = SamplingParams(1), EncodeTask((LENGTH,) * each)
    began: dict[int, float] = {}
    thread.start()
    try:
        due = time.perf_counter()
        last, key = due + LOAD_S, _KEY
        while due < last:
            if (left := due - time.perf_counter()) > 0:
                time.sleep(left)
            key += 1
            began[key] = due  # Late arrivals count from when they were due.
            engine.submit(Job(key, tokens, len(tokens), params, encode=task))
            due += chance.expovariate(rate / each)
        while len(ends.ended) < len(began):
            time.sleep(0.001)
    finally:
        stop.set()
        engine.wake()
        thread.join()
    return [(ends.ended[key] - at) * 1e3 for key, at in began.items()]


def measure(name: str, options: EngineOptions) -> list[Figure]:
    """All figures of one shape."""
    shape = SHAPES[name]
    with tempfile.TemporaryDirectory(prefix="weft-encoders-") as home:
        began = time.perf_counter()
        model = make_model(shape, Path(home))
        written = time.perf_counter()
        built = build_encoder(Path(home), resolve_engine(options, Path(home), encodes=True), lambda *_: None)
        started = time.perf_counter() - written
    runner: Any = built.engine.runner
    assert isinstance(runner, GpuTextRunner)
    least = LEAST_COSINE[options.quantize or ""]
    figures = [
        Figure("start, kernels compiled", started, "s", note=f"checkpoint written in {written - began:.1f} s"),
        Figure("least cosine with transformers in float32", cosine(model, runner), "", f">= {least}"),
    ]
    best = 0.0
    for count in BATCHES:
        peak = sustained(MEASURED_S)
        rate = throughput(runner, count, LENGTH)
        best = max(best, rate)
        share = operations(shape, 1, LENGTH) * LENGTH * rate / peak
        goal = f">= {GOAL}" if count == BATCHES[-1] and not options.quantize else ""
        note = f"{rate:,.0f} texts/s; matrix rate {peak / 1e12:.0f} TFLOP/s"
        figures.append(Figure(f"{count} texts of {LENGTH} tokens: share of the matrix rate", share, "", goal, note))
    for length in (QUERY, LENGTH):
        times = alone_ms(runner, length)
        p99 = np.percentile(times, 99)
        figures.append(
            Figure(f"one text of {length} tokens, p50", statistics.median(times), "ms", note=f"p99 {p99:.3f}")
        )
    figures.append(Figure("many texts of 8 tokens", throughput(runner, runner.most_texts, QUERY), "texts/s"))
    times = latencies_ms(built, LOAD * best)
    title = f"job of {JOB_TEXTS} texts at {LOAD:.0%} of {best:,.0f} texts/s"
    figures += [
        Figure(f"{title}, p{percent}", float(np.percentile(times, percent)), "ms", note=f"{len(times)} jobs")
        for percent in (50, 99)
    ]
    return figures


def main() -> int:
    """The program. -> its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["minilm", "bert-base"])
    parser.add_argument("--quantize", choices=[name for name in LEAST_COSINE if name])
    parser.add_argument("--step-tokens", type=int, help="most tokens of a batch; absent: as it serves")
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    asked = parser.parse_args()
    out = Console(width=150 if not sys.stdout.isatty() else None)
    table.show_machine(out)
    given = {"step_tokens": asked.step_tokens} if asked.step_tokens else {}
    options = EngineOptions.model_validate({"engine": "gpu", "quantize": asked.quantize, **given})
    figures: list[Figure] = []
    for name in asked.shapes:
        new = measure(name, options)
        table.show(f"{name}, {asked.quantize or 'bfloat16'}", new, out)
        figures += [Figure(f"{name}: {each.name}", each.value, each.unit, each.goal, each.note) for each in new]
    if asked.out:
        table.save(asked.out, figures)
    return 1 if any("cosine" in each.name and not each.met for each in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
