"""Identical concurrent requests are computed once, at any gateway, also if some of their clients disconnect."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc import aio

from protos import inference_pb2 as api
from protos import mesh_pb2
from protos.mesh_pb2_grpc import WorkerStub
from tests.mesh.harness import Answer, Mesh, Process, Stub, ask, generate

pytestmark = pytest.mark.asyncio(loop_scope="session")

PACED = {"ENGINE": "paced", "WEFT_PACED_STEP_MS": "5", "MAX_BATCH_SIZE": "64"}
PROMPT = list(range(100, 164))
LENGTH = 100
LONG = 4 * LENGTH
"""The length of an answer that a retry meets, on a busy machine too: 2 s."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mesh(tmp_path_factory: pytest.TempPathFactory, model: Path) -> AsyncIterator[Mesh]:
    """Two gateways, two paced workers, no result cache."""
    async with Mesh(tmp_path_factory.mktemp("joins"), model, workers=2, gateways=2, worker_env=PACED) as running:
        await until_all_listed(running)
        yield running


async def until_all_listed(mesh: Mesh) -> None:
    """Waits until each gateway lists each worker."""
    for gateway in range(2):
        await until_listed(mesh, gateway, workers=2)


async def until_listed(mesh: Mesh, gateway: int, workers: int) -> None:
    """Waits until the gateway lists at least `workers` workers."""

    async def listed() -> int:
        return sum(model.workers for model in (await mesh.stub(gateway).ListModels(api.ListModelsRequest())).models)

    async with asyncio.timeout(60):
        while await listed() < workers:  # noqa: ASYNC110 (the event is in another process)
            await asyncio.sleep(0.02)


async def status(worker: Process) -> mesh_pb2.StatusResponse:
    """The status of a worker."""
    async with aio.insecure_channel(worker.address) as channel:
        reply: mesh_pb2.StatusResponse = await WorkerStub(channel).Status(mesh_pb2.StatusRequest())
        return reply


async def idle(mesh: Mesh) -> None:
    """Waits until no worker has a job that holds a block."""
    async with asyncio.timeout(60):
        for worker in mesh.workers:
            while (await status(worker)).report.active_blocks:  # noqa: ASYNC110 (the event is in another process)
                await asyncio.sleep(0.02)


def fresh(seeds: "itertools.count[int]" = itertools.count(1000)) -> api.GenerateRequest:  # noqa: B008
    """A deterministic request that differs from all earlier ones."""
    return ask(PROMPT, max_tokens=LENGTH, temperature=1.0, seed=next(seeds), ignore_eos=True)


async def first_tokens(call: Any, count: int) -> list[int]:
    """Reads a stream until at least `count` tokens have arrived."""
    tokens: list[int] = []
    while len(tokens) < count:
        tokens.extend((await call.read()).delta.token_ids)
    return tokens


def cost(answers: list[Answer]) -> int:
    """The number of prompt tokens that were computed, cached or fetched for these answers."""
    return sum(answer.receipt.prefill_tokens + answer.receipt.cached_tokens for answer in answers)


async def test_32_identical_requests_through_two_gateways_cost_one(mesh: Mesh) -> None:
    stubs = [mesh.stub(0), mesh.stub(1)]
    request = fresh()
    answers = await asyncio.gather(*(generate(stubs[i % 2], request) for i in range(32)))
    assert len({tuple(answer.ids) for answer in answers}) == 1
    assert len({answer.text for answer in answers}) == 1
    assert all(len(answer.ids) == LENGTH for answer in answers)
    assert sum(answer.receipt.joined for answer in answers) == 31
    assert cost(answers) == len(PROMPT)
    assert len({answer.receipt.workers[0] for answer in answers}) == 1


async def test_the_others_are_answered_when_the_first_client_disconnects(mesh: Mesh) -> None:
    request = fresh()
    first = mesh.stub(0).Generate(request)
    await first_tokens(first, 1)
    stubs = [mesh.stub(0), mesh.stub(1)]
    others = [asyncio.create_task(generate(stubs[i % 2], request)) for i in range(31)]
    began: list[int] = []
    watched = asyncio.create_task(generate(stubs[1], request, on_delta=lambda delta: began.append(delta.position)))
    while not began:  # noqa: ASYNC110 (the callback of a delta sets it)
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)
    first.cancel()
    answers = [*await asyncio.gather(*others), await watched]
    assert len({tuple(answer.ids) for answer in answers}) == 1
    assert all(len(answer.ids) == LENGTH for answer in answers)
    assert all(answer.receipt.joined for answer in answers)
    assert all(answer.receipt.attempts == 1 for answer in answers)
    assert cost(answers) == 0  # The receipt of the disconnected client has the cost.


async def test_the_first_client_disconnects_at_once(mesh: Mesh) -> None:
    """Whenever the leader's client disconnects, the others share one generation, or two in the worst case."""
    stubs = [mesh.stub(0), mesh.stub(1)]
    for pause_s in (0.0, 0.001, 0.002, 0.004, 0.006, 0.01):
        request = fresh()
        first = stubs[0].Generate(request)
        await asyncio.sleep(pause_s)
        others = [asyncio.create_task(generate(stubs[i % 2], request)) for i in range(8)]
        await asyncio.sleep(pause_s)
        first.cancel()
        answers = await asyncio.gather(*others)
        assert len({tuple(answer.ids) for answer in answers}) == 1
        assert all(len(answer.ids) == LENGTH for answer in answers)
        # They may have received tokens of the leader's answer, which are then part of the next leader's prompt.
        assert cost(answers) <= 2 * (len(PROMPT) + 10), pause_s
        assert sum(answer.receipt.joined for answer in answers) >= 6, pause_s


async def test_the_first_clients_deadline_is_its_own(mesh: Mesh) -> None:
    request = fresh()
    first = asyncio.create_task(generate(mesh.stub(0), request, deadline_s=0.2))
    await asyncio.sleep(0.05)
    second = await generate(mesh.stub(1), request)
    assert len(second.ids) == LENGTH
    with pytest.raises(aio.AioRpcError) as caught:
        await first
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_retry_through_another_gateway_joins_its_own_generation(mesh: Mesh) -> None:
    request = fresh()
    request.request_id = "mine"
    request.sampling.ClearField("seed")  # The draws are equal nevertheless: the seed is derived from the id.
    await retry_joins(mesh, request)


async def connected(mesh: Mesh, gateway: int) -> Stub:
    """A client of the gateway that has its connection already."""
    stub = mesh.stub(gateway)
    await stub.ListModels(api.ListModelsRequest())
    return stub


async def retry_joins(mesh: Mesh, request: api.GenerateRequest) -> None:
    """A client that retries at another gateway, and then cancels its first call, joins its own generation."""
    request.sampling.max_tokens = LONG
    other, answered = await connected(mesh, 1), asyncio.Event()
    lost = mesh.stub(0).Generate(request)
    tokens = await first_tokens(lost, 10)
    retry = asyncio.create_task(generate(other, request, on_delta=lambda _: answered.set()))
    await answered.wait()
    lost.cancel()
    answer = await retry
    assert answer.ids[: len(tokens)] == tokens
    assert len(answer.ids) == LONG
    assert answer.receipt.joined
    assert answer.receipt.attempts == 1
    assert cost([answer]) == 0


async def test_the_same_id_with_another_body_is_refused_at_the_other_gateway(mesh: Mesh) -> None:
    request, other = fresh(), fresh()
    request.request_id = other.request_id = "taken"
    running = mesh.stub(0).Generate(request)
    await running.read()
    with pytest.raises(aio.AioRpcError) as caught:
        await generate(mesh.stub(1), other)
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
    running.cancel()


async def test_the_loss_of_a_gateway_affects_only_its_own_clients(mesh: Mesh) -> None:
    await mesh.revive()
    request = fresh()
    leading = mesh.stub(0).Generate(request)
    await leading.read()
    began: list[int] = []
    following = [
        asyncio.create_task(generate(mesh.stub(1), request, on_delta=lambda delta: began.append(delta.position)))
        for _ in range(4)
    ]
    while len(began) < 4:  # noqa: ASYNC110 (deltas arrive meanwhile)
        await asyncio.sleep(0.005)
    assert mesh.gateways[0].kill() == -9
    answers = await asyncio.gather(*following)
    mesh.gateways[0].start()
    await mesh.gateways[0].ready()
    assert len({tuple(answer.ids) for answer in answers}) == 1
    assert all(len(answer.ids) == LENGTH for answer in answers)
    assert cost(answers) == 0


async def test_the_loss_of_a_worker_costs_one_more_generation(mesh: Mesh) -> None:
    """Requests that shared the lost generation share the next one, whatever number of tokens each has received."""
    await mesh.revive()
    await idle(mesh)
    stubs = [mesh.stub(0), mesh.stub(1)]
    request = fresh()
    request.sampling.max_tokens = 3 * LENGTH  # Longer than it takes to find the worker, on a busy machine too.
    undisturbed = await generate(stubs[0], request)
    tokens: list[int] = []
    answers = [
        asyncio.create_task(generate(stubs[i % 2], request, on_delta=lambda delta: tokens.extend(delta.token_ids)))
        for i in range(16)
    ]
    while len(tokens) < 16 * 20:  # noqa: ASYNC110 (deltas arrive meanwhile)
        await asyncio.sleep(0.005)
    busy = [worker for worker in mesh.workers if (await status(worker)).report.running]
    assert len(busy) == 1
    assert busy[0].kill() == -9
    done = await asyncio.gather(*answers)
    assert [answer.ids for answer in done] == [undisturbed.ids] * 16
    assert max(answer.receipt.attempts for answer in done) == 2
    # The first attempt computes the prompt, the second one the prompt and the tokens generated so far.
    assert cost(done) <= 2 * len(PROMPT) + 3 * LENGTH
    assert sum(answer.receipt.joined for answer in done) >= 15
    busy[0].start()
    await busy[0].ready()
    await until_all_listed(mesh)
