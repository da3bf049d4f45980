"""Measures how much 16 clients with texts of 1 MiB delay the first tokens of others: at most 2 times at the p99.

python -m tests.security.hostile_texts     # in turns: without them, with them
"""

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from grpc import aio

from protos.inference_pb2_grpc import InferenceStub
from tests.mesh.conftest import demo_model
from tests.mesh.harness import Mesh, Stub, ask, generate
from tests.security.conftest import PACED

HOSTILE = 16
GOOD = 4
SECONDS = 10.0
TURNS = 3
TEXT = ("a hostile text " * 70_000)[: (1 << 20) - 200]


async def first_tokens(stub: Stub, until: float) -> list[float]:
    """Seconds to the first token of one request after the other."""
    taken = []
    while time.monotonic() < until:
        began = time.monotonic()
        arrived: list[float] = []
        await generate(stub, ask("hello", max_tokens=2), on_delta=lambda _, a=arrived: a.append(time.monotonic()))  # type: ignore[misc]
        taken.append(arrived[0] - began)
    return taken


async def attack(address: str) -> None:
    """Sends texts that do not fit, as fast as they are refused, until it is killed; a line for each refusal."""

    async def client() -> None:
        async with aio.insecure_channel(address) as channel:
            stub: Stub = InferenceStub(channel)
            while True:
                try:
                    await generate(stub, ask(TEXT, max_tokens=2))
                except aio.AioRpcError as error:
                    print(error.code().name, flush=True)

    await asyncio.gather(*(client() for _ in range(HOSTILE)))


@contextlib.asynccontextmanager
async def attacked(address: str) -> AsyncIterator[list[bytes]]:
    """Hostile clients in a process of their own while the block runs, from their first refusal. -> their refusals,
    which the end of the block adds."""
    refusals: list[bytes] = []
    command = [sys.executable, "-m", "tests.security.hostile_texts", address]
    attacker = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert attacker.stdout is not None
    try:
        refusals.append(await attacker.stdout.readline())
        yield refusals
    finally:
        attacker.kill()
        refusals += (await attacker.stdout.read()).splitlines()
        await attacker.wait()


async def measure() -> int:
    """Prints both percentiles; returns 1 if the promise does not hold."""
    quiet: list[float] = []
    beside: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        async with Mesh(Path(folder), demo_model(), worker_env=PACED) as mesh:
            await generate(mesh.stub(), ask("hello", max_tokens=2))
            for _ in range(TURNS):
                quiet += await _taken(mesh)
                async with attacked(mesh.gateways[0].address):
                    beside += await _taken(mesh)
    ratio = _p99(beside) / _p99(quiet)
    print(f"first token, p99: {_p99(quiet) * 1e3:.1f} ms; beside {HOSTILE} hostile clients {_p99(beside) * 1e3:.1f} ms")
    print(f"{ratio:.2f} times, at most 2")
    return int(ratio > 2)


async def _taken(mesh: Mesh) -> list[float]:
    until = time.monotonic() + SECONDS
    taken = await asyncio.gather(*(first_tokens(mesh.stub(), until) for _ in range(GOOD)))
    return [each for client in taken for each in client]


def _p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


if __name__ == "__main__":
    sys.exit(asyncio.run(attack(sys.argv[1]) if len(sys.argv) > 1 else measure()))
