"""The Open Inference Protocol over HTTP on a gateway among fakes: JSON, binary data, events, errors, keys."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest_asyncio

from tests.gateway.fakes import FakeMesh, until
from tests.gateway.http_client import client as http_client
from tests.gateway.model import ANSWER, LOREM
from tests.ports import free_port

KEY = "wk-secret"
TENANTS = f"""
[[tenant]]
name = "one"
keys = ["sha256:{hashlib.sha256(KEY.encode()).hexdigest()}"]
methods = ["Generate"]
"""
GREEDY = {"temperature": 0, "max_tokens": 400}
client = partial(http_client, path="/v2")
TEXT = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hello world"]}


@pytest_asyncio.fixture
async def mesh() -> AsyncIterator[FakeMesh]:
    async with FakeMesh(http_port=free_port()) as running:
        yield running


async def ready(http: httpx.AsyncClient) -> None:
    """Waits until the gateway has its list of models."""
    for _ in range(500):
        if (await http.get("/health/ready")).status_code == 200:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the gateway is not ready")


def body(*inputs: Any, outputs: tuple[str, ...] = (), **parameters: Any) -> dict[str, Any]:
    """A request for the prompt "hello world"."""
    named = [{"name": name} for name in outputs]
    return {"id": "7", "inputs": [TEXT, *inputs], "outputs": named, "parameters": GREEDY | parameters}


def error_of(response: httpx.Response) -> tuple[int, str]:
    """Status and field of an error, whose message is text."""
    found = response.json()
    assert isinstance(found["error"], str)
    return response.status_code, found.get("field", "")


async def test_a_whole_answer_as_json(mesh: FakeMesh) -> None:
    async with client(mesh) as http:
        names = ("text_output", "output_ids", "finish_reason", "num_input_tokens")
        reply = (await http.post("/models/fake/infer", json=body(outputs=names))).json()
        versioned = await http.post("/models/alias/versions/1/infer", json=body(n=2, stop=["fox", "owl"]))
    assert (reply["model_name"], reply["model_version"], reply["id"]) == ("fake", "1", "7")
    found = {each["name"]: each["data"] for each in reply["outputs"]}
    assert found["text_output"] == [LOREM]
    assert (found["output_ids"], found["finish_reason"]) == (ANSWER, ["stop"])
    [texts] = versioned.json()["outputs"]
    assert texts == {"name": "text_output", "datatype": "BYTES", "shape": [2], "data": ["the quick brown "] * 2}


async def test_tensors_as_bytes_behind_the_json(mesh: FakeMesh) -> None:
    prompt = b"hello world"
    raw = len(prompt).to_bytes(4, "little") + prompt
    inputs = [
        {"name": "text_input", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(raw)}},
        {"name": "max_tokens", "datatype": "INT32", "shape": [1], "data": [3]},
        {"name": "top_k", "datatype": "INT32", "shape": [1, 1], "parameters": {"binary_data_size": 4}},
    ]
    outputs = [{"name": "output_ids", "parameters": {"binary_data": True}}]
    head = json.dumps({"inputs": inputs, "outputs": outputs, "parameters": {"temperature": 0}}).encode()
    data = head + raw + (5).to_bytes(4, "little")
    size = {"inference-header-content-length": str(len(head))}
    async with client(mesh) as http:
        reply = await http.post("/models/fake/infer", content=data, headers=size)
        behind = int(reply.headers["inference-header-content-length"])
        described = json.loads(reply.content[:behind])["outputs"][0]
        assert described["parameters"] == {"binary_data_size": 12}
        ids = reply.content[behind:]
        assert [int.from_bytes(ids[at : at + 4], "little") for at in (0, 4, 8)] == ANSWER[:3]
        for content, headers in ((data + b"x", size), (data[:-1], size), (data, {**size, next(iter(size)): "x"})):
            assert (await http.post("/models/fake/infer", content=content, headers=headers)).status_code == 400


async def test_the_generate_extension(mesh: FakeMesh) -> None:
    fields = {"text_input": "hello world", "id": "9", "parameters": GREEDY}
    async with client(mesh) as http:
        whole = (await http.post("/models/fake/generate", json=fields | {"stop": ["fox"]})).json()
        assert whole == {"model_name": "fake", "model_version": "1", "id": "9", "text_output": "the quick brown "}
        reply = await http.post("/models/fake/generate_stream", json=fields | {"return_finish_reason": True})
        assert reply.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line.removeprefix("data: ")) for line in reply.text.split("\n\n") if line]
        assert "".join(event["text_output"] for event in events) == LOREM
        assert [event["finish_reason"] for event in events][-1] == "stop"
        once = await http.post("/models/fake/generate_stream", json=fields | {"stream": False})
        assert json.loads(once.text.removeprefix("data: "))["text_output"] == LOREM
        assert error_of(await http.post("/models/fake/generate", json=fields | {"stream": True})) == (400, "stream")
        assert error_of(await http.post("/models/fake/generate", json={"temperature": 1})) == (400, "text_input")
        wrong = await http.post("/models/fake/generate_stream", json=fields | {"parameters": {"top_p": 7}})
        assert error_of(wrong) == (400, "top_p")


async def test_errors_name_the_callers_field(mesh: FakeMesh) -> None:
    top_k = {"name": "top_k", "datatype": "INT32", "shape": [1], "data": [1234]}
    async with client(mesh) as http:

        async def refused(sent: Any, model: str = "fake") -> tuple[int, str]:
            return error_of(await http.post(f"/models/{model}/infer", json=sent))

        assert await refused(body(temperature=-1)) == (400, "temperature")
        assert await refused(body(beam_width=3)) == (400, "beam_width")
        assert await refused(body(guided=1)) == (400, "guided")
        assert await refused(body() | {"model": "x"}) == (400, "model")
        assert await refused(body(), "nobody") == (404, "model_name")
        assert await refused(body(), "fake/versions/2") == (404, "model_version")
        assert await refused(body({"name": "top_p", "datatype": "FP32", "shape": [1], "data": ["x"]})) == (400, "top_p")
        assert await refused(body({"name": "top_p", "datatype": "FP32", "shape": [2], "data": [1]})) == (400, "top_p")
        assert await refused(body({"name": "top_k", "datatype": "INT32", "shape": [1], "data": [1 << 40]})) == (
            400,
            "top_k",
        )
        assert await refused(body({"name": "top_p", "datatype": "X", "shape": [1], "data": [1]})) == (400, "top_p")
        assert await refused(body(top_k | {"datatype": ["INT32"]})) == (400, "top_k")
        assert await refused(body(top_k | {"shape": [1 << 63]})) == (400, "top_k.shape")
        for levels, status in ((8, 200), (9, 400), (1000, 400)):
            nested = json.dumps(body(top_k)).replace("[1234]", "[" * levels + "1" + "]" * levels)
            assert (await http.post("/models/fake/infer", content=nested)).status_code == status
        assert await refused({"inputs": 5}) == (400, "inputs")
        assert (await http.post("/models/fake/infer", content=b"[")).status_code == 400
        assert error_of(await http.get("/models/fake/infer")) == (405, "")
        assert error_of(await http.get("/models/fake/stats")) == (404, "")
        messages = [{"role": "", "content": "x"}]
        conversation = {"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "two words"}]}
        for sent, field in ((messages, "messages.role"), (conversation, "messages.tools.name")):
            assert error_of(await http.post("/models/fake/generate", json={"messages": sent})) == (400, field)


async def test_a_client_that_disconnects_frees_its_job(mesh: FakeMesh) -> None:
    mesh.workers[0].hold_at = 3
    async with client(mesh) as http:
        fields = {"text_input": "hello world", "parameters": GREEDY}
        async with http.stream("POST", "/models/fake/generate_stream", json=fields) as response:
            await anext(response.aiter_lines())
            assert mesh.workers[0].running
    await until(lambda: not mesh.workers[0].running)


async def test_the_server_describes_itself_and_its_models(mesh: FakeMesh) -> None:
    async with client(mesh) as http:
        assert (await http.get(str(http.base_url).rstrip("/"))).json()["name"] == "weft"
        assert (await http.get("/health/live")).json() == {"live": True}
        await ready(http)
        assert (await http.get("/models/fake/ready")).status_code == 200
        assert (await http.get("/models/nobody/ready")).status_code == 404
        metadata = (await http.get("/models/fake")).json()
        assert {"name": "text_input", "datatype": "BYTES", "shape": [1]} in metadata["inputs"]
        config = (await http.get("/models/fake/versions/1/config")).json()
        assert config["model_transaction_policy"] == {"decoupled": True}
        assert (await http.post("/repository/index")).json() == [{"name": "fake", "version": "1", "state": "READY"}]
        assert (await http.get("/models/nobody")).status_code == 404


async def test_keys_and_methods_hold(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(TENANTS)
    async with FakeMesh(http_port=free_port(), tenants_file=str(path)) as mesh:
        async with client(mesh) as http:
            await ready(http)
            assert (await http.get(str(http.base_url).rstrip("/"))).status_code == 401
            for name in ("infer", "generate", "generate_stream"):
                assert (await http.post(f"/models/fake/{name}", json=body())).status_code == 401
        async with client(mesh, KEY) as http:
            assert (await http.get("/models/fake")).status_code == 403
            assert (await http.post("/models/fake/infer", json=body())).status_code == 403
            fields = {"text_input": "hello", "parameters": GREEDY}
            assert (await http.post("/models/fake/generate_stream", json=fields)).status_code == 200
