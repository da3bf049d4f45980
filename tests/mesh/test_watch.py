"""Watching a real mesh: every gateway reports all of it, while workers and the scheduler come and go."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from protos import inference_pb2 as api
from tests.mesh.harness import Mesh, ask, generate

pytestmark = pytest.mark.asyncio(loop_scope="module")

PACED = {"ENGINE": "paced", "WEFT_PACED_STEP_MS": "10", "MAX_BATCH_SIZE": "4", "WEFT_PACED_PREFILL_RATE": "4000"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory, model: Path) -> AsyncIterator[Mesh]:
    """Two paced workers behind two gateways."""
    folder = tmp_path_factory.mktemp("watch")
    async with Mesh(folder, model, workers=2, gateways=2, worker_env=PACED) as running:
        yield running


async def seen(mesh: Mesh, gateway: int, expected: Callable[[api.MeshSnapshot], bool]) -> api.MeshSnapshot:
    """The first snapshot of a gateway for which something holds."""
    call = mesh.stub(gateway).WatchMesh(api.WatchMeshRequest())
    async with asyncio.timeout(60):
        async for snapshot in call:
            if expected(snapshot):
                call.cancel()
                return snapshot
    raise AssertionError("the watch ended")


async def test_a_gateway_shows_the_traffic_of_the_other(mesh: Mesh) -> None:
    request = ask("A tale", max_tokens=100, ignore_eos=True)
    running = asyncio.create_task(generate(mesh.stub(1), request))
    busy = await seen(mesh, 0, lambda now: any(worker.running for worker in now.workers))
    assert sum(worker.active_blocks for worker in busy.workers) > 0
    assert max(worker.credits for worker in busy.workers) == 4
    await running
    ended = await seen(mesh, 0, lambda now: now.models[0].requests_per_s > 0)
    (model,) = ended.models
    assert model.first_token.count == 1
    assert model.inter_token.count == 99
    assert model.inter_token.p50_s > 0.0085  # The worker takes 10 ms for a step.
    assert model.block_size > 0
    assert len(ended.gateways) == 2
    assert sorted(gateway.tokens_per_s > 0 for gateway in ended.gateways) == [False, True]
    assert ended.cache == api.CACHE_STATE_NONE
    # Both gateways report the same.
    other = await seen(mesh, 1, lambda now: now.models[0].requests_per_s > 0)
    assert {gateway.gateway_id for gateway in other.gateways} == {gateway.gateway_id for gateway in ended.gateways}
    assert other.gateway_id != ended.gateway_id


async def test_a_killed_worker_disappears_and_comes_back(mesh: Mesh) -> None:
    await mesh.revive()
    before = await seen(mesh, 0, lambda now: len(now.workers) == 2)
    mesh.workers[1].kill(signal.SIGKILL)
    alive = {worker.worker_id for worker in (await seen(mesh, 0, lambda now: len(now.workers) == 1)).workers}
    assert alive < {worker.worker_id for worker in before.workers}
    mesh.workers[1].start()
    after = await seen(mesh, 0, lambda now: [each.phase for each in now.workers] == [api.WorkerState.PHASE_READY] * 2)
    assert alive < {worker.worker_id for worker in after.workers}


async def test_a_restarted_scheduler_receives_the_reports_again(mesh: Mesh) -> None:
    await mesh.revive()
    mesh.scheduler.kill(signal.SIGKILL)
    gone = await seen(mesh, 0, lambda now: not now.scheduler_connected)
    assert gone.gateway_id
    mesh.scheduler.start()
    await seen(mesh, 0, lambda now: now.scheduler_connected and len(now.workers) == 2)
    await generate(mesh.stub(1), ask("Another tale", max_tokens=10, ignore_eos=True))
    await seen(mesh, 0, lambda now: any(gateway.tokens_per_s for gateway in now.gateways))
