"""Requests with ids that start as early attempts: joins, retries and conflicts work as without early attempts."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc import aio

from protos import inference_pb2 as api
from protos import mesh_pb2, mesh_pb2_grpc
from tests.mesh.harness import Answer, Mesh, generate
from tests.mesh.test_joins import (
    LENGTH,
    LONG,
    PACED,
    PROMPT,
    connected,
    cost,
    first_tokens,
    fresh,
    idle,
    retry_joins,
    status,
    until_listed,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")

PAUSES_S = (0.0, 0.001, 0.002, 0.004)
"""Seconds between two callers: the second one meets the job of the first in transit, waiting and running."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mesh(tmp_path_factory: pytest.TempPathFactory, model: Path) -> AsyncIterator[Mesh]:
    """Two gateways, one paced worker, no result cache."""
    async with Mesh(tmp_path_factory.mktemp("early"), model, gateways=2, worker_env=PACED) as running:
        yield running


def named(name: str) -> api.GenerateRequest:
    """A new request with this id."""
    request = fresh()
    request.request_id = name
    return request


async def until_attached(mesh: Mesh) -> None:
    """Waits until the scheduler has its gateways and its worker: a gateway without it places requests by itself."""
    async with aio.insecure_channel(mesh.scheduler.address) as channel, asyncio.timeout(60):
        scheduler = mesh_pb2_grpc.SchedulerStub(channel)
        while True:
            overview = await scheduler.Overview(mesh_pb2.OverviewRequest())
            if (overview.gateways, len(overview.workers)) == (2, 1):
                return
            await asyncio.sleep(0.02)


def unnamed(request: api.GenerateRequest) -> api.GenerateRequest:
    """The same request without its id."""
    same = api.GenerateRequest()
    same.CopyFrom(request)
    same.ClearField("request_id")
    return same


def whole(answer: Answer, length: int = LENGTH) -> bool:
    """Whether the answer is complete after one attempt."""
    return len(answer.ids) == length and answer.receipt.attempts == 1


async def test_two_callers_of_one_request_at_two_gateways_share_its_generation(mesh: Mesh) -> None:
    for number, pause_s in enumerate(PAUSES_S):
        await idle(mesh)
        request = named(f"shared-{number}")
        first = asyncio.create_task(generate(mesh.stub(0), request))
        await asyncio.sleep(pause_s)
        answers = [await generate(mesh.stub(1), request), await first]
        assert all(map(whole, answers))
        assert answers[0].ids == answers[1].ids
        assert sorted(answer.receipt.joined for answer in answers) == [False, True]
        assert cost(answers) == len(PROMPT)


async def test_of_two_requests_with_one_id_one_is_refused_and_the_other_not_disturbed(mesh: Mesh) -> None:
    for number, pause_s in enumerate(PAUSES_S):
        await idle(mesh)
        requests = [named(f"taken-{number}") for _ in range(2)]
        first = asyncio.create_task(generate(mesh.stub(0), requests[0]))
        await asyncio.sleep(pause_s)
        second = asyncio.create_task(generate(mesh.stub(1), requests[1]))
        outcomes = await asyncio.gather(first, second, return_exceptions=True)
        [(request, answer)] = [
            (request, outcome)
            for request, outcome in zip(requests, outcomes, strict=True)
            if isinstance(outcome, Answer)
        ]
        [refused] = [outcome for outcome in outcomes if isinstance(outcome, aio.AioRpcError)]
        assert refused.code() is grpc.StatusCode.ALREADY_EXISTS
        assert whole(answer)
        assert answer.ids == (await generate(mesh.stub(0), unnamed(request))).ids


async def test_a_retry_at_another_gateway_joins_its_own_generation(mesh: Mesh) -> None:
    await retry_joins(mesh, named("mine"))


async def test_a_retry_after_the_schedulers_death_joins_its_own_generation(mesh: Mesh) -> None:
    await idle(mesh)
    request = named("survivor")
    request.sampling.max_tokens = 18 * LENGTH  # The answer takes longer than the start of a scheduler.
    lost: Any = mesh.stub(0).Generate(request)
    calls: list[Any] = [lost]
    try:
        tokens = await first_tokens(lost, 10)
        assert mesh.scheduler.kill() == -9
        mesh.scheduler.start()
        await mesh.scheduler.ready()
        await until_listed(mesh, gateway=1, workers=1)
        retry: Any = mesh.stub(1).Generate(request)
        calls.append(retry)
        again = await first_tokens(retry, 20)
        rest = await first_tokens(lost, len(again))
        assert again == [*tokens, *rest][: len(again)]
        # A busy machine may have moved the stream that both read.
        assert (await lost.read()).delta.attempt == (await retry.read()).delta.attempt
        assert (await status(mesh.workers[0])).report.running == 1
    finally:
        for call in calls:
            call.cancel()


async def test_two_gateways_share_a_generation_while_the_scheduler_is_away(mesh: Mesh) -> None:
    await idle(mesh)
    request = named("unplaced")
    request.sampling.max_tokens = 18 * LENGTH
    assert mesh.scheduler.kill() == -9
    try:
        calls: list[Any] = [mesh.stub(gateway).Generate(request) for gateway in range(2)]
        tokens = await asyncio.gather(*(first_tokens(call, 20) for call in calls))
        attempts = [(await call.read()).delta.attempt for call in calls]
        running = (await status(mesh.workers[0])).report.running
        for call in calls:
            call.cancel()
    finally:
        mesh.scheduler.start()
        await mesh.scheduler.ready()
        await until_attached(mesh)
    assert tokens[0][:20] == tokens[1][:20]
    assert running == 1
    assert max(attempts) <= 2  # The first attempt of a gateway that has yet to lose the scheduler ends unconfirmed.


async def test_a_retry_after_a_gateways_death_joins_its_own_generation(mesh: Mesh) -> None:
    await idle(mesh)
    request = named("carried")
    request.sampling.max_tokens = LONG
    other = await connected(mesh, 1)
    lost = mesh.stub(0).Generate(request)
    tokens = await first_tokens(lost, 10)
    assert mesh.gateways[0].kill() == -9
    try:
        answer = await generate(other, request)
    finally:
        mesh.gateways[0].start()
        await mesh.gateways[0].ready()
    assert whole(answer, LONG)
    assert answer.ids[: len(tokens)] == tokens
    assert answer.receipt.joined
