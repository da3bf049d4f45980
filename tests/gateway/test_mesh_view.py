"""The view of the mesh on a gateway among fakes: what it reports, who shares a call, what survives the scheduler."""

import asyncio
from typing import Any

import pytest
from grpc import StatusCode, aio

from protos import inference_pb2 as api
from protos import mesh_pb2
from protos.inference_pb2_grpc import InferenceStub
from services.gateway.links import mesh_view
from services.gateway.links.mesh_view import snapshot_of
from tests.gateway.fakes import FakeMesh, ask, generate, until
from tests.gateway.model import ANSWER

Phase = api.WorkerState
WATCH = api.WatchMeshRequest()


async def test_a_gateway_reports_its_traffic_and_then_its_silence() -> None:
    async with FakeMesh() as mesh:
        await generate(mesh.stub, ask())
        reports = mesh.scheduler.reports
        await until(lambda: any(report.models for report in reports))
        (model,) = next(report for report in reports if report.models).models
        assert (model.model, model.requests, model.failed, model.tokens) == ("fake", 1, 0, len(ANSWER))
        assert sum(model.first_token.counts) == 1
        assert sum(model.inter_token.counts) == len(ANSWER) - 1


async def test_an_answer_that_goes_on_after_a_report_is_counted_whole() -> None:
    async with FakeMesh() as mesh:
        worker, reports = mesh.workers[0], mesh.scheduler.reports
        worker.hold_at = 12
        answer = asyncio.create_task(generate(mesh.stub, ask()))
        await until(lambda: any(model.tokens == 12 for report in reports for model in report.models))
        worker.hold_at = None
        await answer
        await until(lambda: any(model.requests for report in reports for model in report.models))
        (model,) = reports[-1].models
        assert (model.requests, model.tokens) == (1, len(ANSWER))
        assert sum(model.inter_token.counts) == len(ANSWER) - 1


async def test_a_scheduler_that_accepts_no_reports_gets_none() -> None:
    async with FakeMesh() as mesh:
        await until(lambda: mesh.scheduler.hellos == 1)
        mesh.scheduler.accepts_reports = False
        mesh.scheduler.hang_up()
        await until(lambda: mesh.scheduler.hellos == 2)
        mesh.scheduler.reports.clear()
        await generate(mesh.stub, ask())
        await asyncio.sleep(1.5)  # Longer than the time between two reports.
        assert mesh.scheduler.reports == []
        assert (await generate(mesh.stub, ask("more"))).error is None


async def test_watchers_share_the_calls_to_the_scheduler_and_cost_nothing_when_they_leave() -> None:
    async with FakeMesh() as mesh:
        calls = [mesh.stub.WatchMesh(WATCH) for _ in range(5)]
        streams = [aiter(call) for call in calls]
        for _ in range(2):
            snapshots = await asyncio.gather(*(anext(stream) for stream in streams))
            assert len({snapshot.gateway_id for snapshot in snapshots}) == 1
            assert all(snapshot.scheduler_connected for snapshot in snapshots)
        assert mesh.scheduler.overviews <= 3
        for call in calls:
            call.cancel()
        seen = -1
        while seen != mesh.scheduler.overviews:  # It changes no more once the last watcher has left.
            seen = mesh.scheduler.overviews
            await asyncio.sleep(1.5)


async def test_a_watch_outlives_the_scheduler_and_ends_with_the_gateway() -> None:
    async with asyncio.timeout(20):  # Less than the gateway gives to calls that are running.
        async with FakeMesh(drain_s=60) as mesh:
            mesh.scheduler.overview.workers.add(worker_id="fox-1", model="fake", ready=True)
            stream = aiter(InferenceStub(aio.insecure_channel(f"127.0.0.1:{mesh.server.port}")).WatchMesh(WATCH))
            assert [worker.worker_id for worker in (await anext(stream)).workers] == ["fox-1"]
            address = mesh.address("scheduler")
            await mesh.stop("scheduler")
            while (gone := await anext(stream)).scheduler_connected:
                pass
            assert [worker.worker_id for worker in gone.workers] == ["fox-1"]
            await mesh.start_scheduler(address)
            while not (await anext(stream)).scheduler_connected:
                pass
            rest = asyncio.create_task(_read_to_the_end(stream))
            await asyncio.sleep(0)
        await rest


async def test_a_view_that_fails_ends_its_watches_and_the_next_one_is_new(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(overview: mesh_pb2.OverviewResponse) -> api.MeshSnapshot:
        raise KeyError("a secret")

    async with asyncio.timeout(20), FakeMesh() as mesh:
        monkeypatch.setattr(mesh_view, "snapshot_of", fail)
        watches = await asyncio.gather(*(_end_of(mesh.stub.WatchMesh(WATCH)) for _ in range(2)))
        assert watches == [StatusCode.INTERNAL] * 2
        monkeypatch.undo()
        assert (await anext(aiter(mesh.stub.WatchMesh(WATCH)))).scheduler_connected
    log = "".join(capfd.readouterr())
    assert "KeyError" in log
    assert "a secret" not in log


async def _end_of(call: Any) -> StatusCode:
    with pytest.raises(aio.AioRpcError) as caught:
        await _read_to_the_end(aiter(call))
    return caught.value.code()


async def _read_to_the_end(stream: Any) -> None:
    async for _ in stream:
        pass


def test_the_snapshot_has_each_state_of_a_worker() -> None:
    draining = mesh_pb2.WorkerReport(draining=True)
    overview = mesh_pb2.OverviewResponse(
        workers=[
            mesh_pb2.WorkerOverview(worker_id="a", model="fox", ready=True, address="10.0.0.1:50061"),
            mesh_pb2.WorkerOverview(worker_id="b", model="fox", ready=False),
            mesh_pb2.WorkerOverview(worker_id="c", model="fox", report=draining),
            mesh_pb2.WorkerOverview(worker_id="d", model="fox", detached=True),
        ],
        models=[mesh_pb2.ModelOverview(name="fox", waiting=3, block_size=16)],
        loading=[mesh_pb2.WorkerLoading(worker_id="e", model="owl", phase="weights", done=1, total=4)],
    )
    snapshot = snapshot_of(overview)
    phases = [Phase.PHASE_READY, Phase.PHASE_SILENT, Phase.PHASE_DRAINING, Phase.PHASE_DETACHED, Phase.PHASE_LOADING]
    assert [worker.phase for worker in snapshot.workers] == phases
    assert (snapshot.workers[4].step, snapshot.workers[4].percent) == ("weights", 25)
    assert [(model.name, model.waiting, model.block_size) for model in snapshot.models] == [
        ("fox", 3, 16),
        ("owl", 0, 0),
    ]
    assert b"10.0.0.1" not in snapshot.SerializeToString()


def test_rates_and_percentiles_are_those_of_all_gateways() -> None:
    def report(name: str, tokens: int, first: int) -> mesh_pb2.GatewayReport:
        slow = mesh_pb2.Latencies(first=first, counts=[10])
        model = mesh_pb2.ModelTraffic(
            model="fox", requests=10, failed=1, tokens=tokens, prompt_tokens=100, cached_tokens=25, first_token=slow
        )
        return mesh_pb2.GatewayReport(gateway_id=name, running=1, window_s=10, models=[model])

    overview = mesh_pb2.OverviewResponse(
        gateway_reports=[report("g1", 300, 40), report("g2", 100, 60), mesh_pb2.GatewayReport(gateway_id="g3")],
        models=[mesh_pb2.ModelOverview(name="fox"), mesh_pb2.ModelOverview(name="owl")],
    )
    snapshot = snapshot_of(overview)
    fox, owl = snapshot.models
    assert (fox.tokens_per_s, fox.requests_per_s, fox.failed_per_s, fox.cached_share) == (40, 2, 0.2, 0.25)
    assert fox.first_token.count == 20
    assert fox.first_token.p99_s > 25 * fox.first_token.p50_s
    assert (owl.name, owl.tokens_per_s, owl.first_token.count) == ("owl", 0, 0)
    assert [gateway.tokens_per_s for gateway in snapshot.gateways] == [30, 10, 0]
