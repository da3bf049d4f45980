"""Early attempts: jobs that are sent to the only worker before the scheduler has placed them."""

import asyncio
import json

import pytest
from grpc import StatusCode, aio
from structlog.testing import capture_logs

from protos import inference_pb2 as api
from protos import mesh_pb2
from protos.inference_pb2_grpc import InferenceStub
from protos.mesh_pb2_grpc import add_WorkerServicer_to_server
from services.errors import unavailable
from services.gateway.answers import early_attempt
from tests.gateway.fakes import Answer, FakeMesh, ask, assigned, generate, rejected, until
from tests.gateway.model import ANSWER, LOREM, ids_of
from weft import Client


@pytest.fixture
def _no_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_attempt, "CONFIRM_WAIT_S", 60.0)


@pytest.mark.usefixtures("_no_timeout")
async def test_an_early_attempt_runs_before_the_placement_and_delivers_nothing_until_then() -> None:
    async with FakeMesh() as mesh:
        mesh.scheduler.hold = True
        received: list[api.GenerateResponse] = []

        async def read() -> None:
            async for response in mesh.stub.Generate(ask()):
                received.append(response)

        reading = asyncio.create_task(read())
        await until(lambda: mesh.workers[0].sent == len(ANSWER))
        await asyncio.sleep(0.02)
        assert not received
        mesh.scheduler.release()
        await reading
        assert "".join(response.delta.text for response in received) == LOREM
        receipt = received[-1].receipt
        assert (receipt.attempts, list(receipt.workers)) == (1, ["worker-0"])
        [job] = mesh.workers[0].jobs
        assert (job.job_id, job.attempt) == (mesh.scheduler.submits[0].job_id, 1)
        assert not mesh.workers[0].cancelled


@pytest.mark.usefixtures("_no_timeout")
async def test_a_tentative_job_of_the_python_client_is_confirmed() -> None:
    async with FakeMesh() as mesh, Client(f"127.0.0.1:{mesh.server.port}") as client:
        worker, scheduler = mesh.workers[0], mesh.scheduler
        scheduler.decide = lambda submit: assigned(submit, "worker-0", mesh.address("worker-0"), placement=7)
        scheduler.hold = True
        answer = client.generate("hello")
        answering = asyncio.create_task(answer.text())
        await until(lambda: worker.sent == len(ANSWER))
        assert not answering.done()
        scheduler.release()
        assert await answering == LOREM
        [job] = worker.jobs
        assert answer.request_id in job.job_id
        assert (job.tentative, job.placement) == (True, 0)
        assert [(each.stream_id, each.placement) for each in worker.confirmed] == [(job.stream_id, 7)]


@pytest.mark.usefixtures("_no_timeout")
async def test_of_two_equal_requests_the_one_with_the_early_attempt_is_submitted_first() -> None:
    async with FakeMesh(cache=True) as mesh:
        worker = mesh.workers[0]
        worker.hold_bundle.clear()
        request = ask(prompt=api.Prompt(token_ids=api.TokenIds(ids=ids_of("hello"))))
        both = [asyncio.create_task(generate(mesh.stub, request)) for _ in range(2)]
        await asyncio.sleep(0.1)  # Both wait for the tokenizer, and continue at the same time.
        worker.hold_bundle.set()
        assert [(await each).ids() for each in both] == [ANSWER, ANSWER]
        assert worker.jobs[0].job_id == mesh.scheduler.submits[0].job_id


@pytest.mark.usefixtures("_no_timeout")
async def test_initial_metadata_is_sent_before_the_first_token() -> None:
    async with FakeMesh() as mesh:
        mesh.workers[0].hold_at = 0
        call = mesh.stub.Generate(ask())
        await asyncio.wait_for(call.initial_metadata(), 5)
        assert not mesh.workers[0].sent
        mesh.workers[0].hold_at = None
        assert [response async for response in call][-1].HasField("receipt")


@pytest.mark.usefixtures("_no_timeout")
async def test_grpc_may_retry_a_call_whose_early_attempt_was_refused() -> None:
    retry = {"maxAttempts": 2, "initialBackoff": "0.01s", "maxBackoff": "0.01s", "backoffMultiplier": 1}
    policy = {"name": [{}], "retryPolicy": {**retry, "retryableStatusCodes": ["UNAVAILABLE"]}}
    options = [("grpc.service_config", json.dumps({"methodConfig": [policy]}))]
    async with FakeMesh() as mesh, aio.insecure_channel(f"127.0.0.1:{mesh.server.port}", options) as channel:
        mesh.scheduler.hold = True
        mesh.workers[0].hold_at = 0
        answering = asyncio.create_task(generate(InferenceStub(channel), ask()))
        await until(lambda: len(mesh.workers[0].jobs) == len(mesh.scheduler.submits) == 1)
        await asyncio.sleep(0.02)  # gRPC does not retry a call that has received initial metadata.
        mesh.scheduler.decide = lambda submit: rejected(submit, unavailable("BUSY", "no room"))
        mesh.scheduler.release()
        mesh.scheduler.decide = mesh.workers[0].hold_at = None
        assert (await answering).ids() == ANSWER
        assert len(mesh.scheduler.submits) == 2


@pytest.mark.usefixtures("_no_timeout")
async def test_an_early_attempt_at_a_worker_that_was_restarted_is_repeated() -> None:
    async with FakeMesh() as mesh:
        mesh.scheduler.hold = True
        mesh.workers[0].hold_at = 3
        answering = asyncio.create_task(generate(mesh.stub, ask()))
        await until(lambda: mesh.workers[0].sent == 3)
        address = mesh.address("worker-0")
        with capture_logs() as logs:
            await mesh.stop("worker-0")
            await until(lambda: any(entry["event"] == "link broke" for entry in logs))
        mesh.workers[0].hold_at = None
        await mesh.start("worker-0", "weft.v1.Worker", add_WorkerServicer_to_server, mesh.workers[0], address)
        mesh.scheduler.release()
        answer = await answering
        assert answer.text() == LOREM
        assert answer.receipt.attempts == 1
        assert len(mesh.workers[0].jobs) == 2


@pytest.mark.usefixtures("_no_timeout")
async def test_a_rejected_early_attempt_is_aborted() -> None:
    async with FakeMesh() as mesh:
        mesh.workers[0].hold_at = 2
        mesh.scheduler.decide = lambda submit: rejected(submit, unavailable("QUEUE_FULL", "no room"))
        answer = await generate(mesh.stub, ask())
        assert answer.error is not None
        assert answer.ids() == []
        await until(lambda: [cancel.position for cancel in mesh.workers[0].cancelled] == [0])


@pytest.mark.usefixtures("_no_timeout")
async def test_a_rejected_early_attempt_is_aborted_even_if_it_has_ended() -> None:
    async with FakeMesh() as mesh:
        worker, scheduler = mesh.workers[0], mesh.scheduler
        scheduler.hold = True
        scheduler.decide = lambda submit: rejected(submit, unavailable("QUEUE_FULL", "no room"))
        answering = asyncio.create_task(generate(mesh.stub, ask()))
        await until(lambda: worker.sent == len(ANSWER) and not worker.running)
        await asyncio.sleep(0.02)  # The gateway has received the end.
        scheduler.release()
        assert (await answering).ids() == []
        await until(lambda: [cancel.stream_id for cancel in worker.cancelled] == [worker.jobs[0].stream_id])
        assert not worker.confirmed


@pytest.mark.usefixtures("_no_timeout")
async def test_the_failure_of_a_tentative_job_is_not_a_lost_attempt() -> None:
    async with FakeMesh() as mesh:
        worker = mesh.workers[0]
        worker.fail_at = (0, unavailable("DRAINING", "leaving"))
        mesh.scheduler.hold = True
        answering = asyncio.create_task(generate(mesh.stub, ask()))
        await until(lambda: len(worker.jobs) == 1 and not worker.running)
        await asyncio.sleep(0.02)  # The gateway has received the end.
        worker.fail_at = None
        mesh.scheduler.release()
        answer = await answering
        assert (answer.ids(), answer.receipt.attempts) == (ANSWER, 1)
        assert not worker.confirmed


async def test_an_early_attempt_is_aborted_when_the_job_has_to_wait() -> None:
    async with FakeMesh() as mesh:
        mesh.scheduler.hold = True
        mesh.workers[0].hold_at = 2
        answering = asyncio.create_task(generate(mesh.stub, ask()))
        await until(lambda: bool(mesh.workers[0].cancelled))
        mesh.workers[0].hold_at = None
        mesh.scheduler.release()
        answer = await answering
        assert answer.ids() == ANSWER
        assert [job.attempt for job in mesh.workers[0].jobs] == [1, 1]


async def test_without_a_scheduler_an_early_attempt_delivers_nothing_and_is_aborted() -> None:
    async with FakeMesh(gateway_scheduler_wait_s=0.5) as mesh:
        await generate(mesh.stub, ask())
        await mesh.stop("scheduler")
        mesh.workers[0].hold_at = 2
        refused = await generate(mesh.stub, ask())
        assert refused.error is not None
        assert (refused.error.code(), refused.ids()) == (StatusCode.UNAVAILABLE, [])
        assert len(mesh.workers[0].jobs) == 2
        assert [cancel.position for cancel in mesh.workers[0].cancelled] == [0]


@pytest.mark.usefixtures("_no_timeout")
async def test_a_cached_answer_aborts_the_early_attempt_each_time() -> None:
    async with FakeMesh(cache=True) as mesh:
        cache, worker = mesh.cache, mesh.workers[0]
        assert cache is not None
        await generate(mesh.stub, ask())
        await until(lambda: bool(cache.results))
        worker.hold_at = 0
        for number in (1, 2):
            answer = await generate(mesh.stub, ask())
            assert (answer.receipt.result_hit, answer.ids()) == (True, ANSWER)
            await until(lambda number=number: [each.position for each in worker.cancelled] == [0] * number)  # type: ignore[misc]
            assert len(worker.jobs) == 1 + number
        assert all(job.tentative for job in worker.jobs)


@pytest.mark.usefixtures("_no_timeout")
async def test_an_early_attempt_is_aborted_when_another_worker_is_assigned() -> None:
    async with FakeMesh(2) as mesh:
        served = mesh.served()
        served[0].addresses.remove(mesh.address("worker-1"))
        mesh.scheduler.serve_models(served)
        first, second = mesh.workers
        first.hold_at = 2
        mesh.scheduler.decide = lambda submit: assigned(submit, "worker-1", mesh.address("worker-1"))
        answer = await generate(mesh.stub, ask())
        assert answer.ids() == ANSWER
        assert list(answer.receipt.workers) == ["worker-1"]
        assert len(second.jobs) == 1
        await until(lambda: len(first.cancelled) == len(first.jobs) == 1)


@pytest.mark.usefixtures("_no_timeout")
async def test_an_early_attempt_is_aborted_when_the_job_joins_another() -> None:
    async with FakeMesh() as mesh:
        worker = mesh.workers[0]
        worker.hold_at = 2

        def join(submit: mesh_pb2.Submit) -> mesh_pb2.DispatchResponse | None:
            if not submit.identity:
                worker.hold_at = None
                return None
            joined = mesh_pb2.Joined(
                job_id=submit.job_id,
                attempt=submit.attempt,
                worker_id="worker-0",
                address=mesh.address("worker-0"),
                leader_job_id="one that is gone",
            )
            return mesh_pb2.DispatchResponse(joined=joined)

        mesh.scheduler.decide = join
        answer = await generate(mesh.stub, ask())
        assert answer.ids() == ANSWER
        assert [job.attempt for job in worker.jobs] == [1, 3]
        await until(lambda: len(worker.cancelled) == 1)


@pytest.mark.usefixtures("_no_timeout")
@pytest.mark.parametrize("why", ["several workers", "this gateway has another job there"])
async def test_there_is_no_early_attempt_where_the_placement_is_uncertain(why: str) -> None:
    async with FakeMesh(2 if why == "several workers" else 1) as mesh:
        worker, before = mesh.workers[0], 0
        other: asyncio.Task[Answer] | None = None
        if why == "this gateway has another job there":
            worker.hold_at = 2
            other = asyncio.create_task(generate(mesh.stub, ask("other")))
            await until(lambda: worker.sent == 2)
            before = 1
        mesh.scheduler.hold = True
        answering = asyncio.create_task(generate(mesh.stub, ask()))
        await until(lambda: len(mesh.scheduler.submits) == before + 1)
        await asyncio.sleep(0.02)
        assert sum(len(each.jobs) for each in mesh.workers) == before
        worker.hold_at = None
        mesh.scheduler.release()
        assert (await answering).ids() == ANSWER
        assert other is None or (await other).ids() == ANSWER
