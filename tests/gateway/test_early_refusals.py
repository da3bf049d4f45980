"""While the queues of a tenant's models are full, its requests are refused before they are read."""

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from grpc import StatusCode
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from protos import inference_pb2 as api
from protos import kserve_pb2 as kserve
from protos import mesh_pb2
from protos.kserve_pb2_grpc import GRPCInferenceServiceStub
from services.errors import exhausted
from services.gateway.links import adaptive_limit, early_refusal, queue_share, unread_submissions
from tests.gateway.fakes import Answer, FakeMesh, ask, assigned, generate, rejected, until
from tests.gateway.http_client import client
from tests.gateway.model import ANSWER, LOREM
from tests.gateway.tenant_files import KEY, tenant
from tests.gateway.test_refusals import reason_of
from tests.ports import free_port

TEXT: dict[str, Any] = {"prompt": "hello world", "max_tokens": 400, "temperature": 0, "cache": "bypass"}
MANY = 5000


def full(submit: mesh_pb2.Submit) -> mesh_pb2.DispatchResponse:
    """The scheduler's refusal."""
    return rejected(submit, exhausted("QUEUE_FULL", "no room", 0.5))


def was_read(answer: Answer) -> bool:
    """The call was refused by a full queue -> whether it was read before: only then it has a receipt."""
    assert answer.error is not None
    assert (answer.error.code(), reason_of(answer.error)) == (StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    return "weft-receipt-bin" in answer.trailing


@asynccontextmanager
async def crowded(monkeypatch: pytest.MonkeyPatch, key: str = "", **settings: Any) -> AsyncIterator[FakeMesh]:
    """A gateway whose scheduler's queue is full, and which has begun to refuse requests unread."""
    monkeypatch.setattr(adaptive_limit, "_GROWTH_PER_S", 0.0)  # Time passes at any speed here.
    monkeypatch.setattr(early_refusal, "_PAUSE_S", 0.0)
    monkeypatch.setattr(early_refusal, "_AT_ONCE", 1e9)
    monkeypatch.setattr(early_refusal, "_MORE_PER_S", 1e12)
    async with FakeMesh(http_port=free_port(), cache=True, gateway_cache_budget_s=5.0, **settings) as mesh:
        await generate(mesh.stub, ask(), metadata=authorization(key))
        await until(lambda: mesh.cache is not None and len(mesh.cache.results) == 1)
        mesh.scheduler.decide = full
        refusals = 0
        while was_read(await refused(mesh, key)):
            refusals += 1
            assert refusals < MANY
        assert 16 < refusals < 64
        yield mesh


def authorization(key: str) -> tuple[tuple[str, str], ...]:
    """The metadata of a call with this key."""
    return (("authorization", f"Bearer {key}"),) if key else ()


async def refused(mesh: FakeMesh, key: str = "") -> Answer:
    """A call that no result can answer."""
    return await generate(mesh.stub, ask(cache=api.CACHE_POLICY_BYPASS), metadata=authorization(key))


async def test_requests_for_a_full_queue_are_refused_unread_until_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with crowded(monkeypatch) as mesh, client(mesh) as http_client:
        submits = len(mesh.scheduler.submits)
        assert sum([was_read(await refused(mesh)) for _ in range(200)]) < 100
        unread = 0
        for _ in range(50):
            response = await http_client.post("/v1/completions", json=TEXT)
            assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
            assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("1", "500")
            unread += "weft-receipt" not in response.headers
            infer = await http_client.post("/v2/models/fake/generate", json={"text_input": "hello"})
            assert (infer.status_code, infer.json()["reason"]) == (429, "QUEUE_FULL")
        assert unread > 25
        assert len(mesh.scheduler.submits) == submits
        assert "weft_gateway_refused_total 0.0" not in (await http_client.get("/metrics")).text
        for path in ("/v1/models", "/v2/models/fake", "/health"):  # They need no place in a queue.
            assert (await http_client.get(path)).status_code == 200
        assert (await http_client.post("/tokenize", json={"prompt": "hello"})).status_code == 200
        monkeypatch.setattr(adaptive_limit, "_GROWTH_PER_S", 1e9)
        mesh.scheduler.decide = None
        assert (await http_client.post("/v1/completions", json=TEXT)).json()["choices"][0]["text"] == LOREM


async def test_requests_of_a_stream_for_a_full_queue_are_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    async with crowded(monkeypatch) as mesh:
        monkeypatch.setattr(early_refusal, "_PAUSE_S", 1e9)  # None is read nevertheless.
        streaming: Any = GRPCInferenceServiceStub(mesh.channel).ModelStreamInfer()
        submits = len(mesh.scheduler.submits)
        for _ in range(20):
            await streaming.write(kserve.ModelInferRequest())  # Would be invalid if it was read.
            parameters = (await streaming.read()).infer_response.parameters
            assert parameters["error_reason"].string_param == "QUEUE_FULL"
            assert parameters["retry_after_s"].double_param == 0.5
        assert len(mesh.scheduler.submits) == submits
        streaming.cancel()


async def test_a_queue_that_is_nearly_full_has_the_gateway_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive_limit, "_GROWTH_PER_S", 0.0)
    async with FakeMesh() as mesh:

        def crowded(submit: mesh_pb2.Submit) -> mesh_pb2.DispatchResponse:
            answer = assigned(submit, *mesh.scheduler.workers[0])
            answer.assigned.retry_after_s = 0.75
            return answer

        mesh.scheduler.decide = crowded
        first = await refused(mesh)
        assert (first.error, first.ids()) == (None, ANSWER)
        assert was_read(await refused(mesh))
        assert len(mesh.scheduler.submits) == 1


async def test_a_request_that_is_refused_leaves_nothing_to_the_garbage_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def left() -> Counter[str]:
        kinds = ("_ServicerContext", "WeftError", "Exchange", "AdmittedRequest")
        return Counter(name for each in gc.get_objects() if (name := type(each).__name__) in kinds)

    async with crowded(monkeypatch) as mesh, client(mesh) as http_client:
        health: Any = HealthStub(mesh.channel)
        gc.collect()
        before = left()
        gc.disable()
        try:
            responses = [await http_client.post("/v1/completions", json=TEXT) for _ in range(300)]
            assert {"weft-receipt" in response.headers for response in responses} == {True, False}  # Some are read.
            await until(lambda: left() <= before, 5)
            read = sum([was_read(await refused(mesh)) for _ in range(200)])
            await health.Check(HealthCheckRequest())  # gRPC keeps the last call of all.
            # The exception by which gRPC ends a call that was read holds the call.
            await until(lambda: left()["_ServicerContext"] <= before["_ServicerContext"] + read, 5)
            assert read < 100
        finally:
            gc.enable()


async def test_requests_are_read_again_once_the_result_cache_has_their_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    async with crowded(monkeypatch) as mesh:
        in_a_row = 0
        for _ in range(MANY):
            answer = await generate(mesh.stub, ask())
            in_a_row = in_a_row + 1 if answer.error is None else 0
            if in_a_row == 20:
                break
        assert (in_a_row, answer.ids(), answer.receipt.result_hit) == (20, ANSWER, True)


def test_requests_are_read_about_as_fast_as_places_become_free() -> None:
    pace, now, settled = early_refusal.ReadingPace(), 0.0, 0.0

    def read(seconds: float, answers_per_s: float) -> int:
        """How many requests are read of 1,000 that arrive in each second of this time."""
        nonlocal now, settled
        count = 0
        for _ in range(round(1000 * seconds)):
            now, settled = now + 1e-3, settled + 1e-3 * answers_per_s
            count += pace.takes(int(settled), now)
        return count

    read(3, 100)
    assert 170 <= read(1, 100) <= 185, "100 in a second, one and a half times, and 32"
    read(3, 400)
    assert 600 <= read(1, 400) <= 640
    read(5, 0)
    assert 30 <= read(1, 0) <= 36, "some are read without any"
    burst = [pace.takes(int(settled) + 40, now + 1e-4) for _ in range(20)]
    assert sum(burst) <= 5, "forty places that become free together do not have forty requests read at once"


@pytest.mark.parametrize(
    ("crowded_models", "least", "most"), [(("a", "b"), 4, 100), (("a",), 200, 200), ((), 200, 200)]
)
def test_requests_are_paced_where_all_models_of_their_tenant_have_queues_that_are_mostly_taken(
    crowded_models: tuple[str, ...], least: int, most: int
) -> None:
    full = exhausted("QUEUE_FULL", "no room", 0.5)
    scheduler: Any = SimpleNamespace(
        refuses=True,
        settled=0,
        refusal_unread=lambda model, tenant: None,
        crowding=lambda model: full if model in crowded_models else None,
    )
    access: Any = SimpleNamespace(tenant=lambda credentials: SimpleNamespace(hash="t"))
    catalog: Any = SimpleNamespace(generating=lambda tenant: ("a", "b"))
    early = early_refusal.EarlyRefusal(access, catalog, scheduler)
    for _ in range(40):
        early.note(found=False)
    refusals = [early.refusal([]) for _ in range(200)]
    assert least <= refusals.count(None) <= most
    assert early.refused == 200 - refusals.count(None)


async def test_no_more_requests_are_read_at_once_than_have_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    async with crowded(monkeypatch) as mesh:
        monkeypatch.setattr(early_refusal, "_PAUSE_S", 1e9)
        monkeypatch.setattr(queue_share, "_PROMISE_S", 1e9)
        monkeypatch.setattr(adaptive_limit.AdaptiveLimit, "most", lambda self, now: 5.0)
        scheduler = mesh.scheduler
        scheduler.hold, before = True, len(scheduler.submits)
        calls = [asyncio.ensure_future(refused(mesh)) for _ in range(40)]
        await until(lambda: sum(call.done() for call in calls) == 35)
        assert not any(was_read(call.result()) for call in calls if call.done())
        await until(lambda: len(scheduler.submits) == before + 5)
        scheduler.decide = None
        scheduler.release()
        answers = await asyncio.gather(*calls)
        assert sorted(len(answer.ids()) for answer in answers) == [0] * 35 + [len(ANSWER)] * 5


async def test_a_pause_follows_a_request_that_is_read_nevertheless(monkeypatch: pytest.MonkeyPatch) -> None:
    async with crowded(monkeypatch) as mesh:
        monkeypatch.setattr(early_refusal, "_PAUSE_S", 1e9)
        assert not any([was_read(await refused(mesh)) for _ in range(300)])


async def test_a_queue_that_is_full_anew_has_its_first_requests_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async with crowded(monkeypatch) as mesh:
        monkeypatch.setattr(adaptive_limit, "_FORGET_S", 0.0)
        assert was_read(await refused(mesh)), "the queue was not full lately"
        monkeypatch.setattr(adaptive_limit, "_FORGET_S", 1e9)
        assert all([was_read(await refused(mesh)) for _ in range(16)])


async def test_while_the_scheduler_is_behind_every_door_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread_submissions, "BEHIND_S", 0.0)  # Time passes at any speed here.
    monkeypatch.setattr(unread_submissions, "BURST_S", 0.0)
    monkeypatch.setattr(adaptive_limit, "_GROWTH_PER_S", 0.0)
    mesh = FakeMesh(http_port=free_port())
    scheduler = mesh.scheduler
    scheduler.counts_submissions = scheduler.hold = True
    async with mesh, client(mesh) as http_client:

        async def asked() -> Answer:
            return await generate(mesh.stub, ask(model="fake", cache=api.CACHE_POLICY_BYPASS))

        waiting = [asyncio.ensure_future(asked()) for _ in range(40)]
        await until(lambda: len(scheduler.submits) == 40)

        async def count(read: int, name: str) -> None:
            """The gateway has received this count, as it shows a model that was listed after it."""
            scheduler.send(mesh_pb2.DispatchResponse(heartbeat=mesh_pb2.SchedulerHeartbeat(), submissions_read=read))
            other = mesh_pb2.ServedModel()
            other.CopyFrom(mesh.served()[0])
            other.card.name = name
            scheduler.serve_models([*mesh.served(), other])
            while name not in (await http_client.get("/v1/models")).text:  # noqa: ASYNC110 (a public door is asked)
                await asyncio.sleep(0.01)

        await count(1, "behind")
        for _ in range(3):
            answer = await asked()
            assert answer.error is not None
            assert answer.error.code() is StatusCode.RESOURCE_EXHAUSTED
            assert reason_of(answer.error) == "SCHEDULER_OVERLOADED"
            response = await http_client.post("/v1/completions", json=TEXT | {"model": "fake"})
            assert (response.status_code, response.json()["error"]["code"]) == (429, "scheduler_overloaded")
            assert response.headers["retry-after"] == "1"
        assert len(scheduler.submits) == 40
        await count(40, "caught up")
        scheduler.release()
        assert [answer.error for answer in await asyncio.gather(*waiting)] == [None] * 40
        assert (await asked()).error is None


async def test_a_wrong_key_is_refused_as_one_and_another_tenant_has_its_share(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text(tenant("one") + tenant("two", "wk-two"))
    async with crowded(monkeypatch, KEY, tenants_file=str(file)) as mesh, client(mesh, "wk-wrong") as stranger:
        for _ in range(20):
            assert (await stranger.post("/v1/completions", json=TEXT)).status_code == 401
            answer = await refused(mesh, "wk-wrong")
            assert answer.error is not None
            assert answer.error.code() is StatusCode.UNAUTHENTICATED
        scheduler = mesh.scheduler
        scheduler.hold = True
        monkeypatch.setattr(adaptive_limit, "_GROWTH_PER_S", 1e9)
        before = len(scheduler.submits)
        waiting = [asyncio.ensure_future(refused(mesh, KEY)) for _ in range(8)]
        await until(lambda: len(scheduler.submits) == before + 8)
        scheduler.hold = False
        assert was_read(await refused(mesh, KEY))  # The ninth is refused by the scheduler: seven may wait.
        monkeypatch.setattr(adaptive_limit, "_GROWTH_PER_S", 0.0)
        before = len(scheduler.submits)
        for _ in range(50):
            was_read(await refused(mesh, KEY))
        assert len(scheduler.submits) == before
        scheduler.decide = None
        assert (await refused(mesh, "wk-two")).ids() == ANSWER
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
