"""Runs a whole load: reads the model from the mesh, starts the client processes together, merges their results."""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from protos import inference_pb2 as api
from weft.client.api import Client
from weft.client.requests import not_served
from weft.load.driver import KEY_VARIABLE
from weft.load.plan import Plan, PlanError
from weft.load.tally import Tally
from weft.load.workload import Workload

_LEAD_S = 0.2
_LINE_BYTES = 64 << 20


class RunError(Exception):
    """A run failed; the message is one line."""


@dataclass(frozen=True, slots=True)
class Run:
    """A completed run."""

    plan: Plan
    model: api.Model
    tally: Tally
    clipped: int
    """Requests of the trace that were shortened to the model's context."""


Progress = Callable[[int, int], None]
"""Takes the number of requests that have ended, and the most that there will be."""


async def run(plan: Plan, notify: Progress = lambda ended, total: None) -> Run:
    """Runs a plan against a running mesh. Raises PlanError, TraceError, RunError and the client's WeftError."""
    model = await _model(plan)
    plan = replace(plan, model=model.name, vocab_size=model.vocab_size, context_length=model.context_length).checked()
    workload = Workload(plan)
    plan = replace(plan, requests=len(workload)).checked()
    async with _clients(plan) as clients:
        await asyncio.gather(*(client.ready() for client in clients))
        start = time.monotonic() + _LEAD_S + plan.delay_s
        ended_by_client = [0] * len(clients)

        def on_progress(number: int, ended: int) -> None:
            ended_by_client[number] = ended
            notify(sum(ended_by_client), plan.requests)

        tallies = await asyncio.gather(*(client.run(start, on_progress) for client in clients))
    tally = tallies[0]
    for other in tallies[1:]:
        tally.merge(other)
    return Run(plan, model, tally, workload.clipped)


async def _model(plan: Plan) -> api.Model:
    key = os.environ.get(KEY_VARIABLE, "")
    async with Client(plan.address.split(",")[0], deadline_s=10, api_key=key) as client:
        models = await client.models()
    served = [model for model in models if model.workers]
    matching = [model for model in served if plan.model in ("", model.name, *model.aliases)]
    if not matching:
        raise PlanError(not_served(plan.address, plan.model, [model.name for model in served]))
    if not plan.model:
        matching = [model for model in matching if not model.base]
    if len(matching) > 1:
        raise PlanError(f"several models are served: name one of {', '.join(model.name for model in matching)}")
    return matching[0]


class _Client:
    """One client process, from the parent's side."""

    def __init__(self, number: int, process: asyncio.subprocess.Process) -> None:
        self.number = number
        self.process = process

    async def ready(self) -> None:
        """Waits until its warm-up has ended. Raises RunError."""
        answer = await self._receive()
        if "ready" not in answer:
            raise RunError(f"the warm-up failed: {answer['error']}")

    async def run(self, start: float, notify: Callable[[int, int], None]) -> Tally:
        """Starts its measured part at `start` (monotonic clock) and waits for its result."""
        self.send(repr(start))
        while "tally" not in (answer := await self._receive()):
            completed, failed, _ = answer["progress"]
            notify(self.number, completed + failed)
        return Tally.from_json(answer["tally"])

    def send(self, line: str) -> None:
        """Writes a line to its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")

    async def _receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            raise RunError(f"client process {self.number} ended with exit code {await self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@asynccontextmanager
async def _clients(plan: Plan) -> AsyncIterator[list[_Client]]:
    """The client processes, started with the plan; they are killed at the end of the block."""
    clients: list[_Client] = []
    try:
        for number in range(plan.processes):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "weft.load"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LINE_BYTES,
            )
            clients.append(_Client(number, process))
            clients[-1].send(json.dumps({"plan": plan.to_json(), "process": number}))
        yield clients
    finally:
        for client in clients:
            with suppress(ProcessLookupError):
                client.process.kill()
            await client.process.wait()
