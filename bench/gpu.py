"""The whole mesh on one GPU over gRPC: gateways, scheduler, worker and clients in processes of their own, on loopback.

    python -m bench.gpu [--models 8b 1b] [--formats bf16 fp8 int4] [--only WORD ...] [--gateways 4] [--fresh]
                        [--out bench/results]

Each row sends N requests at once with fresh random prompts and replaces each finished one until 3N (at least 16) have
been sent or 40 s (fp8, int4 and answers of 1,024: 25 s) have passed; answers of 16 tokens are over too soon for that:
5,000 are asked for. tok/s are output tokens over the time from the first submit to the last finish. Rows already in the
results are not measured again unless --fresh is given. Beside each is what vLLM 0.25.1 reached with the same method on
the same GPU, in its own process (answers of 16 tokens: through its HTTP server); what the floor of `bench.floors` would
allow; and what the bare engine loop reached, where `bench.engine` has measured it into the same folder at the same
commit.
"""

import argparse
import asyncio
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import figures, mesh
from bench.floors import FORMATS, loop_tokens_per_s
from report import machine
from weft.load import metrics
from weft.load.plan import Plan
from weft.load.run import run

MODELS = {"8b": "random:llama-3.1-8b", "1b": "random:llama-3.2-1b"}
PREFIX = 1800
DERIVED = ("tok/s over vLLM's", "over the floor's", "over the bare loop's")
COLUMNS = ("tok/s", "ttft p50", "ttft p99", "itl p50", "itl p99", "request p99")
SHORT = 16
"""Tokens of a query that is rewritten, and of its answer."""


@dataclass(frozen=True, slots=True)
class Row:
    """What a row asks for."""

    model: str
    inputs: int
    outputs: int
    concurrency: int
    prefix: int = 0
    format: str = "bf16"

    @property
    def name(self) -> str:
        """For the table."""
        shared = f", {self.prefix} shared" if self.prefix else ""
        kind = "" if self.format == "bf16" else f" {self.format}"
        return f"{self.model}{kind} {self.inputs}/{self.outputs}{shared}, {self.concurrency} at a time"

    @property
    def seconds(self) -> float:
        """After which no request is sent."""
        return 40.0 if self.format == "bf16" and self.outputs < 1000 else 25.0

    @property
    def requests(self) -> int:
        """Most that are sent."""
        if self.outputs == SHORT:
            return 5000
        single_wave = self.format == "int4" and self.concurrency == 256
        return self.concurrency if single_wave else max(3 * self.concurrency, 16)


# In the order of COLUMNS, as far as they are known; None where a figure is not.
VLLM: Mapping[str, tuple[float | None, ...]] = {
    "8b 1950/200, 1 at a time": (193, 46.8, 47.9, 4.97, 5.60),
    "8b 1950/200, 8 at a time": (1108, 257, 359, 5.46, 6.05),
    "8b 1950/200, 32 at a time": (2227, 554, 1482, 7.19, 185),
    "8b 1950/200, 128 at a time": (2931, 605, 6048, 14.5, 224),
    "8b 1950/200, 256 at a time": (2976, 3397, 12445, 25.4, 392),
    "8b 1950/200, 1800 shared, 1 at a time": (199, 15.9, None, 4.95, None),
    "8b 1950/200, 1800 shared, 32 at a time": (4400, 155, None, 6.47, None),
    "8b 1950/200, 1800 shared, 256 at a time": (10012, 607, None, 19.8, None),
    "8b 128/128, 1 at a time": (202, 15.7, None, 4.86, None),
    "8b 128/128, 32 at a time": (5155, 93, None, 5.46, None),
    "8b 128/128, 256 at a time": (14343, 432, None, 10.8, None),
    "8b fp8 1950/200, 1 at a time": (266, 35.8, 38.1, 3.59, 4.24),
    "8b fp8 1950/200, 8 at a time": (1581, 151, None, 3.93, None),
    "8b fp8 1950/200, 32 at a time": (3087, 343, None, 5.81, None),
    "8b fp8 1950/200, 128 at a time": (4399, 387, None, 10.8, None),
    "8b fp8 1950/200, 256 at a time": (4427, 2596, None, 18.4, None),
    "8b int4 1950/200, 1 at a time": (238, 49.3, 49.8, 3.97, 4.55),
    "8b int4 1950/200, 8 at a time": (1313, 217, None, 4.48, None),
    "8b int4 1950/200, 32 at a time": (2522, 486, None, 6.34, None),
    "8b int4 1950/200, 128 at a time": (3144, 694, None, 14.0, None),
    "8b int4 1950/200, 256 at a time": (3357, 5342, None, 24.1, None),
    "1b 1950/200, 1 at a time": (498, 12.6, 20.8, 1.75, 2.88),
    "1b 1950/200, 8 at a time": (3070, 49, None, 2.42, None),
    "1b 1950/200, 32 at a time": (7355, 87, None, 3.15, None),
    "1b 1950/200, 128 at a time": (13370, 111, None, 4.88, None),
    "1b 1950/200, 256 at a time": (13613, 567, None, 8.28, None),
    "1b 16/16, 16 at a time": (203 * SHORT, 40, None, None, None, 91),
    "1b 16/16, 64 at a time": (417 * SHORT, 97, None, None, None, 164),
    "1b 16/16, 256 at a time": (400 * SHORT, 330, None, None, None, 662),
}


def rows(model: str, format: str) -> Iterator[Row]:
    """All rows of a model in a number format of `bench.floors`."""
    for concurrency in (1, 8, 32, 128, 256):
        yield Row(model, 1950, 200, concurrency, format=format)
    if (model, format) == ("8b", "bf16"):
        for concurrency in (1, 32, 256):
            yield Row(model, 1950, 200, concurrency, PREFIX)
        for concurrency in (1, 32, 256):
            yield Row(model, 128, 128, concurrency)
        yield Row(model, 128, 1024, 256)
    if (model, format) == ("1b", "bf16"):
        for concurrency in (16, 64, 256):
            yield Row(model, SHORT, SHORT, concurrency)


async def measure(row: Row, address: str, seed: int, processes: int) -> dict[str, float]:
    """One row against a mesh that is up."""
    plan = Plan(
        address=address,
        requests=row.requests,
        duration_s=row.seconds,
        concurrency=row.concurrency,
        input_tokens=row.inputs,
        output_tokens=row.outputs,
        prefix_tokens=row.prefix,
        warmup=processes,
        processes=processes,
        seed=seed,
    )
    done = await run(plan)
    figures, told = metrics.figures(done.tally), metrics.receipts(done.tally)
    return {
        "tok/s": figures["output_throughput"],
        "ttft p50": figures["median_ttft_ms"],
        "ttft p99": figures["p99_ttft_ms"],
        "itl p50": figures["median_itl_ms"],
        "itl p99": figures["p99_itl_ms"],
        "request p99": figures["p99_e2el_ms"],
        "requests": figures["completed"],
        "failed": figures["failed"],
        "cached": told["cached_share"],
        "seconds": figures["duration"],
        **{f"{hop} p50": told["hops"][hop]["median_ms"] for hop in ("tokenize", "queue", "prefill", "network")},
    }


async def of_model(wanted: list[Row], gateways: int, found: dict[str, Any], file: Path) -> None:
    """Bring a mesh up and measure rows of its model, saving after each."""
    settings = {"WEFT_PREFIX_FETCH": "false", "WEFT_LOG_LEVEL": "warning", **FORMATS[wanted[0].format].settings}
    async with mesh.up(settings, gateways=gateways, model=MODELS[wanted[0].model]) as up:
        address = ",".join(up.gateways)
        for row in wanted:
            seed = sum(map(ord, row.name)) * 1000 + len(found["rows"])
            processes = min(row.concurrency, 8)
            measured = await measure(row, address, seed, processes)
            found["rows"][row.name] = {**measured, "commit": found["machine"].get("commit", "")}
            print(row.name, {name: round(value, 2) for name, value in measured.items()}, flush=True)
            save(file, found)


def save(file: Path, found: dict[str, Any]) -> None:
    """JSON, and a table beside it."""
    file.write_text(json.dumps(found, indent=1) + "\n")
    lines = ["# Through the whole mesh, over gRPC", ""]
    lines += [f"- {name}: {value}" for name, value in found["machine"].items()]
    vllm = "in brackets vLLM 0.25.1 on the same GPU, in process (16/16: its HTTP server)"
    lines += [f"- times in ms, percentiles within 0.5%; {vllm}", ""]
    lines += [
        "| | " + " | ".join([*COLUMNS, *DERIVED, "requests", "failed", "cached", "commit"]) + " |",
        "|---" * 14 + "|",
    ]
    bare = _bare(file.with_name("engine.json"))
    for name, row in found["rows"].items():
        theirs = (*VLLM.get(name, ()), *(None,) * len(COLUMNS))
        cells = [
            f"{_number(row[column])} ({_number(its)})" if its else _number(row[column]) if column in row else ""
            for column, its in zip(COLUMNS, theirs, strict=False)
        ]
        alone, at = bare.get(name, (None, ""))
        against = (theirs[0], _floor(name), alone if at == row.get("commit", "") else None)
        ratios = [f"{row['tok/s'] / other:.2f}" if other else "" for other in against]
        counts = [f"{row['requests']:.0f}", f"{row['failed']:.0f}", f"{row['cached']:.0%}"]
        tail = [*ratios, *counts, row.get("commit", "")]
        lines.append(f"| {name} | " + " | ".join([*cells, *tail]) + " |")
    file.with_suffix(".md").write_text("\n".join(lines) + "\n")
    for model in MODELS:
        plot(file.with_name(f"throughput-{model}.svg"), model, found)
    known = ((name, row["tok/s"], VLLM.get(name, (None,))[0]) for name, row in found["rows"].items())
    over = {name: ours / vllm for name, ours, vllm in known if vllm}
    figures.against(file.with_name("over-vllm.svg"), "Tokens per second over vLLM 0.25.1's on an H200", over)


def plot(file: Path, model: str, found: dict[str, Any]) -> None:
    """Throughput over concurrency: here, vLLM's, the floor's."""
    names = {row.concurrency: row.name for row in rows(model, "bf16") if (row.inputs, row.prefix) == (1950, 0)}
    known: dict[str, dict[str, float | None]] = {
        "Weft, through the mesh": {name: row["tok/s"] for name, row in found["rows"].items()},
        "vLLM 0.25.1, in process": {name: row[0] for name, row in VLLM.items()},
        "floor": {name: _floor(name) for name in names.values()},
    }
    points = {
        label: [(float(c), value) for c, name in names.items() if (value := values.get(name))]
        for label, values in known.items()
    }
    figures.write(file, f"{model.upper()} bf16, 1,950 in, 200 out", points)


def _floor(name: str) -> float | None:
    """Tokens per second that the row's floor allows; None where prompts share a prefix, whose floor is another."""
    row = next((row for model in MODELS for format in FORMATS for row in rows(model, format) if row.name == name), None)
    if row is None or row.prefix:
        return None
    return loop_tokens_per_s(MODELS[row.model], row.format, row.inputs, row.outputs, row.concurrency)


def _bare(file: Path) -> dict[str, tuple[float, str]]:
    """Tokens per second of the bare loop by row, as far as they are known, and the commit they were measured at."""
    known = json.loads(file.read_text()) if file.exists() else {"cells": {}}
    found = {}
    for model in MODELS:
        for row in rows(model, "bf16"):
            shared = f", {row.prefix} shared" if row.prefix else ""
            name = f"{model} loop {row.inputs}/{row.outputs} {row.concurrency}{shared}"
            if name in known["cells"]:
                found[row.name] = float(known["cells"][name]["tok/s"]), known.get("commits", {}).get(name, "")
    return found


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def main() -> None:
    """Measures what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--formats", nargs="*", default=["bf16"], choices=list(FORMATS))
    parser.add_argument("--only", nargs="*", help="only rows whose name holds one of these")
    parser.add_argument("--gateways", type=int, default=4)
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    wanted = parser.parse_args()
    machine.need_gpu()
    wanted.out.mkdir(parents=True, exist_ok=True)
    file = wanted.out / "gpu.json"
    found = json.loads(file.read_text()) if file.exists() and not wanted.fresh else {"rows": {}}
    found["machine"] = machine.describe()
    for model, format in itertools.product(wanted.models, wanted.formats):
        missing = [
            row
            for row in rows(model, format)
            if row.name not in found["rows"] and (not wanted.only or any(word in row.name for word in wanted.only))
        ]
        if missing:
            asyncio.run(of_model(missing, wanted.gateways, found, file))
    save(file, found)


if __name__ == "__main__":
    main()
