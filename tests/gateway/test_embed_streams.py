"""EmbedStream: requests for vectors on one stream, at a gateway among fakes."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from grpc import StatusCode, aio

from protos import inference_pb2 as api
from protos import mesh_pb2
from protos.inference_pb2_grpc import InferenceStub
from services import validate
from services.errors import WeftError, unavailable
from services.gateway.doors import request_stream
from services.rpc import PUBLIC_MESSAGE_BYTES
from tests.gateway.fakes import VECTOR, FakeMesh, rejected, until
from tests.gateway.model import make_card
from tests.gateway.tenant_files import KEY, tenant
from weft.client.errors import from_rpc

CARD = make_card(encoder=mesh_pb2.EncoderCard(tasks=["embed"], width=len(VECTOR)))
TRACE = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-00"


def embed(*texts: list[int], **options: Any) -> api.EmbedRequest:
    """A request for the vectors of these tokens."""
    inputs = [api.Input(token_ids=api.TokenIds(ids=text)) for text in texts]
    return api.EmbedRequest(inputs=inputs, options=api.EncodeOptions(**options))


class Stream:
    """A call of EmbedStream."""

    def __init__(self, stub: Any, key: str = "", **options: Any) -> None:
        if key:
            options["metadata"] = (("authorization", f"Bearer {key}"),)
        self.call: Any = stub.EmbedStream(**options)

    async def send(self, number: int, request: api.EmbedRequest | None = None, traceparent: str = "") -> None:
        """Sends a request, by default one for a text that no other number has."""
        request = request or embed([5, number])
        await self.call.write(api.EmbedStreamRequest(number=number, request=request, traceparent=traceparent))

    async def next(self) -> api.EmbedStreamResponse:
        """The next response."""
        response: Any = await asyncio.wait_for(self.call.read(), 20)
        assert isinstance(response, api.EmbedStreamResponse), await self.call.code()
        return response

    async def answer(self, number: int, request: api.EmbedRequest | None = None) -> api.EmbedStreamResponse:
        """The response to one request, while no other is under way."""
        await self.send(number, request)
        response = await self.next()
        assert response.number == number
        return response

    async def end(self) -> tuple[StatusCode, str]:
        """Code and reason with which the stream ends, behind no further response."""
        try:
            assert await asyncio.wait_for(self.call.read(), 20) is aio.EOF
        except aio.AioRpcError as error:
            return error.code(), from_rpc(error).reason
        return await self.call.code(), ""


@pytest_asyncio.fixture
async def mesh() -> AsyncIterator[FakeMesh]:
    async with FakeMesh(card=CARD) as running:
        yield running


def is_vector(response: api.EmbedStreamResponse) -> bool:
    """The response has the vector of one text."""
    return [list(each.values) for each in response.response.embeddings] == [list(VECTOR)]


# ---- responses ----


async def test_a_response_has_what_embed_returns_and_the_number_of_its_request(mesh: FakeMesh) -> None:
    stream = Stream(mesh.stub)
    for number in (7, 2**64 - 1, 0, 7):  # The numbers are the client's.
        response = await stream.answer(number, embed([5, 6], [7], request_id="mine"))
        reply = await mesh.stub.Embed(embed([5, 6], [7]))
        assert list(response.response.embeddings) == list(reply.embeddings)
        receipt = response.response.receipt
        assert (receipt.request_id, receipt.model, receipt.prompt_tokens, receipt.attempts) == ("mine", "fake", 3, 1)
        assert receipt.timings.wall_s > 0
    await stream.call.done_writing()
    assert await stream.end() == (StatusCode.OK, "")


async def test_responses_come_in_the_order_in_which_they_are_ready(mesh: FakeMesh) -> None:
    stream = Stream(mesh.stub)
    mesh.scheduler.hold = True
    await stream.send(1)
    await until(lambda: len(mesh.scheduler.submits) == 1)
    mesh.scheduler.hold = False
    assert is_vector(await stream.answer(2))
    mesh.scheduler.release()
    assert (await stream.next()).number == 1


async def test_many_requests_are_under_way_at_once(mesh: FakeMesh) -> None:
    stream, worker = Stream(mesh.stub), mesh.workers[0]
    worker.hold_at = 0
    for number in range(100):
        await stream.send(number)
    await until(lambda: len(worker.running) == 100)
    worker.hold_at = None
    responses = [await stream.next() for _ in range(100)]
    assert {each.number for each in responses} == set(range(100))
    assert all(map(is_vector, responses))


async def test_a_request_has_its_own_trace_or_that_of_the_call(mesh: FakeMesh) -> None:
    stream = Stream(mesh.stub, metadata=(("traceparent", TRACE.replace("0123", "abcd")),))
    for sent, trace_id in ((TRACE, TRACE[3:35]), ("", TRACE[3:35].replace("0123", "abcd"))):
        await stream.send(1, traceparent=sent)
        assert (await stream.next()).response.receipt.trace_id == trace_id


# ---- failures ----


async def test_a_bad_request_fails_alone(mesh: FakeMesh) -> None:
    unknown = api.EmbedStreamRequest.FromString(b"\xa0\x06\x01" + api.EmbedStreamRequest(number=3).SerializeToString())
    long = embed([5])
    long.inputs.add(text="hello " * 500)
    wrong = {
        1: (embed([5], []), (StatusCode.INVALID_ARGUMENT, "EMPTY_INPUT", "inputs[1].token_ids")),
        2: (embed([10**6]), (StatusCode.INVALID_ARGUMENT, "TOKEN_OUT_OF_RANGE", "inputs[0]")),
        4: (embed([5], model="other"), (StatusCode.NOT_FOUND, "MODEL_NOT_FOUND", "model")),
        5: (api.EmbedRequest(), (StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "inputs")),
        6: (long, (StatusCode.INVALID_ARGUMENT, "CONTEXT_EXCEEDED", "inputs[1]")),
    }
    stream = Stream(mesh.stub)
    for number, (request, _) in wrong.items():
        await stream.send(number, request)
    await stream.call.write(unknown)
    await stream.send(9)
    responses = {each.number: each for each in [await stream.next() for _ in range(len(wrong) + 2)]}
    assert is_vector(responses[9])
    for number, (request, expected) in wrong.items():
        error = responses[number].error
        assert (error.code, error.reason, error.field) == (expected[0].value[0], *expected[1:])
        assert error.receipt.finish_reason == api.FINISH_REASON_ERROR
        with pytest.raises(aio.AioRpcError) as failed:
            await mesh.stub.Embed(request)
        assert (failed.value.code(), failed.value.details()) == (expected[0], error.message)
    error = responses[3].error
    assert (error.code, error.reason) == (StatusCode.UNIMPLEMENTED.value[0], "UNKNOWN_FIELD")
    assert not error.HasField("receipt")


async def test_a_failure_of_the_mesh_fails_its_request_alone(mesh: FakeMesh) -> None:
    stream = Stream(mesh.stub)
    mesh.workers[0].fail_at = 0, WeftError(StatusCode.INTERNAL, "NUMERIC", "not a number")
    error = (await stream.answer(1)).error
    assert (error.code, error.reason, error.message) == (StatusCode.INTERNAL.value[0], "NUMERIC", "not a number")
    mesh.workers[0].fail_at = None
    late = WeftError(StatusCode.UNAVAILABLE, "LATER", "not now", retry_after_s=2.5)
    mesh.scheduler.decide = lambda submit: rejected(submit, late)
    error = (await stream.answer(2)).error
    assert (error.reason, error.retry_after_s) == ("LATER", 2.5)
    mesh.scheduler.decide = None
    assert is_vector(await stream.answer(3))


async def test_a_bug_fails_its_request_alone_and_shows_nothing(mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(message: object, field: str) -> None:
        raise KeyError("a secret")

    stream = Stream(mesh.stub)
    with monkeypatch.context() as patched:
        patched.setattr(validate, "check_known", fail)
        error = (await stream.answer(1)).error
    assert (error.code, error.message) == (StatusCode.INTERNAL.value[0], "internal error")
    assert is_vector(await stream.answer(2))


async def test_a_malformed_message_ends_the_stream_behind_the_responses_before_it(mesh: FakeMesh) -> None:
    mesh.workers[0].hold_at = 0
    calling: Any = mesh.channel.stream_stream("/weft.v1.Inference/EmbedStream")
    call = calling()
    await call.write(api.EmbedStreamRequest(number=1, request=embed([5])).SerializeToString())
    await call.write(b"\xff\xff\xff")
    await until(lambda: len(mesh.workers[0].running) == 1)
    mesh.workers[0].hold_at = None
    assert is_vector(api.EmbedStreamResponse.FromString(await call.read()))
    with pytest.raises(aio.AioRpcError) as failed:
        await call.read()
    assert (failed.value.code(), from_rpc(failed.value).reason) == (StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE")


async def test_a_message_that_is_too_large_ends_the_stream(mesh: FakeMesh) -> None:
    stream, worker = Stream(mesh.stub), mesh.workers[0]
    worker.hold_at = 0
    await stream.send(1)
    await until(lambda: len(worker.running) == 1)
    await stream.send(2, api.EmbedRequest(inputs=[api.Input(text="x" * PUBLIC_MESSAGE_BYTES)]))
    assert (await stream.end())[0] is StatusCode.RESOURCE_EXHAUSTED
    await until(lambda: not worker.running)


# ---- keys, limits and load ----


async def test_a_stream_needs_a_key_that_permits_embed(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text(tenant("acme", KEY, 'methods = ["Embed"]') + tenant("other", "wk-other", 'methods = ["Generate"]'))
    async with FakeMesh(card=CARD, tenants_file=str(file)) as mesh:
        assert await Stream(mesh.stub).end() == (StatusCode.UNAUTHENTICATED, "KEY_REQUIRED")
        assert await Stream(mesh.stub, "wk-wrong").end() == (StatusCode.UNAUTHENTICATED, "KEY_UNKNOWN")
        assert await Stream(mesh.stub, "wk-other").end() == (StatusCode.PERMISSION_DENIED, "METHOD_DENIED")
        stream = Stream(mesh.stub, KEY)
        assert is_vector(await stream.answer(1))
        error = (await stream.answer(2, embed([5], priority=1))).error
        assert (error.code, error.reason) == (StatusCode.PERMISSION_DENIED.value[0], "PRIORITY_DENIED")


async def test_each_request_counts_against_the_rate(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text(tenant("acme", KEY, "requests_per_second = 0.001", "burst = 2"))
    async with FakeMesh(card=CARD, tenants_file=str(file)) as mesh:
        stream = Stream(mesh.stub, KEY)
        assert [is_vector(await stream.answer(number)) for number in range(2)] == [True, True]
        for number in (2, 3):
            error = (await stream.answer(number)).error
            assert (error.code, error.reason) == (StatusCode.RESOURCE_EXHAUSTED.value[0], "RATE_LIMITED")
            assert error.retry_after_s > 0


async def test_each_request_counts_as_a_concurrent_one(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text(tenant("acme", KEY, "concurrent = 1"))
    async with FakeMesh(card=CARD, tenants_file=str(file)) as mesh:
        error = await error_of_the_second(mesh, Stream(mesh.stub, KEY))
        assert error.reason == "TOO_MANY_CONCURRENT"


async def test_a_gateway_without_room_refuses_each_request() -> None:
    async with FakeMesh(card=CARD, gateway_most_calls=1) as mesh:
        stream = Stream(mesh.stub)
        error = await error_of_the_second(mesh, stream)
        assert (error.reason, error.retry_after_s) == ("GATEWAY_OVERLOADED", 1)
        assert not error.HasField("receipt")


async def error_of_the_second(mesh: FakeMesh, stream: Stream) -> api.RequestError:
    """Of two requests at once the second is refused; afterwards there is room for another one."""
    worker = mesh.workers[0]
    worker.hold_at = 0
    await stream.send(1)
    await until(lambda: len(worker.running) == 1)
    error = (await stream.answer(2)).error
    assert error.code == StatusCode.RESOURCE_EXHAUSTED.value[0]
    worker.hold_at = None
    first = await stream.next()
    assert (first.number, is_vector(first)) == (1, True)
    assert is_vector(await stream.answer(3))
    return error


async def test_beyond_the_bound_requests_wait_unread(mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_stream, "MOST_REQUESTS", 4)
    stream, worker = Stream(mesh.stub), mesh.workers[0]
    worker.hold_at = 0
    for number in range(10):
        await stream.send(number)
    await until(lambda: len(worker.jobs) == 4)
    other = asyncio.ensure_future(mesh.stub.Embed(embed([6])))
    await until(lambda: len(worker.jobs) == 5)  # A call on the same connection is read behind all of them.
    assert Counter(list(job.token_ids) == [6] for job in worker.jobs) == {False: 4, True: 1}
    worker.hold_at = None
    assert {(await stream.next()).number for _ in range(10)} == set(range(10))
    await other


# ---- ends ----


async def test_a_half_closed_stream_ends_when_its_requests_are_answered(mesh: FakeMesh) -> None:
    stream, worker = Stream(mesh.stub), mesh.workers[0]
    worker.hold_at = 0
    for number in range(3):
        await stream.send(number)
    await stream.call.done_writing()
    await until(lambda: len(worker.running) == 3)
    worker.hold_at = None
    assert {(await stream.next()).number for _ in range(3)} == {0, 1, 2}
    assert await stream.end() == (StatusCode.OK, "")


async def test_a_client_that_cancels_frees_its_jobs_and_leaves_nothing_behind(mesh: FakeMesh) -> None:
    await mesh.stub.Embed(embed([5]))  # The links are open.
    worker, tasks = mesh.workers[0], len(asyncio.all_tasks())
    stream = Stream(mesh.stub)
    worker.hold_at = 0
    for number in range(3):
        await stream.send(number)
    await until(lambda: len(worker.running) == 3)
    stream.call.cancel()
    await until(lambda: not worker.running)
    assert len(worker.cancelled) == 3
    await until(lambda: len(asyncio.all_tasks()) <= tasks)


async def test_the_deadline_of_the_call_ends_its_requests(mesh: FakeMesh) -> None:
    stream, worker = Stream(mesh.stub, timeout=2), mesh.workers[0]
    worker.hold_at = 0
    await stream.send(1)
    await until(lambda: len(worker.running) == 1)
    assert await stream.call.code() is StatusCode.DEADLINE_EXCEEDED
    await until(lambda: not worker.running)


async def test_a_gateway_that_stops_answers_what_is_under_way() -> None:
    async with asyncio.timeout(30), FakeMesh(card=CARD, drain_s=60) as mesh:
        stream, idle, worker = Stream(mesh.stub), Stream(mesh.stub), mesh.workers[0]
        await idle.answer(0)
        worker.hold_at = 0
        for number in (1, 2):
            await stream.send(number)
        await until(lambda: len(worker.running) == 2)
        stopping = asyncio.create_task(mesh.stop_gateway())
        assert await idle.end() == (StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
        worker.hold_at = None
        assert {(await stream.next()).number for _ in range(2)} == {1, 2}
        assert await stream.end() == (StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
        await stopping


async def test_a_client_that_does_not_read_ends_its_stream() -> None:
    narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_535)]
    async with FakeMesh(card=CARD, gateway_stall_s=1) as mesh:
        async with aio.insecure_channel(f"127.0.0.1:{mesh.server.port}", options=narrow) as channel:
            stream, scheduler = Stream(InferenceStub(channel)), mesh.scheduler
            scheduler.hold = True
            await stream.send(0)
            await until(lambda: len(scheduler.submits) == 1)
            scheduler.hold = False
            for number in range(1, 13):  # Responses of some 25 kB each.
                await stream.send(number, embed(*[[5, number]] * 2048))
            await until(lambda: len(scheduler.withdrawn) > 0, 30)  # The gateway has given the stream up.
            with contextlib.suppress(aio.AioRpcError):
                while await stream.call.read() is not aio.EOF:
                    pass
            assert await stream.call.code() is StatusCode.ABORTED
        assert is_vector(await Stream(mesh.stub).answer(1))


async def test_a_stream_while_no_worker_is_left_refuses_its_requests(mesh: FakeMesh) -> None:
    mesh.scheduler.decide = lambda submit: rejected(submit, unavailable("NO_WORKER", "no worker is left"))
    stream = Stream(mesh.stub)
    error = (await stream.answer(1)).error
    assert (error.code, error.reason) == (StatusCode.UNAVAILABLE.value[0], "NO_WORKER")
    mesh.scheduler.decide = None
    assert is_vector(await stream.answer(2))
