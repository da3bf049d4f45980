"""The client over a real socket: streams, broken connections, retries, deadlines, cancellation."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from grpc import aio

from protos import inference_pb2 as api
from protos import inference_pb2_grpc as stubs
from services import rpc
from services.errors import WeftError as MeshError
from services.errors import invalid, unavailable
from tests.weft.fakes import WORDS, FakeMesh, cancels, fails, served, token_ids
from weft import Client, SyncClient, WeftError
from weft.client.requests import _OF_CHAT
from weft.client.retry import RetryState

TEXT = "".join(f" {word}" for word in WORDS)


@pytest.fixture
def mesh() -> FakeMesh:
    return FakeMesh()


@pytest.fixture
async def address(mesh: FakeMesh) -> AsyncIterator[str]:
    async with served(mesh) as address:
        yield address


@pytest.fixture
async def client(address: str) -> AsyncIterator[Client]:
    async with Client(address, deadline_s=10) as client:
        yield client


async def test_an_answer_streams_and_ends_with_its_receipt(client: Client) -> None:
    answer = client.generate("Once", max_tokens=20)
    deltas = [delta async for delta in answer]
    assert "".join(delta.text for delta in deltas) == TEXT
    assert answer.receipt is not None
    assert answer.receipt.completion_tokens == len(WORDS)
    assert answer.receipt.request_id == answer.request_id


@pytest.mark.parametrize("at", [0, 1, 3, -1])
async def test_a_broken_stream_is_resumed_at_its_position(client: Client, mesh: FakeMesh, at: int) -> None:
    gone = unavailable("DRAINING", "the gateway stops", retry_after_s=0.01)
    mesh.faults = [fails(at, gone), cancels(at)]
    answer = client.generate("Once", n=2)
    deltas = [delta async for delta in answer]
    for index in (0, 1):
        tokens = [token for delta in deltas if delta.index == index for token in delta.token_ids]
        assert tokens == token_ids(WORDS)
        assert "".join(delta.text for delta in deltas if delta.index == index) == TEXT
    assert len(mesh.requests) == 3
    assert len({request.SerializeToString(deterministic=True) for request in mesh.requests}) == 1


async def test_a_restarted_server_costs_the_consumer_no_token(mesh: FakeMesh) -> None:
    mesh.pause_s = 0.02
    async with served(mesh) as address:
        client = Client(address, deadline_s=10)
        answer = client.generate("Once")
        deltas = [await anext(aiter(answer))]
    second = FakeMesh()
    service = rpc.Service("weft.v1.Inference", stubs.add_InferenceServicer_to_server, second)
    server = await rpc.serve(address, [service])
    deltas += [delta async for delta in answer]
    assert "".join(delta.text for delta in deltas) == TEXT
    assert second.requests[0] == mesh.requests[0]
    await client.close()
    await server.stop(0)


async def test_a_retry_with_a_different_answer_is_an_error(client: Client, mesh: FakeMesh) -> None:
    mesh.faults = [fails(2, unavailable("GONE", "gone", retry_after_s=0.01))]
    answer = client.generate("Once")
    await anext(aiter(answer))
    mesh.words = WORDS[1:]
    with pytest.raises(WeftError, match="REPLAY_DIFFERS"):
        await answer.text()


async def test_a_sampled_request_keeps_its_seed_on_retries_and_stores_no_result(client: Client, mesh: FakeMesh) -> None:
    await client.generate("Once").text()
    await client.generate("Once", temperature=0).text()
    await client.generate("Once", seed=5).text()
    drawn, greedy, seeded = mesh.requests
    assert drawn.sampling.HasField("seed")
    assert drawn.cache == api.CACHE_POLICY_READ_ONLY
    assert not greedy.sampling.HasField("seed")
    assert greedy.cache == seeded.cache == api.CACHE_POLICY_UNSPECIFIED
    assert seeded.sampling.seed == 5


async def test_a_refusal_is_reported_in_full_and_not_retried(client: Client, mesh: FakeMesh) -> None:
    mesh.faults = [fails(0, invalid("sampling.top_p", "above 0 to 1"))]
    with pytest.raises(WeftError) as caught:
        await client.generate("Once", top_p=7).text()
    error = caught.value
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert error.field == "sampling.top_p"
    assert error.receipt is not None
    assert error.receipt.model == "fox"
    assert str(error) == "INVALID_ARGUMENT/INVALID_FIELD: sampling.top_p: above 0 to 1"
    assert len(mesh.requests) == 1


async def test_a_retry_waits_as_long_as_the_mesh_asks(client: Client, mesh: FakeMesh) -> None:
    mesh.faults = [fails(0, unavailable("NO_WORKER", "no worker yet", retry_after_s=0.6))]
    began = time.monotonic()
    await client.complete("Once")
    assert time.monotonic() - began >= 0.6


async def test_the_number_of_retries_is_bounded(address: str, mesh: FakeMesh) -> None:
    mesh.faults = [fails(0, unavailable("NO_WORKER", "no worker", retry_after_s=0.01)) for _ in range(9)]
    async with Client(address, retries=2) as client:
        with pytest.raises(WeftError) as caught:
            await client.complete("Once")
    assert caught.value.reason == "NO_WORKER"
    assert caught.value.retry_after_s == pytest.approx(0.01)
    assert len(mesh.requests) == 3


async def test_a_full_queue_is_not_retried(client: Client, mesh: FakeMesh) -> None:
    full = MeshError(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", "the queue is full", retry_after_s=0.2)
    mesh.faults = [fails(0, full)]
    with pytest.raises(WeftError) as caught:
        await client.generate("Once").text()
    assert caught.value.retry_after_s == pytest.approx(0.2)
    assert len(mesh.requests) == 1


async def test_the_deadline_covers_all_attempts(client: Client, mesh: FakeMesh) -> None:
    mesh.faults = [fails(0, unavailable("NO_WORKER", "no worker", retry_after_s=0.15)) for _ in range(9)]
    began = time.monotonic()
    with pytest.raises(WeftError):
        await client.generate("Once", deadline_s=0.4).text()
    assert time.monotonic() - began < 1.0
    assert len(mesh.requests) <= 3


@pytest.mark.parametrize("deadline_s", [float("inf"), 1e300, 1e10])
async def test_a_deadline_in_the_far_future_has_not_passed(client: Client, deadline_s: float) -> None:
    assert await client.generate("Once", deadline_s=deadline_s).text()
    with pytest.raises(ValueError, match="not a number"):
        client.generate("Once", deadline_s=float("nan"))


async def test_a_slow_answer_ends_at_the_deadline(client: Client, mesh: FakeMesh) -> None:
    mesh.pause_s = 0.2
    with pytest.raises(WeftError) as caught:
        await client.generate("Once", deadline_s=0.5).text()
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(mesh.ended.wait(), 5)


async def test_a_missing_server_is_unavailable_without_a_reason() -> None:
    async with Client("127.0.0.1:1", retries=1) as client:
        with pytest.raises(WeftError) as caught:
            await client.models()
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert caught.value.reason == ""


async def test_cancelling_an_answer_reaches_the_mesh(client: Client, mesh: FakeMesh) -> None:
    mesh.pause_s = 0.05
    answer = client.generate("Once")
    await anext(aiter(answer))
    reading = asyncio.create_task(answer.text())
    await asyncio.sleep(0.02)
    await answer.cancel()
    assert await reading == ""
    assert answer.receipt is None
    await asyncio.wait_for(mesh.ended.wait(), 5)
    assert len(mesh.requests) == 1


async def test_cancelling_the_consumer_reaches_the_mesh(client: Client, mesh: FakeMesh) -> None:
    mesh.pause_s = 0.05
    reading = asyncio.create_task(client.generate("Once").text())
    await asyncio.sleep(0.1)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await asyncio.wait_for(mesh.ended.wait(), 5)


async def test_every_option_is_sent(client: Client, mesh: FakeMesh) -> None:
    sampling = {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_k": 40,
        "top_p": 0.75,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "seed": 7,
        "stop": ["end"],
        "stop_token_ids": [3],
        "logit_bias": {4: -1.0},
        "logprobs": 2,
        "ignore_eos": True,
        "include_stop_string": True,
        "bad_words": ["fox"],
        "prompt_logprobs": 1,
        "bad_token_sequences": [api.TokenIds(ids=[1, 2])],
        "structured": api.Structured(regex="a+"),
    }
    other = {"model": "fox", "n": 2, "priority": 3, "request_id": "r-1", "speculation": 2, "echo": True}
    given: dict[str, Any] = {**sampling, **other, "bad_token_sequences": [[1, 2]], "regex": "a+"}
    del given["structured"]
    await client.generate([1, 2], cache="bypass", criticality="sheddable", traceparent="00-1-2-03", **given).text()
    (request,) = mesh.requests
    assert set(sampling) == {field.name for field in api.Sampling.DESCRIPTOR.fields}
    assert request == api.GenerateRequest(
        prompt=api.Prompt(token_ids=api.TokenIds(ids=[1, 2])),
        sampling=api.Sampling(**sampling),  # type: ignore[arg-type]
        cache=api.CACHE_POLICY_BYPASS,
        criticality=api.CRITICALITY_SHEDDABLE,
        **other,  # type: ignore[arg-type]
    )
    assert mesh.metadata[0]["traceparent"] == "00-1-2-03"
    assert set(sampling) | set(other) | {"cache", "criticality", "prompt", "sampling"} == set(sampling) | {
        field.name for field in api.GenerateRequest.DESCRIPTOR.fields
    }


async def test_each_form_of_an_answer_is_an_option(client: Client, mesh: FakeMesh) -> None:
    forms: list[tuple[dict[str, Any], api.Structured]] = [
        ({"json_schema": {"type": "null"}}, api.Structured(json_schema='{"type": "null"}')),
        ({"json_schema": "{}"}, api.Structured(json_schema="{}")),
        ({"json_object": True}, api.Structured(json_object=True)),
        ({"choice": ["a", "b"]}, api.Structured(choice=api.Choices(texts=["a", "b"]))),
        ({"grammar": "root ::= [0-9]"}, api.Structured(grammar="root ::= [0-9]")),
    ]
    for option, form in forms:
        await client.generate("x", **option).text()
        assert mesh.requests[-1].sampling.structured == form
    for wrong in ({"regex": "a", "json_object": True}, {"choice": "a"}, {"json_schema": {1, 2}}):
        with pytest.raises(TypeError):
            await client.generate("x", **wrong).text()


async def test_the_python_type_of_a_prompt_selects_its_form(client: Client, mesh: FakeMesh) -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    mixed: Any = ["x", *turns]
    for prompt in ("text", [5, 6], turns):
        await client.generate(prompt).text()
    forms = [request.prompt.WhichOneof("form") for request in mesh.requests]
    assert forms == ["text", "token_ids", "chat"]
    assert mesh.requests[2].prompt.chat.messages[1].content == "Hi"
    with pytest.raises(TypeError, match="max_token"):
        client.generate("x", max_token=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="messages alone"):
        client.generate(mixed)
    with pytest.raises(TypeError, match="max_tokens"):
        client.generate(api.GenerateRequest(prompt=api.Prompt(text="x")), max_tokens=3)
    with pytest.raises(ValueError, match="sometimes"):
        client.generate("x", cache="sometimes")


async def test_one_text_is_not_a_list_of_its_characters(client: Client) -> None:
    with pytest.raises(TypeError, match="stop: a list of texts"):
        client.generate("x", stop="end")
    with pytest.raises(TypeError, match="bad_words: a list of texts"):
        client.generate("x", bad_words="fox")
    with pytest.raises(TypeError, match="a list of texts"):
        await client.rank("x", "abc")


async def test_every_part_of_a_conversation_is_sent(client: Client, mesh: FakeMesh) -> None:
    function = {"name": "f", "description": "does f", "parameters": {"type": "object"}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "name": "f", "arguments": {"a": "é"}}]},
        {"role": "tool", "content": "7", "tool_call_id": "c1"},
    ]
    openai: Any = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
    for calls, tools in (
        (turns[1]["tool_calls"], [function]), ([openai], [{"type": "function", "function": function}]),
    ):  # fmt: skip
        turns[1]["tool_calls"] = calls
        answer = client.generate(
            turns, tools=tools, template_variables={"enable_thinking": False}, add_generation_prompt=True
        )
        await answer.text()
        chat = mesh.requests[-1].prompt.chat
        assert chat == api.Chat(
            messages=[
                api.ChatMessage(role="user", content="Hi", name="ann"),
                api.ChatMessage(role="assistant", tool_calls=[api.ToolCall(id="c1", name="f", arguments='{"a": "é"}')]),
                api.ChatMessage(role="tool", content="7", tool_call_id="c1"),
            ],
            tools=[api.Tool(name="f", description="does f", parameters='{"type": "object"}')],
            template_variables='{"enable_thinking": false}',
            add_generation_prompt=True,
        )
    await client.generate(turns, continue_final_message=True, parallel_tool_calls=False, tool_choice="none").text()
    chat = mesh.requests[-1].prompt.chat
    assert chat.continue_final_message
    assert (chat.HasField("parallel_tool_calls"), chat.parallel_tool_calls) == (True, False)
    assert chat.tool_mode == api.TOOL_MODE_NONE
    await client.generate(turns, tool_choice={"type": "function", "function": {"name": "f"}}).text()
    assert mesh.requests[-1].prompt.chat.tool_function == "f"
    with pytest.raises(ValueError, match="sometimes"):
        client.generate(turns, tool_choice="sometimes")
    of_chat = {field.name for field in api.Chat.DESCRIPTOR.fields} - {"messages", "tool_mode", "tool_function"}
    assert of_chat | {"tool_choice"} == _OF_CHAT
    with pytest.raises(TypeError, match="tools"):
        client.generate("x", tools=[function])
    with pytest.raises(ValueError, match="no_such_field"):
        client.generate(turns, tools=[{"no_such_field": 1}])


async def test_complete_tokenize_and_models(client: Client) -> None:
    assert (await client.complete("Once")).choices[0].text == " ".join(WORDS)
    assert list((await client.tokenize("a b")).pieces) == ["a", "b"]
    assert [model.name for model in await client.models()] == ["fox"]


async def test_the_synchronous_client_needs_no_event_loop(address: str, mesh: FakeMesh) -> None:
    def script() -> tuple[str, Message | None, str]:
        with SyncClient(address, deadline_s=10) as client:
            answer = client.generate("Once")
            text = "".join(delta.text for delta in answer)
            for _ in client.generate("left early"):
                break
            return text, answer.receipt, client.models()[0].name

    text, receipt, name = await asyncio.to_thread(script)
    assert (text, name) == (TEXT, "fox")
    assert isinstance(receipt, api.Receipt)


async def test_a_closed_synchronous_client_says_so(address: str) -> None:
    client = SyncClient(address)
    client.close()
    for call in (client.models, client.generate("Once").text):
        with pytest.raises(RuntimeError, match="the client is closed"):
            call()


def test_pauses_grow_with_jitter_and_progress_resets_them() -> None:
    gone = WeftError(grpc.StatusCode.UNAVAILABLE, "gone")
    retry = RetryState(6, None, draw=lambda: 1.0)
    assert [retry.pause_s(gone, 0.0) for _ in range(6)] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0])
    with pytest.raises(WeftError):
        retry.pause_s(gone, 0.0)
    retry.progressed()
    assert retry.pause_s(gone, 0.0) == pytest.approx(0.1)
    assert RetryState(6, None, draw=lambda: 0.0).pause_s(gone, 0.0) == pytest.approx(0.05)


async def test_an_unreadable_rich_status_is_still_an_error(client: Client, mesh: FakeMesh) -> None:
    async def fault(context: aio.ServicerContext[api.GenerateRequest, api.GenerateResponse], number: int) -> None:
        broken = (("grpc-status-details-bin", b"\xff\xff"), ("weft-receipt-bin", b"\xff"))
        await context.abort(grpc.StatusCode.INTERNAL, "internal error", broken)

    mesh.faults = [fault]
    with pytest.raises(WeftError) as caught:
        await client.complete("Once")
    assert (caught.value.code, caught.value.reason, caught.value.receipt) == (grpc.StatusCode.INTERNAL, "", None)
