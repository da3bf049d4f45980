"""A whole run: asks the mesh for its model, starts the client processes together, adds up what they saw."""

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
from weft.load.driver import KEY_VARIABLE
from weft.load.plan import Plan, PlanError
from weft.load.tally import Tally
from weft.load.workload import Workload

_LEAD_S = 0.2
_LINE_BYTES = 64 << 20


class RunError(Exception):
    """A run could not be made; the message is one line."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run that is over."""

    plan: Plan
    model: api.Model
    tally: Tally
    clipped: int
    """Requests of the trace that were too long for the model."""


Progress = Callable[[int, int], None]
"""Is told how many requests have ended, and how many there will be at most."""


async def run(plan: Plan, progress: Progress = lambda ended, total: None) -> Run:
    """Runs a plan against a mesh that is up. Raises PlanError, TraceError, RunError and the client's WeftError."""
    model = await _model(plan)
    plan = replace(plan, model=model.name, vocab_size=model.vocab_size, context_length=model.context_length).checked()
    workload = Workload(plan)
    plan = replace(plan, requests=len(workload)).checked()
    async with _clients(plan) as clients:
        await asyncio.gather(*(client.ready() for client in clients))
        start = time.monotonic() + _LEAD_S
        seen = [0] * len(clients)

        def note(number: int, ended: int) -> None:
            seen[number] = ended
            progress(sum(seen), plan.requests)

        tallies = await asyncio.gather(*(client.run(start, note) for client in clients))
    tally = tallies[0]
    for other in tallies[1:]:
        tally.merge(other)
    return Run(plan, model, tally, workload.clipped)


async def _model(plan: Plan) -> api.Model:
    key = os.environ.get(KEY_VARIABLE, "")
    async with Client(plan.address.split(",")[0], deadline_s=10, api_key=key) as client:
        models = await client.models()
    wanted = [model for model in models if model.workers and plan.model in ("", model.name, *model.aliases)]
    if not wanted:
        raise PlanError(f"{plan.address} serves no model {plan.model}".rstrip())
    if len(wanted) > 1:
        raise PlanError(f"name one of the models {', '.join(model.name for model in wanted)}")
    return wanted[0]


class _Client:
    """A client process, seen from here."""

    def __init__(self, number: int, process: asyncio.subprocess.Process) -> None:
        self.number = number
        self.process = process

    async def ready(self) -> None:
        """Waits for the end of its warm-up. Raises RunError."""
        answer = await self._hear()
        if "ready" not in answer:
            raise RunError(f"the warm-up failed: {answer['broken']}")

    async def run(self, start: float, note: Callable[[int, int], None]) -> Tally:
        """Lets it begin at `start` and waits for what it saw."""
        self.say(repr(start))
        while "tally" not in (answer := await self._hear()):
            completed, failed, _ = answer["progress"]
            note(self.number, completed + failed)
        return Tally.from_json(answer["tally"])

    def say(self, line: str) -> None:
        """A line on its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")

    async def _hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            raise RunError(f"client process {self.number} ended with {await self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@asynccontextmanager
async def _clients(plan: Plan) -> AsyncIterator[list[_Client]]:
    """The client processes, told their plan, gone at the end of the block."""
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
            clients[-1].say(json.dumps({"plan": plan.to_json(), "process": number}))
        yield clients
    finally:
        for client in clients:
            with suppress(ProcessLookupError):
                client.process.kill()
            await client.process.wait()
