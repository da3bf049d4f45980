"""A worker of a real mesh through VllmEngine: the same tokens as through the gateway, stops, aborts, errors."""

import asyncio
import hashlib
import io
import zipfile
from typing import Any

import pytest
from grpc import StatusCode, aio

from protos import inference_pb2 as api
from protos import smg_common_pb2 as smg
from protos import vllm_engine_pb2 as vllm
from protos.vllm_engine_pb2_grpc import VllmEngineStub
from tests.mesh.harness import Mesh, Stub, ask, generate

pytestmark = pytest.mark.asyncio(loop_scope="session")

STORY = "Once upon a time there was a fox who lived in a dark wood near the old mill"
SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 7, "top_p": 0.95, "top_k": 40, "frequency_penalty": 0.5}


def engine(mesh: Mesh) -> Any:
    """A client of the worker."""
    return VllmEngineStub(aio.insecure_channel(mesh.workers[0].address))


async def tokens_of(stub: Stub, text: str = STORY) -> list[int]:
    """The tokens of a text."""
    return list((await stub.Tokenize(api.TokenizeRequest(prompt=api.Prompt(text=text)))).token_ids)


def request(ids: list[int], name: str = "", stream: bool = True, **sampling: Any) -> vllm.GenerateRequest:
    """A request, greedy unless `sampling` sets a temperature."""
    params = vllm.SamplingParams(**({"temperature": 0.0, "max_tokens": 16} | sampling))
    tokenized = vllm.TokenizedInput(input_ids=ids)
    return vllm.GenerateRequest(request_id=name, tokenized=tokenized, sampling_params=params, stream=stream)


async def run(
    client: Any, asked: vllm.GenerateRequest
) -> tuple[dict[int, list[int]], dict[int, vllm.GenerateComplete]]:
    """The tokens and the end of each continuation."""
    tokens: dict[int, list[int]] = {}
    ends: dict[int, vllm.GenerateComplete] = {}
    async for response in client.Generate(asked):
        if response.HasField("chunk"):
            assert response.chunk.index not in ends
            tokens.setdefault(response.chunk.index, []).extend(response.chunk.token_ids)
        else:
            ends[response.complete.index] = response.complete
            tokens.setdefault(response.complete.index, []).extend(response.complete.output_ids)
    return tokens, ends


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("sampling", [{}, SAMPLED])
async def test_the_same_tokens_as_through_the_gateway(
    mesh: Mesh, stub: Stub, sampling: dict[str, Any], n: int, stream: bool
) -> None:
    asked = ask(STORY, max_tokens=16, **sampling)
    asked.n, asked.cache = n, api.CACHE_POLICY_BYPASS
    expected = await generate(stub, asked)
    tokens, ends = await run(engine(mesh), request(await tokens_of(stub), stream=stream, n=n, **sampling))
    assert tokens == expected.tokens
    assert {end.finish_reason for end in ends.values()} == {"length"}
    assert {end.prompt_tokens for end in ends.values()} == {expected.receipt.prompt_tokens}


async def test_log_probabilities_are_those_of_the_gateway(mesh: Mesh, stub: Stub) -> None:
    expected = await generate(stub, ask(STORY, max_tokens=8, logprobs=2))
    _, ends = await run(engine(mesh), request(await tokens_of(stub), stream=False, max_tokens=8, logprobs=2))
    found = ends[0].output_logprobs
    assert list(found.token_logprobs) == pytest.approx(expected.logprobs[0], abs=1e-4)
    assert [len(top.values) for top in found.top_logprobs] == [2] * 8


async def test_stop_strings_and_stop_tokens_end_the_answer(mesh: Mesh, stub: Stub) -> None:
    client, ids = engine(mesh), await tokens_of(stub)
    free = await generate(stub, ask(STORY, max_tokens=16))
    word = free.text.split()[3]
    tokens, ends = await run(client, request(ids, stop=[word, "never"]))
    assert (ends[0].finish_reason, ends[0].matched_stop_str) == ("stop", word)
    assert tokens[0] == free.ids[: len(tokens[0])]
    assert len(tokens[0]) < 16
    stop = free.ids[4]
    tokens, ends = await run(client, request(ids, stop_token_ids=[stop]))
    assert (ends[0].finish_reason, ends[0].matched_token_id) == ("stop", stop)
    assert tokens[0] == free.ids[: free.ids.index(stop)]


async def test_an_aborted_request_ends_with_abort(mesh: Mesh, stub: Stub) -> None:
    client = engine(mesh)
    call = client.Generate(request(await tokens_of(stub), "to-abort", max_tokens=1500, ignore_eos=True))
    responses = aiter(call)
    assert (await anext(responses)).chunk.token_ids
    await client.Abort(vllm.AbortRequest(request_ids=["to-abort", "nobody"]))
    *_, last = [response async for response in responses]
    assert last.complete.finish_reason == "abort"


async def running(client: Any) -> int:
    """Requests that the worker runs or has waiting."""
    load = (await client.GetLoads(vllm.GetLoadsRequest())).loads[0]
    return int(load.num_total_reqs)


async def test_a_caller_that_cancels_ends_its_job(mesh: Mesh, stub: Stub) -> None:
    client = engine(mesh)
    call = client.Generate(request(await tokens_of(stub), n=2, max_tokens=1500, ignore_eos=True))
    await anext(aiter(call))
    assert await running(client) == 2
    call.cancel()
    for _ in range(400):
        if await running(client) == 0:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the jobs still run")


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"temperature": -1.0}, "sampling_params.temperature"),
        ({"max_tokens": 5000}, "tokenized.input_ids"),
        ({"stop_token_ids": [1 << 30]}, "sampling_params.stop_token_ids"),
        ({"stop": ["x"] * 17}, "sampling_params.stop"),
        ({"prompt_logprobs": 1}, "sampling_params.prompt_logprobs"),
    ],
)
async def test_a_refusal_names_the_field(mesh: Mesh, stub: Stub, sampling: dict[str, Any], field: str) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await run(engine(mesh), request(await tokens_of(stub), **sampling))
    assert caught.value.code() is StatusCode.INVALID_ARGUMENT
    assert str(caught.value.details()).startswith(f"{field}: ")


async def test_the_worker_describes_itself_and_its_model(mesh: Mesh) -> None:
    client = engine(mesh)
    assert (await client.HealthCheck(vllm.HealthCheckRequest())).healthy
    info = await client.GetModelInfo(vllm.GetModelInfoRequest())
    assert (info.served_model_name, info.max_context_length) == ("weft-story-2m", 2048)
    server = await client.GetServerInfo(vllm.GetServerInfoRequest())
    assert (server.server_type, server.data_parallel_size) == ("weft", 1)
    load = (await client.GetLoads(vllm.GetLoadsRequest())).loads[0]
    assert load.max_total_num_tokens > load.num_used_tokens >= 0
    chunks = [chunk async for chunk in client.GetTokenizer(smg.GetTokenizerRequest())]
    archive = b"".join(chunk.data for chunk in chunks)
    assert hashlib.sha256(archive).hexdigest() == chunks[-1].sha256
    assert "tokenizer.json" in zipfile.ZipFile(io.BytesIO(archive)).namelist()


async def test_what_a_worker_does_not_have_is_refused(mesh: Mesh) -> None:
    client = engine(mesh)
    assert not (await client.FlushCache(smg.FlushCacheRequest())).success
    assert not (await client.StartProfile(smg.StartProfileRequest())).success
    assert not (await client.StopProfile(smg.StopProfileRequest())).success
    for call in (client.Embed(vllm.EmbedRequest()), client.SubscribeKvEvents(smg.SubscribeKvEventsRequest()).read()):
        with pytest.raises(aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is StatusCode.UNIMPLEMENTED
