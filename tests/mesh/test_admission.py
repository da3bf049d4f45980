"""Deadlines at a full mesh: a hopeless request is refused at once, and one that expires in the queue costs nothing."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2
from grpc import aio
from grpc_status import rpc_status

from protos import inference_pb2 as api
from protos import mesh_pb2
from protos.mesh_pb2_grpc import SchedulerStub, WorkerStub
from tests.mesh.harness import Mesh, Stub, ask, generate, receipt_of
from tests.timing import timely

pytestmark = pytest.mark.asyncio(loop_scope="session")
CODES = grpc.StatusCode

PACED = {"ENGINE": "paced", "WEFT_PACED_STEP_MS": "5", "MAX_BATCH_SIZE": "1", "WEFT_PACED_PREFILL_RATE": "20000"}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mesh(tmp_path_factory: pytest.TempPathFactory, model: Path) -> AsyncIterator[Mesh]:
    """One paced worker that runs one job at a time."""
    async with Mesh(tmp_path_factory.mktemp("admission"), model, worker_env=PACED) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stub(mesh: Mesh) -> Stub:
    """A client of the mesh."""
    return mesh.stub()


async def steps(mesh: Mesh) -> int:
    """The number of steps that the worker has run."""
    async with aio.insecure_channel(mesh.workers[0].address) as channel:
        status: mesh_pb2.StatusResponse = await WorkerStub(channel).Status(mesh_pb2.StatusRequest())
        assert not status.report.running
        return status.report.steps


def long(seed: int, tokens: int = 100) -> Any:
    """A request that takes half a second and shares neither prefix nor result with others."""
    return ask([seed] * 32, max_tokens=tokens, temperature=1.0, ignore_eos=True)


async def test_a_deadline_that_expires_in_the_queue_costs_nothing(mesh: Mesh, stub: Stub) -> None:
    """Must run first: until the worker's rates are measured, the scheduler refuses no job by a forecast."""
    before, begun = await steps(mesh), asyncio.Event()
    leading = asyncio.create_task(generate(stub, long(11, 140), on_delta=lambda _: begun.set()))
    await begun.wait()
    with pytest.raises(aio.AioRpcError) as caught:
        await generate(stub, long(12), deadline_s=0.3)
    assert caught.value.code() is CODES.DEADLINE_EXCEEDED
    answer = await leading
    await asyncio.sleep(0.1)
    # One step for the prompt and the first token, one for each further token; nothing else was computed.
    assert len(answer.ids) == 140
    assert await steps(mesh) - before == 140
    receipt = receipt_of(caught.value.trailing_metadata())
    assert receipt is None or (receipt.prefill_tokens, receipt.completion_tokens, len(receipt.workers)) == (0, 0, 0)


@timely
async def test_a_deadline_that_cannot_be_met_is_refused_at_once(mesh: Mesh, stub: Stub) -> None:
    for seed in (21, 22):  # Afterwards the scheduler has measured the worker's rates and the length of answers.
        await generate(stub, long(seed))
    before = await steps(mesh)
    waiting = [asyncio.create_task(generate(stub, long(30 + i))) for i in range(4)]
    async with aio.insecure_channel(mesh.scheduler.address) as channel:
        scheduler = SchedulerStub(channel)
        while (await scheduler.Overview(mesh_pb2.OverviewRequest())).models[0].waiting < 3:  # noqa: ASYNC110 (remote)
            await asyncio.sleep(0.01)
    took_ms: list[float] = []
    for number in range(9):
        began = time.perf_counter()
        with pytest.raises(aio.AioRpcError) as caught:
            await generate(stub, long(40 + number), deadline_s=0.4)
        took_ms.append((time.perf_counter() - began) * 1e3)
        error: Any = caught.value
        assert error.code() is CODES.DEADLINE_EXCEEDED
        status, info = rpc_status.from_call(error), error_details_pb2.ErrorInfo()
        assert status is not None
        assert any(detail.Unpack(info) for detail in status.details)
        assert info.reason == "DEADLINE_UNMEETABLE"
        receipt = receipt_of(error.trailing_metadata())
        assert receipt is not None
        assert receipt.prefill_tokens == 0
    took_ms.sort()
    print(f"refused in {took_ms[4]:.1f} ms (median), {took_ms[0]:.1f} to {took_ms[-1]:.1f}")
    assert took_ms[4] <= 10
    assert [len(answer.ids) for answer in await asyncio.gather(*waiting)] == [100] * 4
    await asyncio.sleep(0.1)
    assert await steps(mesh) - before == 400


async def test_a_deadline_that_can_be_met_is_not_refused(stub: Stub) -> None:
    waiting = asyncio.create_task(generate(stub, long(50)))
    await asyncio.sleep(0.05)
    answer = await generate(stub, long(51), deadline_s=30)
    assert len(answer.ids) == 100
    await waiting


async def test_sheddable_requests_are_refused_first(mesh: Mesh, stub: Stub) -> None:
    """Of two requests that would have to wait behind a long one, the sheddable one is refused, with a delay."""
    await generate(stub, long(60))  # The lengths of answers and the worker's rates are known.
    running = [asyncio.create_task(generate(stub, long(61 + number))) for number in range(3)]
    async with aio.insecure_channel(mesh.scheduler.address) as channel:
        scheduler = SchedulerStub(channel)
        while (await scheduler.Overview(mesh_pb2.OverviewRequest())).models[0].waiting < 2:  # noqa: ASYNC110 (remote)
            await asyncio.sleep(0.01)
    request = long(70)
    request.criticality = api.CRITICALITY_SHEDDABLE
    with pytest.raises(aio.AioRpcError) as caught:
        await generate(stub, request)
    error: Any = caught.value
    status, info, retry = rpc_status.from_call(error), error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert status is not None
    assert any(detail.Unpack(info) for detail in status.details)
    assert any(detail.Unpack(retry) for detail in status.details)
    assert (error.code(), info.reason) == (CODES.RESOURCE_EXHAUSTED, "SHED")
    assert [len(answer.ids) for answer in await asyncio.gather(*running)] == [100] * 3
    assert len((await generate(stub, request)).ids) == 100
