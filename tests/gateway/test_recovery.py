"""Lost workers and schedulers: no token is lost or repeated, and no request waits without a limit."""

import asyncio

import grpc
import pytest

from protos import inference_pb2 as api
from protos import mesh_pb2
from services.errors import WeftError, unavailable
from tests.gateway.fakes import FakeMesh, ask, assigned, generate, until
from tests.gateway.model import ANSWER, LOREM
from tests.timing import timely


async def test_a_broken_link_leads_to_the_next_attempt_at_another_worker() -> None:
    async with FakeMesh(2) as mesh:
        first, second = mesh.workers
        first.hold_at = 12
        streaming = asyncio.create_task(generate(mesh.stub, ask("hello", stop=["never said"], seed=3)))
        await until(lambda: first.sent == 12)
        await asyncio.sleep(0.05)
        await mesh.stop("worker-0")
        answer = await streaming
        assert answer.error is None
        assert answer.text() == LOREM
        assert answer.ids() == ANSWER
        assert {delta.attempt for delta in answer.deltas if delta.position < 12 and delta.token_ids} == {1}
        assert {delta.attempt for delta in answer.deltas if delta.position >= 12 and delta.token_ids} == {2}
        [job] = second.jobs
        assert list(job.token_ids[job.prompt_len :]) == ANSWER[:12]
        assert job.attempt == 2
        assert job.sampling.seed == 3
        again = mesh.scheduler.submits[1]
        assert list(again.avoid) == ["worker-0"]
        assert (
            again.identity == mesh.scheduler.submits[0].identity
        )  # Requests that shared the first attempt share this one.
        assert again.prompt_tokens == job.prompt_len + 12
        receipt = answer.receipt
        assert receipt.attempts == 2
        assert list(receipt.workers) == ["worker-0", "worker-1"]
        assert receipt.completion_tokens == len(ANSWER)


async def test_a_lost_worker_is_fenced_even_if_it_still_sends() -> None:
    async with FakeMesh(2) as mesh:
        zombie, second = mesh.workers
        zombie.hold_at = 5
        second.step_s = 0.01
        streaming = asyncio.create_task(generate(mesh.stub, ask()))
        await until(lambda: zombie.sent == 5)
        await asyncio.sleep(0.05)
        row = zombie.jobs[0].stream_id
        mesh.scheduler.send(mesh_pb2.DispatchResponse(worker_lost=mesh_pb2.WorkerLost(worker_id="worker-0")))
        await until(lambda: second.sent > 2)
        late = mesh_pb2.RunResponse(stream_ids=[row] * 30, positions=range(5, 35), token_ids=[9] * 30)
        late.ends.add(stream_id=row, reason=api.FINISH_REASON_STOP)
        zombie.send(late)
        answer = await streaming
        assert answer.ids() == ANSWER
        assert answer.text() == LOREM
        assert answer.receipt.attempts == 2
        assert [cancel.stream_id for cancel in zombie.cancelled] == [row]  # The worker may be alive.


async def test_a_job_carries_its_placement() -> None:
    async with FakeMesh(2) as mesh:
        mesh.scheduler.decide = lambda submit: assigned(submit, "worker-0", mesh.address("worker-0"), placement=7)
        await generate(mesh.stub, ask())
        assert [job.placement for job in mesh.workers[0].jobs] == [7]


async def test_repeated_positions_are_dropped() -> None:
    async with FakeMesh() as mesh:
        worker = mesh.workers[0]
        worker.hold_at = 5
        streaming = asyncio.create_task(generate(mesh.stub, ask()))
        await until(lambda: worker.sent == 5)
        worker.send(
            mesh_pb2.RunResponse(stream_ids=[worker.jobs[0].stream_id] * 3, positions=range(2, 5), token_ids=[9] * 3)
        )
        worker.hold_at = None
        assert (await streaming).ids() == ANSWER


async def test_a_gap_in_positions_loses_the_attempt_not_a_token() -> None:
    async with FakeMesh(2) as mesh:
        worker = mesh.workers[0]
        worker.hold_at = 5
        streaming = asyncio.create_task(generate(mesh.stub, ask()))
        await until(lambda: worker.sent == 5)
        worker.send(mesh_pb2.RunResponse(stream_ids=[worker.jobs[0].stream_id], positions=[7], token_ids=[9]))
        answer = await streaming
        assert answer.ids() == ANSWER
        assert answer.receipt.attempts == 2


async def test_a_message_with_columns_of_unequal_length_loses_the_link() -> None:
    async with FakeMesh(2) as mesh:
        worker = mesh.workers[0]
        worker.hold_at = 5
        streaming = asyncio.create_task(generate(mesh.stub, ask()))
        await until(lambda: worker.sent == 5)
        worker.send(mesh_pb2.RunResponse(stream_ids=[1, 2], positions=[5], token_ids=[9, 9, 9]))
        answer = await streaming
        assert answer.error is None
        assert answer.receipt.attempts == 2


async def test_a_worker_that_fails_retryably_is_avoided() -> None:
    async with FakeMesh(2) as mesh:
        mesh.workers[0].fail_at = (3, unavailable("DRAINING", "leaving"))
        answer = await generate(mesh.stub, ask())
        assert answer.ids() == ANSWER
        assert answer.receipt.attempts == 2
        prompt = answer.receipt.prompt_tokens
        assert answer.receipt.prefill_tokens == (prompt - 1) + (prompt + 3 - 1)


async def test_a_failure_that_is_not_retryable_is_passed_to_the_client() -> None:
    async with FakeMesh(2) as mesh:
        mesh.workers[0].fail_at = (3, WeftError(grpc.StatusCode.INTERNAL, "NUMERIC", "the logits are not numbers"))
        answer = await generate(mesh.stub, ask())
        assert answer.error is not None
        assert answer.error.code() is grpc.StatusCode.INTERNAL
        assert answer.error.details() == "the logits are not numbers"
        assert answer.ids() == ANSWER[:3]
        assert answer.trailing_receipt.finish_reason == api.FINISH_REASON_ERROR
        assert answer.trailing_receipt.completion_tokens == 3
        assert not mesh.workers[1].jobs


async def test_attempts_are_bounded() -> None:
    async with FakeMesh(8, gateway_max_attempts=3) as mesh:
        for worker in mesh.workers:
            worker.fail_at = (0, unavailable("DRAINING", "leaving"))
        answer = await generate(mesh.stub, ask())
        assert answer.error is not None
        assert answer.error.code() is grpc.StatusCode.UNAVAILABLE
        assert len(mesh.scheduler.submits) == 3
        assert answer.trailing_receipt.attempts == 3


async def test_a_worker_lost_after_the_last_token_needs_no_other() -> None:
    async with FakeMesh(2) as mesh:
        worker = mesh.workers[0]
        worker.hold_at = 6
        streaming = asyncio.create_task(generate(mesh.stub, ask(max_tokens=6)))
        await until(lambda: worker.sent == 6)
        await asyncio.sleep(0.05)
        await mesh.stop("worker-0")
        answer = await streaming
        assert answer.ids() == ANSWER[:6]
        assert answer.last().finish_reason == api.FINISH_REASON_LENGTH
        assert not mesh.workers[1].jobs


async def test_a_running_stream_survives_the_scheduler() -> None:
    async with FakeMesh() as mesh:
        worker = mesh.workers[0]
        worker.hold_at = 5
        streaming = asyncio.create_task(generate(mesh.stub, ask()))
        await until(lambda: worker.sent == 5)
        await mesh.stop("scheduler")
        worker.hold_at = None
        answer = await streaming
        assert answer.ids() == ANSWER
        assert answer.receipt.attempts == 1


async def test_a_queued_job_survives_the_scheduler() -> None:
    async with FakeMesh() as mesh:
        mesh.scheduler.hold = True
        streaming = asyncio.create_task(generate(mesh.stub, ask(), timeout=20))
        await until(lambda: len(mesh.scheduler.submits) == 1)
        address = mesh.address("scheduler")
        await mesh.stop("scheduler")
        mesh.scheduler.hold = False
        await asyncio.sleep(0.1)
        await mesh.start_scheduler(address)
        answer = await streaming
        assert answer.ids() == ANSWER
        before, after = mesh.scheduler.submits
        assert mesh.scheduler.hellos == 2
        assert (before.job_id, before.attempt) == (after.job_id, after.attempt)
        assert after.deadline_s < before.deadline_s - 0.09


async def test_without_a_scheduler_an_admission_waits_and_is_then_refused() -> None:
    async with FakeMesh(gateway_scheduler_wait_s=0.3) as mesh:
        await generate(mesh.stub, ask())
        address = mesh.address("scheduler")
        await mesh.stop("scheduler")
        refused = await generate(mesh.stub, ask())
        assert refused.error is not None
        assert refused.error.code() is grpc.StatusCode.UNAVAILABLE
        assert 0.25 < refused.trailing_receipt.timings.wall_s < 1.0
        mesh.scheduler.hold = False
        waiting = asyncio.create_task(generate(mesh.stub, ask()))
        await asyncio.sleep(0.1)
        await mesh.start_scheduler(address)
        answer = await waiting
        if (
            answer.error is not None
        ):  # The channel may back off for longer than the wait: then the next request is served.
            await until(lambda: mesh.scheduler.hellos == 2)
            answer = await generate(mesh.stub, ask())
        assert answer.ids() == ANSWER


async def test_the_placement_of_an_older_attempt_is_ignored() -> None:
    async with FakeMesh(2) as mesh:
        first, second = mesh.workers
        first.fail_at = (3, unavailable("DRAINING", "leaving"))
        mesh.scheduler.decide = lambda submit: assigned(submit, "worker-0", mesh.address("worker-0"))
        mesh.scheduler.hold = False
        streaming = asyncio.create_task(generate(mesh.stub, ask()))
        await until(lambda: len(mesh.scheduler.submits) == 1)
        mesh.scheduler.hold = True
        await until(lambda: len(mesh.scheduler.submits) == 2)
        old, new = mesh.scheduler.submits
        assert new.attempt == 2
        mesh.scheduler.send(assigned(old, "worker-0", mesh.address("worker-0")))
        mesh.scheduler.send(assigned(new, "worker-1", mesh.address("worker-1")))
        answer = await streaming
        assert answer.ids() == ANSWER
        assert [job.attempt for job in (*first.jobs, *second.jobs)] == [1, 2]


async def test_a_rejection_is_passed_to_the_client() -> None:
    async with FakeMesh(0) as mesh:
        answer = await generate(mesh.stub, ask())
        assert answer.error is not None
        assert answer.error.code() is grpc.StatusCode.UNAVAILABLE


@timely
@pytest.mark.parametrize("assigned_already", [False, True])
async def test_a_cancelled_request_is_cancelled_at_scheduler_and_worker(assigned_already: bool) -> None:
    async with FakeMesh() as mesh:
        worker = mesh.workers[0]
        mesh.scheduler.hold = not assigned_already
        worker.hold_at = 4
        call = mesh.stub.Generate(ask(n=2))
        first = asyncio.create_task(call.read())
        await until(lambda: worker.sent == 8 if assigned_already else len(mesh.scheduler.submits) == 2)
        await asyncio.sleep(0.05)
        began = asyncio.get_running_loop().time()
        call.cancel()
        if assigned_already:
            await until(lambda: not worker.running)
            assert [cancel.position for cancel in worker.cancelled] == [4, 4]
        else:
            await until(lambda: len(mesh.scheduler.withdrawn) == 2)
        assert asyncio.get_running_loop().time() - began < 0.1
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


@timely
async def test_a_deadline_ends_everything_in_time() -> None:
    async with FakeMesh() as mesh:
        worker = mesh.workers[0]
        worker.hold_at = 4
        answer = await generate(mesh.stub, ask(), timeout=0.4)
        assert answer.error is not None
        assert answer.error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: not worker.running, seconds=0.2)
        assert 0 < worker.jobs[0].deadline_s <= 0.4


async def test_a_placement_that_crosses_a_withdrawal_is_ignored() -> None:
    async with FakeMesh(2) as mesh:  # With several workers there is no early attempt.
        mesh.scheduler.hold = True
        call = mesh.stub.Generate(ask())
        await until(lambda: len(mesh.scheduler.submits) == 1)
        call.cancel()
        await until(lambda: len(mesh.scheduler.withdrawn) == 1)
        mesh.scheduler.send(assigned(mesh.scheduler.submits[0], "worker-0", mesh.address("worker-0")))
        mesh.scheduler.hold = False
        answer = await generate(mesh.stub, ask())
        assert answer.ids() == ANSWER
        assert len(mesh.workers[0].jobs) == 1
