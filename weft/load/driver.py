"""One client process: sends its share of a run's requests and counts the answers. Knows one plan and one gateway.

The parent writes the plan as a line of JSON, reads a line when the warm-up has ended, writes the time at which the
measured part begins (on the machine's monotonic clock), and reads lines of JSON with the progress, the last one with
the whole result.
"""

import asyncio
import json
import os
import stat
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from itertools import chain, cycle, islice
from typing import Any, NoReturn

from grpc import aio

from protos import inference_pb2 as api
from protos import inference_pb2_grpc as stubs
from services.process import keep_pauses_short
from weft.client.channel import open_channel
from weft.client.errors import from_rpc
from weft.load.http_calls import HttpCalls, HttpError
from weft.load.plan import Plan
from weft.load.tally import Outcome, Tally
from weft.load.workload import Due, Workload

clock = time.monotonic
_PROGRESS_S = 0.25
KEY_VARIABLE = "WEFT_API_KEY"
"""Holds the API key. A plan does not: plans are written into reports."""
_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", 16 << 20),
]


class Driver:
    """Sends requests and counts answers."""

    def __init__(self, plan: Plan, process: int, callers: "Sequence[stubs.InferenceAsyncStub]") -> None:
        """`callers`: one for each connection."""
        self.plan = plan
        self.process = process
        self.tally = Tally()
        self.workload = Workload(plan)
        self._callers = cycle(callers)
        key = os.environ.get(KEY_VARIABLE)
        self._http = HttpCalls(plan.http, key or "", plan.connections) if plan.http else None
        self._metadata = (("authorization", f"Bearer {key}"),) if key else ()
        self._start = 0.0

    async def warm_up(self) -> str:
        """Sends requests that are not counted. -> the first error, or ""."""
        requests = (self.workload.request(due) for due in self.workload.warmup(self.process))
        await _all_of(self._send, requests, self._width() or 8)
        return next(iter(self.tally.errors), "")

    async def run(self, start: float) -> None:
        """Sends all requests from `start` on and waits until each has ended."""
        self._start = start
        self.tally = Tally()
        used = time.process_time()
        await self._send_all(start)
        self.tally.processor_s = time.process_time() - used

    async def _send_all(self, start: float) -> None:
        dues, width = self.workload.share(self.process), self._width() or 1
        if self.plan.open_loop:
            await asyncio.sleep(max(0.0, start - clock()))
            await self._send_on_schedule(dues)
            return
        first = [self.workload.request(due) for due in islice(dues, width)]  # built early, to be sent at once
        await asyncio.sleep(max(0.0, start - clock()))
        later = (self.workload.request(due) for due in self._in_time(dues))
        await _all_of(self._send, chain(first, later), width)

    def _width(self) -> int | None:
        """This process's share of the concurrency; None without a bound."""
        plan = self.plan
        if plan.concurrency is None:
            return None
        return (plan.concurrency - self.process + plan.processes - 1) // plan.processes

    def _in_time(self, dues: Iterator[Due]) -> Iterator[Due]:
        limit = self.plan.duration_s
        for due in dues:
            if limit is not None and clock() - self._start >= limit:
                return
            yield due

    async def _send_on_schedule(self, dues: Iterator[Due]) -> None:
        room = _Room(self._width())
        async with asyncio.TaskGroup() as tasks:
            for due in self._in_time(dues):
                if self.plan.duration_s is not None and due.at_s >= self.plan.duration_s:
                    return
                request = self.workload.request(due)
                await asyncio.sleep(max(0.0, self._start + due.at_s - clock()))
                await room.enter()
                self.tally.lag.add(max(0.0, clock() - self._start - due.at_s) * 1e3)
                tasks.create_task(self._send(request)).add_done_callback(room.leave)

    async def _send(self, request: api.GenerateRequest) -> None:
        """One measured request."""
        began = clock()
        self.tally.count(began - self._start, "started")
        try:
            self.tally.add(await self._answer(request, began), self._start, self.plan.goodput)
        except aio.AioRpcError as error:
            failure = from_rpc(error)
            refused = failure.code.name == "RESOURCE_EXHAUSTED" or failure.reason == "DEADLINE_UNMEETABLE"
            name = f"{failure.code.name}/{failure.reason}" if failure.reason else failure.code.name
            self._failed(name, began, refused)
            if refused and failure.receipt is not None:
                self.tally.refusals_inside.add(failure.receipt.timings.wall_s * 1e3)
        except HttpError as error:
            self._failed(str(error), began, error.refused)
        except (OSError, EOFError) as error:
            self._failed(type(error).__name__, began, False)

    def _failed(self, name: str, began: float, refused: bool) -> None:
        now = clock()
        self.tally.errors[name] += 1
        if refused:
            self.tally.refusals.add((now - began) * 1e3)
        self.tally.last_ended = max(self.tally.last_ended, now - self._start)
        self.tally.count(now - self._start, "ended")

    async def _answer(self, request: api.GenerateRequest, began: float) -> Outcome:
        """Reads one answer to its end."""
        if self._http is not None:
            receipt = await self._http.complete(request, self.plan.deadline_s)
        elif not self.plan.stream:
            call = next(self._callers).Complete(request, timeout=self.plan.deadline_s, metadata=self._metadata)
            receipt = (await call).receipt
        else:
            return await self._stream(request, began)
        now = clock()
        self.tally.count(now - self._start, "tokens", receipt.completion_tokens)
        return Outcome(began, None, now, now, receipt.completion_tokens, receipt)

    async def _stream(self, request: api.GenerateRequest, began: float) -> Outcome:
        """Reads one answer to its end. Inter-token latency is the time between messages that bring tokens."""
        tally, start = self.tally, self._start
        gaps: list[float] = []
        first: float | None = None
        last, tokens, receipt = began, 0, api.Receipt()
        call = next(self._callers).Generate(request, timeout=self.plan.deadline_s, metadata=self._metadata)
        async for response in call:
            brought = len(response.delta.token_ids)
            if not brought:
                receipt = response.receipt if response.HasField("receipt") else receipt
                continue
            now = clock()
            if first is None:
                first = now
            else:
                gaps.append((now - last) * 1e3)
                tally.latencies["itl"].add(gaps[-1])
            last = now
            tokens += brought
            tally.messages += 1
            tally.count(now - start, "tokens", brought)
        return Outcome(began, first, last, clock(), tokens, receipt, gaps)


class _Room:
    """Bounds the requests at a time, or not."""

    def __init__(self, width: int | None) -> None:
        self._places = None if width is None else asyncio.Semaphore(width)

    async def enter(self) -> None:
        """Waits until another request may be sent."""
        if self._places is not None:
            await self._places.acquire()

    def leave(self, task: object) -> None:
        """Ends a request, so that another one may be sent."""
        if self._places is not None:
            self._places.release()


async def _all_of(
    work: Callable[[api.GenerateRequest], Awaitable[None]], requests: Iterator[api.GenerateRequest], width: int
) -> None:
    """Calls `work` for each request, `width` at a time."""

    async def lane() -> None:
        for request in requests:
            await work(request)

    async with asyncio.TaskGroup() as lanes:
        for _ in range(width):
            lanes.create_task(lane())


async def main() -> None:
    """Follows the parent's lines on standard input. The process ends when standard input does."""
    lines = _lines()
    try:
        order = json.loads(await anext(lines, b""))
    except ValueError:
        _refuse()
    plan, process = Plan.from_json(order["plan"]), int(order["process"])
    addresses = plan.address.split(",")
    async with AsyncExitStack() as stack:
        callers: list[Any] = []
        for _ in range(plan.connections):
            channel = open_channel(addresses[process % len(addresses)], _OPTIONS)
            callers.append(stubs.InferenceStub(await stack.enter_async_context(channel)))
        driver = Driver(plan, process, callers)
        error = await driver.warm_up()
        keep_pauses_short()  # Long ones would count as the mesh's.
        _report({"error": error} if error else {"ready": True})
        start = float(await anext(lines))
        parent_gone = asyncio.create_task(_until_end(lines))
        progress = asyncio.create_task(_report_progress(driver))
        work = asyncio.create_task(driver.run(start))
        await asyncio.wait([work, parent_gone], return_when=asyncio.FIRST_COMPLETED)
        progress.cancel()
        parent_gone.cancel()
        if work.done():
            work.result()
            _report({"tally": driver.tally.to_json()})
        else:
            work.cancel()


async def _lines() -> AsyncIterator[bytes]:
    reader = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield line


async def _until_end(lines: AsyncIterator[bytes]) -> None:
    async for _ in lines:
        pass


async def _report_progress(driver: Driver) -> None:
    while True:
        await asyncio.sleep(_PROGRESS_S)
        tally = driver.tally
        _report({"progress": [tally.completed, tally.failed, tally.messages]})


def _report(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _has_parent() -> bool:
    """Whether standard input is a pipe or a socket, to which another program may write."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:  # It is closed.
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _refuse() -> NoReturn:
    """Ends the process if no parent sends it a plan."""
    print(
        "weft: this is one client process of a load and is started by `weft bench`: run that instead", file=sys.stderr
    )
    sys.exit(2)


def run() -> None:
    """The client as a process."""
    import uvloop

    if sys.argv[1:] or not _has_parent():
        _refuse()
    uvloop.run(main())
