"""Invalid requests are refused with the right status, a reason and a receipt; no prompt is logged, no process ends."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc import aio
from grpc_status import rpc_status

from protos import inference_pb2 as api
from tests.mesh.harness import Mesh, Stub, ask, generate, receipt_of

pytestmark = pytest.mark.asyncio(loop_scope="session")
Change = Callable[[api.GenerateRequest], object]

SECRET = "the moon is made of cheese"
INVALID = grpc.StatusCode.INVALID_ARGUMENT
NAN, INF = float("nan"), float("inf")


def sampling(**fields: object) -> Change:
    """A change to a request that sets sampling fields."""
    return lambda request: request.sampling.MergeFrom(api.Sampling(**fields))  # type: ignore[arg-type]


def prompt(value: api.Prompt) -> Change:
    """A change to a request that replaces its prompt."""
    return lambda request: request.prompt.CopyFrom(value)


CASES: dict[str, tuple[Change, grpc.StatusCode, str]] = {
    "no prompt": (lambda r: r.ClearField("prompt"), INVALID, "prompt"),
    "empty text": (prompt(api.Prompt(text="")), INVALID, "prompt.text"),
    "no ids": (prompt(api.Prompt(token_ids=api.TokenIds())), INVALID, "prompt.token_ids"),
    "no messages": (prompt(api.Prompt(chat=api.Chat())), INVALID, "prompt.chat.messages"),
    "id beyond the vocabulary": (
        prompt(api.Prompt(token_ids=api.TokenIds(ids=[1 << 30]))),
        INVALID,
        "prompt.token_ids",
    ),
    "prompt beyond the context": (
        prompt(api.Prompt(token_ids=api.TokenIds(ids=[5] * 5000))),
        INVALID,
        "prompt",
    ),
    "answer beyond the context": (sampling(max_tokens=1_000_000), INVALID, "prompt"),
    "max_tokens 0": (sampling(max_tokens=0), INVALID, "sampling.max_tokens"),
    "min over max": (sampling(min_tokens=100), INVALID, "sampling.min_tokens"),
    "temperature below 0": (sampling(temperature=-0.1), INVALID, "sampling.temperature"),
    "temperature NaN": (sampling(temperature=NAN), INVALID, "sampling.temperature"),
    "temperature Inf": (sampling(temperature=INF), INVALID, "sampling.temperature"),
    "top_p 0": (sampling(top_p=0.0), INVALID, "sampling.top_p"),
    "top_p over 1": (sampling(top_p=1.1), INVALID, "sampling.top_p"),
    "min_p over 1": (sampling(min_p=1.5), INVALID, "sampling.min_p"),
    "repetition 0": (sampling(repetition_penalty=0.0), INVALID, "sampling.repetition_penalty"),
    "presence over 2": (sampling(presence_penalty=2.5), INVALID, "sampling.presence_penalty"),
    "frequency NaN": (sampling(frequency_penalty=NAN), INVALID, "sampling.frequency_penalty"),
    "logprobs over 20": (sampling(logprobs=21), INVALID, "sampling.logprobs"),
    "too many stops": (sampling(stop=["x"] * 17), INVALID, "sampling.stop"),
    "empty stop": (sampling(stop=[""]), INVALID, "sampling.stop"),
    "stop token beyond the vocabulary": (sampling(stop_token_ids=[1 << 30]), INVALID, "sampling.stop_token_ids"),
    "bias beyond the vocabulary": (sampling(logit_bias={1 << 30: 1.0}), INVALID, "sampling.logit_bias"),
    "bias NaN": (sampling(logit_bias={5: NAN}), INVALID, "sampling.logit_bias"),
    "n over 16": (lambda r: setattr(r, "n", 17), INVALID, "n"),
    "speculation over 8": (lambda r: setattr(r, "speculation", 9), INVALID, "speculation"),
    "priority over 100": (lambda r: setattr(r, "priority", 101), INVALID, "priority"),
    "unknown policy": (lambda r: setattr(r, "cache", 99), INVALID, "cache"),
    "odd request id": (lambda r: setattr(r, "request_id", "a b"), INVALID, "request_id"),
    "request id without end": (lambda r: setattr(r, "request_id", "x" * 20_000), INVALID, "request_id"),
    "model without end": (lambda r: setattr(r, "model", "m" * 20_000), grpc.StatusCode.NOT_FOUND, "model"),
    "unknown model": (lambda r: setattr(r, "model", "no-such-model"), grpc.StatusCode.NOT_FOUND, "model"),
}


def details(error: aio.AioRpcError) -> tuple[error_details_pb2.ErrorInfo, list[str]]:
    """ErrorInfo and the fields named by BadRequest."""
    call: Any = error
    status = rpc_status.from_call(call)
    assert status is not None, "no rich status"
    info, fields = error_details_pb2.ErrorInfo(), []
    for detail in status.details:
        bad = error_details_pb2.BadRequest()
        if detail.Unpack(bad):
            fields += [violation.field for violation in bad.field_violations]
        detail.Unpack(info)
    return info, fields


@pytest.mark.parametrize("case", CASES)
async def test_impossible_values_are_refused_by_name(stub: Stub, case: str) -> None:
    change, code, field = CASES[case]
    request = ask(SECRET, max_tokens=8)
    change(request)
    with pytest.raises(aio.AioRpcError) as caught:
        await generate(stub, request)
    error = caught.value
    assert error.code() is code, error.details()
    info, fields = details(error)
    assert info.reason
    assert info.domain == "weft"
    assert fields == [field]
    assert SECRET not in f"{error.details()}{error.debug_error_string()}"
    receipt = receipt_of(error.trailing_metadata())
    assert receipt is not None
    assert receipt.finish_reason == api.FINISH_REASON_ERROR


async def test_unknown_fields_are_unimplemented(stub: Stub) -> None:
    raw = ask(SECRET).SerializeToString() + b"\xba\x3e\x03abc"  # field 999
    with pytest.raises(aio.AioRpcError) as caught:
        await generate(stub, api.GenerateRequest.FromString(raw))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "999" in (caught.value.details() or "")


@pytest.mark.parametrize("method", ["Generate", "Complete", "Tokenize"])
@pytest.mark.parametrize("body", [b"\xff\xff\xff\xff", b"\x0a\x02\xff\xfe", b"\x12\x80\x01", b"\x0a\x0a" * 200])
async def test_bytes_that_are_no_message_are_invalid(mesh: Mesh, method: str, body: bytes) -> None:
    async with aio.insecure_channel(mesh.gateways[0].address) as channel:
        kind: Any = channel.unary_stream if method == "Generate" else channel.unary_unary
        call = kind(f"/weft.v1.Inference/{method}")(body)
        with pytest.raises(aio.AioRpcError) as caught:
            await (call.read() if method == "Generate" else call)
        assert caught.value.code() is INVALID
        assert "Traceback" not in (caught.value.details() or "")


async def test_an_unknown_method_is_unimplemented(mesh: Mesh) -> None:
    async with aio.insecure_channel(mesh.gateways[0].address) as channel:
        dream: Any = channel.unary_unary("/weft.v1.Inference/Dream")
        with pytest.raises(aio.AioRpcError) as caught:
            await dream(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_message_over_one_mebibyte_is_refused(stub: Stub) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await generate(stub, ask("x" * (1 << 20)))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_the_mesh_still_answers_after_all_refusals(mesh: Mesh, stub: Stub) -> None:
    """After the tests above the same processes answer, and no log contains the prompt."""
    answer = await generate(stub, ask(SECRET, max_tokens=8))
    assert len(answer.ids) == 8
    for process in mesh.processes:
        assert process.popen is not None
        assert process.popen.poll() is None
        assert SECRET not in process.log.read_text()
