"""The link to a worker, over a real socket: nothing of it is left when it has ended."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import pytest

from protos import inference_pb2 as api
from protos import mesh_pb2 as mesh
from protos.mesh_pb2_grpc import add_WorkerServicer_to_server
from services import rpc
from services.gateway.links.token_pace import StepMeans
from services.gateway.links.worker_link import WorkerLink, clock
from services.gateway.links.worker_links import WorkerLinks
from tests.gateway.fakes import FakeWorker, until


def worker_of(tokens: Sequence[int] = ()) -> FakeWorker:
    """A worker that gives this answer to every job."""
    return FakeWorker("a worker", lambda job: tokens)  # type: ignore[abstract]


async def test_a_link_that_breaks_leaves_no_task_behind() -> None:
    worker = worker_of()
    server = await rpc.serve("127.0.0.1:0", [rpc.Service("weft.v1.Worker", add_WorkerServicer_to_server, worker)])
    link = WorkerLink(f"127.0.0.1:{server.port}", "a gateway")
    await until(lambda: len(worker.links) == 1)
    assert readers() == 1
    await server.stop(0)
    await until(lambda: not link.alive)
    await until(lambda: readers() == 0)


@contextlib.asynccontextmanager
async def linked(worker: FakeWorker, heartbeat: mesh.WorkerHeartbeat) -> AsyncIterator[WorkerLink]:
    """A link to this worker, which has sent this heartbeat."""
    server = await rpc.serve("127.0.0.1:0", [rpc.Service("weft.v1.Worker", add_WorkerServicer_to_server, worker)])
    link = WorkerLink(f"127.0.0.1:{server.port}", "a gateway")
    await until(lambda: len(worker.links) == 1)
    (unsent,) = worker.links
    unsent.put(mesh.RunResponse(heartbeat=heartbeat))
    await until(lambda: link.health.last is not None)
    yield link
    await link.close()
    await server.stop(0)


@pytest.mark.parametrize("reads_more", [True, False])
async def test_jobs_are_sent_together_to_a_worker_that_reads_them(reads_more: bool) -> None:
    worker = worker_of()
    async with linked(worker, mesh.WorkerHeartbeat(received=0, reads_more=reads_more)) as link:
        for number in range(9):
            link.run(mesh.Job(job_id=str(number)), "a worker", lambda: None)
        await until(lambda: len(worker.jobs) == 9)
    assert [job.job_id for job in worker.jobs] == [str(number) for number in range(9)]
    assert sum(worker.together) == 10, "the hello and nine jobs"
    assert (len(worker.together) < 10) == reads_more


@pytest.mark.parametrize("hold_s", [0.0, 0.05])
@pytest.mark.parametrize("guesses", [False, True])
async def test_tokens_of_steps_with_guesses_are_taken_one_by_one(guesses: bool, hold_s: float) -> None:
    worker, taken, times = worker_of(range(90)), list[list[int]](), list[float]()
    worker.tokens_per_step, worker.step_s = 3, 0.006

    def take() -> None:
        taken.append(stream.take()[0])
        times.append(stream.taken_at)

    async with linked(worker, mesh.WorkerHeartbeat(guesses=guesses)) as link:
        job = mesh.Job(job_id="a job", token_ids=[1], prompt_len=1, sampling=api.Sampling(max_tokens=90))
        stream = link.run(job, "a worker", take, hold_s)
        await until(stream.closed.done)
        await until(lambda: sum(map(len, taken)) == 90)
    assert [token for tokens in taken for token in tokens] == list(range(90))
    assert any(len(tokens) % 3 for tokens in taken) == bool(guesses and hold_s)
    assert times == sorted(times)


async def test_what_steps_of_an_answer_took_is_known_to_the_next_one() -> None:
    worker, found = worker_of(range(60)), list[StepMeans | None]()
    worker.step_s = 0.004
    async with linked(worker, mesh.WorkerHeartbeat(guesses=True)) as link:
        job = mesh.Job(job_id="a job", token_ids=[1], prompt_len=1, sampling=api.Sampling(max_tokens=60))
        for tokens in (3, 3, 1):
            worker.tokens_per_step = tokens
            stream = link.run(job, "a worker", lambda: None, 0.05)
            await until(stream.closed.done)
            found.append(link.usual_steps)
    first, second, plain = found
    assert first is not None
    assert second is not None
    assert first.guessed
    assert second.steps > 1.5 * first.steps
    assert plain is second, "an answer without guesses changes nothing"


def readers() -> int:
    """gRPC's tasks that read what a client sends."""
    return sum("_consume_request_iterator" in repr(task.get_coro()) for task in asyncio.all_tasks())


async def test_a_worker_whose_link_broke_is_out_of_reach_until_a_new_link_is_connected() -> None:
    worker = worker_of()
    service = rpc.Service("weft.v1.Worker", add_WorkerServicer_to_server, worker)
    server = await rpc.serve("127.0.0.1:0", [service])
    address, reports = f"127.0.0.1:{server.port}", list[frozenset[str]]()
    links = WorkerLinks("a gateway")
    links.on_unreachable = reports.append
    link = links.to(address)
    await until(lambda: len(worker.links) == 1)
    assert links.reaches(address)
    await server.stop(0)
    await until(lambda: not link.alive)
    again = links.to(address)  # As a job does that goes on there before the watch has seen the broken link.
    assert again.alive
    assert not links.reaches(address)
    links.look(clock())
    assert reports == [{address}]
    server = await rpc.serve(address, [service])

    def reached() -> bool:
        links.to(address)
        return links.reaches(address)

    await until(reached)
    links.look(clock())
    assert reports == [{address}, set()]
    await links.close()
    await server.stop(0)


async def test_nothing_is_kept_of_a_worker_that_is_no_longer_served() -> None:
    address, reports = "127.0.0.1:1", list[frozenset[str]]()
    links = WorkerLinks("a gateway", connect_s=0.1)
    links.on_unreachable = reports.append
    await links.keep([address])
    link = links.to(address)
    await until(lambda: not link.alive)
    links.look(clock())
    assert links.find(address) not in (None, link), "a broken link to a served worker is tried again"
    await links.keep([])
    links.look(clock())
    assert reports == [{address}, set()]
    assert (links._links, links._probed_at, links._broken) == ({}, {}, set())
