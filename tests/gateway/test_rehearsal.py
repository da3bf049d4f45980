"""Stories of first tokens that a worker announces: the gateway gets ready, and nothing is told before they come."""

import asyncio
from collections.abc import Sequence

import pytest

from protos import inference_pb2 as api
from protos import mesh_pb2
from services.errors import unavailable
from services.gateway.text.tokenizer import Detokenizer, TextModel
from tests.gateway.fakes import FakeMesh, ask, generate, until
from tests.gateway.model import ANSWER, LOREM


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Detokenizer]:
    """Every detokenizer that the gateway makes: one for an answer, one for its rehearsal."""
    detokenizers: list[Detokenizer] = []
    detokenizer = TextModel.detokenizer

    def noted(self: TextModel, prompt: Sequence[int] = ()) -> Detokenizer:
        detokenizers.append(detokenizer(self, prompt))
        return detokenizers[-1]

    monkeypatch.setattr(TextModel, "detokenizer", noted)
    return detokenizers


async def test_an_announced_token_is_rehearsed_once_and_told_when_it_comes(made: list[Detokenizer]) -> None:
    async with FakeMesh() as mesh:
        worker = mesh.workers[0]
        worker.hold_at = 0
        heard: list[api.GenerateResponse] = []

        async def listen() -> None:
            async for response in mesh.stub.Generate(ask()):
                heard.append(response)

        listening = asyncio.create_task(listen())
        await until(lambda: len(worker.running) == 1)
        worker.announce()
        await until(lambda: len(made) == 2)
        worker.announce()
        await asyncio.sleep(0.02)
        assert not heard
        worker.hold_at = None
        await listening
        assert "".join(response.delta.text for response in heard) == LOREM
        assert [token for response in heard for token in response.delta.token_ids] == ANSWER
        receipt = heard[-1].receipt
        assert (receipt.completion_tokens, receipt.attempts) == (len(ANSWER), 1)
        assert len(made) == 2


async def test_where_first_tokens_are_announced_the_client_is_greeted_with_the_announcement() -> None:
    async with FakeMesh() as mesh:
        worker, greeted_early = mesh.workers[0], list[bool]()
        for announced in (True, True, False, False):
            worker.hold_at = 0
            call = mesh.stub.Generate(ask())
            greeting = asyncio.create_task(call.initial_metadata())
            await until(lambda: len(worker.running) == 1)
            await asyncio.sleep(0.05)
            early = greeting.done()
            if announced:
                worker.announce()
                await asyncio.wait_for(greeting, 5)
            worker.hold_at = None
            assert [response async for response in call][-1].HasField("receipt")
            greeted_early.append(early)
        # At once while nothing was ever announced, and again after a first token that was not.
        assert greeted_early == [True, False, False, True]


async def test_an_answer_that_was_not_announced_is_not_rehearsed(made: list[Detokenizer]) -> None:
    async with FakeMesh() as mesh:
        assert (await generate(mesh.stub, ask())).text() == LOREM
        assert len(made) == 1


async def test_what_an_older_gateway_reads_in_an_announcement_changes_nothing() -> None:
    """It knows no such field: to it the message is empty."""
    async with FakeMesh() as mesh:
        worker = mesh.workers[0]
        worker.hold_at = 0
        answering = asyncio.create_task(generate(mesh.stub, ask()))
        await until(lambda: len(worker.running) == 1)
        worker.say(mesh_pb2.RunResponse())
        worker.hold_at = None
        answer = await answering
        assert (answer.ids(), answer.receipt.attempts) == (ANSWER, 1)


async def test_an_attempt_that_fails_after_its_announcement_is_followed_by_the_next(made: list[Detokenizer]) -> None:
    async with FakeMesh(2) as mesh:
        first, second = mesh.workers
        first.hold_at = 0
        answering = asyncio.create_task(generate(mesh.stub, ask()))
        await until(lambda: len(first.running) == 1)
        first.announce()
        await until(lambda: len(made) == 2)
        first.fail_at, first.hold_at = (0, unavailable("INTERNAL", "failed")), None
        answer = await answering
        assert (answer.ids(), answer.receipt.attempts) == (ANSWER, 2)
        assert len(second.jobs) == 1


async def test_a_client_that_leaves_after_the_announcement_ends_the_job(made: list[Detokenizer]) -> None:
    async with FakeMesh() as mesh:
        worker = mesh.workers[0]
        worker.hold_at = 0
        call = mesh.stub.Generate(ask())
        await until(lambda: len(worker.running) == 1)
        row = worker.jobs[0].row
        worker.announce()
        await until(lambda: len(made) == 2)
        call.cancel()
        await until(lambda: [cancel.position for cancel in worker.cancelled] == [0])
        worker.say(mesh_pb2.RunResponse(soon=[row, row + 100]))
        worker.hold_at = None
        assert (await generate(mesh.stub, ask())).ids() == ANSWER
