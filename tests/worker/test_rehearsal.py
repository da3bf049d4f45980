"""The rehearsal of a first token: who hears of it, when, and what it never changes."""

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from protos import inference_pb2 as api
from protos import mesh_pb2 as mesh
from protos import mesh_pb2_grpc as mesh_grpc
from services import rpc
from services.send_queue import SendQueue
from services.worker.engine import first_token
from services.worker.engine.generation import GenerationEngine
from services.worker.job import StepOutput
from services.worker.loader import checkpoint
from services.worker.loader.config import load_config
from services.worker.options import EngineOptions
from services.worker.runners.base import StepResult
from services.worker.runners.paced import PacedEngine, PacedTiming
from services.worker.runners.step import Words
from services.worker.service import engine_thread
from services.worker.service.jobs import Jobs
from services.worker.service.metrics import WorkerMetrics
from services.worker.service.servicer import Loaded, WorkerService
from services.worker.service.startup import Startup
from tests.worker.conftest import EngineMaker
from tests.worker.drive import job, prompt_of
from weft.launch.demo_model import model_folder

PROMPT = 60
PROMPT_S, ANSWER_S = 0.06, 0.001
PROMPTS = 12
"""So many are tried until one is rehearsed: on a machine that is busy with others a rehearsal may come too late."""


@pytest.fixture(autouse=True)
def _long_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_token, "LEAD_S", 0.03)


class Gateway:
    """The other end of a Run stream: sends jobs, and reads until it has seen enough."""

    def __init__(self, call: AsyncIterator[mesh.RunResponse], requests: SendQueue[mesh.RunRequest]) -> None:
        self._call = call
        self._requests = requests
        self._rows = 0

    def ask(self, tokens: int) -> int:
        """Sends a job with a prompt that nobody has had. Returns its row."""
        self._rows += 1
        prompt = random.Random(self._rows).choices(range(2, 6000), k=PROMPT)
        sampling = api.Sampling(max_tokens=tokens, seed=1, ignore_eos=True)
        self._requests.put(
            mesh.RunRequest(
                job=mesh.Job(
                    row=self._rows,
                    job_id=f"job-{self._rows}",
                    attempt=1,
                    token_ids=prompt,
                    boundary=PROMPT,
                    sampling=sampling,
                )
            )
        )
        return self._rows

    def cancel(self, row: int) -> None:
        """Needs a job no more."""
        self._requests.put(mesh.RunRequest(cancel=mesh.CancelJob(row=row, position=0)))

    async def read(self, enough: Callable[[mesh.RunResponse], bool]) -> list[mesh.RunResponse]:
        """All messages up to the first one that is enough."""
        messages = []
        async with asyncio.timeout(20):
            async for message in self._call:
                messages.append(message)
                if enough(message):
                    return messages
        raise AssertionError("the stream has ended")

    async def answer(self, row: int) -> list[mesh.RunResponse]:
        """All messages until the end of a row."""
        return await self.read(lambda message: any(end.row == row for end in message.ends))

    async def announced(self) -> int:
        """A row whose first token was announced and has not come yet."""
        for _ in range(PROMPTS):
            row = self.ask(2)
            messages = await self.read(lambda message: bool(message.soon or message.rows))
            if messages[-1].soon:
                assert list(messages[-1].soon) == [row]
                return row
            await self.answer(row)
        raise AssertionError("no first token was announced")


class Silent:
    """A link to no scheduler."""

    def changed(self, urgent: bool = True) -> None:
        """Nobody wants to know."""


@asynccontextmanager
async def worker() -> AsyncIterator[Gateway]:
    """A worker's Run stream over a real connection, with an engine that needs PROMPT_S for a prompt."""
    folder = model_folder()
    engine = PacedEngine(folder, EngineOptions(), PacedTiming(ANSWER_S, PROMPT / PROMPT_S))
    card = checkpoint.model_card(
        folder, load_config(folder), name="m", context_length=2048, block_size=16, parameters=1
    )
    jobs, silent = Jobs(engine, card, 1.0, WorkerMetrics()), Silent()
    service = WorkerService(Startup("w", "m"))
    service.loaded(Loaded(jobs, b"", b"", mesh.WorkerReport, engine.profiler))
    server = await rpc.serve(
        "127.0.0.1:0", [rpc.Service("weft.v1.Worker", mesh_grpc.add_WorkerServicer_to_server, service)]
    )
    attachment: Any = silent
    requests: SendQueue[mesh.RunRequest] = SendQueue()
    requests.put(mesh.RunRequest(hello=mesh.GatewayHello(gateway_id="g")))
    try:
        with engine_thread.EngineThread(engine, jobs, attachment):
            async with rpc.link_channel(f"127.0.0.1:{server.port}") as channel:
                call: Any = mesh_grpc.WorkerStub(channel).Run(aiter(requests))
                yield Gateway(call, requests)
                call.cancel()
    finally:
        await server.stop(0)


async def test_a_first_token_is_announced_once_and_then_comes() -> None:
    async with worker() as gateway:
        row = await gateway.announced()
        rest = await gateway.answer(row)
        assert [position for message in rest for position in message.positions] == [0, 1]
        assert not any(message.soon for message in rest)


async def test_nothing_is_announced_that_takes_an_unknown_time() -> None:
    async with worker() as gateway:
        assert not any(message.soon for message in await gateway.answer(gateway.ask(2)))


async def test_nothing_is_announced_where_many_jobs_run() -> None:
    async with worker() as gateway:
        await gateway.announced()
        for _ in range(first_token.MOST_JOBS):
            running = gateway.ask(1900)
        await gateway.read(lambda message: running in message.rows)
        for _ in range(3):
            assert not any(message.soon for message in await gateway.answer(gateway.ask(2)))


async def test_a_job_that_is_cancelled_when_it_was_announced_ends_without_a_token() -> None:
    async with worker() as gateway:
        row = await gateway.announced()
        gateway.cancel(row)
        rest = await gateway.answer(row)
        assert [end.reason for end in rest[-1].ends] == [api.FINISH_REASON_CANCELLED]
        assert not any(row in message.soon for message in rest)
        assert [position for message in await gateway.answer(gateway.ask(2)) for position in message.positions] == [
            0,
            1,
        ]


class Device:
    """The CPU's runner as a device: a prompt's step takes PROMPT_S from its launch."""

    depth = 2

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.fails = False
        self.ends = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, words: Words) -> tuple[float, StepResult]:
        result = self._runner.launch(words)
        self.ends = max(time.monotonic(), self.ends) + PROMPT_S
        return self.ends, result

    def over(self, step: tuple[float, StepResult]) -> bool:
        return time.monotonic() >= step[0]

    def collect(self, step: tuple[float, StepResult]) -> StepResult:
        time.sleep(max(step[0] - time.monotonic(), 0.0))
        return StepResult([False], step[1].sampled) if self.fails else step[1]


class Heard:
    """What an engine says in its own thread."""

    def __init__(self, engine: GenerationEngine) -> None:
        self.said: list[tuple[str, int]] = []
        self._engine = engine
        self._ended, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(
            target=engine.run_forever, args=(self._output, lambda predicted: None, self._soon, self._stop)
        )

    def __enter__(self) -> "Heard":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._engine.wake()
        self._thread.join(5)

    def run(self, key: int) -> list[str]:
        """What was said of a job with a prompt of its own, from its start to its end."""
        self._ended.clear()
        self._engine.submit(job(key, prompt_of(30, seed=key), max_tokens=2))
        assert self._ended.wait(20)
        return [what for what, of in self.said if of == key]

    def _soon(self, keys: list[int]) -> None:
        self.said += [("soon", key) for key in keys]

    def _output(self, output: StepOutput) -> None:
        self.said += [("token", token.key) for token in output.tokens]
        self.said += [(end.reason.value, end.key) for end in output.ended]
        if output.ended:
            self._ended.set()


def test_a_step_that_fails_after_its_rehearsal_fails_its_job_alone(engine: EngineMaker) -> None:
    made = engine()
    device: Any = Device(made.runner)
    made.runner = device
    with Heard(made) as heard:
        keys = iter(range(1, 2 * PROMPTS))
        assert any(heard.run(key) == ["soon", "token", "token", "length"] for key in keys)
        device.fails = True
        assert any(heard.run(key) == ["soon", "error"] for key in keys)
        device.fails = False
        assert heard.run(next(keys))[-3:] == ["token", "token", "length"]
    assert made.stats().active_blocks == 0


def test_a_step_that_is_over_sooner_than_ever_is_not_waited_for() -> None:
    subject = first_token.Rehearsal()
    told: list[list[int]] = []
    subject.tell = told.append
    sequence: Any = type("Sequence", (), {"job": job(1, [5]), "first_token_s": 0.0})()
    rows: Any = [type("Row", (), {"sequence": sequence, "tokens": PROMPT, "samples": True})()]
    subject.after(rows, 60.0)
    began = time.monotonic()
    subject.before(rows, 1, began, lambda: time.monotonic() > began + 0.01)
    assert time.monotonic() < began + 5.0
    assert not told
