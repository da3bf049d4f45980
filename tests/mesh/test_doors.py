"""The same request gives the same tokens through every door of a real mesh and its worker's engine service."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import httpx
import pytest
from grpc import aio

from protos import inference_pb2 as api
from protos import kserve_pb2 as kserve
from protos import vllm_engine_pb2 as vllm
from protos.kserve_pb2_grpc import GRPCInferenceServiceStub
from protos.vllm_engine_pb2_grpc import VllmEngineStub
from tests.mesh.harness import Mesh, ask, generate

pytestmark = pytest.mark.asyncio(loop_scope="session")

STORY = "Once upon a time there was a fox who lived in a dark wood near the old mill"
MODEL = "weft-story-2m"
TOKENS = 20
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "seed": 7, "top_p": 0.95},
    "every number": {
        "temperature": 1.1,
        "seed": 11,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "min_tokens": 5,
        "ignore_eos": True,
    },
    "lists": {"temperature": 0.0, "stop_token_ids": [5, 9], "logit_bias": {17: 1.5, 40: -100.0}},
}
Door: TypeAlias = Callable[[Mesh, dict[str, Any], list[int]], Awaitable[list[int]]]
"""Sends a case, with the tokens of the prompt for a door that takes no text. -> the tokens of the answer."""


def _json(case: dict[str, Any]) -> dict[str, Any]:
    """The fields of a case in JSON."""
    return json.loads(json.dumps(case))  # type: ignore[no-any-return]


async def openai(mesh: Mesh, case: dict[str, Any], prompt: list[int]) -> list[int]:
    """OpenAI's API, not streamed."""
    body = {"prompt": STORY, "max_tokens": TOKENS, "cache": "bypass", "return_token_ids": True, **_json(case)}
    async with httpx.AsyncClient(base_url=mesh.url(), timeout=60) as client:
        reply = (await client.post("/v1/completions", json=body)).json()
    return list(reply["choices"][0]["token_ids"])


def _kserve_fields(case: dict[str, Any]) -> dict[str, Any]:
    return {"max_tokens": TOKENS, "cache": "bypass", **_json(case)}


def _kserve(mesh: Mesh, case: dict[str, Any]) -> tuple[Any, kserve.ModelInferRequest]:
    request = kserve.ModelInferRequest(model_name=MODEL)
    for name, text in (("text_input", STORY), ("sampling_parameters", json.dumps(_kserve_fields(case)))):
        entry = request.inputs.add(name=name, datatype="BYTES", shape=[1])
        entry.contents.bytes_contents.append(text.encode())
    request.outputs.add(name="output_ids")
    return GRPCInferenceServiceStub(aio.insecure_channel(mesh.gateways[0].address)), request


async def kserve_whole(mesh: Mesh, case: dict[str, Any], prompt: list[int]) -> list[int]:
    """KServe's protocol over gRPC, not streamed."""
    client, request = _kserve(mesh, case)
    return list((await client.ModelInfer(request)).outputs[0].contents.int_contents)


async def kserve_stream(mesh: Mesh, case: dict[str, Any], prompt: list[int]) -> list[int]:
    """KServe's protocol over gRPC, streamed."""
    client, request = _kserve(mesh, case)

    async def requests() -> AsyncIterator[kserve.ModelInferRequest]:
        yield request

    responses = [response.infer_response async for response in client.ModelStreamInfer(requests())]
    return [token for response in responses for token in response.outputs[0].contents.int_contents]


async def kserve_http(mesh: Mesh, case: dict[str, Any], prompt: list[int]) -> list[int]:
    """KServe's protocol over HTTP."""
    body = {
        "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [STORY]}],
        "outputs": [{"name": "output_ids"}],
        "parameters": _kserve_fields(case),
    }
    async with httpx.AsyncClient(base_url=mesh.url(), timeout=60) as client:
        reply = (await client.post(f"/v2/models/{MODEL}/infer", json=body)).json()
    return list(reply["outputs"][0]["data"])


async def engine(mesh: Mesh, case: dict[str, Any], prompt: list[int]) -> list[int]:
    """The engine service of the worker, which other gateways call."""
    client: Any = VllmEngineStub(aio.insecure_channel(mesh.workers[0].address))
    params = vllm.SamplingParams(max_tokens=TOKENS, **case)
    request = vllm.GenerateRequest(tokenized=vllm.TokenizedInput(input_ids=prompt), sampling_params=params)
    [response] = [response async for response in client.Generate(request)]
    return list(response.complete.output_ids)


DOORS: tuple[Door, ...] = (openai, kserve_whole, kserve_stream, kserve_http, engine)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_every_door_gives_the_same_tokens(mesh: Mesh, case: dict[str, Any]) -> None:
    stub = mesh.stub()
    request = ask(STORY, max_tokens=TOKENS, **case)
    request.cache = api.CACHE_POLICY_BYPASS
    expected = (await generate(stub, request)).ids
    assert expected, "the case must have an answer"
    assert list((await stub.Complete(request)).choices[0].token_ids) == expected
    prompt = list((await stub.Tokenize(api.TokenizeRequest(prompt=request.prompt))).token_ids)
    found = {door.__name__: await door(mesh, case, prompt) for door in DOORS}
    assert found == dict.fromkeys(found, expected)


async def test_every_door_gives_the_same_form(mesh: Mesh) -> None:
    """An answer of a regular expression, through the doors that have a word for one."""
    pattern = "(red|green) fox(es)? [0-9]{3}"
    request = ask(STORY, max_tokens=TOKENS)
    request.sampling.structured.regex = pattern
    stub = mesh.stub()
    expected = await generate(stub, request)
    case = {"temperature": 0.0, "structured": {"regex": pattern}}
    for door in (kserve_whole, kserve_stream, kserve_http):
        assert await door(mesh, case, []) == expected.ids
    prompt = list((await stub.Tokenize(api.TokenizeRequest(prompt=request.prompt))).token_ids)
    assert await engine(mesh, {"temperature": 0.0, "regex": pattern}, prompt) == expected.ids
