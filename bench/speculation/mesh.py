"""Times between tokens as clients of a mesh receive them, with guesses and without, on one GPU.

    python -m bench.speculation.mesh [--model random:llama-3.1-8b] [--draft random:pard-llama-3.2-1b]
        [--draft-quantize int4] [--rows 1 4 16 64 256] [--tokens 200] [--acceptance 0.7 0.5 0.9] [--together 0.7]
        [--again] [--out FOLDER]

For each number of answers: tokens/s, and the time from one message of an answer to the next at its median and its 99th
percentile. Without `--tokens` no answer ends while it is measured; with it an answer has 0.5 to 1.5 times as many
tokens and is replaced when it ends. Measuring begins when the worker has settled on a depth. Each acceptance has a mesh
of its own, and the worker of that mesh forces the acceptance (`bench.speculation.forced_worker`).
A mesh without speculation runs first. With `--again` another one runs last: the two show how far meshes differ, and the
others are compared with the mean of both. The meshes run one after another on one machine. `--together`: acceptances at
which the gateways hold no tokens back (WEFT_GATEWAY_HOLD_S=0), so that those of a step come together. At an acceptance
of 1 guesses are as right as they are.
"""

import argparse
import asyncio
import itertools
import json
import multiprocessing
import random
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from grpc import aio

from bench import figures as charts
from bench.mesh import processes
from bench.speculation import forced_worker
from bench.speculation.cells import CONTEXT, MOST_TOKENS, p99
from protos import inference_pb2 as api
from protos import inference_pb2_grpc as stubs
from report import machine
from services import process

SETTLE_S, TIMED_S = 2.5, 3.0
FEW, FEW_TIMED_S = 4, 6.0
"""Few answers send few messages, so that a 99th percentile of them takes longer."""
BEGIN_S = 1.5
"""Seconds for the prompts of 64 answers to be computed."""
MOST_STREAMS = 32
"""Answers that one client process reads."""
GATEWAYS = 4
OFF, AGAIN = "off", "off again"
COLUMNS = ("tok/s", "tokens a message", "ms p50", "ms p99")
Cell = dict[str, float]
Arrival = tuple[float, int]
"""When a message arrived, on the monotonic clock that all processes share, and the number of its tokens."""
Client = list[list[Arrival]]
"""The messages of each answer that a client received, one answer after the other."""


async def _follow(address: str, numbers: range, tokens: int | None, end: float) -> list[Client]:
    async def one(stub: "stubs.InferenceAsyncStub", number: int) -> Client:
        draw, answers = random.Random(number), list[list[Arrival]]()
        try:
            async with asyncio.timeout(end - time.monotonic()):
                while True:
                    answers.append([])
                    await read(stub.Generate(_request(draw, tokens)), answers[-1])
                    if tokens is None:
                        raise RuntimeError("an answer ended before it was measured")
        except TimeoutError:
            return answers

    async def read(call: "aio.UnaryStreamCall[api.GenerateRequest, api.GenerateResponse]", into: list[Arrival]) -> None:
        try:
            async for response in call:
                if response.delta.token_ids:
                    into.append((time.monotonic(), len(response.delta.token_ids)))
        finally:
            call.cancel()

    async with aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub: stubs.InferenceAsyncStub = stubs.InferenceStub(channel)
        return await asyncio.gather(*(one(stub, number) for number in numbers))


def _request(draw: random.Random, tokens: int | None) -> api.GenerateRequest:
    """A request with a random prompt. tokens: of its answer, about; None: it does not end."""
    longest = MOST_TOKENS if tokens is None else tokens // 2 + draw.randrange(tokens)
    sampling = api.Sampling(max_tokens=longest, temperature=0.0, ignore_eos=True)
    request = api.GenerateRequest(sampling=sampling, cache=api.CACHE_POLICY_BYPASS)
    request.prompt.token_ids.ids.extend(draw.choices(range(100, 6000), k=CONTEXT))
    return request


def follow(address: str, numbers: range, tokens: int | None, end: float) -> list[Client]:
    """What the clients with these numbers receive until `end`. tokens: of an answer, about, which is replaced when it
    ends; None: none may end."""
    return asyncio.run(_follow(address, numbers, tokens, end))


def measure(addresses: list[str], count: int, tokens: int | None, pool: ProcessPoolExecutor) -> Cell:
    """`COLUMNS` of `count` answers at a time. tokens: as in `follow`."""
    begin = time.monotonic() + BEGIN_S * max(count / 64, 1.0) + SETTLE_S
    end = begin + (FEW_TIMED_S if count <= FEW else TIMED_S)
    parts = [range(count)[first : first + MOST_STREAMS] for first in range(0, count, MOST_STREAMS)]
    reading = [
        pool.submit(follow, address, part, tokens, end + 0.2)
        for address, part in zip(itertools.cycle(addresses), parts, strict=False)
    ]
    return figures([each for part in reading for each in part.result()], begin, end)


def figures(clients: list[Client], begin: float, end: float) -> Cell:
    """`COLUMNS` of the messages between two times. Raises RuntimeError where a client received none."""
    gaps, tokens, messages = list[float](), 0, 0
    for answers in clients:
        timed = [[each for each in arrivals if begin <= each[0] <= end] for arrivals in answers]
        if not any(len(arrivals) > 1 for arrivals in timed):
            raise RuntimeError("a client's answers made no progress")
        gaps += [(after[0] - before[0]) * 1e3 for arrivals in timed for before, after in pairwise(arrivals)]
        tokens += sum(count for arrivals in timed for _, count in arrivals)
        messages += sum(map(len, timed))
    values = tokens / (end - begin), tokens / messages, statistics.median(gaps), p99(gaps)
    return dict(zip(COLUMNS, values, strict=True))


async def of_mesh(
    asked: argparse.Namespace, acceptance: float | None, together: bool, name: str, found: dict[str, Cell]
) -> None:
    """Start a mesh for this acceptance (None: without speculation), measure all rows with it, and add them to `found`
    under this name. together: its gateways hold no tokens back."""
    settings = {
        "WEFT_PREFIX_FETCH": "false", "WEFT_DTYPE": asked.dtype, "MAX_BATCH_SIZE": str(max(asked.rows)),
        "MAX_SEQ_LENGTH": str(CONTEXT + (MOST_TOKENS if asked.tokens is None else 2 * asked.tokens)),
    }  # fmt: skip
    if acceptance is not None:
        settings |= {"WEFT_SPECULATE": f"draft:{asked.draft}", forced_worker.ACCEPTANCE: str(acceptance)}
        if asked.draft_quantize:
            settings["WEFT_DRAFT_QUANTIZE"] = asked.draft_quantize
    if together:
        settings["WEFT_GATEWAY_HOLD_S"] = "0"
    worker = forced_worker.__name__
    async with processes.up(settings, gateways=GATEWAYS, model=asked.model, start_s=400, worker=worker) as up:
        most = -(-max(asked.rows) // MOST_STREAMS)
        with ProcessPoolExecutor(most, multiprocessing.get_context("spawn")) as pool:
            list(pool.map(abs, range(most)))  # All processes are started before anything is measured.
            for count in asked.rows:
                cell = await asyncio.to_thread(measure, up.gateways, count, asked.tokens, pool)
                found[f"{name} {count}"] = cell
                compare(found)
                print(f"{name} {count}: " + ", ".join(f"{key} {value:.4g}" for key, value in cell.items()), flush=True)


def plain(found: dict[str, Cell], count: str) -> Cell | None:
    """The cell of this many answers without speculation: the mean of those that were measured."""
    cells = [found[name] for name in (f"{OFF} {count}", f"{AGAIN} {count}") if name in found]
    return {key: statistics.mean(cell[key] for cell in cells) for key in COLUMNS} if cells else None


def compare(found: dict[str, Cell]) -> None:
    """Put into each cell with speculation its tokens/s and its p99 over those without."""
    for name, cell in found.items():
        kind, _, count = name.rpartition(" ")
        off = None if kind in (OFF, AGAIN) else plain(found, count)
        if off is not None:
            cell |= {"ratio": cell["tok/s"] / off["tok/s"], "p99 ratio": cell["ms p99"] / off["ms p99"]}


def save(out: Path, result: dict[str, Any]) -> None:
    """Write the cells as JSON, as a table and as a plot."""
    out.mkdir(parents=True, exist_ok=True)
    stem = "speculation-mesh" if result["settings"].get("tokens", "None") == "None" else "speculation-mesh-short"
    (out / f"{stem}.json").write_text(json.dumps(result, indent=1) + "\n")
    lines = ["# Speculation: times between messages, as clients of a mesh receive them", ""]
    lines += [f"- {name}: {value}" for group in ("machine", "settings") for name, value in result[group].items()]
    lines += ["- ms: from one message of an answer to the next", "- in brackets: the same without speculation", ""]
    lines += ["| | tok/s | ratio | tokens a message | ms p50 | ms p99 | p99 ratio |", "|---" * 7 + "|"]
    for name, cell in result["cells"].items():
        off = plain(result["cells"], name.rpartition(" ")[2]) if "ratio" in cell else None
        values = [f"{cell['tok/s']:,.0f}", _ratio(cell, "ratio"), f"{cell['tokens a message']:.2f}"]
        values += [f"{cell[key]:.2f}" + (f" ({off[key]:.2f})" if off else "") for key in ("ms p50", "ms p99")]
        lines.append(f"| {name} | " + " | ".join([*values, _ratio(cell, "p99 ratio")]) + " |")
    (out / f"{stem}.md").write_text("\n".join(lines) + "\n")
    points: dict[str, list[tuple[float, float]]] = {}
    for name, cell in result["cells"].items():
        kind, _, count = name.rpartition(" ")
        if "p99 ratio" in cell:
            points.setdefault(f"acceptance {kind}", []).append((float(count), cell["p99 ratio"]))
    if points:
        title = f"Time between messages at p99, {result['settings']['model'].removeprefix('random:')}"
        charts.write(out / f"{stem}.svg", title, points, "over that without guesses")


def _ratio(cell: Cell, name: str) -> str:
    return f"{cell[name]:.3f}" if name in cell else ""


async def main() -> int:
    """The program. -> its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:llama-3.1-8b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--draft", default="random:pard-llama-3.2-1b")
    parser.add_argument("--draft-quantize", default="")
    parser.add_argument("--tokens", type=int, help="of an answer, about; without it no answer ends")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--acceptance", type=float, nargs="*", default=[0.7, 0.5, 0.9])
    parser.add_argument("--together", type=float, nargs="*", default=[])
    parser.add_argument("--again", action="store_true", help="measure without speculation once more at the end")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    asked = parser.parse_args()
    found: dict[str, Cell] = {}
    await of_mesh(asked, None, False, OFF, found)
    for acceptance in asked.acceptance:
        await of_mesh(asked, acceptance, False, f"{acceptance}", found)
    for acceptance in asked.together:
        await of_mesh(asked, acceptance, True, f"{acceptance}, together", found)
    if asked.again:
        await of_mesh(asked, None, False, AGAIN, found)
    settings = {name: str(value) for name, value in vars(asked).items() if name != "out"}
    save(asked.out, {"machine": machine.describe(), "settings": settings, "cells": found})
    return 0


if __name__ == "__main__":
    process.prepare_grpc()
    sys.exit(asyncio.run(main()))
