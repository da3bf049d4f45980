"""One worker computes prompts, others continue their answers: no client notices, whoever dies and whenever."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from grpc import aio

from protos import inference_pb2 as api
from protos import mesh_pb2, mesh_pb2_grpc
from tests.mesh.harness import Answer, Mesh, Process, Stub, ask, generate
from tests.mesh.test_prefixes import tale

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORKER = {"WEFT_DETERMINISTIC": "true", "WEFT_STEP_TOKENS": "64", "WEFT_LOG_LEVEL": "debug"}
STREAMS = 64
AT_FIRST = 48
"""Streams before a worker is suspended; the others start then."""
TOKENS = 20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory, model: Path) -> AsyncIterator[Mesh]:
    """A worker for prompts and two for answers. The last tests kill the second and the first one."""
    made = Mesh(tmp_path_factory.mktemp("roles"), model, workers=0, worker_env=WORKER)
    roles = ("prefill", "decode", "decode")
    made.workers = [made.new_worker(number, WEFT_ROLE=role) for number, role in enumerate(roles)]
    async with made:
        async with asyncio.timeout(60):
            while len((await overview(made)).workers) < len(roles):  # noqa: ASYNC110 - another process changes it
                await asyncio.sleep(0.02)
        yield made


@pytest.fixture
def stub(mesh: Mesh) -> Stub:
    """A client of the mesh."""
    return mesh.stub()


async def overview(mesh: Mesh) -> mesh_pb2.OverviewResponse:
    """The scheduler's view."""
    async with aio.insecure_channel(mesh.scheduler.address) as channel:
        return await mesh_pb2_grpc.SchedulerStub(channel).Overview(mesh_pb2.OverviewRequest())


async def is_idle(mesh: Mesh, worker: Process) -> bool:
    """Whether a worker has fewer than 4 jobs, by the scheduler's count. One that is lost had some."""
    return any(each.address == worker.address and each.jobs < 4 for each in (await overview(mesh)).workers)


async def no_credit_is_held(mesh: Mesh) -> None:
    """Waits until the scheduler counts no job any more."""
    async with asyncio.timeout(20):
        while any(worker.jobs for worker in (await overview(mesh)).workers):  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.02)


def whole(request: api.GenerateRequest) -> api.GenerateRequest:
    """The same request for one worker: its blocks are not cached, so that none could fetch them."""
    alone = api.GenerateRequest()
    alone.CopyFrom(request)
    alone.cache = api.CACHE_POLICY_BYPASS
    return alone


def same(answer: Answer, other: Answer) -> None:
    """Asserts that two answers have the same tokens, log-probabilities and ends."""
    assert answer.tokens == other.tokens
    assert answer.texts == other.texts
    assert answer.finish == other.finish
    assert answer.stop == other.stop
    for index, logprobs in other.logprobs.items():
        assert answer.logprobs[index] == logprobs


def samples(request: api.GenerateRequest, n: int) -> api.GenerateRequest:
    """The request for several answers."""
    request.n = n
    return request


REQUESTS = {
    "greedy": ask(tale(1, 100), max_tokens=12),
    "seeded, chunked": ask(tale(2, 400), max_tokens=12, temperature=0.9, seed=7, logprobs=2),
    "a prefix that is cached": ask(tale(2, 400) + tale(12, 100), max_tokens=12, temperature=0.9, seed=8, logprobs=0),
    "penalties": ask(tale(3, 100), max_tokens=12, repetition_penalty=1.3, presence_penalty=0.5, min_tokens=6),
    "log-probabilities of the prompt": ask(tale(4, 100), max_tokens=6, prompt_logprobs=0, logprobs=0),
    "several samples": samples(ask(tale(5, 100), max_tokens=10, temperature=1.0, seed=3, ignore_eos=True), 3),
    "a stop string": ask(tale(6, 100), max_tokens=40, stop=["e", "a"]),
    "a form": ask(tale(7, 100), max_tokens=20, structured=api.Structured(regex="[a-c]{6}")),
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_divided_answer_is_that_of_one_worker(mesh: Mesh, stub: Stub, name: str) -> None:
    answer = await generate(stub, REQUESTS[name])
    same(answer, await generate(stub, whole(REQUESTS[name])))
    assert answer.receipt.attempts == 1
    if len(answer.ids) > 1:
        assert len(answer.receipt.workers) >= 2
    if name == "seeded, chunked":  # So long that fetching it pays on a busy machine, too.
        assert answer.receipt.fetched_tokens > 0
    await no_credit_is_held(mesh)


async def test_a_worker_that_has_the_prompt_continues_it_alone(mesh: Mesh, stub: Stub) -> None:
    request = ask(tale(1, 100) + " and then", max_tokens=12)
    expected = await generate(stub, whole(request))
    async with asyncio.timeout(60):  # Until the worker for answers has reported the blocks of earlier answers.
        while len((answer := await generate(stub, request)).receipt.workers) > 1:
            same(answer, expected)
    same(answer, expected)
    assert answer.receipt.cached_tokens > 0


async def test_an_answer_of_one_token_is_not_handed_off(mesh: Mesh, stub: Stub) -> None:
    answer = await generate(stub, ask(tale(8, 100), max_tokens=1))
    assert (len(answer.ids), len(answer.receipt.workers)) == (1, 1)
    await no_credit_is_held(mesh)


async def test_equal_requests_share_both_parts(mesh: Mesh, stub: Stub) -> None:
    request = ask(tale(9, 300), max_tokens=12, ignore_eos=True)
    answers = await asyncio.gather(*(generate(stub, request) for _ in range(4)))
    for answer in answers[1:]:
        same(answer, answers[0])
    assert sum(answer.receipt.joined for answer in answers) >= 3
    assert {answer.receipt.attempts for answer in answers} == {1}


async def test_cancelled_answers_give_every_credit_back(mesh: Mesh, stub: Stub) -> None:
    calls = [stub.Generate(ask(tale(20 + number, 100), max_tokens=200, ignore_eos=True)) for number in range(12)]
    await asyncio.gather(*(call.read() for call in calls[:6]))
    for call in calls:
        call.cancel()
    await no_credit_is_held(mesh)


def crowd(number: int) -> api.GenerateRequest:
    """The request of stream `number`: long enough to be divided; every second one is sampled."""
    temperature = 0.9 if number % 2 else 0.0
    return ask(
        tale(100 + number, 70), max_tokens=TOKENS, temperature=temperature, seed=number, ignore_eos=True, logprobs=0
    )


class Crowd:
    """Many streams at once, and how many tokens each has delivered."""

    def __init__(self, stub: Stub, salt: str) -> None:
        """`salt` makes prompts that no worker has cached: a request under which two workers die is refused."""
        self.seen = [0] * STREAMS
        self.requests = [crowd(number) for number in range(STREAMS)]
        for request in self.requests:
            request.prompt.text = f"{salt} {request.prompt.text}"
        self._stub = stub
        self.tasks: list[asyncio.Task[Answer]] = []
        self._start(AT_FIRST)

    def _start(self, count: int) -> None:
        for number in range(len(self.tasks), len(self.tasks) + count):
            self.tasks.append(asyncio.create_task(self._run(self._stub, number)))

    async def _run(self, stub: Stub, number: int) -> Answer:
        def on_delta(delta: api.Delta) -> None:
            self.seen[number] += len(delta.token_ids)

        return await generate(stub, self.requests[number], deadline_s=110, on_delta=on_delta)

    async def until(self, count: int, least: int) -> None:
        """Waits until `count` streams have `least` tokens."""
        while sum(seen >= least for seen in self.seen) < count:  # noqa: ASYNC110 - each delta changes it
            await asyncio.sleep(0.002)

    async def lose(self, mesh: Mesh, worker: Process) -> None:
        """Kills a worker that has jobs, however late this client is: suspends it, and starts the other streams."""
        os.kill(worker.pid, signal.SIGSTOP)
        self._start(STREAMS - AT_FIRST)
        async with asyncio.timeout(60):
            while await is_idle(mesh, worker):  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.002)
        kill(worker)

    async def check(self, stub: Stub) -> list[Answer]:
        """-> the answers, each of which is that of an undisturbed worker."""
        answers = await asyncio.gather(*self.tasks)
        calm: list[Answer] = []
        for start in range(0, STREAMS, 16):  # A gateway of a very busy machine may refuse some of 64 at once.
            some = self.requests[start : start + 16]
            calm += await asyncio.gather(*(generate(stub, whole(each), deadline_s=110) for each in some))
        for answer, other in zip(answers, calm, strict=True):
            assert len(answer.ids) == TOKENS
            same(answer, other)
        return list(answers)


def kill(process: Process) -> None:
    assert process.kill(signal.SIGKILL) == -signal.SIGKILL


async def test_a_worker_killed_after_the_handoff_costs_the_clients_nothing(mesh: Mesh, stub: Stub) -> None:
    await mesh.revive()
    streams = Crowd(stub, "First")
    await streams.until(24, 3)
    await streams.lose(mesh, mesh.workers[1])
    answers = await streams.check(stub)
    assert sum(answer.receipt.attempts > 1 for answer in answers) >= 4
    await no_credit_is_held(mesh)


async def test_a_worker_killed_in_the_handoff_costs_the_clients_nothing(mesh: Mesh, stub: Stub) -> None:
    await mesh.revive(mesh.workers[0])
    streams = Crowd(stub, "Second")
    await streams.until(12, 1)
    await streams.lose(mesh, mesh.workers[0])
    answers = await streams.check(stub)
    assert sum(answer.receipt.attempts > 1 for answer in answers) >= 4
    assert len((await generate(stub, ask(tale(90, 100), max_tokens=4))).ids) == 4, "the last worker does everything"
    await no_credit_is_held(mesh)
