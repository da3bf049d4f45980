"""Early attempts at texts: sent to the only worker before the scheduler has placed them, as those at answers are."""

import asyncio

import grpc
import pytest
from grpc import aio

from protos import inference_pb2 as api
from protos import mesh_pb2
from services.errors import unavailable
from services.gateway.answers import early_attempt
from tests.gateway.fakes import VECTOR, FakeMesh, assigned, rejected, until
from tests.gateway.model import make_card

CARD = make_card(encoder=mesh_pb2.EncoderCard(tasks=["embed"], width=len(VECTOR)))
TEXT = [5, 6, 7]


@pytest.fixture(autouse=True)
def _no_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_attempt, "CONFIRM_WAIT_S", 60.0)


def embed(mesh: FakeMesh, *texts: list[int]) -> "asyncio.Task[api.EmbedResponse]":
    """The reply to a request for the vectors of these texts."""
    inputs = [api.Input(token_ids=api.TokenIds(ids=text)) for text in texts or (TEXT,)]

    async def reply() -> api.EmbedResponse:
        return await mesh.stub.Embed(api.EmbedRequest(inputs=inputs))

    return asyncio.create_task(reply())


async def test_a_text_is_computed_before_its_placement_and_its_vector_delivered_behind_it() -> None:
    async with FakeMesh(card=CARD) as mesh:
        worker, scheduler = mesh.workers[0], mesh.scheduler
        scheduler.decide = lambda submit: assigned(submit, "worker-0", mesh.address("worker-0"), placement=7)
        scheduler.hold = True
        embedding = embed(mesh, TEXT, [8])
        await until(lambda: len(worker.jobs) == len(scheduler.submits) == 1 and not worker.running)
        assert not embedding.done()
        scheduler.release()
        reply = await embedding
        assert [list(each.values) for each in reply.embeddings] == [list(VECTOR)] * 2
        assert (reply.receipt.attempts, list(reply.receipt.workers)) == (1, ["worker-0"])
        [job] = worker.jobs
        assert (job.tentative, job.placement, job.attempt) == (True, 0, 1)
        await until(lambda: bool(worker.confirmed))  # The confirmation and the reply cross.
        assert [(each.stream_id, each.placement) for each in worker.confirmed] == [(job.stream_id, 7)]
        assert not worker.cancelled


async def test_a_text_that_the_scheduler_rejects_is_aborted() -> None:
    async with FakeMesh(card=CARD) as mesh:
        mesh.workers[0].hold_at = 0
        mesh.scheduler.decide = lambda submit: rejected(submit, unavailable("QUEUE_FULL", "no room"))
        with pytest.raises(aio.AioRpcError) as refused:
            await embed(mesh)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        await until(lambda: [each.position for each in mesh.workers[0].cancelled] == [0])
        assert not mesh.workers[0].confirmed


async def test_the_failure_of_a_tentative_text_is_not_a_lost_attempt() -> None:
    async with FakeMesh(card=CARD) as mesh:
        worker = mesh.workers[0]
        worker.fail_at = (0, unavailable("DRAINING", "leaving"))
        mesh.scheduler.hold = True
        embedding = embed(mesh)
        await until(lambda: len(worker.jobs) == 1 and not worker.running)
        await asyncio.sleep(0.02)  # The gateway has received the end.
        worker.fail_at = None
        mesh.scheduler.release()
        reply = await embedding
        assert (list(reply.embeddings[0].values), reply.receipt.attempts) == (list(VECTOR), 1)
        assert [job.tentative for job in worker.jobs] == [True, False]


async def test_a_suspected_text_is_placed_by_the_scheduler_alone() -> None:
    async with FakeMesh(card=CARD) as mesh:
        await embed(mesh)
        suspects = mesh_pb2.Suspects(fingerprints=[mesh.scheduler.submits[0].fingerprint])
        mesh.scheduler.send(mesh_pb2.DispatchResponse(suspects=suspects))
        await embed(mesh, [8])  # Behind the list of suspects: the link delivers in order.
        await embed(mesh)
        assert [job.tentative for job in mesh.workers[0].jobs] == [True, True, False]


@pytest.mark.parametrize("why", ["several workers", "this gateway has another text there"])
async def test_a_text_waits_for_its_placement_where_that_is_uncertain(why: str) -> None:
    async with FakeMesh(2 if why == "several workers" else 1, card=CARD) as mesh:
        worker, others = mesh.workers[0], list["asyncio.Task[api.EmbedResponse]"]()
        worker.hold_at = 0
        if why == "this gateway has another text there":
            others = [embed(mesh, [8])]
            await until(lambda: len(worker.jobs) == 1)
        embedding = embed(mesh)
        await until(lambda: len(worker.jobs) == len(others) + 1)
        assert not worker.jobs[-1].tentative
        worker.hold_at = None
        for reply in await asyncio.gather(embedding, *others):
            assert list(reply.embeddings[0].values) == list(VECTOR)
