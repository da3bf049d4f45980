"""The whole mesh on one GPU over gRPC: gateways, scheduler, worker and clients, each in its own process, on loopback.

    python -m bench.mesh.gpu [--models 8b 1b] [--formats bf16 fp8 int4] [--only NAME ...] [--gateways 4] [--fresh]
                             [--out bench/results]

Each row keeps N requests with fresh random prompts in flight and replaces each finished request until 3N (at least 16)
have been sent or 40 s have passed (fp8, int4 and answers of 1,024 tokens: 25 s). Rows with answers of 16 tokens send
5,000 requests, because 3N would end too soon. tok/s are output tokens from the first submission to the last completion.
Rows that the results already contain are not measured again unless --fresh is given.

The table shows beside each row: vLLM's figures by the same method on the same kind of GPU (`bench/peers/vllm.toml`),
the floor of `bench.mesh.floors`, and the bare engine loop where `bench.engine.measure` has written it into the same
folder at the same commit.
"""

import argparse
import asyncio
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import figures, peers, table
from bench.mesh import processes
from bench.mesh.floors import FORMATS, loop_tokens_per_s
from report import machine
from weft.load import metrics
from weft.load.plan import Plan
from weft.load.run import run

MODELS = {"8b": "random:llama-3.1-8b", "1b": "random:llama-3.2-1b"}
PREFIX = 1800
RATIOS = ("tok/s over vLLM's", "over the floor's", "over the bare loop's")
COLUMNS = {
    "tok/s": "tok_per_s",
    "ttft p50": "ttft_p50_ms",
    "ttft p99": "ttft_p99_ms",
    "itl p50": "itl_p50_ms",
    "itl p99": "itl_p99_ms",
    "request p99": "request_p99_ms",
}
"""Column of the table -> the same figure in a peer's file."""
SHORT = 16
"""Prompt and answer tokens of a query-rewriting request."""


@dataclass(frozen=True, slots=True)
class Row:
    """One workload: model, number format, token counts and concurrency."""

    model: str
    inputs: int
    outputs: int
    concurrency: int
    prefix: int = 0
    format: str = "bf16"

    @property
    def name(self) -> str:
        """The row's key in the results and in peers' files."""
        shared = f", {self.prefix} shared" if self.prefix else ""
        kind = "" if self.format == "bf16" else f" {self.format}"
        return f"{self.model}{kind} {self.inputs}/{self.outputs}{shared}, {self.concurrency} at a time"

    @property
    def seconds(self) -> float:
        """No request is sent after this time."""
        return 40.0 if self.format == "bf16" and self.outputs < 1000 else 25.0

    @property
    def requests(self) -> int:
        """The most requests that are sent."""
        if self.outputs == SHORT:
            return 5000
        single_wave = self.format == "int4" and self.concurrency == 256
        return self.concurrency if single_wave else max(3 * self.concurrency, 16)


def rows(model: str, format: str) -> Iterator[Row]:
    """All rows of a model in a number format of `bench.mesh.floors`."""
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


async def measure(row: Row, address: str, seed: int, clients: int) -> dict[str, float]:
    """Measures one row of the table against a running mesh, with `clients` client processes."""
    plan = Plan(
        address=address,
        requests=row.requests,
        duration_s=row.seconds,
        concurrency=row.concurrency,
        input_tokens=row.inputs,
        output_tokens=row.outputs,
        prefix_tokens=row.prefix,
        warmup=clients,
        processes=clients,
        seed=seed,
    )
    done = await run(plan)
    load, receipts = metrics.figures(done.tally), metrics.receipts(done.tally)
    return {
        "tok/s": load["output_throughput"],
        "ttft p50": load["median_ttft_ms"],
        "ttft p99": load["p99_ttft_ms"],
        "itl p50": load["median_itl_ms"],
        "itl p99": load["p99_itl_ms"],
        "request p99": load["p99_e2el_ms"],
        "requests": load["completed"],
        "failed": load["failed"],
        "cached": receipts["cached_share"],
        "seconds": load["duration"],
        **{f"{hop} p50": receipts["hops"][hop]["median_ms"] for hop in ("tokenize", "queue", "prefill", "network")},
    }


async def of_model(wanted: list[Row], gateways: int, found: dict[str, Any], file: Path) -> None:
    """Start a mesh and measure rows of its model; the results are saved after each row."""
    settings = {"WEFT_PREFIX_FETCH": "false", "WEFT_LOG_LEVEL": "warning", **FORMATS[wanted[0].format].settings}
    async with processes.up(settings, gateways=gateways, model=MODELS[wanted[0].model]) as up:
        address = ",".join(up.gateways)
        for row in wanted:
            seed = sum(map(ord, row.name)) * 1000 + len(found["rows"])
            clients = min(row.concurrency, 8)
            measured = await measure(row, address, seed, clients)
            found["rows"][row.name] = {**measured, "commit": found["machine"].get("commit", "")}
            print(row.name, {name: round(value, 2) for name, value in measured.items()}, flush=True)
            save(file, found)


def save(file: Path, found: dict[str, Any]) -> None:
    """Write the results as JSON, and beside it the table and the plots."""
    vllm = peers.load("vllm")
    file.write_text(json.dumps(found, indent=1) + "\n")
    lines = ["# Through the whole mesh, over gRPC", ""]
    lines += [f"- {name}: {value}" for name, value in found["machine"].items()]
    note = f"in brackets {vllm.title} ({vllm.machine}, {vllm.date}): {vllm.source}"
    lines += [f"- times in ms, percentiles within 0.5%; {note}", ""]
    lines += [
        "| | " + " | ".join([*COLUMNS, *RATIOS, "requests", "failed", "cached", "commit"]) + " |",
        "|---" * 14 + "|",
    ]
    bare = _bare(file.with_name("engine.json"))
    for name, row in found["rows"].items():
        theirs = vllm.rows.get(name, {})
        cells = [_beside(row.get(column), theirs.get(figure)) for column, figure in COLUMNS.items()]
        alone, at = bare.get(name, (None, ""))
        against = (theirs.get("tok_per_s"), _floor(name), alone if at == row.get("commit", "") else None)
        ratios = [f"{row['tok/s'] / other:.2f}" if other else "" for other in against]
        counts = [f"{row['requests']:.0f}", f"{row['failed']:.0f}", f"{row['cached']:.0%}"]
        tail = [*ratios, *counts, row.get("commit", "")]
        lines.append(f"| {name} | " + " | ".join([*cells, *tail]) + " |")
    file.with_suffix(".md").write_text("\n".join(lines) + "\n")
    for model in MODELS:
        plot(file.with_name(f"throughput-{model}.svg"), model, found)
    both = [name for name in found["rows"] if "tok_per_s" in vllm.rows.get(name, {})]
    over = {name: found["rows"][name]["tok/s"] / vllm.rows[name]["tok_per_s"] for name in both}
    figures.against(file.with_name("over-vllm.svg"), f"Tokens per second over {vllm.title}'s on an H200", over)


def plot(file: Path, model: str, found: dict[str, Any]) -> None:
    """Throughput over concurrency: Weft's, vLLM's and the floor's."""
    vllm = peers.load("vllm")
    names = {row.concurrency: row.name for row in rows(model, "bf16") if (row.inputs, row.prefix) == (1950, 0)}
    known: dict[str, dict[str, float | None]] = {
        "Weft, through the mesh": {name: row["tok/s"] for name, row in found["rows"].items()},
        f"{vllm.title}, in process": {name: row.get("tok_per_s") for name, row in vllm.rows.items()},
        "floor": {name: _floor(name) for name in names.values()},
    }
    points = {
        label: [(float(c), value) for c, name in names.items() if (value := values.get(name))]
        for label, values in known.items()
    }
    figures.write(file, f"{model.upper()} bf16, 1,950 in, 200 out", points)


def _floor(name: str) -> float | None:
    """Tokens per second that the row's floor allows; None for shared prefixes, which the floor does not model."""
    row = next((row for model in MODELS for format in FORMATS for row in rows(model, format) if row.name == name), None)
    if row is None or row.prefix:
        return None
    return loop_tokens_per_s(MODELS[row.model], row.format, row.inputs, row.outputs, row.concurrency)


def _bare(file: Path) -> dict[str, tuple[float, str]]:
    """Row name -> tokens per second of the bare engine loop, and the commit it was measured at."""
    known = json.loads(file.read_text()) if file.exists() else {"cells": {}}
    found = {}
    for model in MODELS:
        for row in rows(model, "bf16"):
            shared = f", {row.prefix} shared" if row.prefix else ""
            name = f"{model} loop {row.inputs}/{row.outputs} {row.concurrency}{shared}"
            if name in known["cells"]:
                found[row.name] = float(known["cells"][name]["tok/s"]), known.get("commits", {}).get(name, "")
    return found


def _beside(value: float | None, theirs: float | None) -> str:
    """A cell of the table: our figure, and the peer's in brackets."""
    if value is None:
        return ""
    return f"{_number(value)} ({_number(theirs)})" if theirs else _number(value)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def main() -> None:
    """Measure the rows that are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--formats", nargs="*", default=["bf16"], choices=list(FORMATS))
    parser.add_argument("--only", nargs="*", help="only rows with these names; *, ? match")
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
            if row.name not in found["rows"] and table.selected(row.name, wanted.only)
        ]
        if missing:
            asyncio.run(of_model(missing, wanted.gateways, found, file))
    save(file, found)


if __name__ == "__main__":
    main()
