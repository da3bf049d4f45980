"""Calls of a gRPC server before their handler begins: what a gate sees and refuses; and calls that end unusually."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc import aio

from protos import inference_pb2 as api
from protos.inference_pb2_grpc import InferenceStub, add_InferenceServicer_to_server
from services import rpc
from services.calls.server import Gate, Metadata
from tests.gateway.fakes import until
from tests.gateway.test_refusals import reason_of

COMPLETE = "/weft.v1.Inference/Complete"


class Full(grpc.Status):
    """A refusal."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    details = "full"
    trailing_metadata = (("reason", "FULL"),)


class Servicer:
    """Answers ListModels, never ends Complete, and fails in Tokenize."""

    def __init__(self) -> None:
        self.began, self.cancelled = 0, 0

    async def ListModels(self, request: api.ListModelsRequest, context: Any) -> api.ListModelsResponse:
        """Answers."""
        return api.ListModelsResponse(models=[api.Model(name="fox")])

    async def Complete(self, request: api.GenerateRequest, context: Any) -> api.CompleteResponse:
        """Waits until it is cancelled."""
        self.began += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled += 1
        raise AssertionError

    async def Tokenize(self, request: api.TokenizeRequest, context: Any) -> api.TokenizeResponse:
        """Fails."""
        raise KeyError("secret")

    def __getattr__(self, name: str) -> Any:
        """The other methods, which nothing calls."""


class Gated:
    """A server with a gate, and its client."""

    def __init__(self, servicer: Servicer, server: rpc.Server, channel: aio.Channel) -> None:
        self.servicer, self.server, self.channel = servicer, server, channel
        self.stub: Any = InferenceStub(channel)

    @classmethod
    async def with_gate(cls, gate: Gate) -> "Gated":
        """Serves."""
        servicer = Servicer()
        service = rpc.Service("weft.v1.Inference", add_InferenceServicer_to_server, servicer)
        server = await rpc.serve("127.0.0.1:0", [service], gate=gate)
        return cls(servicer, server, aio.insecure_channel(f"127.0.0.1:{server.port}"))


class Doorkeeper:
    """A gate that refuses calls of one method."""

    def __init__(self) -> None:
        self.refuses, self.seen = "", list[tuple[str, Metadata]]()

    def __call__(self, method: str, metadata: Metadata) -> grpc.Status | None:
        """Notes the call. Fails if it is to."""
        self.seen.append((method, metadata))
        if self.refuses == "fail":
            raise LookupError(method)
        return Full() if method == self.refuses else None


@pytest.fixture
def keeper() -> Doorkeeper:
    """The gate."""
    return Doorkeeper()


@pytest.fixture
async def gated(keeper: Doorkeeper) -> AsyncIterator[Gated]:
    """A server with it."""
    made = await Gated.with_gate(keeper)
    yield made
    await made.channel.close()
    await made.server.stop(0)


async def test_a_gate_sees_method_and_metadata_and_what_it_refuses_has_its_status(
    gated: Gated, keeper: Doorkeeper
) -> None:
    keeper.refuses = COMPLETE
    with pytest.raises(aio.AioRpcError) as refused:
        await gated.stub.Complete(api.GenerateRequest(), metadata=(("authorization", "Bearer key"),))
    assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    assert ("reason", "FULL") in tuple(refused.value.trailing_metadata() or ())
    assert gated.servicer.began == 0
    assert [model.name for model in (await gated.stub.ListModels(api.ListModelsRequest())).models] == ["fox"]
    [(method, metadata), (other, _)] = keeper.seen
    assert (method, other) == (COMPLETE, "/weft.v1.Inference/ListModels")
    assert ("authorization", "Bearer key") in metadata


async def test_a_streaming_call_is_refused_before_it_sends_anything(gated: Gated, keeper: Doorkeeper) -> None:
    keeper.refuses = COMPLETE
    silent: Any = gated.channel.stream_stream(COMPLETE)()
    assert await asyncio.wait_for(silent.code(), 30) is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_refusals_leave_nothing_to_the_garbage_collector(gated: Gated, keeper: Doorkeeper) -> None:
    keeper.refuses = COMPLETE
    counts = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            calls = (gated.stub.Complete(api.GenerateRequest()) for _ in range(500))
            await asyncio.gather(*calls, return_exceptions=True)
            await until(lambda: len(asyncio.all_tasks()) < 10)
            counts.append(sum(type(each).__name__ == "RPCState" for each in gc.get_objects()))
    finally:
        gc.enable()
    assert 0 < counts[0] == counts[1]
    assert len(keeper.seen) == 1000


async def test_a_client_that_goes_cancels_its_call_and_further_calls_are_answered(gated: Gated) -> None:
    calls = [gated.stub.Complete(api.GenerateRequest()) for _ in range(20)]
    await until(lambda: gated.servicer.began == 20)
    for call in calls:
        call.cancel()
    await until(lambda: gated.servicer.cancelled == 20)
    assert await gated.stub.ListModels(api.ListModelsRequest())


async def test_calls_that_their_client_cancels_at_once_break_nothing(gated: Gated, keeper: Doorkeeper) -> None:
    keeper.refuses = COMPLETE
    for _ in range(50):
        calls = [gated.stub.Complete(api.GenerateRequest()) for _ in range(8)]
        await asyncio.sleep(0)
        for call in calls:
            call.cancel()
    assert await gated.stub.ListModels(api.ListModelsRequest())


async def test_a_handler_that_fails_is_an_internal_error_and_an_unknown_method_unimplemented(gated: Gated) -> None:
    with pytest.raises(aio.AioRpcError) as failed:
        await gated.stub.Tokenize(api.TokenizeRequest())
    assert (failed.value.code(), failed.value.details()) == (grpc.StatusCode.INTERNAL, "internal error")
    unknown: Any = gated.channel.unary_unary("/weft.v1.Inference/Nothing")
    for _ in range(3):
        with pytest.raises(aio.AioRpcError) as missing:
            await unknown(b"")
        assert missing.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_gate_that_fails_costs_its_calls_alone(gated: Gated, keeper: Doorkeeper) -> None:
    for keeper.refuses, code in [("fail", grpc.StatusCode.INTERNAL), (COMPLETE, grpc.StatusCode.RESOURCE_EXHAUSTED)]:
        for _ in range(20):  # More than a method has requests for calls.
            with pytest.raises(aio.AioRpcError) as refused:
                await gated.stub.Complete(api.GenerateRequest())
            assert refused.value.code() is code
            assert COMPLETE not in str(refused.value.details())


async def test_a_call_that_reaches_a_server_which_stops_is_refused_with_a_reason(gated: Gated) -> None:
    inner(gated.server)._closing = True
    with pytest.raises(aio.AioRpcError) as refused:
        await gated.stub.ListModels(api.ListModelsRequest())
    inner(gated.server)._closing = False
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert reason_of(refused.value) == "SHUTTING_DOWN"


async def test_a_server_that_has_stopped_is_no_longer_referred_to(keeper: Doorkeeper) -> None:
    made = await Gated.with_gate(keeper)
    await made.stub.ListModels(api.ListModelsRequest())
    await made.channel.close()
    await made.server.stop(0)
    server = weakref.ref(inner(made.server))
    del made
    gc.collect()
    assert server() is None


def inner(server: rpc.Server) -> Any:
    """gRPC's own server."""
    outer: Any = server._server
    return outer._server
