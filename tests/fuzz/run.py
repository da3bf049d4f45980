"""Fuzzes every method of every port and every HTTP route of a running mesh, and abuses its connections.

    python -m tests.fuzz --cases 100000 --seed 1

A case fails if a call ends with UNKNOWN or INTERNAL, or HTTP with 500; the run fails if a golden request between cases
has another answer, or a process has another id. Cases are reproduced by their seed and number.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
from google.protobuf.descriptor import MethodDescriptor
from grpc import aio

from protos import inference_pb2 as api
from tests.fuzz import abuse
from tests.fuzz.messages import damaged, random_body, random_message
from tests.mesh.harness import Answer, Mesh, ask, generate
from tests.security import callers

MODEL = "weft-story-2m"
"""Random messages do not name it, or random workers would serve it, too: inner ports trust the role."""
CALL_S = 2.0
GOLDEN_S = 60.0
AT_ONCE = 16
GOLDEN_EVERY = 500
ABUSE_EVERY = 2000
FLOOD = 2000
CODES = grpc.StatusCode
BUGS = (CODES.UNKNOWN, CODES.INTERNAL, CODES.DATA_LOSS)
_OF_THE_CLIENT = callers.WRITTEN_AFTER_END


@dataclass
class Report:
    """What a run found."""

    cases: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    bugs: list[str] = field(default_factory=list)
    golden: int = 0
    abused: Counter[str] = field(default_factory=Counter)


class Fuzzer:
    """A run against one mesh. Its gateways, workers, scheduler and cache must be reachable without credentials."""

    def __init__(self, mesh: Mesh, routes: Sequence[tuple[str, str]], seed: int) -> None:
        self._mesh = mesh
        self._routes = routes
        self._seed = seed
        self._pids = [process.pid for process in mesh.processes]
        self._methods = [
            (process.address, method) for process in mesh.processes for method in _methods_of(process.health)
        ]
        self._channels: dict[str, aio.Channel] = {}
        self._golden: Answer | None = None
        self.report = Report()

    async def run(self, cases: int) -> Report:
        """Runs this number of cases, `AT_ONCE` at a time."""
        numbers = iter(range(cases))
        await self._check_golden()
        async with httpx.AsyncClient(base_url=self._mesh.url(), timeout=CALL_S * 4) as http:
            await asyncio.gather(*(self._work(numbers, http) for _ in range(AT_ONCE)))
        await self._check_golden()
        for channel in self._channels.values():
            await channel.close()
        return self.report

    async def _work(self, numbers: Any, http: httpx.AsyncClient) -> None:
        for number in numbers:
            await self._case(number, http)
            self.report.cases += 1
            if number % GOLDEN_EVERY == GOLDEN_EVERY - 1:
                await self._check_golden()
            if number % ABUSE_EVERY == ABUSE_EVERY // 2:
                await self.abuse(number // ABUSE_EVERY)

    async def abuse(self, number: int) -> None:
        """Abuses one connection in the way with this number."""
        gateway = self._mesh.gateways[0]
        every = [("grpc", gateway.port, *each) for each in abuse.GRPC.items()]
        every += [("http", int(gateway.env["WEFT_GATEWAY_HTTP_PORT"]), *each) for each in abuse.HTTP.items()]
        kind, port, name, pieces = every[number % len(every)]
        await asyncio.to_thread(abuse.abuse, ("127.0.0.1", port), pieces(FLOOD))
        self.report.abused[f"{kind} {name}"] += 1
        await self._check_golden()

    async def _case(self, number: int, http: httpx.AsyncClient) -> None:
        draw = random.Random(f"{self._seed}/{number}")
        if draw.random() < 0.3:
            await self._request(number, draw, http)
        else:
            await self._call(number, draw)

    async def _call(self, number: int, draw: random.Random) -> None:
        address, method = draw.choice(self._methods)
        count = draw.choice((1, 1, 1, 2, 5)) if method.client_streaming else 1
        made = [random_message(draw, method.input_type) for _ in range(count)]
        if "model" in method.input_type.fields_by_name and draw.random() < 0.7:
            for each in made:
                each.model = MODEL  # type: ignore[attr-defined]
        messages = [each.SerializeToString() for each in made]
        if draw.random() < 0.5:
            messages = [damaged(draw, data) for data in messages]
        if address not in self._channels:
            self._channels[address] = aio.insecure_channel(address)
        path = f"/{method.containing_service.full_name}/{method.name}"
        caller: Any = self._channels[address].stream_stream(path)
        call: Any = caller(iter(messages), timeout=draw.choice((0.05, 0.3, CALL_S)))
        try:
            async for _ in call:
                pass
            code = await call.code()
        except aio.AioRpcError as error:
            if error.details() == _OF_THE_CLIENT:
                return
            code = error.code()
        except asyncio.CancelledError:  # gRPC raises it for a call that the server has cancelled.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            code = CODES.CANCELLED
        self.report.codes[code.name] += 1
        if code in BUGS:
            self.report.bugs.append(f"case {number}: {path} ended with {code.name}")

    async def _request(self, number: int, draw: random.Random, http: httpx.AsyncClient) -> None:
        method, path = draw.choice(self._routes)
        filled = "/".join(
            draw.choice(("x", "%00", "weft-story-2m")) if "{" in part else part for part in path.split("/")
        )
        headers = {"content-type": "application/json", "x-request-timeout": draw.choice(("0.5", "nan", "-1", "1"))}
        try:
            async with asyncio.timeout(CALL_S):
                reply = await http.request(method, filled, content=random_body(draw), headers=headers)
        except (TimeoutError, httpx.TimeoutException):
            self.report.codes["HTTP stream"] += 1
            return
        except httpx.TransportError as error:
            self.report.bugs.append(f"case {number}: {method} {path} ended with {type(error).__name__}")
            return
        self.report.codes[f"HTTP {reply.status_code}"] += 1
        if reply.status_code == 500:
            self.report.bugs.append(f"case {number}: {method} {path} has status 500")

    async def _check_golden(self) -> None:
        """Asserts that the golden request has its answer, and that no process was replaced."""
        assert [process.pid for process in self._mesh.processes] == self._pids
        dead = [
            process.name
            for process in self._mesh.processes
            if process.popen is None or process.popen.poll() is not None
        ]
        assert not dead, f"{dead} ended"
        request = ask("Once upon a time", max_tokens=6, model=MODEL)
        request.cache = api.CACHE_POLICY_BYPASS  # The worker computes it anew each time.
        began = time.monotonic()
        while (answer := await self._answered(request)) is None:
            if time.monotonic() - began > GOLDEN_S:
                raise AssertionError("the golden request is refused all the time")
            await asyncio.sleep(0.2)
        self._golden = self._golden or answer
        assert (answer.ids, answer.text) == (self._golden.ids, self._golden.text), (
            "the golden request has another answer"
        )
        self.report.golden += 1

    async def _answered(self, request: api.GenerateRequest) -> Answer | None:
        """The answer; None if the mesh has no room for it now, which is no failure."""
        try:
            return await generate(self._mesh.stub(), request, deadline_s=GOLDEN_S)
        except aio.AioRpcError as error:
            if error.code() not in (CODES.RESOURCE_EXHAUSTED, CODES.UNAVAILABLE):
                raise
            return None


def _methods_of(service: str) -> list[MethodDescriptor]:
    """The methods that the port of this service has: a gateway's are those of all contracts for clients."""
    files = callers.PUBLIC if service == "weft.v1.Inference" else callers.INNER
    found = [each for file in files for each in file.DESCRIPTOR.services_by_name.values()]
    return [
        method
        for each in found
        if service in ("weft.v1.Inference", each.full_name)
        for method in each.methods
    ]  # fmt: skip
