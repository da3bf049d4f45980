"""One answer through the mesh beside the same model in other runtimes alone, in turns, on this machine's CPU.

    python -m bench.mesh.beside_runtimes MODEL --python PYTHON [--genai FILE] [--ik FILE] [--set NAME=VALUE ...]

MODEL is a checkpoint's folder; FILE the same model as openvino-genai or ik-llama-cpp-python reads it, which PYTHON has
installed; --set gives a setting of the mesh (QUANTIZE=int4). All are loaded at once and wait while another one answers.
The median of the ratios of neighbouring turns counts: a machine that others use changes its speed in seconds.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from grpc import aio
from rich.console import Console

from bench import table
from bench.mesh.cpu import answer, prompts
from bench.mesh.processes import up
from bench.table import Figure
from protos import inference_pb2 as api
from protos import inference_pb2_grpc as stubs

_START_S = 600.0
_CHILD = Path(__file__).with_name("runtime_child.py")

Rate = Callable[[int], Awaitable[float]]
"""Tokens per second after the first of an answer of so many tokens."""


@contextlib.asynccontextmanager
async def other(python: str, kind: str, file: str, threads: int) -> AsyncIterator[Rate]:
    """A runtime in a process of its own. Raises EOFError if it ends."""
    command = [python, str(_CHILD), kind, file, str(threads)]
    pipe, devnull = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    child = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=devnull)
    stdin, stdout = child.stdin, child.stdout
    assert stdin is not None, child
    assert stdout is not None, child

    async def line(word: str) -> str:
        """What follows a word at the beginning of one of its lines."""
        async for each in stdout:
            if each.decode().startswith(word):
                return each.decode().removeprefix(word)
        raise EOFError(f"{kind} has ended")

    async def rate(tokens: int) -> float:
        stdin.write(f"{tokens}\n".encode())
        return float(await line("rate"))

    try:
        await line("ready")
        yield rate
    finally:
        child.kill()
        await child.wait()


async def turns(asked: argparse.Namespace) -> list[Figure]:
    """The rates of all, and Weft's over the others'."""
    async with contextlib.AsyncExitStack() as stack:
        settings = {"WEFT_THREADS": str(asked.threads), **dict(each.split("=", 1) for each in asked.set)}
        mesh = await stack.enter_async_context(up(settings, model=asked.model, start_s=_START_S))
        channel = await stack.enter_async_context(aio.insecure_channel(mesh.gateways[0]))
        stub: Any = stubs.InferenceStub(channel)
        (model,) = (await stub.ListModels(api.ListModelsRequest())).models
        ours = f"Weft through the mesh ({model.engine})"

        async def weft(tokens: int) -> float:
            return 1 / await answer(stub, prompts(1)[0], tokens)

        rates: dict[str, Rate] = {ours: weft}
        for kind, file in (("genai", asked.genai), ("ik", asked.ik)):
            if file:
                runtime = other(asked.python, kind, file, asked.threads)
                rates[kind] = await stack.enter_async_context(runtime)
        await weft(2)
        found: dict[str, list[float]] = {name: [] for name in rates}
        for turn in range(asked.turns):
            for name in list(rates)[:: 1 if turn % 2 == 0 else -1]:
                found[name].append(await rates[name](asked.tokens))
    figures = [Figure(f"{name}, median", statistics.median(values), "tokens/s") for name, values in found.items()]
    for name, values in list(found.items())[1:]:
        ratio = statistics.median(mine / its for mine, its in zip(found[ours], values, strict=True))
        figures.append(Figure(f"Weft over {name}, median of {asked.turns} pairs", ratio, "x", ">= 1"))
    return figures


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--python", default="python3", help="the Python that has the other runtimes")
    parser.add_argument("--genai", default="", help="what openvino-genai reads")
    parser.add_argument("--ik", default="", help="what ik-llama-cpp-python reads")
    parser.add_argument("--set", nargs="*", default=[], help="settings of the mesh")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=8)
    asked = parser.parse_args()
    out = Console(width=120)
    table.show_machine(out)
    figures = asyncio.run(turns(asked))
    table.show(f"Batch 1, load average {os.getloadavg()[0]:.1f}", figures, out)


if __name__ == "__main__":
    main()
