"""Encoders through the public door: vectors, caches, recovery, refusals, ranks and labels."""

import asyncio
import base64
import json
import random
import signal
import string
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import openai
import pytest
import pytest_asyncio
import torch
from grpc import aio
from transformers.models.auto.modeling_auto import AutoModel, AutoModelForSequenceClassification

from protos import inference_pb2 as api
from services.gateway.links.unread_submissions import FEW
from tests.encoders import CONTEXT, TEXTS, add_modules, make_encoder, make_tokenizer
from tests.mesh.harness import Mesh, Stub, ask, receipt_of
from tests.redis_server import RedisServer
from weft import Client
from weft.client.embeddings import EmbedSettings
from weft.client.errors import from_rpc

POISON = 4
"""A token that no text has: the worker's engine fails at it."""
PROMPTS = {"query": "quick: ", "document": ""}
EMBEDDER = api.EncodeOptions(model="tiny-bert")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_modules(
        make_encoder(tmp_path_factory.mktemp("models") / "tiny-bert", matryoshka_dimensions=[8]), prompts=PROMPTS
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> AsyncIterator[Mesh]:
    home = tmp_path_factory.mktemp("mesh")
    env = {"WEFT_FAILPOINTS": f"engine.step=raise:{POISON}"}
    with RedisServer(home / "redis") as redis:
        async with Mesh(home, folder, workers=2, redis_url=redis.url, worker_env=env) as running:
            for number, (name, labels) in enumerate({"reranker": 1, "classifier": 3}.items(), 2):
                other = running.new_worker(number, MODEL_NAME=str(make_encoder(home / name, labels=labels)))
                running.workers.append(other)
                other.start()
            for worker in running.workers[2:]:
                await worker.ready()
            yield running


@pytest.fixture
def stub(mesh: Mesh) -> Stub:
    return mesh.stub()


def embed(*texts: str | list[int], cache: str = "BYPASS", **fields: Any) -> api.EmbedRequest:
    inputs = [
        api.Input(text=text) if isinstance(text, str) else api.Input(token_ids=api.TokenIds(ids=text)) for text in texts
    ]
    options = api.EncodeOptions(model="tiny-bert", cache=api.CachePolicy.Value(f"CACHE_POLICY_{cache}"))
    request = api.EmbedRequest(inputs=inputs, options=options)
    request.MergeFrom(api.EmbedRequest(**fields))
    return request


def reference(folder: Path, *texts: str) -> np.ndarray:
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), make_tokenizer()
    with torch.inference_mode():
        states = [model(input_ids=torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0] for text in texts]
    vectors = np.stack([state.mean(0).numpy() for state in states])
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_vectors_are_those_of_transformers(stub: Stub, folder: Path) -> None:
    call = stub.Embed(embed(*TEXTS, [2, 40, 3]))
    reply = await call
    own = np.array([each.values for each in reply.embeddings])
    np.testing.assert_allclose(own[:-1], reference(folder, *TEXTS), atol=2e-5)
    tokens = sum(len(make_tokenizer().encode(text).ids) for text in TEXTS) + 3
    assert (reply.receipt.prompt_tokens, reply.receipt.prefill_tokens) == (tokens, tokens)
    assert reply.receipt == receipt_of(await call.trailing_metadata())
    assert reply.receipt.attempts == 1
    assert len(reply.receipt.workers) == 1


async def test_prompts_truncation_and_fields(stub: Stub, folder: Path) -> None:
    reply = await stub.Embed(embed("the fox", prompt_name="query"))
    np.testing.assert_allclose([reply.embeddings[0].values], reference(folder, "quick: the fox"), atol=2e-5)
    reply = await stub.Embed(embed("the fox", prompt_name="document"))  # puts nothing before a text
    np.testing.assert_allclose([reply.embeddings[0].values], reference(folder, "the fox"), atol=2e-5)
    long = embed("fox " * 200, options=api.EncodeOptions(truncate=True))
    assert (await stub.Embed(long)).receipt.prompt_tokens == CONTEXT
    plain = await stub.Embed(embed("the fox", normalize=False))
    cut = await stub.Embed(embed("the fox", normalize=False, dimensions=8))
    np.testing.assert_allclose(cut.embeddings[0].values, plain.embeddings[0].values[:8], atol=2e-5)
    length = np.linalg.norm(plain.embeddings[0].values)
    assert abs(length - 1) > 0.01
    np.testing.assert_allclose(np.array([plain.embeddings[0].values]) / length, reference(folder, "the fox"), atol=2e-5)


async def test_a_large_request_is_shared_by_the_workers(stub: Stub) -> None:
    texts = [[2, 5 + place % 40, 6 + place // 40, 3] for place in range(300)]
    reply = await stub.Embed(embed(*texts))
    assert len(reply.embeddings) == 300
    assert reply.receipt.prefill_tokens == 1200
    assert len(reply.receipt.workers) == 2


async def test_equal_texts_are_computed_once_and_cached_for_their_tenant(stub: Stub) -> None:
    morning, snow = ("".join(random.choices(string.ascii_lowercase, k=12)) for _ in range(2))
    texts = [morning, snow, morning]
    tokens = [len(make_tokenizer().encode(text).ids) for text in texts]
    replies = await asyncio.gather(*(stub.Embed(embed(*texts, cache="READ_WRITE")) for _ in range(16)))
    # On a busy machine some requests come between the end of a computation and the time when it is stored.
    computed = sum(reply.receipt.prefill_tokens for reply in replies)
    assert tokens[0] + tokens[1] <= computed < 8 * (tokens[0] + tokens[1])
    assert {reply.receipt.prompt_tokens for reply in replies} == {sum(tokens)}
    first = replies[0].embeddings[0].values
    assert all(reply.embeddings[2].values == first for reply in replies)
    async for receipt in _until_hit(stub, texts):
        assert receipt.result_hit
        assert (receipt.cached_tokens, receipt.prefill_tokens, receipt.attempts) == (sum(tokens), 0, 0)
    other = await stub.Embed(embed(*texts, cache="READ_WRITE", normalize=False))
    assert not other.receipt.result_hit


async def _until_hit(stub: Stub, texts: list[str]) -> AsyncIterator[api.Receipt]:
    """The receipt of the first hit: vectors are stored in the background."""
    for _ in range(100):
        receipt = (await stub.Embed(embed(*texts, cache="READ_WRITE"))).receipt
        if receipt.result_hit:
            yield receipt
            return
    raise AssertionError("never a hit")


async def test_a_poisoned_text_fails_alone_and_is_named(stub: Stub) -> None:
    good = [stub.Embed(embed([2, 5 + place, 3])) for place in range(20)]
    with pytest.raises(aio.AioRpcError) as failed:
        await stub.Embed(embed([2, 5, 3], [2, POISON, 3]))
    assert "inputs[1]" in str(failed.value.details())
    assert failed.value.code() is grpc.StatusCode.INTERNAL
    assert all(len(reply.embeddings) == 1 for reply in await asyncio.gather(*good))


WRONG = [
    (api.EmbedRequest(), "inputs", "INVALID_FIELD"),
    (embed(*["x"] * 2049), "inputs", "INVALID_FIELD"),
    (embed("x", ""), "inputs[1].text", "EMPTY_INPUT"),
    (api.EmbedRequest(inputs=[api.Input()]), "inputs[0]", "EMPTY_INPUT"),
    (embed("x", []), "inputs[1].token_ids", "EMPTY_INPUT"),
    (embed("fox " * 100), "inputs[0]", "CONTEXT_EXCEEDED"),
    (embed([2, 5000]), "inputs[0]", "TOKEN_OUT_OF_RANGE"),
    (embed("x", dimensions=9), "dimensions", "DIMENSIONS_UNSUPPORTED"),
    (embed("x", dimensions=0), "dimensions", "INVALID_FIELD"),
    (embed("x", prompt_name="passage"), "prompt_name", "PROMPT_UNKNOWN"),
    (embed([2, 3], prompt_name="query"), "prompt_name", "PROMPT_UNSUPPORTED"),
    (embed("x", options=api.EncodeOptions(priority=101)), "options.priority", "INVALID_FIELD"),
    (embed("x", options=api.EncodeOptions(request_id="a b")), "options.request_id", "INVALID_FIELD"),
    (embed("x", options=api.EncodeOptions(model="other")), "model", "MODEL_NOT_FOUND"),
]
"""Requests that are refused, each with the field and the reason of its error."""


@pytest.mark.parametrize(("request_", "field", "reason"), WRONG)
async def test_bad_fields_are_refused_by_name(stub: Stub, request_: api.EmbedRequest, field: str, reason: str) -> None:
    with pytest.raises(aio.AioRpcError) as failed:
        await stub.Embed(request_)
    error = from_rpc(failed.value)
    assert (error.field, error.reason) == (field, reason)


AT_ONCE = [[2, 5 + place, 6 + place, 3] for place in range(FEW - len(TEXTS))]
"""Texts for requests that are sent together. A gateway may refuse some of more than these on a busy machine."""


async def streamed(stub: Stub, *requests: api.EmbedRequest) -> list[api.EmbedStreamResponse]:
    """The responses to requests on one stream, in the order of the requests."""
    messages = [api.EmbedStreamRequest(number=number, request=each) for number, each in enumerate(requests)]
    responses = {each.number: each async for each in stub.EmbedStream(iter(messages))}
    return [responses[number] for number in range(len(requests))]


async def test_a_stream_returns_the_vectors_of_embed(stub: Stub, folder: Path) -> None:
    tokens = AT_ONCE
    responses = await streamed(stub, *map(embed, TEXTS), *map(embed, tokens))
    own = np.array([each.response.embeddings[0].values for each in responses])
    np.testing.assert_allclose(own[: len(TEXTS)], reference(folder, *TEXTS), atol=2e-5)
    replies = await stub.Embed(embed(*tokens))
    np.testing.assert_allclose(own[len(TEXTS) :], [each.values for each in replies.embeddings], atol=2e-5)
    assert all(each.response.receipt.attempts == 1 for each in responses)


async def test_a_stream_finds_vectors_in_the_cache(stub: Stub) -> None:
    text = "".join(random.choices(string.ascii_lowercase, k=12))
    [first] = await streamed(stub, embed(text, cache="READ_WRITE"))
    assert not first.response.receipt.result_hit
    async for receipt in _until_hit(stub, [text]):
        assert receipt.result_hit
    [again] = await streamed(stub, embed(text, cache="READ_WRITE"))
    assert again.response.receipt.result_hit
    assert list(again.response.embeddings) == list(first.response.embeddings)


async def test_bad_requests_of_a_stream_fail_alone(stub: Stub) -> None:
    poisoned, good = embed([2, 5, 3], [2, POISON, 3]), [embed([2, 5 + place, 3]) for place in range(20)]
    responses = await streamed(stub, *(request for request, _, _ in WRONG), poisoned, *good)
    errors = [each.error for each in responses[: len(WRONG) + 1]]
    assert [(each.field, each.reason) for each in errors[:-1]] == [(field, reason) for _, field, reason in WRONG]
    assert errors[-1].code == grpc.StatusCode.INTERNAL.value[0]
    assert "inputs[1]" in errors[-1].message
    assert all(len(each.response.embeddings) == 1 for each in responses[len(WRONG) + 1 :])


async def test_the_clients_stream_returns_what_embed_returns(mesh: Mesh, folder: Path) -> None:
    tokens = AT_ONCE
    async with Client(mesh.gateways[0].address, deadline_s=60) as weft, weft.embed_stream() as stream:
        reply = await stream.embed(TEXTS, model="tiny-bert", cache="bypass")
        np.testing.assert_allclose(vectors(reply), reference(folder, *TEXTS), atol=2e-5)
        replies = await asyncio.gather(*(stream.embed([each], model="tiny-bert", cache="bypass") for each in tokens))
        expected = await weft.embed(tokens, model="tiny-bert", cache="bypass")
        np.testing.assert_allclose(np.concatenate([vectors(each) for each in replies]), vectors(expected), atol=2e-5)
        cut = EmbedSettings(model="tiny-bert", normalize=True, dimensions=8, prompt_name="query", truncate=True)
        own, call = [await embed(["fox " * 200], **cut) for embed in (stream.embed, weft.embed)]
        assert own.embeddings[0] == call.embeddings[0]
        assert own.receipt.prompt_tokens == CONTEXT


def vectors(reply: api.EmbedResponse) -> np.ndarray:
    """The vectors of a reply, one in a row."""
    return np.array([each.values for each in reply.embeddings])


async def test_what_an_embedder_does_not_do_is_refused_by_name(stub: Stub) -> None:
    calls: list[Any] = [
        stub.Complete(ask("x", model="tiny-bert")),
        stub.Complete(ask("x", model="classifier")),
        stub.Rank(api.RankRequest(query="a", documents=["b"], options=EMBEDDER)),
        stub.Classify(api.ClassifyRequest(inputs=[api.Input(text="a")], options=EMBEDDER)),
        stub.Embed(embed("a", options=api.EncodeOptions(model="reranker"))),
    ]
    for call in calls:
        with pytest.raises(aio.AioRpcError) as failed:
            await call
        assert from_rpc(failed.value).reason == "TASK_UNSUPPORTED"
    models = {model.name: model for model in (await stub.ListModels(api.ListModelsRequest())).models}
    embedder = models["tiny-bert"]
    assert (list(embedder.tasks), embedder.dimensions, set(embedder.prompts)) == (["embed"], 32, set(PROMPTS))
    assert list(models["reranker"].tasks) == ["rank"]
    assert list(models["classifier"].tasks) == ["classify"]
    assert list(models["classifier"].labels) == ["LABEL_0", "LABEL_1", "LABEL_2"]


@torch.inference_mode()
def scores(folder: Path, *texts: tuple[str, str | None]) -> torch.Tensor:
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder).eval(), make_tokenizer()
    rows = []
    for text in texts:
        each = tokenizer.encode(text[0], text[1])
        segments = torch.tensor([each.type_ids])
        rows.append(model(input_ids=torch.tensor([each.ids]), token_type_ids=segments).logits[0])
    return torch.stack(rows)


async def test_a_reranker_orders_documents(mesh: Mesh, tmp_path: Path) -> None:
    shares = scores(make_encoder(tmp_path, labels=1), *(("the fox", text) for text in TEXTS)).sigmoid()[:, 0].tolist()
    best = sorted(range(len(TEXTS)), key=lambda place: -shares[place])
    async with Client(mesh.gateways[0].address) as weft, httpx.AsyncClient(base_url=mesh.url()) as web:
        reply = await weft.rank("the fox", TEXTS, model="reranker")
        assert [each.index for each in reply.results] == best
        assert [each.score for each in reply.results] == pytest.approx([shares[place] for place in best], abs=1e-5)
        body = {"model": "reranker", "query": "the fox", "documents": TEXTS, "top_n": 2, "return_documents": True}
        results = (await web.post("/v1/rerank", json=body)).json()["results"]
        assert [each["index"] for each in results] == best[:2]
        assert results[0]["document"] == {"text": TEXTS[best[0]]}


async def test_a_classifier_scores_labels(mesh: Mesh, tmp_path: Path) -> None:
    shares = scores(make_encoder(tmp_path, labels=3), *((text, None) for text in TEXTS)).softmax(1)
    async with Client(mesh.gateways[0].address) as weft:
        reply = await weft.classify(TEXTS, model="classifier")
    for each, expected in zip(reply.results, shares.tolist(), strict=True):
        found = {label.label: label.score for label in each.labels}
        assert [found[f"LABEL_{label}"] for label in range(3)] == pytest.approx(expected, abs=1e-5)
        assert [label.score for label in each.labels] == sorted(found.values(), reverse=True)


async def test_openais_client_embeds(mesh: Mesh, folder: Path) -> None:
    own = reference(folder, *TEXTS)
    async with openai.AsyncOpenAI(base_url=f"{mesh.url()}/v1", api_key="none", max_retries=0) as ai:
        create: Any = ai.embeddings.create
        for form in ("float", "base64"):
            reply = await create(model="tiny-bert", input=list(TEXTS), encoding_format=form)
            found = [each.embedding for each in reply.data]
            if form == "base64":
                found = [np.frombuffer(base64.b64decode(each), "<f4") for each in found]
            np.testing.assert_allclose(np.array(found), own, atol=2e-5)
            assert reply.usage.total_tokens == sum(len(make_tokenizer().encode(text).ids) for text in TEXTS)
        reply = await create(model="tiny-bert", input=make_tokenizer().encode(TEXTS[0]).ids)
        np.testing.assert_allclose(np.array([reply.data[0].embedding]), own[:1], atol=2e-5)
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"dimensions": 9}, "dimensions"),
            ({"user": "me"}, "user"),
            ({"input": ["a", ""]}, "input[1].text"),
            ({"input": [[2, "x"]]}, "input[0]"),
        ]
        for fields, param in wrong:
            with pytest.raises(openai.BadRequestError) as refused:
                await create(**{"model": "tiny-bert", "input": "a", **fields})
            assert refused.value.param == param


async def test_the_command_embeds(mesh: Mesh, folder: Path) -> None:
    command = [sys.executable, "-c", "from weft.main import main; main()", "embed", *TEXTS[:2], "--model", "tiny-bert"]
    process = await asyncio.create_subprocess_exec(
        *command, "--address", mesh.gateways[0].address, stdout=asyncio.subprocess.PIPE
    )
    written, _ = await process.communicate()
    lines = [json.loads(line) for line in written.splitlines()]
    np.testing.assert_allclose(np.array(lines), reference(folder, *TEXTS[:2]), atol=2e-5)


async def test_a_deadline_ends_a_request(stub: Stub) -> None:
    with pytest.raises(aio.AioRpcError) as failed:
        await stub.Embed(embed(*[[2, 5, 3]] * 500), timeout=0.001)
    assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_killed_worker_loses_no_text(mesh: Mesh, stub: Stub) -> None:
    """It always has calls: each client asks again until the worker is gone."""
    await mesh.revive()
    answered, killed, busy = 0, False, asyncio.Event()

    async def ask_on(place: int) -> None:
        nonlocal answered
        last = False
        while not last:
            last = killed
            reply = await stub.Embed(embed(*[[2, 5 + place, 6 + part, 3] for part in range(12)]))
            assert len(reply.embeddings) == 12
            answered += 1
            if answered > 32:
                busy.set()

    async with asyncio.TaskGroup() as clients:
        for place in range(16):
            clients.create_task(ask_on(place))
        await busy.wait()
        mesh.workers[0].kill()
        killed = True
    mesh.workers[0].start()
    await mesh.workers[0].ready()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_a_gateway_that_restarts_loses_no_request_of_the_clients_stream(mesh: Mesh, how: signal.Signals) -> None:
    await mesh.revive()
    gateway, begun, restarted = mesh.gateways[0], asyncio.Event(), asyncio.Event()
    replies: list[list[tuple[list[int], np.ndarray]]] = [[] for _ in range(20)]

    async def embed_on(place: int) -> None:
        """Embeds one text after another until one is answered by the new gateway."""
        last = False
        while not last:
            last, text = restarted.is_set(), [2, 5 + place, 6 + len(replies[place]) % 40, 3]
            reply = await stream.embed([text], model="tiny-bert", cache="bypass")
            replies[place].append((text, vectors(reply)[0]))
            if min(map(len, replies)) >= 3:
                begun.set()

    async with Client(gateway.address, deadline_s=60, retries=1000) as weft, weft.embed_stream() as stream:
        async with asyncio.TaskGroup() as embedding:
            for place in range(len(replies)):
                embedding.create_task(embed_on(place))
            await begun.wait()
            await asyncio.to_thread(gateway.kill, how)
            gateway.start()
            await gateway.ready()
            restarted.set()
        received = [each for of_one in replies for each in of_one]
        expected = [await weft.embed([text], model="tiny-bert") for text, _ in received[::10]]
    for (_, own), reply in zip(received[::10], expected, strict=True):
        np.testing.assert_allclose(own, vectors(reply)[0], atol=2e-5)
