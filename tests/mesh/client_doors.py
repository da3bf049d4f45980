"""Clients of gRPC and of OpenAI's API as functions: the same request in, each continuation's tokens out. Knows no test.

A new client is a function and a row of DOORS.
"""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import openai

from protos import inference_pb2 as api
from tests.mesh.harness import Mesh, generate
from weft import Client

Tokens = dict[int, list[int]]
"""By index of the continuation."""
Door = Callable[[Mesh, api.GenerateRequest], Awaitable[Tokens]]
_POLICIES = {api.CACHE_POLICY_BYPASS: "bypass", api.CACHE_POLICY_READ_ONLY: "read_only"}
_SAME = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
         "frequency_penalty", "seed", "stop", "stop_token_ids", "ignore_eos", "bad_words")  # fmt: skip


async def grpc_stream(mesh: Mesh, request: api.GenerateRequest) -> Tokens:
    """weft.v1, streamed."""
    return (await generate(mesh.stub(), request)).tokens


async def grpc_whole(mesh: Mesh, request: api.GenerateRequest) -> Tokens:
    """weft.v1, in one reply."""
    return {choice.index: list(choice.token_ids) for choice in (await mesh.stub().Complete(request)).choices}


async def python_client(mesh: Mesh, request: api.GenerateRequest) -> Tokens:
    """Weft's own client."""
    tokens: Tokens = {}
    async with Client(mesh.gateways[0].address, deadline_s=60) as client:
        async for delta in client.generate(request):
            tokens.setdefault(delta.index, []).extend(delta.token_ids)
    return tokens


def body_of(request: api.GenerateRequest) -> dict[str, Any]:
    """The request as OpenAI's JSON, with Weft's extensions."""
    sampling, prompt = request.sampling, request.prompt
    body: dict[str, Any] = {"model": request.model, "n": max(1, request.n), "return_token_ids": True}
    body["cache"] = _POLICIES.get(request.cache, "read_write")
    for field, value in sampling.ListFields():
        if field.name in _SAME:
            body[field.name] = list(value) if field.is_repeated else value
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if prompt.HasField("chat"):
        body["messages"] = [{"role": each.role, "content": each.content} for each in prompt.chat.messages]
    else:
        body["prompt"] = prompt.text if prompt.HasField("text") else list(prompt.token_ids.ids)
    return body


def _path(request: api.GenerateRequest) -> str:
    return "/v1/chat/completions" if request.prompt.HasField("chat") else "/v1/completions"


async def http_whole(mesh: Mesh, request: api.GenerateRequest) -> Tokens:
    """OpenAI's API, in one reply."""
    async with httpx.AsyncClient(base_url=mesh.url(), timeout=60) as client:
        reply = await client.post(_path(request), json=body_of(request))
    assert reply.status_code == 200, reply.text
    return {choice["index"]: choice["token_ids"] for choice in reply.json()["choices"]}


async def http_stream(mesh: Mesh, request: api.GenerateRequest) -> Tokens:
    """OpenAI's API, as server-sent events."""
    tokens: Tokens = {}
    async with (
        httpx.AsyncClient(base_url=mesh.url(), timeout=60) as client,
        client.stream("POST", _path(request), json=body_of(request) | {"stream": True}) as reply,
    ):
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    tokens.setdefault(choice["index"], []).extend(choice["token_ids"])
    return tokens


async def openai_client(mesh: Mesh, request: api.GenerateRequest) -> Tokens:
    """OpenAI's client for Python, unmodified."""
    body = body_of(request)
    own = {name: body.pop(name) for name in ("model", "messages", "prompt", "n") if name in body}
    async with openai.AsyncOpenAI(base_url=f"{mesh.url()}/v1", api_key="none", timeout=60) as client:
        create: Any = client.chat.completions.create if "messages" in own else client.completions.create
        whole = await create(**own, extra_body=body)
    return {choice.index: choice.token_ids for choice in whole.choices}


DOORS: dict[str, Door] = {
    "grpc stream": grpc_stream,
    "grpc whole": grpc_whole,
    "python client": python_client,
    "http stream": http_stream,
    "http whole": http_whole,
    "openai client": openai_client,
}
