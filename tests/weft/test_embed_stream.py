"""The client's stream of requests for vectors, at a real gateway among fakes and at one that breaks streams."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from protos import inference_pb2 as api
from protos import mesh_pb2
from services.errors import WeftError as MeshError
from services.errors import unavailable
from services.rpc import PUBLIC_MESSAGE_BYTES
from tests.gateway.fakes import VECTOR, FakeMesh, rejected, until
from tests.gateway.model import make_card
from tests.gateway.tenant_files import KEY, tenant
from tests.weft import fakes
from weft import Client, EmbedStream, SyncClient, WeftError

CARD = make_card(encoder=mesh_pb2.EncoderCard(tasks=["embed"], width=len(VECTOR)))
LATER = MeshError(grpc.StatusCode.UNAVAILABLE, "LATER", "not now", retry_after_s=0.01)


def address_of(mesh: FakeMesh) -> str:
    """Where the gateway listens."""
    return f"127.0.0.1:{mesh.server.port}"


@pytest_asyncio.fixture
async def mesh() -> AsyncIterator[FakeMesh]:
    async with FakeMesh(card=CARD) as running:
        yield running


@pytest_asyncio.fixture
async def client(mesh: FakeMesh) -> AsyncIterator[Client]:
    async with Client(address_of(mesh), deadline_s=20) as client:
        yield client


@pytest_asyncio.fixture
async def stream(client: Client) -> AsyncIterator[EmbedStream]:
    async with client.embed_stream() as stream:
        yield stream


@asynccontextmanager
async def streaming(gateway: fakes.FakeMesh) -> AsyncIterator[EmbedStream]:
    """A stream to a gateway without a mesh."""
    async with (
        fakes.served(gateway) as address,
        Client(address, deadline_s=20) as client,
        client.embed_stream() as stream,
    ):
        yield stream


def is_vector(reply: api.EmbedResponse) -> bool:
    """The reply has the vector of one text."""
    return [list(each.values) for each in reply.embeddings] == [list(VECTOR)]


async def error_of(request: Any) -> WeftError:
    """The error with which a request fails."""
    with pytest.raises(WeftError) as failed:
        await request
    return failed.value


def parts_of(error: WeftError) -> tuple[Any, ...]:
    """What an error has, but for times and ids."""
    reason = error.receipt.finish_reason if error.receipt is not None else None
    return error.code, error.reason, error.message, error.field, error.retry_after_s, reason


# ---- replies ----


async def test_a_stream_returns_what_embed_returns(client: Client, stream: EmbedStream) -> None:
    for settings in ({}, {"request_id": "mine", "model": "fake", "priority": 3, "cache": "bypass"}):
        given: Any = settings
        own = await stream.embed([[5, 6], [7]], **given)
        reply = await client.embed([[5, 6], [7]], **given)
        assert list(own.embeddings) == list(reply.embeddings)
        for name in ("model", "prompt_tokens", "prefill_tokens", "attempts", "finish_reason", "workers"):
            assert getattr(own.receipt, name) == getattr(reply.receipt, name)
        assert own.receipt.request_id
        assert own.receipt.request_id == settings.get("request_id", own.receipt.request_id)


async def test_arguments_are_refused_as_those_of_embed(stream: EmbedStream) -> None:
    wrong: list[tuple[type[Exception], str, Any, Any]] = [
        (TypeError, "unknown option: dimension", [[5]], {"dimension": 2}),
        (TypeError, "a list of texts", "text", {}),
        (ValueError, "sometimes", [[5]], {"cache": "sometimes"}),
        (ValueError, "not a number", [[5]], {"deadline_s": float("nan")}),
    ]
    for kind, message, texts, settings in wrong:
        with pytest.raises(kind, match=message):
            await stream.embed(texts, **settings)


async def test_many_tasks_use_a_stream_at_once(mesh: FakeMesh, stream: EmbedStream) -> None:
    worker = mesh.workers[0]
    worker.hold_at = 0
    ids = [f"r-{number}" for number in range(300)]
    requests = [
        asyncio.create_task(stream.embed([[5, number % 50, number]], request_id=each, cache="bypass"))
        for number, each in enumerate(ids)
    ]
    await until(lambda: len(worker.running) == 256, 20)  # The gateway reads no more until one is answered.
    worker.hold_at = None
    replies = await asyncio.gather(*requests)
    assert [each.receipt.request_id for each in replies] == ids
    assert all(map(is_vector, replies))


async def test_a_blocking_stream_is_used_by_many_threads(mesh: FakeMesh) -> None:
    def script() -> list[str]:
        with SyncClient(address_of(mesh), deadline_s=20) as client, client.embed_stream() as stream:
            replies = [stream.embed([[5, number]], request_id=f"r-{number}") for number in range(3)]
            with pytest.raises(WeftError, match="MODEL_NOT_FOUND"):
                stream.embed([[5]], model="other")
            stream.close()
            with pytest.raises(RuntimeError, match="the stream is closed"):
                stream.embed([[5]])
            return [each.receipt.request_id for each in replies]

    assert await asyncio.gather(*(asyncio.to_thread(script) for _ in range(2))) == [["r-0", "r-1", "r-2"]] * 2


# ---- failures of a request ----


async def test_a_request_fails_alone_and_as_a_call_would(mesh: FakeMesh, client: Client, stream: EmbedStream) -> None:
    worker = mesh.workers[0]
    worker.hold_at = 0
    good = asyncio.create_task(stream.embed([[5]]))
    await until(lambda: len(worker.running) == 1)
    wrong: list[tuple[Any, Any]] = [([[5], []], {}), ([[10**6]], {}), ([[5]], {"model": "other"}), ([], {})]
    for texts, settings in wrong:
        error = await error_of(stream.embed(texts, **settings))
        assert parts_of(error) == parts_of(await error_of(client.embed(texts, **settings)))
        assert (error.field != "", error.receipt is not None) == (True, True)
    worker.hold_at = None
    assert is_vector(await good)


async def test_a_request_that_is_too_large_is_not_sent(mesh: FakeMesh, client: Client, stream: EmbedStream) -> None:
    worker = mesh.workers[0]
    worker.hold_at = 0
    good = asyncio.create_task(stream.embed([[5]]))
    await until(lambda: len(worker.running) == 1)
    error = await error_of(stream.embed(["x" * PUBLIC_MESSAGE_BYTES]))
    assert parts_of(error) == parts_of(await error_of(client.embed(["x" * PUBLIC_MESSAGE_BYTES])))
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    worker.hold_at = None
    assert is_vector(await good)
    assert len(worker.jobs) == 1


async def test_a_refusal_that_passes_is_retried(mesh: FakeMesh, stream: EmbedStream) -> None:
    refusals = [LATER, MeshError(grpc.StatusCode.UNAVAILABLE, "NO_WORKER", "no worker")]
    mesh.scheduler.decide = lambda submit: rejected(submit, refusals.pop()) if refusals else None
    assert is_vector(await stream.embed([[5]]))
    assert len(mesh.scheduler.submits) == 3


async def test_retries_are_bounded_and_a_full_queue_has_none(mesh: FakeMesh) -> None:
    async with Client(address_of(mesh), retries=2) as client, client.embed_stream() as stream:
        full = MeshError(grpc.StatusCode.RESOURCE_EXHAUSTED, "FULL", "the queue is full", retry_after_s=2.5)
        for refusal, submits in ((LATER, 3), (full, 1)):
            mesh.scheduler.submits.clear()
            mesh.scheduler.decide = lambda submit, refusal=refusal: rejected(submit, refusal)
            error = await error_of(stream.embed([[5]]))
            assert error.reason == refusal.reason
            assert error.retry_after_s == pytest.approx(refusal.retry_after_s)
            assert len(mesh.scheduler.submits) == submits


async def test_a_deadline_ends_its_request_alone(mesh: FakeMesh, client: Client, stream: EmbedStream) -> None:
    worker = mesh.workers[0]
    worker.hold_at = 0
    good = asyncio.create_task(stream.embed([[5]]))
    await until(lambda: len(worker.running) == 1)
    error = await error_of(stream.embed([[6]], deadline_s=0.2))
    assert (error.code, error.message) == (grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline has passed")
    assert error.code is (await error_of(client.embed([[7]], deadline_s=0.2))).code
    assert (await error_of(stream.embed([[8]], deadline_s=0))).code is error.code
    assert not good.done()
    worker.hold_at = None
    assert is_vector(await good)
    assert is_vector(await stream.embed([[6]]))


async def test_a_task_that_is_cancelled_leaves_the_stream_usable(mesh: FakeMesh, stream: EmbedStream) -> None:
    worker = mesh.workers[0]
    worker.hold_at = 0
    requests = [asyncio.create_task(stream.embed([[5, number]])) for number in range(3)]
    await until(lambda: len(worker.running) == 3)
    requests[1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await requests[1]
    unsent = asyncio.create_task(stream.embed([[6]]))
    await asyncio.sleep(0)
    unsent.cancel()
    worker.hold_at = None
    assert is_vector(await requests[0])
    assert is_vector(await requests[2])
    assert is_vector(await stream.embed([[7]]))
    assert not worker.cancelled
    assert [list(job.token_ids) for job in worker.jobs].count([6]) == 0


# ---- the end of the stream ----


@pytest.mark.parametrize("at", [0, 1, 3])
async def test_a_stream_that_breaks_has_its_requests_sent_again(at: int) -> None:
    gone = unavailable("SHUTTING_DOWN", "the server is stopping")
    gateway = fakes.FakeMesh()
    gateway.stream_faults = [fakes.fails(at, gone), fakes.cancels(at)]
    async with streaming(gateway) as stream:
        replies = await asyncio.gather(*(stream.embed(["x" * size], request_id=f"r-{size}") for size in range(9)))
    assert [each.embeddings[0].values[0] for each in replies] == list(range(9))
    assert not gateway.stream_faults
    assert sorted(gateway.embedded) == [f"r-{size}" for size in range(9)], "those with a response are not repeated"


async def test_the_error_of_a_stream_is_that_of_its_requests_and_the_next_one_opens_another() -> None:
    class Aborting(fakes.FakeMesh):
        """Answers one of three requests on its first stream, and ends that with an error."""

        async def EmbedStream(self, requests: Any, context: Any) -> AsyncIterator[api.EmbedStreamResponse]:
            """The next streams are answered."""
            await context.send_initial_metadata(())
            received = [await anext(requests) for _ in range(1 if self.embedded else 3)]
            response = await self.Embed(received[0].request, context)
            yield api.EmbedStreamResponse(number=received[0].number, response=response)
            if len(received) == 3:
                self.embedded.append(received[0].request.options.request_id)
                raise MeshError(grpc.StatusCode.ABORTED, "STALLED", "nothing is read")

    async with streaming(Aborting()) as stream:
        first, *failed = await asyncio.gather(*(stream.embed(["x"]) for _ in range(3)), return_exceptions=True)
        assert isinstance(first, api.EmbedResponse)
        errors = [(each.code, each.reason) for each in failed if isinstance(each, WeftError)]
        assert errors == [(grpc.StatusCode.ABORTED, "STALLED")] * 2
        assert failed[0] is not failed[1]
        assert (await stream.embed(["xyz"])).embeddings[0].values[0] == 3


async def test_initial_metadata_that_comes_with_the_first_response_delays_it_alone() -> None:
    class Behind(fakes.FakeMesh):
        """Behind a proxy that holds it back."""

        async def EmbedStream(self, requests: Any, context: Any) -> AsyncIterator[api.EmbedStreamResponse]:
            """Reads a request first."""
            async for each in requests:
                yield api.EmbedStreamResponse(number=each.number, response=await self.Embed(each.request, context))

    async with streaming(Behind()) as stream:
        replies = await asyncio.gather(*(stream.embed(["x" * size]) for size in range(3)))
        assert [each.embeddings[0].values[0] for each in replies] == [0, 1, 2]


async def test_a_stream_that_ends_without_a_response_is_an_error() -> None:
    class Silent(fakes.FakeMesh):
        """Ends each stream at once."""

        async def EmbedStream(self, requests: Any, context: Any) -> None:  # type: ignore[override]
            """Answers nothing."""

    async with streaming(Silent()) as stream:
        assert (await error_of(stream.embed(["x"]))).code is grpc.StatusCode.DATA_LOSS


async def test_a_missing_gateway_is_unavailable_and_leaves_no_task_behind() -> None:
    before = len(asyncio.all_tasks())
    async with Client("127.0.0.1:1", retries=1) as client:
        async with client.embed_stream() as stream:
            errors = await asyncio.gather(*(error_of(stream.embed(["x"])) for _ in range(3)))
        assert {(each.code, each.reason) for each in errors} == {(grpc.StatusCode.UNAVAILABLE, "")}
        await until(lambda: len(asyncio.all_tasks()) <= before)


async def test_a_key_that_is_refused_is_refused_as_by_embed(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text(tenant("acme", KEY, 'methods = ["Embed"]') + tenant("other", "wk-other", 'methods = ["Generate"]'))
    async with FakeMesh(card=CARD, tenants_file=str(file)) as mesh:
        for key, reason in (("", "KEY_REQUIRED"), ("wk-wrong", "KEY_UNKNOWN"), ("wk-other", "METHOD_DENIED")):
            async with Client(address_of(mesh), api_key=key) as client, client.embed_stream() as stream:
                error = await error_of(stream.embed([[5]]))
                assert error.reason == reason
                assert parts_of(error) == parts_of(await error_of(client.embed([[5]])))
        async with Client(address_of(mesh), api_key=KEY) as client, client.embed_stream() as stream:
            assert is_vector(await stream.embed([[5]]))


async def test_a_gateway_that_stops_answers_what_it_has_read() -> None:
    async with asyncio.timeout(60), FakeMesh(card=CARD, drain_s=60) as mesh:
        worker = mesh.workers[0]
        async with Client(address_of(mesh), retries=0) as client, client.embed_stream() as stream:
            worker.hold_at = 0
            requests = [asyncio.create_task(stream.embed([[5, number]])) for number in range(3)]
            await until(lambda: len(worker.running) == 3)
            stopping = asyncio.create_task(mesh.stop_gateway())
            worker.hold_at = None
            assert all(map(is_vector, await asyncio.gather(*requests)))
            await stopping
            assert (await error_of(stream.embed([[5]]))).code is grpc.StatusCode.UNAVAILABLE


# ---- the end of the block ----


async def test_leaving_the_block_waits_for_requests_under_way(mesh: FakeMesh, client: Client) -> None:
    worker = mesh.workers[0]
    worker.hold_at = 0
    async with client.embed_stream() as stream:
        requests = [asyncio.create_task(stream.embed([[5, number]])) for number in range(3)]
        await until(lambda: len(worker.running) == 3)
        leaving = asyncio.create_task(stream.close())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="the stream is closed"):
            await stream.embed([[6]])
        assert not leaving.done()
        worker.hold_at = None
        await leaving
        assert all(each.done() and is_vector(each.result()) for each in requests)


async def test_leaving_the_block_waits_for_no_request_that_nobody_waits_for(mesh: FakeMesh, client: Client) -> None:
    worker = mesh.workers[0]
    worker.hold_at = 0
    async with client.embed_stream() as stream:
        await error_of(stream.embed([[5]], deadline_s=0.5))
        await until(lambda: len(worker.running) == 1)
    await until(lambda: not worker.running)
    assert worker.cancelled_once


async def test_an_exception_that_leaves_the_block_ends_requests_under_way(mesh: FakeMesh, client: Client) -> None:
    worker = mesh.workers[0]
    worker.hold_at = 0
    requests: list[asyncio.Task[api.EmbedResponse]] = []

    async def leave() -> None:
        """Leaves the block by an exception once three requests are under way."""
        async with client.embed_stream() as stream:
            requests.extend(asyncio.create_task(stream.embed([[5, number]])) for number in range(3))
            await until(lambda: len(worker.running) == 3)
            raise KeyError

    with pytest.raises(KeyError):
        await leave()
    for each in requests:
        with pytest.raises(RuntimeError, match="the stream is closed"):
            await each
    await until(lambda: not worker.running)


async def test_a_client_that_closes_ends_its_streams(mesh: FakeMesh, client: Client) -> None:
    worker = mesh.workers[0]
    worker.hold_at = 0
    stream = client.embed_stream()
    request = asyncio.create_task(stream.embed([[5]]))
    await until(lambda: len(worker.running) == 1)
    await client.close()
    with pytest.raises(RuntimeError, match="the stream is closed"):
        await request
    await until(lambda: not worker.running)


async def test_a_stream_leaves_nothing_behind(mesh: FakeMesh, client: Client) -> None:
    async with client.embed_stream() as stream:  # The links are open.
        await stream.embed([[5]])
    before = len(asyncio.all_tasks())
    async with client.embed_stream() as stream:
        await asyncio.gather(*(stream.embed([[5, number]]) for number in range(20)))
    await until(lambda: len(asyncio.all_tasks()) <= before)
    assert not mesh.workers[0].running
    async with client.embed_stream():
        pass
