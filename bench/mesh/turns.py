"""Two checkouts of the project in turns on one machine: first tokens and throughput before and after a change.

    python -m bench.mesh.turns ../before [--model random:llama-3.1-8b --engine gpu] [--setting MAX_SEQ_LENGTH=16384]
                               [--firsts 100] [--rounds 2] [--rows 1950/200@1x8 128/128@256x768]

Each checkout runs its own mesh, with its own processes and weights; `make stubs` must have generated the stubs of the
other one. One client sends to both meshes in turns; the mesh whose turn it is not is idle. A row is
INPUT/OUTPUT@CONCURRENCYxREQUESTS in tokens. First tokens are those of prompts of 128 tokens, one request at a time,
once through one gateway and once through all in turn; the last column is the median over pairs of neighbouring
requests. Without --model the demo model runs.
"""

import argparse
import asyncio
import contextlib
import json
import random
import re
import sys
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

from grpc import aio
from rich import box
from rich.table import Table

from protos import inference_pb2 as api
from protos import inference_pb2_grpc as stubs
from report import machine
from report.console import console
from weft.launch.demo_model import model_folder
from weft.load import metrics
from weft.load.plan import Plan
from weft.load.run import run

HERE = Path(__file__).parents[2]
HOLD = Path(__file__).with_name("hold.py")
START_S = 180.0
PROMPT, ANSWER = 128, 8
"""Tokens of the requests whose first token is timed."""
PAUSE_S = 0.005
"""Between two requests: what follows an answer is done before the next one begins."""
WARM_UP = 8
MOST_CLIENTS = 8

Gateways = Mapping[str, list[str]]
"""`before` and `after` -> host:port of each gateway."""


@dataclass(frozen=True, slots=True)
class Row:
    """A closed loop."""

    inputs: int
    outputs: int
    concurrency: int
    requests: int

    @classmethod
    def parse(cls, text: str) -> "Row":
        """The row that INPUT/OUTPUT@CONCURRENCYxREQUESTS describes."""
        match = re.fullmatch(r"(\d+)/(\d+)@(\d+)x(\d+)", text)
        if match is None:
            raise argparse.ArgumentTypeError(f"{text!r} is not like 1950/200@32x64")
        return cls(*map(int, match.groups()))

    async def measure(self, gateways: list[str], seed: int) -> float:
        """Output tokens per second through a mesh. Raises RuntimeError if a request failed."""
        clients = min(self.concurrency, MOST_CLIENTS)
        done = await run(
            Plan(
                ",".join(gateways), requests=self.requests, concurrency=self.concurrency, input_tokens=self.inputs,
                output_tokens=self.outputs, warmup=clients, processes=clients, seed=seed,
            )
        )  # fmt: skip
        if done.tally.failed:
            raise RuntimeError(f"{done.tally.failed} requests failed: {dict(done.tally.errors)}")
        return float(metrics.figures(done.tally)["output_throughput"])


@contextlib.asynccontextmanager
async def held(checkout: Path, model: str, gateways: int, settings: Mapping[str, str]) -> AsyncIterator[list[str]]:
    """A mesh of a checkout: host:port of each gateway. Raises RuntimeError if it does not serve."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(HOLD), model, str(gateways), json.dumps(settings), cwd=checkout,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            line = await process.stdout.readline()
        if not line:
            raise RuntimeError(f"the mesh of {checkout} did not start")
        yield json.loads(line)
    finally:
        process.stdin.close()
        await process.wait()


async def first_token_ms(stub: Any, token_ids: list[int]) -> float:
    """Milliseconds from the call to the first token of a request, which is read to its end."""
    request = api.GenerateRequest(
        prompt=api.Prompt(token_ids=api.TokenIds(ids=token_ids)),
        sampling=api.Sampling(max_tokens=ANSWER, ignore_eos=True),
    )
    began, first = time.monotonic(), 0.0
    async for response in stub.Generate(request):
        if not first and response.delta.token_ids:
            first = time.monotonic() - began
    return first * 1e3


async def first_tokens(meshes: Gateways, pairs: int, vocab: int, seed: int) -> dict[str, list[float]]:
    """The first token of `pairs` requests to each mesh, in pairs of neighbouring requests."""
    draw = random.Random(seed)
    found: dict[str, list[float]] = {name: [] for name in meshes}
    async with contextlib.AsyncExitStack() as stack:
        turn = {name: cycle([await _stub(stack, each) for each in addresses]) for name, addresses in meshes.items()}
        for number in range(-WARM_UP, pairs):
            for name in sorted(meshes, reverse=bool(number % 2)):
                taken = await first_token_ms(next(turn[name]), draw.sample(range(vocab), PROMPT))
                await asyncio.sleep(PAUSE_S)
                if number >= 0:
                    found[name].append(taken)
    return found


async def _stub(stack: contextlib.AsyncExitStack, address: str) -> Any:
    return stubs.InferenceStub(await stack.enter_async_context(aio.insecure_channel(address)))


async def vocabulary(address: str) -> int:
    """The number of token ids of the model that a gateway serves."""
    async with aio.insecure_channel(address) as channel:
        stub: Any = stubs.InferenceStub(channel)
        listed = await stub.ListModels(api.ListModelsRequest())
        return int(listed.models[0].vocab_size)


async def measured(meshes: Gateways, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All figures, each printed as it comes."""
    figures: list[dict[str, Any]] = []
    vocab = await vocabulary(meshes["after"][0])
    for number in range(arguments.rounds if arguments.firsts else 0):
        for way, through in (("one gateway", 1), ("all gateways", None)):
            found = await first_tokens(
                {name: each[:through] for name, each in meshes.items()}, arguments.firsts, vocab, number
            )
            middle = {name: median(values) for name, values in found.items()}
            pairs = median(b - a for a, b in zip(found["before"], found["after"], strict=True))
            figures.append({"row": f"first token, {way}, ms", **middle, "difference": pairs})
            show(figures[-1:])
    for row in arguments.rows:
        rates: dict[str, list[float]] = {name: [] for name in meshes}
        for number in range(arguments.rounds):
            for place, name in enumerate(meshes):
                rates[name].append(await row.measure(meshes[name], hash((row, number, place)) % (1 << 31)))
        name = f"{row.inputs}/{row.outputs}, {row.concurrency} at a time, tokens/s"
        figures.append({"row": name, **{which: median(values) for which, values in rates.items()}, "rounds": rates})
        show(figures[-1:])
    return figures


def show(figures: list[dict[str, Any]]) -> None:
    """Prints figures as a table."""
    table = Table("", "before", "after", "after / before", "median difference", box=box.SIMPLE)
    for figure in figures:
        before, after = figure["before"], figure["after"]
        difference = f"{figure['difference']:+.3f}" if "difference" in figure else ""
        table.add_row(figure["row"], f"{before:,.2f}", f"{after:,.2f}", f"{after / before:.3f}", difference)
    console().print(table)


async def main(arguments: argparse.Namespace) -> None:
    """Starts both meshes, measures, prints the table."""
    settings = {"WEFT_PREFIX_FETCH": "false", **dict(each.split("=", 1) for each in arguments.setting)}
    if arguments.engine:
        settings["ENGINE"] = arguments.engine
    model = arguments.model or str(model_folder())
    async with (
        held(arguments.before, model, arguments.gateways, settings) as before,
        held(HERE, model, arguments.gateways, settings) as after,
    ):
        figures = await measured({"before": before, "after": after}, arguments)
    console().print(f"{machine.describe()}", markup=False)
    show(figures)
    if arguments.out:
        arguments.out.write_text(json.dumps({"machine": machine.describe(), "figures": figures}, indent=1) + "\n")


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Two checkouts in turns: first tokens and throughput.")
    parser.add_argument("before", type=Path, help="folder of the other checkout")
    parser.add_argument("--model", default="", help="folder, hub id or random:NAME (default: the demo model)")
    parser.add_argument("--engine", default="", help="ENGINE of the workers (default: theirs)")
    parser.add_argument("--setting", action="append", default=[], metavar="NAME=VALUE", help="for both meshes")
    parser.add_argument("--gateways", type=int, default=4, help="gateways of each mesh (default 4)")
    parser.add_argument("--firsts", type=int, default=100, help="requests of each series of first tokens (default 100)")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of each figure (default 2)")
    parser.add_argument("--rows", type=Row.parse, nargs="*", default=[], help="for example 1950/200@32x64")
    parser.add_argument("--out", type=Path, default=None, help="write the figures as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main(parsed()))
