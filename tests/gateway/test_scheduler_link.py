"""The control link to a scheduler, over a real socket: each submitted job is placed or withdrawn."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc import StatusCode

from protos import mesh_pb2 as mesh
from protos.mesh_pb2_grpc import add_SchedulerServicer_to_server
from services import rpc
from services.errors import WeftError, exhausted
from services.gateway.links import adaptive_limit, unread_submissions
from services.gateway.links.scheduler_link import SchedulerLink
from tests.gateway.fakes import FakeScheduler, rejected, until

WAIT_S = 10.5


@contextlib.asynccontextmanager
async def linked(scheduler: FakeScheduler) -> AsyncIterator[SchedulerLink]:
    """A gateway's link to this scheduler."""
    server = await rpc.serve(
        "127.0.0.1:0", [rpc.Service("weft.v1.Scheduler", add_SchedulerServicer_to_server, scheduler)]
    )
    link = SchedulerLink(f"127.0.0.1:{server.port}", "a gateway", WAIT_S, lambda models: None, lambda worker: None)
    running = asyncio.create_task(link.run())
    try:
        yield link
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.stop(0)


@pytest.fixture
def scheduler() -> FakeScheduler:
    """A scheduler that assigns every job."""
    fake = FakeScheduler()  # type: ignore[abstract]
    fake.workers = [("a worker", "127.0.0.1:1")]
    return fake


async def test_the_log_has_the_address_of_the_scheduler(capfd: pytest.CaptureFixture[str]) -> None:
    link = SchedulerLink("127.0.0.1:1", "a gateway", WAIT_S, lambda models: None, lambda worker: None)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(link.run(), 0.1)
    assert "127.0.0.1:1" in "".join(capfd.readouterr())


async def test_a_placement_that_arrives_in_the_instant_of_a_cancel_is_withdrawn(
    scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with linked(scheduler) as link:
        placing = asyncio.create_task(link.submit(mesh.Submit(job_id="job", attempt=1)))
        answer = link._answer

        def answer_and_cancel(*what: Any) -> None:
            answer(*what)
            placing.cancel()

        monkeypatch.setattr(link, "_answer", answer_and_cancel)
        with pytest.raises(asyncio.CancelledError):
            await placing
        await until(lambda: scheduler.withdrawn == ["job"])


async def test_a_placed_job_is_not_withdrawn(scheduler: FakeScheduler) -> None:
    async with linked(scheduler) as link:
        for number in range(2):
            placement = await link.submit(mesh.Submit(job_id=f"job {number}", attempt=1))
            assert (placement.job_id, placement.worker_id) == (f"job {number}", "a worker")
        assert scheduler.withdrawn == []


async def test_more_jobs_than_the_default_queue_holds_are_all_placed(scheduler: FakeScheduler) -> None:
    async with linked(scheduler) as link:
        await asyncio.wait_for(link.models_known.wait(), 10)
        jobs = [mesh.Submit(job_id=str(number), attempt=1) for number in range(4200)]
        placements = await asyncio.gather(*map(link.submit, jobs))
        assert [placement.job_id for placement in placements] == [job.job_id for job in jobs]


async def test_each_disconnect_of_the_scheduler_starts_a_new_timer(
    scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    call_later, timers = loop.call_later, list[asyncio.TimerHandle]()

    def note(delay: float, *what: Any, **options: Any) -> asyncio.TimerHandle:
        timer = call_later(delay, *what, **options)
        if delay == WAIT_S:
            timers.append(timer)
        return timer

    scheduler.hold = True
    async with linked(scheduler) as link:
        await asyncio.wait_for(link.models_known.wait(), 10)
        monkeypatch.setattr(loop, "call_later", note)
        placing = asyncio.create_task(link.submit(mesh.Submit(job_id="job", attempt=1)))
        await until(lambda: len(scheduler.submits) == 1)
        scheduler.hang_up()
        await until(lambda: len(scheduler.submits) == 2)
        scheduler.hang_up()
        await until(lambda: len(scheduler.submits) == 3)
        assert [timer.cancelled() for timer in timers] == [True, True]
        scheduler.release()
        assert (await placing).worker_id == "a worker"


async def test_while_the_queue_is_full_jobs_are_refused_without_the_scheduler(
    scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adaptive_limit, "_GROWTH_PER_S", 0.0)  # Time passes at any speed here.
    full = exhausted("QUEUE_FULL", "no room", 0.5)
    async with linked(scheduler) as link:

        async def refused(job_id: str) -> WeftError:
            with pytest.raises(WeftError) as caught:
                await link.submit(mesh.Submit(job_id=job_id, attempt=1, model="m", tenant="t"))
            return caught.value

        scheduler.decide = lambda submit: rejected(submit, full)
        for number in range(20):
            error = await refused(str(number))
            assert (error.reason, error.retry_after_s) == ("QUEUE_FULL", 0.5)
        assert len(scheduler.submits) == 1
        scheduler.decide = None
        assert (await link.submit(mesh.Submit(job_id="other", attempt=1, model="n", tenant="t"))).job_id == "other"
        later = mesh.Submit(job_id="0", attempt=2, model="m", tenant="t")  # Its client has part of its answer.
        assert (await link.submit(later)).attempt == 2


@pytest.mark.parametrize("reads_more", [True, False])
async def test_submissions_are_sent_together_to_a_scheduler_that_reads_them(
    scheduler: FakeScheduler, reads_more: bool
) -> None:
    scheduler.reads_more = reads_more
    async with linked(scheduler) as link:
        await asyncio.wait_for(link.models_known.wait(), 10)
        submits = [mesh.Submit(job_id=str(number), attempt=1, model="m") for number in range(9)]
        placed = await asyncio.gather(*(link.submit(submit) for submit in submits))
    assert [each.job_id for each in placed] == [each.job_id for each in scheduler.submits] == [str(n) for n in range(9)]
    assert sum(scheduler.together) == 10, "the hello and nine submissions"
    assert (len(scheduler.together) < 10) == reads_more


async def test_a_queue_is_mostly_taken_while_more_than_half_of_what_may_wait_there_waits(
    scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adaptive_limit, "_GROWTH_PER_S", 0.0)
    scheduler.hold = True
    async with linked(scheduler) as link:
        await asyncio.wait_for(link.models_known.wait(), 10)
        submits = [mesh.Submit(job_id=str(number), attempt=1, model="m") for number in range(9)]
        waiting = [asyncio.create_task(link.submit(submit)) for submit in submits]
        await until(lambda: len(scheduler.submits) == 9)
        assert link.crowding("m") is None
        scheduler.send(rejected(submits.pop(), exhausted("QUEUE_FULL", "no room", 0.5)))
        with pytest.raises(WeftError):
            await waiting.pop()
        error = link.crowding("m")
        assert error is not None
        assert (error.reason, error.retry_after_s) == ("QUEUE_FULL", 0.5)
        assert link.crowding("another") is None
        scheduler.submits.pop()
        scheduler.release()
        await asyncio.gather(*waiting)
        assert (link.crowding("m"), link.refuses, link.settled) == (None, True, 9)


async def test_another_scheduler_is_not_taken_as_full(
    scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adaptive_limit, "_GROWTH_PER_S", 0.0)
    scheduler.decide = lambda submit: rejected(submit, exhausted("QUEUE_FULL", "no room", 0.5))
    async with linked(scheduler) as link:
        with pytest.raises(WeftError):
            await link.submit(mesh.Submit(job_id="a", attempt=1, model="m", tenant="t"))
        with pytest.raises(WeftError):
            link.check_room("m", "t", False)
        scheduler.hang_up()
        await until(lambda: scheduler.hellos == 2)
        link.check_room("m", "t", False)


async def test_while_the_scheduler_is_behind_new_jobs_are_refused(
    scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unread_submissions, "BEHIND_S", 0.0)  # Time passes at any speed here.
    monkeypatch.setattr(unread_submissions, "BURST_S", 0.0)
    monkeypatch.setattr(adaptive_limit, "_GROWTH_PER_S", 0.0)
    scheduler.hold = scheduler.counts_submissions = True

    def job(number: int, attempt: int = 1) -> mesh.Submit:
        return mesh.Submit(job_id=str(number), attempt=attempt, model=f"model {number % 2}")

    async with linked(scheduler) as link:
        await asyncio.wait_for(link.models_known.wait(), 10)
        waiting = [asyncio.create_task(link.submit(job(number))) for number in range(40)]
        await until(lambda: len(scheduler.submits) == 40)
        link.check_room("model 0", "t", False)
        scheduler.send(mesh.DispatchResponse(heartbeat=mesh.SchedulerHeartbeat(), submissions_read=5))
        await until(lambda: link.refuses)
        for number in (40, 41):
            with pytest.raises(WeftError) as caught:
                await link.submit(job(number))
            assert (caught.value.code, caught.value.reason) == (StatusCode.RESOURCE_EXHAUSTED, "SCHEDULER_OVERLOADED")
            assert caught.value.retry_after_s == 1.0
        # The client of a later attempt has part of its answer.
        waiting.append(asyncio.create_task(link.submit(job(42, attempt=2))))
        await until(lambda: len(scheduler.submits) == 41)
        scheduler.send(mesh.DispatchResponse(heartbeat=mesh.SchedulerHeartbeat(), submissions_read=41))
        await until(lambda: link.refusal("model 0", "t") is None)
        scheduler.release()
        assert len(await asyncio.gather(*waiting)) == 41
        assert (await link.submit(job(43))).job_id == "43"


async def test_another_connection_counts_from_the_beginning(
    scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unread_submissions, "BEHIND_S", 0.0)
    monkeypatch.setattr(unread_submissions, "BURST_S", 0.0)
    scheduler.hold = scheduler.counts_submissions = True
    async with linked(scheduler) as link:
        await asyncio.wait_for(link.models_known.wait(), 10)
        waiting = [asyncio.create_task(link.submit(mesh.Submit(job_id=str(n), attempt=1))) for n in range(40)]
        await until(lambda: len(scheduler.submits) == 40)
        scheduler.send(mesh.DispatchResponse(heartbeat=mesh.SchedulerHeartbeat(), submissions_read=1))
        await until(lambda: link.refusal("", "t") is not None)
        scheduler.hang_up()
        await until(lambda: len(scheduler.submits) == 80)
        scheduler.send(mesh.DispatchResponse(heartbeat=mesh.SchedulerHeartbeat(), submissions_read=40))
        await until(lambda: link.refusal("", "t") is None)
        scheduler.release()
        assert len(await asyncio.gather(*waiting)) == 40


async def test_the_suspects_of_an_earlier_connection_are_forgotten(scheduler: FakeScheduler) -> None:
    """A scheduler that has none sends no list: it is another one, or its last suspect was cleared meanwhile."""
    async with linked(scheduler) as link:
        await asyncio.wait_for(link.models_known.wait(), 10)
        scheduler.send(mesh.DispatchResponse(suspects=mesh.Suspects(fingerprints=[b"mark"])))
        await until(lambda: link.suspects == {b"mark"})
        scheduler.hang_up()
        await link.submit(mesh.Submit(job_id="job", attempt=1))
        assert not link.suspects
