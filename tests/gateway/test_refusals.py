"""Refused requests: the right status, a reason, a receipt, and no part of the prompt."""

import gc
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc import aio
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_status import rpc_status

from protos import inference_pb2 as api
from services.errors import WeftError, exhausted
from services.gateway.links import adaptive_limit
from services.gateway.text.encoder import Encoder
from tests.gateway.fakes import FakeMesh, ask, generate, rejected, until
from tests.gateway.model import ANSWER, BUNDLE, make_card

SECRET = "hush: the moon is made of cheese"
CODES = grpc.StatusCode


def reason_of(error: aio.AioRpcError) -> str:
    """The reason in the ErrorInfo."""
    call: Any = error
    info = error_details_pb2.ErrorInfo()
    status = rpc_status.from_call(call)
    assert status is not None
    assert any(detail.Unpack(info) for detail in status.details)
    return str(info.reason)


def with_prompt(**fields: Any) -> api.GenerateRequest:
    """A request with this prompt."""
    return ask(prompt=api.Prompt(**fields))


BAD = [
    (api.GenerateRequest(), CODES.INVALID_ARGUMENT, "EMPTY_PROMPT"),
    (with_prompt(text=""), CODES.INVALID_ARGUMENT, "EMPTY_PROMPT"),
    (with_prompt(token_ids=api.TokenIds(ids=[10**6])), CODES.INVALID_ARGUMENT, "TOKEN_OUT_OF_RANGE"),
    (with_prompt(token_ids=api.TokenIds(ids=[5] * 500)), CODES.INVALID_ARGUMENT, "CONTEXT_EXCEEDED"),
    (ask(SECRET, max_tokens=10**6), CODES.INVALID_ARGUMENT, "CONTEXT_EXCEEDED"),
    (ask(SECRET, temperature=float("nan")), CODES.INVALID_ARGUMENT, "INVALID_FIELD"),
    (ask(SECRET, n=17), CODES.INVALID_ARGUMENT, "INVALID_FIELD"),
    (ask(SECRET, stop=[""]), CODES.INVALID_ARGUMENT, "INVALID_FIELD"),
    (ask(SECRET, structured=api.Structured()), CODES.INVALID_ARGUMENT, "INVALID_FIELD"),
    (ask(SECRET, request_id="not good"), CODES.INVALID_ARGUMENT, "INVALID_FIELD"),
    (ask(SECRET, model="unknown"), CODES.NOT_FOUND, "MODEL_NOT_FOUND"),
    (
        api.GenerateRequest.FromString(ask(SECRET).SerializeToString() + b"\xba\x3e\x03abc"),
        CODES.UNIMPLEMENTED,
        "UNKNOWN_FIELD",
    ),
]


async def test_a_refusal_has_a_reason_and_does_not_quote_the_prompt() -> None:
    async with FakeMesh() as mesh:
        for request, code, reason in BAD:
            answer = await generate(mesh.stub, request)
            assert answer.error is not None
            assert (answer.error.code(), reason_of(answer.error)) == (code, reason)
            assert "moon" not in (answer.error.details() or "")
            receipt = answer.trailing_receipt
            assert receipt.finish_reason == api.FINISH_REASON_ERROR
            assert len(receipt.trace_id) == 32
            assert receipt.timings.wall_s > 0
        assert not mesh.scheduler.submits
        assert (await generate(mesh.stub, ask())).ids() == ANSWER


async def test_bytes_that_are_not_a_message_are_invalid() -> None:
    async with FakeMesh() as mesh:
        for method in ("Complete", "Tokenize", "ListModels"):
            call: Any = mesh.channel.unary_unary(f"/weft.v1.Inference/{method}")
            with pytest.raises(aio.AioRpcError) as caught:
                await call(b"\xff\xff\xff")
            assert caught.value.code() is CODES.INVALID_ARGUMENT
        stream: Any = mesh.channel.unary_stream("/weft.v1.Inference/Generate")
        with pytest.raises(aio.AioRpcError) as caught:
            await stream(b"\x0a\x02\xff\xfe").read()
        assert caught.value.code() is CODES.INVALID_ARGUMENT


async def test_the_error_of_a_template_does_not_quote_the_chat() -> None:
    import hashlib

    from protos import mesh_pb2

    bundle = mesh_pb2.Bundle.FromString(BUNDLE)
    bundle.chat_template = "{{ raise_exception('no ' + messages[0].content) }}"
    data = bundle.SerializeToString(deterministic=True)
    chat = api.Chat(messages=[api.ChatMessage(role="user", content=SECRET)])
    async with FakeMesh(card=make_card(bundle_digest=hashlib.sha256(data).digest())) as mesh:
        mesh.workers[0].bundle = data
        answer = await generate(mesh.stub, with_prompt(chat=chat))
        assert answer.error is not None
        assert answer.error.code() is CODES.INVALID_ARGUMENT
        assert reason_of(answer.error) == "CHAT_TEMPLATE"
        assert "moon" not in (answer.error.details() or "")
        assert (await generate(mesh.stub, ask())).ids() == ANSWER


async def test_a_bundle_that_does_not_match_its_digest_is_not_used() -> None:
    async with FakeMesh(2) as mesh:
        mesh.workers[0].bundle = b"x" * len(BUNDLE)
        mesh.scheduler.serve_models(mesh.served())
        answer = await generate(mesh.stub, ask())
        assert answer.ids() == ANSWER  # The bundle of the other worker is intact.
    async with FakeMesh(1, card=make_card(bundle_digest=b"d" * 32)) as mesh:
        answer = await generate(mesh.stub, ask())
        assert answer.error is not None
        assert answer.error.code() is CODES.UNAVAILABLE
        assert reason_of(answer.error) == "NO_TOKENIZER"


async def test_a_model_without_workers_is_unavailable_not_unknown() -> None:
    async with FakeMesh() as mesh:
        await generate(mesh.stub, ask())
        mesh.scheduler.workers = []
        mesh.scheduler.serve_models([])
        answer = await generate(mesh.stub, ask(model="fake"))
        assert answer.error is not None
        assert answer.error.code() is CODES.UNAVAILABLE
        answer = await generate(mesh.stub, ask(model="never"))
        assert answer.error is not None
        assert answer.error.code() is CODES.NOT_FOUND


async def test_tokenize_refuses_like_generate() -> None:
    async with FakeMesh() as mesh:
        for request, code in [
            (api.TokenizeRequest(), CODES.INVALID_ARGUMENT),
            (api.TokenizeRequest(model="unknown", prompt=api.Prompt(text="a")), CODES.NOT_FOUND),
            (api.TokenizeRequest.FromString(b"\xba\x3e\x03abc"), CODES.UNIMPLEMENTED),
        ]:
            with pytest.raises(aio.AioRpcError) as caught:
                await mesh.stub.Tokenize(request)
            assert caught.value.code() is code


async def test_a_refused_call_leaves_neither_key_nor_request_in_memory(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text(f'[[tenant]]\nname = "someone"\nkeys = ["sha256:{"0" * 64}"]\n')
    async with FakeMesh(tenants_file=str(file)) as mesh:
        answer = await generate(mesh.stub, ask(SECRET), metadata=(("authorization", "Bearer weft-unknown"),))
        assert answer.error is not None
        assert reason_of(answer.error) == "KEY_UNKNOWN"
        health: Any = HealthStub(mesh.channel)
        await health.Check(HealthCheckRequest())  # gRPC keeps the last call of all.
        gc.collect()
        # A traceback would hold the key and the request. `isinstance` makes some objects warn.
        refusals = [each for each in gc.get_objects() if issubclass(type(each), WeftError)]
        assert "KEY_UNKNOWN" not in [refusal.reason for refusal in refusals]


async def test_while_the_queue_is_full_requests_are_refused_before_they_are_tokenized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenized: list[str] = []
    encode = Encoder.encode

    async def noted(*what: Any) -> Any:
        tokenized.append("")
        return await encode(*what)

    monkeypatch.setattr(Encoder, "encode", noted)
    monkeypatch.setattr(adaptive_limit, "_GROWTH_PER_S", 0.0)  # Time passes at any speed here.
    async with FakeMesh(cache=True, gateway_cache_budget_s=5.0) as mesh:
        stored = await generate(mesh.stub, ask())
        assert mesh.cache is not None
        await until(lambda: mesh.cache is not None and len(mesh.cache.results) == 1)
        full = exhausted("QUEUE_FULL", "no room", 0.5)
        mesh.scheduler.decide = lambda submit: rejected(submit, full)
        for _ in range(10):
            answer = await generate(mesh.stub, ask(cache=api.CACHE_POLICY_BYPASS))
            assert answer.error is not None
            assert (answer.error.code(), reason_of(answer.error)) == (CODES.RESOURCE_EXHAUSTED, "QUEUE_FULL")
            assert answer.trailing_receipt.timings.wall_s > 0
        assert len(tokenized) == 2
        again = await generate(mesh.stub, ask())  # A result that is in the cache needs no room.
        assert (again.ids(), again.receipt.result_hit) == (stored.ids(), True)
