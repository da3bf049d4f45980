"""OpenAI's API over HTTP on a gateway among fakes: answers, errors, limits, disconnects, slow readers."""

import asyncio
import gc
import json
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from grpc import StatusCode
from prometheus_client.parser import text_string_to_metric_families

from protos import mesh_pb2
from services import metrics
from services.errors import WeftError, invalid, unavailable
from services.gateway.answers.continuation import Continuation
from services.gateway.answers.generation import Generation
from services.gateway.doors import http, http_server
from tests.gateway.fakes import FakeMesh, ask, generate, rejected, until
from tests.gateway.http_client import client
from tests.gateway.model import ANSWER, LOREM
from tests.gateway.tenant_files import KEY, tenant
from tests.ports import free_port

TENANTS = tenant("one", KEY, 'models = ["fake"]', "concurrent = 1") + tenant(
    "two", "wk-other", 'models = ["another"]', 'methods = ["ListModels", "Complete"]', "requests_per_second = 0.1"
)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 400, "temperature": 0}
TEXT: dict[str, Any] = {"prompt": "hello world", "max_tokens": 400, "temperature": 0}
DEEP: dict[str, Any] = json.loads('{"x":' * 300 + "{}" + "}" * 300)


@pytest_asyncio.fixture
async def mesh() -> AsyncIterator[FakeMesh]:
    async with FakeMesh(http_port=free_port()) as running:
        yield running


def openai_client(mesh: FakeMesh) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{mesh.http_port}/v1", api_key="none", max_retries=0)


def events(text: str) -> list[Any]:
    """The data of all events but the last, which must be [DONE]."""
    data = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return [json.loads(each) for each in data]


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of a response in OpenAI's form."""
    body = response.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


# ---- answers ----


async def test_a_whole_answer_with_its_receipt(mesh: FakeMesh) -> None:
    async with client(mesh) as http_client:
        response = await http_client.post("/v1/chat/completions", json=CHAT)
    body, receipt = response.json(), json.loads(response.headers["weft-receipt"])
    assert body["choices"][0]["message"] == {"role": "assistant", "content": LOREM, "refusal": None}
    assert (body["object"], body["model"], body["choices"][0]["finish_reason"]) == ("chat.completion", "fake", "stop")
    assert body["usage"]["completion_tokens"] == receipt["completion_tokens"] == len(ANSWER)
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": receipt["cached_tokens"]}
    assert receipt["cached_tokens"] == 1
    assert receipt["workers"] == ["worker-0"]
    assert body["id"] == f"chatcmpl-{receipt['request_id']}"
    assert response.headers["x-request-id"] == receipt["request_id"]


@pytest.mark.parametrize("include_usage", [True, False])
async def test_a_stream_ends_with_usage_receipt_and_done(mesh: FakeMesh, include_usage: bool) -> None:
    options = {"stream": True, "stream_options": {"include_usage": include_usage}}
    async with client(mesh) as http_client:
        response = await http_client.post("/v1/chat/completions", json=CHAT | options)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    chunks = events(response.text)
    usage = chunks.pop() if include_usage else None
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == LOREM
    assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert {"usage" in chunk for chunk in chunks} == {include_usage}
    comment, done = response.text.split("\n\n")[-3:-1]
    assert comment.startswith(": receipt {")
    assert done == "data: [DONE]"
    receipt = json.loads(comment.removeprefix(": receipt "))
    if usage is not None:
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == receipt["completion_tokens"] == len(ANSWER)
        assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] == 1


async def test_the_streamed_parts_are_the_whole_answer(mesh: FakeMesh) -> None:
    fields = TEXT | {"n": 2, "logprobs": 2, "return_token_ids": True, "stop": ["émoji", "never"]}
    async with client(mesh) as http_client:
        whole = (await http_client.post("/v1/completions", json=fields)).json()["choices"]
        chunks = events((await http_client.post("/v1/completions", json=fields | {"stream": True})).text)
    for choice in whole:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"] == LOREM.partition("émoji")[0]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [each for part in parts for each in part["logprobs"][name]] == choice["logprobs"][name]
        assert parts[-1]["stop_reason"] == choice["stop_reason"] == "émoji"
        assert choice["logprobs"]["text_offset"][:3] == [0, 3, 9]
    assert len(whole) == 2


async def test_the_same_tokens_as_over_grpc(mesh: FakeMesh) -> None:
    answer = await generate(mesh.stub, ask("hello world"))
    async with client(mesh) as http_client:
        body = (await http_client.post("/v1/completions", json=TEXT | {"return_token_ids": True})).json()
    assert (body["choices"][0]["text"], body["choices"][0]["token_ids"]) == (answer.text(), answer.ids())
    jobs = mesh.workers[0].jobs
    assert jobs[0].token_ids == jobs[1].token_ids
    seeds = [job.sampling.seed for job in jobs]
    jobs[0].sampling.ClearField("seed")
    jobs[1].sampling.ClearField("seed")
    assert jobs[0].sampling == jobs[1].sampling
    assert seeds[0] != seeds[1]


async def test_the_unmodified_client_of_openai(mesh: FakeMesh) -> None:
    async with openai_client(mesh) as ai:
        assert [model.id async for model in ai.models.list()] == ["fake"]
        assert (await ai.models.retrieve("alias")).id == "fake"
        chat = await ai.chat.completions.create(
            model="fake", messages=CHAT["messages"], max_completion_tokens=5, logprobs=True, top_logprobs=2
        )
        choice = chat.choices[0]
        assert (choice.finish_reason, chat.usage and chat.usage.completion_tokens) == ("length", 5)
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [entry.token for entry in choice.logprobs.content][:2] == ["the", " quick"]
        assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [2] * 5
        assert choice.logprobs.content[0].bytes == list(b"the")
        stream = await ai.completions.create(
            model="alias", prompt="hello", max_tokens=400, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == LOREM
        usage = chunks[-1].usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert (usage.completion_tokens, usage.prompt_tokens_details.cached_tokens) == (len(ANSWER), 1)
        with pytest.raises(openai.NotFoundError) as missing:
            await ai.completions.create(model="none", prompt="hello")
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError) as refused:
            await ai.embeddings.create(model="fake", input="hello")
        assert (refused.value.code, refused.value.param) == ("task_unsupported", "model")


async def test_tokenize(mesh: FakeMesh) -> None:
    async with client(mesh) as http_client:
        nulls = {"model": None, "messages": None}
        text = (await http_client.post("/tokenize", json={"prompt": "hello world"} | nulls)).json()
        chat = (await http_client.post("/tokenize", json={"model": "alias", "messages": CHAT["messages"]})).json()
        assert text["count"] == len(text["tokens"]) == len(text["token_strs"]) == 11
        assert "".join(chat["token_strs"]).startswith("<s>user: hi")
        for body, param in [
            ({"prompt": "x", "messages": []}, "prompt"),
            ({"prompt": None, "model": "fake"}, "prompt"),
            ({"prompt": "x", "lora": 1}, "lora"),
            ({}, "prompt"),
        ]:
            response = await http_client.post("/tokenize", json=body)
            assert (response.status_code, error_of(response)["param"]) == (400, param)
        for seconds, status in (("soon", 400), ("9", 200)):
            headers = {"x-request-timeout": seconds}
            response = await http_client.post("/tokenize", json={"prompt": "hello"}, headers=headers)
            assert response.status_code == status


async def test_the_receipts_of_many_prompts_fit_in_the_headers_that_proxies_take(mesh: FakeMesh) -> None:
    async with client(mesh) as http_client:
        response = await http_client.post("/v1/completions", json=TEXT | {"prompt": ["hello"] * 32, "max_tokens": 1})
    assert len(response.json()["choices"]) == 32
    assert len(response.headers["weft-receipt"]) < 3500
    ids = [each["request_id"] for each in json.loads(response.headers["weft-receipt"])]
    assert ids == [f"{response.headers['x-request-id']}-{place}" for place in range(len(ids))]
    assert ids


async def test_a_traceparent_is_the_parent(mesh: FakeMesh) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    async with client(mesh) as http_client:
        headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
        response = await http_client.post("/v1/completions", json=TEXT, headers=headers)
    assert json.loads(response.headers["weft-receipt"])["trace_id"] == trace_id


async def test_requests_are_counted_as_those_over_grpc() -> None:
    port = free_port()
    async with FakeMesh(http_port=free_port(), metrics_port=port) as mesh, client(mesh) as http_client:
        await generate(mesh.stub, ask())
        await http_client.post("/v1/completions", json=TEXT)
        await http_client.post("/v1/completions", json=TEXT | {"stream": True})
        await http_client.get("/nowhere")
        text = (await http_client.get(f"http://127.0.0.1:{port}/metrics")).text
        public = await http_client.get("/metrics")
    assert public.headers["content-type"] == metrics.CONTENT_TYPE
    families = [{each.name for each in text_string_to_metric_families(one)} for one in (public.text, text)]
    assert families[0] == families[1]
    assert 'weft_gateway_requests_total{code="OK",finish_reason="stop",model="fake"} 3.0' in text
    assert 'weft_http_seconds_count{route="/v1/completions",status="200"} 2.0' in text
    assert 'weft_http_seconds_count{route="other",status="404"} 1.0' in text
    named = 'gen_ai_operation_name="text_completion",gen_ai_provider_name="weft",gen_ai_request_model="fake"'
    assert f"gen_ai_server_time_to_first_token_seconds_count{{{named}}} 3.0" in text


# ---- health ----


async def test_health_and_the_phase_of_loading_workers(mesh: FakeMesh) -> None:
    async with client(mesh) as http_client:
        await generate(mesh.stub, ask())
        assert (await http_client.get("/health")).status_code == 200
        loading = mesh_pb2.WorkerLoading(model="fake", phase="weights", done=1, total=4)
        models = mesh_pb2.ModelList(loading=[loading])
        mesh.scheduler.send(mesh_pb2.DispatchResponse(models=models))
        for _ in range(500):
            if (response := await http_client.get("/startupz")).status_code != 200:
                break
            await asyncio.sleep(0.01)
        assert response.status_code == 503
        assert response.json() == {"started": False, "loading": [{"phase": "weights", "percent": 25}]}
        response = await http_client.get("/health")
        assert (response.status_code, response.json()) == (503, {"status": "not_serving"})


# ---- refusals ----


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"temperature": 1000}, "temperature", "invalid_field"),
        ({"max_tokens": 100000}, "messages", "context_length_exceeded"),
        ({"messages": []}, "messages", "empty_prompt"),
        ({"bad_words": ["word " * 50]}, "bad_words", "invalid_field"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "tools_unsupported"),
        ({"user": "me"}, "user", "unsupported_field"),
        ({"no_such_field": "x"}, "no_such_field", "unknown_field"),
        ({"request_id": "x" * 150_000}, "request_id", "invalid_field"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refused_field_is_named(mesh: FakeMesh, fields: Any, param: str, code: str, stream: bool) -> None:
    async with client(mesh) as http_client:
        response = await http_client.post("/v1/chat/completions", json=CHAT | fields | {"stream": stream})
    error = error_of(response)
    assert (response.status_code, error["type"], error["param"], error["code"]) == (
        400, "invalid_request_error", param, code,
    )  # fmt: skip
    assert error["message"].startswith(f"{param}: ")


async def test_every_field_of_a_request_to_an_encoder_is_honoured_or_refused_by_name(mesh: FakeMesh) -> None:
    embedding, ranking = {"input": "hello"}, {"query": "hello", "documents": ["world"]}
    requests: list[tuple[str, dict[str, Any], str, str]] = [
        ("embeddings", embedding | {"encoding_format": None, "user": None}, "model", "task_unsupported"),
        ("embeddings", embedding | {"user": "me"}, "user", "unsupported_field"),
        ("embeddings", embedding | {"cache": "bypass"}, "cache", "unknown_field"),
        ("rerank", ranking | {"top_n": None, "documents": [{"text": "a", "title": None}]}, "model", "task_unsupported"),
        ("rerank", ranking | {"user": "me"}, "user", "unknown_field"),
        ("rerank", ranking | {"documents": ["a", {"text": "b", "x": 1}]}, "documents[1].x", "unsupported_field"),
        ("rerank", ranking | {"documents": [{"title": None}]}, "documents[0].text", "invalid_field"),
        ("embeddings", {"input": ["a"] * 2048}, "model", "task_unsupported"),
        ("embeddings", {"input": [*["a"] * 2048, 5]}, "input", "invalid_field"),
        ("rerank", ranking | {"documents": [*["a"] * 2048, 5]}, "documents", "invalid_field"),
    ]  # fmt: skip
    async with client(mesh) as http_client:
        for path, body, param, code in requests:
            response = await http_client.post(f"/v1/{path}", json=body)
            error = error_of(response)
            assert (response.status_code, error["param"], error["code"]) == (400, param, code)


async def test_json_that_is_nested_too_deeply_is_refused_by_name(mesh: FakeMesh) -> None:
    call = {"function": {"name": "f", "arguments": '{"x":' * 600 + "{}" + "}" * 600}}
    refusals: list[tuple[str, dict[str, Any]]] = [
        ("response_format.json_schema.schema", {
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": DEEP}},
        }),
        ("guided_json", {"guided_json": DEEP}),
        ("structured_outputs.json", {"structured_outputs": {"json": DEEP}}),
        ("chat_template_kwargs", {"chat_template_kwargs": DEEP}),
        ("tools[0].function.parameters", {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP}}],
        }),
        ("messages.tool_calls.arguments", {"messages": [{"role": "assistant", "tool_calls": [call]}]}),
    ]  # fmt: skip
    async with client(mesh) as http_client:
        for param, fields in refusals:
            response = await http_client.post("/v1/chat/completions", json=CHAT | fields)
            assert (response.status_code, error_of(response)["param"]) == (400, param)


async def test_a_form_that_a_worker_cannot_follow_is_named_as_the_client_named_it(mesh: FakeMesh) -> None:
    mesh.workers[0].fail_at = 0, invalid("sampling.structured", "no token can continue it", "INVALID_GRAMMAR")
    async with client(mesh) as http_client:
        response = await http_client.post("/v1/completions", json=TEXT | {"guided_regex": "a+"})
    error = error_of(response)
    assert (response.status_code, error["param"], error["code"]) == (400, "guided_regex", "invalid_grammar")
    assert error["message"] == "guided_regex: no token can continue it"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b'{"prompt": NaN}']
)
async def test_a_body_that_is_no_json_object_in_utf8_is_refused(mesh: FakeMesh, body: bytes) -> None:
    async with client(mesh) as http_client:
        response = await http_client.post("/v1/completions", content=body)
    assert (response.status_code, error_of(response)["code"]) == (400, "malformed_json")


async def test_a_body_of_more_than_1_mib_is_refused(mesh: FakeMesh) -> None:
    async with client(mesh) as http_client:
        for size, status in ((http.MOST_BODY_BYTES - 40, 400), (http.MOST_BODY_BYTES, 413), (8 << 20, 413)):
            response = await http_client.post("/v1/completions", json={"prompt": "x" * size})
            assert response.status_code == status
        assert error_of(response)["code"] == "body_too_large"


async def test_paths_and_methods_that_do_not_exist(mesh: FakeMesh) -> None:
    async with client(mesh) as http_client:
        assert error_of(response := await http_client.get("/v1/files"))["code"] == "no_such_path"
        assert response.status_code == 404
        assert error_of(response := await http_client.get("/v1/completions"))["code"] == "method_not_allowed"
        assert (response.status_code, response.headers["allow"]) == (405, "POST")
        assert error_of(response := await http_client.get("/v1/models/none"))["code"] == "model_not_found"
        assert response.status_code == 404


async def test_headers_without_end_are_refused(mesh: FakeMesh) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", mesh.http_port)
    writer.write(b"GET /health HTTP/1.1\r\nx-long: " + b"x" * (64 << 10))
    assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 400 ")
    writer.close()


async def test_headers_that_never_end_close_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_HEAD_S", 0.2)
    async with FakeMesh(http_port=free_port()) as mesh:
        reader, writer = await asyncio.open_connection("127.0.0.1", mesh.http_port)
        writer.write(b"GET /health HTTP/1.1\r\n")
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()


async def test_keys_tenants_and_limits(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text(TENANTS)
    async with FakeMesh(http_port=free_port(), tenants_file=str(file)) as mesh:

        async def refused(key: str, path: str = "/v1/completions", **fields: Any) -> tuple[int, Any]:
            async with client(mesh, key) as http_client:
                response = await http_client.post(path, json=TEXT | fields)
                if response.status_code == 429:
                    assert int(response.headers["retry-after"]) >= 1
                    assert int(response.headers["retry-after-ms"]) > 0
                return response.status_code, error_of(response)["code"]

        assert await refused("") == (401, "invalid_api_key")
        assert await refused("wk-wrong") == (401, "invalid_api_key")
        assert await refused("", "/v1/embeddings") == (401, "invalid_api_key")
        assert await refused("", "/tokenize") == (401, "invalid_api_key")
        assert await refused("wk-other", stream=True) == (403, "method_denied")
        assert await refused("wk-other", "/tokenize") == (403, "method_denied")
        assert await refused(KEY, model="another") == (404, "model_not_found")
        assert await refused(KEY, priority=5) == (403, "priority_denied")
        assert await refused("wk-other", model="fake") == (403, "model_denied")
        assert await refused("wk-other", model="fake") == (429, "rate_limit_exceeded")
        async with client(mesh, KEY) as http_client:
            assert (await http_client.post("/v1/completions", json=TEXT)).json()["choices"][0]["text"] == LOREM
            assert (await http_client.get("/health")).status_code == 200
            mesh.workers[0].hold_at = 3
            first = asyncio.create_task(http_client.post("/v1/completions", json=TEXT))
            await until(lambda: bool(mesh.workers[0].running))
            assert await refused(KEY) == (429, "too_many_concurrent")
            mesh.workers[0].hold_at = None
            assert (await first).status_code == 200
        async with client(mesh) as anonymous:
            assert (await anonymous.get("/health")).status_code == 200
            response = await anonymous.get("/v1/models")
            assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")


async def test_a_mesh_without_workers_is_unavailable(mesh: FakeMesh) -> None:
    mesh.scheduler.decide = lambda submit: rejected(submit, unavailable("NO_WORKER", "no worker", 2.5))
    for stream in (False, True):
        async with client(mesh) as http_client:
            response = await http_client.post("/v1/completions", json=TEXT | {"stream": stream})
        assert (response.status_code, error_of(response)["type"]) == (503, "server_error")
        assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("3", "2500")
        assert json.loads(response.headers["weft-receipt"])["finish_reason"] == "error"


async def test_a_deadline_ends_a_request(mesh: FakeMesh) -> None:
    mesh.workers[0].hold_at = 0
    headers = {"x-request-timeout": "0.3"}
    async with client(mesh) as http_client:
        response = await http_client.post("/v1/completions", json=TEXT, headers=headers)
        assert (response.status_code, error_of(response)["code"]) == (504, "deadline_exceeded")
        await until(lambda: not mesh.workers[0].running)
        for wrong in ("0", "soon", "nan"):
            response = await http_client.post("/v1/completions", json=TEXT, headers={"x-request-timeout": wrong})
            assert (response.status_code, error_of(response)["param"]) == (400, "x-request-timeout")


async def test_an_error_in_a_stream_that_has_begun_is_its_last_event(mesh: FakeMesh) -> None:
    failure = WeftError(StatusCode.INTERNAL, "ENGINE_FAILED", "the engine failed")
    mesh.workers[0].fail_at = (4, failure)
    async with client(mesh) as http_client:
        response = await http_client.post("/v1/completions", json=TEXT | {"stream": True})
    assert response.status_code == 200
    data = [
        json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n") if line.startswith("data: ")
    ]
    assert data[0]["choices"][0]["text"] == "the"
    assert data[-1]["error"]["code"] == "engine_failed"
    async with openai_client(mesh) as ai:
        stream = await ai.completions.create(model="fake", prompt="hello", max_tokens=400, stream=True)
        with pytest.raises(openai.APIError, match="the engine failed"):
            [chunk async for chunk in stream]


# ---- clients that leave, or do not read ----


def request_bytes(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    """A POST request as it is on the wire."""
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_cancels_its_job(mesh: FakeMesh, stream: bool) -> None:
    worker = mesh.workers[0]
    worker.hold_at = 5
    reader, writer = await asyncio.open_connection("127.0.0.1", mesh.http_port)
    writer.write(request_bytes(TEXT | {"stream": stream}))
    await until(lambda: worker.sent == 5)
    if stream:
        assert (await reader.readline()) == b"HTTP/1.1 200 OK\r\n"
    writer.close()
    await until(lambda: not worker.running, 1.0)
    assert worker.cancelled_once


async def test_a_client_that_stops_reading_is_disconnected() -> None:
    async with FakeMesh(http_port=free_port(), gateway_stall_s=0.4) as mesh:
        worker = mesh.workers[0]
        worker.script = lambda job: [260] * 400
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", mesh.http_port))
        slow.sendall(request_bytes(TEXT | {"stream": True, "n": 16, "logprobs": 20}))
        await until(lambda: bool(worker.running))
        await until(lambda: worker.sent >= 100, 20)
        slow.setblocking(False)
        await until(lambda: not worker.running, 20)

        def disconnected() -> bool:
            try:
                while slow.recv(1 << 20):
                    pass
            except BlockingIOError:
                return False
            except ConnectionResetError:
                return True
            return True

        await until(disconnected, 10)
        assert not worker.running
        slow.close()


async def test_a_slow_reader_gets_everything(mesh: FakeMesh) -> None:
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect(("127.0.0.1", mesh.http_port))
    slow.sendall(request_bytes(TEXT | {"stream": True, "logprobs": 20}))
    slow.setblocking(False)
    loop, received = asyncio.get_running_loop(), bytearray()
    while b"[DONE]" not in received:
        received += await loop.sock_recv(slow, 2000)
        await asyncio.sleep(0.002)
    slow.close()
    assert received.count(b'"text_completion"') == len(ANSWER) + 1


class Client(asyncio.Transport):
    """The transport of a client, which refuses data once it is closed, as that of uvloop does."""

    def __init__(self, closed: bool = False) -> None:
        super().__init__()
        self.received = b""
        self._closed = closed

    def is_closing(self) -> bool:
        return self._closed

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closed:
            raise RuntimeError("the handler is closed")
        self.received += data


def test_a_client_that_has_gone_takes_no_events_from_others() -> None:
    outbox, clients = http_server.Outbox(), [Client(), Client(closed=True), Client()]
    outbox.unsent += [(each, b"event") for each in clients]
    outbox.flush()
    outbox.flush()
    assert [each.received for each in clients] == [b"event", b"", b"event"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_ends_well_leaves_nothing_to_the_garbage_collector(mesh: FakeMesh, stream: bool) -> None:
    def left() -> list[object]:
        return [each for each in gc.get_objects() if type(each) in (http.Exchange, Generation, Continuation)]

    async def request() -> str:
        async with client(mesh) as http_client:
            reply = await http_client.post("/v1/completions", json=TEXT | {"stream": stream})
            assert reply.status_code == 200
            return reply.text

    gc.collect()
    gc.disable()
    try:
        running = asyncio.create_task(request())
        await until(lambda: {type(each) for each in left()} == {http.Exchange, Generation, Continuation}, 5)
        assert '"finish_reason":"stop"' in await running
        await until(lambda: not left(), 5)
    finally:
        gc.enable()


async def test_connections_are_used_again_and_requests_may_be_pipelined(mesh: FakeMesh) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", mesh.http_port)
    writer.write(request_bytes(TEXT) * 3)
    for _ in range(3):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        assert json.loads(await reader.readexactly(length))["choices"][0]["text"] == LOREM
    writer.close()


async def test_too_many_pipelined_requests_are_refused(mesh: FakeMesh) -> None:
    mesh.workers[0].hold_at = 5
    reader, writer = await asyncio.open_connection("127.0.0.1", mesh.http_port)
    writer.write(request_bytes(TEXT) * 100)
    assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 400 ")
    await until(lambda: not mesh.workers[0].running)
    writer.close()


async def test_a_gateway_that_drains_completes_its_streams() -> None:
    async with FakeMesh(http_port=free_port(), drain_s=5) as mesh:
        mesh.workers[0].hold_at = 5
        reader, writer = await asyncio.open_connection("127.0.0.1", mesh.http_port)
        writer.write(request_bytes(TEXT | {"stream": True}))
        await until(lambda: mesh.workers[0].sent == 5)
        # The block ends while the stream runs; the worker goes on a moment later.
        asyncio.get_running_loop().call_later(0.5, setattr, mesh.workers[0], "hold_at", None)
        began = time.monotonic()
    assert time.monotonic() - began < 5
    received = await asyncio.wait_for(reader.read(), 5)
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert received.count(b'"text_completion"') > len(ANSWER) // 2
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", mesh.http_port)
    writer.close()


async def test_a_gateway_that_stops_ends_its_streams() -> None:
    mesh = FakeMesh(http_port=free_port())
    async with mesh:
        mesh.workers[0].hold_at = 5
        reader, writer = await asyncio.open_connection("127.0.0.1", mesh.http_port)
        writer.write(request_bytes(TEXT | {"stream": True}))
        await until(lambda: mesh.workers[0].sent == 5)
    assert b'"code":"shutting_down"' in await asyncio.wait_for(reader.read(), 5)
    writer.close()
