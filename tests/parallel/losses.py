"""Ranks are lost while streams run: every stream has the tokens that it has without the loss."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from protos import inference_pb2 as api
from tests.checkpoints import DEMO
from tests.mesh.harness import Answer, Mesh, Process, ask, generate

TOKENS = 48
Env = Mapping[str, str]


def request(number: int) -> api.GenerateRequest:
    """The request of stream `number`; every second one is sampled."""
    sampling: dict[str, Any] = {
        "temperature": 0.9 if number % 2 else 0.0,
        "seed": number,
        "ignore_eos": True,
        "logprobs": 0,
    }
    message = ask(f"Once upon a time number {number} and", max_tokens=TOKENS, **sampling)
    message.cache = api.CACHE_POLICY_BYPASS
    return message


def ranks_of(worker: Process) -> list[int]:
    """The process ids of a worker's ranks, rank 1 first."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = status.read_bytes().split(b"\0")
            parent = int((status.parent / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # The process has ended.
        if parent == worker.pid and b"services.worker.build.ranks.rank" in command:
            found[int(command[-3])] = int(status.parent.name)
    return [found[number] for number in sorted(found)]


async def streams_survive(
    folder: Path,
    workers: Sequence[Env],
    harm: Callable[[Mesh], object],
    streams: int = 6,
    *,
    ends: bool = True,
    model: Path = DEMO,
) -> None:
    """Start a worker for each environment, run streams, harm the first worker, and compare all answers with those of
    undisturbed streams. ends: the first worker's process ends within 2 s; otherwise it hangs."""
    mesh = Mesh(folder, model, workers=len(workers), worker_env={"WEFT_DETERMINISTIC": "true"})
    for worker, env in zip(mesh.workers, workers, strict=True):
        worker.env.update(env)
    async with mesh:
        stub = mesh.stub()
        expected = await asyncio.gather(*(generate(stub, request(number)) for number in range(streams)))
        answers = await _harmed(mesh, harm, streams, ends)
        if not ends:  # The gateways have given the worker up, and it still waits: its rank's death ends it.
            signal_rank(1, signal.SIGKILL)(mesh)
        moved = [answer for answer in answers if answer.receipt.attempts > 1]
        assert moved, "no stream was on the harmed worker"
        for number, (answer, calm) in enumerate(zip(answers, expected, strict=True)):
            assert answer.ids == calm.ids, number
            assert answer.logprobs == calm.logprobs, number
            assert answer.text == calm.text, number


async def _harmed(mesh: Mesh, harm: Callable[[Mesh], object], streams: int, ends: bool) -> list[Answer]:
    stub, seen = mesh.stub(), [0] * streams

    def stream(number: int) -> "asyncio.Task[Answer]":
        def count(delta: api.Delta) -> None:
            seen[number] += len(delta.token_ids)

        return asyncio.create_task(generate(stub, request(number), on_delta=count))

    tasks = [stream(number) for number in range(streams)]
    while min(seen) < 4:
        assert not any(task.done() for task in tasks), "a stream ended before all were in flight"
        await asyncio.sleep(0.005)
    harm(mesh)
    harmed_at, victim = time.monotonic(), mesh.workers[0].popen
    assert victim is not None
    while ends and victim.poll() is None:
        assert time.monotonic() - harmed_at < 2, "the worker runs without one of its ranks"
        await asyncio.sleep(0.01)
    return list(await asyncio.gather(*tasks))


def signal_rank(number: int, how: signal.Signals) -> Callable[[Mesh], None]:
    """Send a signal to a rank of the first worker; rank 0 is the worker itself."""

    def harm(mesh: Mesh) -> None:
        worker = mesh.workers[0]
        os.kill([worker.pid, *ranks_of(worker)][number], how)

    return harm


def left_behind() -> list[str]:
    """The ranks that run without their worker."""
    orphans = []
    for status in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = status.read_bytes().split(b"\0")
            parent = int((status.parent / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # The process has ended.
        if b"services.worker.build.ranks.rank" in command and parent == 1:
            orphans.append(status.parent.name)
    return orphans
