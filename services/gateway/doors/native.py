"""The gRPC service weft.v1.Inference: translates its calls to Calls and their outcome back. Knows only gRPC contexts.

The receipt is also sent in the trailing metadata; the initial metadata is sent once a worker has accepted the request.
"""

from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from functools import partial
from typing import Any, TypeAlias

from grpc import aio

from protos import inference_pb2 as api
from services import telemetry, validate
from services.errors import WeftError, internal
from services.gateway.answers.call import Accept, Call, Deliver, Part
from services.gateway.answers.collect import Collector
from services.gateway.answers.encoding.call import EncodeCall, Request
from services.gateway.answers.encoding.serve import EncodeService
from services.gateway.answers.serve import AnswerService
from services.gateway.doors.grpc_gate import RECEIPT_KEY, credentials_of
from services.gateway.doors.request_stream import RequestStream, StreamLimits

Context: TypeAlias = aio.ServicerContext[Any, Any]


class InferenceService:
    """Serves weft.v1.Inference."""

    def __init__(self, answers: AnswerService, encoding: EncodeService, streams: StreamLimits) -> None:
        """`streams`: what holds for streams of requests."""
        self._answers = answers
        self._encoding = encoding
        self._streams = streams

    async def Generate(self, request: api.GenerateRequest, context: Context) -> None:
        """Streams the answer, and last the receipt."""
        write, accept = context.write, partial(context.send_initial_metadata, ())
        await self._answers.serve(_call("Generate", request, context, lambda part: write(_message(part)), accept))

    async def Complete(self, request: api.GenerateRequest, context: Context) -> api.CompleteResponse:
        """Returns the whole answer."""
        collector = Collector()
        await self._answers.serve(_call("Complete", request, context, collector.add))
        return collector.response

    async def Tokenize(self, request: api.TokenizeRequest, context: Context) -> api.TokenizeResponse:
        """Converts text or chat to token ids."""
        return await self._answers.tokenize(request, credentials_of(context.invocation_metadata()))

    async def ListModels(self, request: api.ListModelsRequest, context: Context) -> api.ListModelsResponse:
        """Lists the models that are served, and those that are being loaded."""
        return await self._answers.list_models(request, credentials_of(context.invocation_metadata()))

    async def WatchMesh(self, request: api.WatchMeshRequest, context: Context) -> None:
        """Streams snapshots of the mesh."""
        credentials = credentials_of(context.invocation_metadata())
        async with aclosing(self._answers.watch_mesh(request, credentials)) as snapshots:
            async for snapshot in snapshots:
                await context.write(snapshot)

    async def Embed(self, request: api.EmbedRequest, context: Context) -> api.EmbedResponse:
        """Returns a vector for each input."""
        return await self._encoding.embed(_encode_call("Embed", request, context))

    async def EmbedStream(self, requests: AsyncIterator[api.EmbedStreamRequest], context: Context) -> None:
        """Answers the requests of a stream, each when its vectors are there. An error ends its request alone."""
        stream = RequestStream(context, self._streams)
        await stream.run(requests, _EmbedStream(self._encoding, stream).answer)

    async def Rank(self, request: api.RankRequest, context: Context) -> api.RankResponse:
        """Orders documents by how well they belong to a query."""
        return await self._encoding.rank(_encode_call("Rank", request, context))

    async def Classify(self, request: api.ClassifyRequest, context: Context) -> api.ClassifyResponse:
        """Scores the labels of each input."""
        return await self._encoding.classify(_encode_call("Classify", request, context))


class _EmbedStream:
    """The requests of one call of EmbedStream."""

    def __init__(self, encoding: EncodeService, stream: RequestStream) -> None:
        self._encoding = encoding
        self._stream = stream
        self._traceparent = _traceparent(stream.context.invocation_metadata() or ())

    async def answer(self, request: api.EmbedStreamRequest) -> None:
        """Writes the response to one of them."""
        refused = self._stream.refusal()
        response = _failed(refused) if refused is not None else await self._response(request)
        response.number = request.number
        await self._stream.write(response)

    async def _response(self, request: api.EmbedStreamRequest) -> api.EmbedStreamResponse:
        """What a call of Embed returns, or the error with which it fails."""
        receipts: list[api.Receipt] = []
        call = EncodeCall(
            method="Embed",
            protocol="grpc",
            request=request.request,
            credentials=self._stream.credentials,
            finish=receipts.append,
            remaining_s=self._stream.context.time_remaining(),
            traceparent=request.traceparent or self._traceparent,
        )
        try:
            validate.check_known(request, "request")
            return api.EmbedStreamResponse(response=await self._encoding.embed(call))
        except WeftError as error:
            return _failed(error, *receipts)
        except Exception as error:
            telemetry.log_exception("unexpected exception in a request of a stream", error)
            return _failed(internal(), *receipts)


def _failed(error: WeftError, receipt: api.Receipt | None = None) -> api.EmbedStreamResponse:
    """The response to a request that failed."""
    described = api.RequestError(
        code=error.code.value[0],
        reason=error.reason,
        message=error.message,
        field=error.field,
        retry_after_s=error.retry_after_s,
        receipt=receipt,
    )
    return api.EmbedStreamResponse(error=described)


def _encode_call(method: str, request: Request, context: Context) -> EncodeCall[Request]:
    metadata = tuple(context.invocation_metadata() or ())
    return EncodeCall(
        method=method,
        protocol="grpc",
        request=request,
        credentials=credentials_of(metadata),
        finish=partial(_send_receipt, context),
        remaining_s=context.time_remaining(),
        traceparent=_traceparent(metadata),
    )


def _call(
    method: str, request: api.GenerateRequest, context: Context, deliver: Deliver, accept: Accept | None = None
) -> Call:
    metadata = context.invocation_metadata() or ()
    return Call(
        method=method,
        protocol="grpc",
        request=request,
        credentials=credentials_of(metadata),
        remaining_s=context.time_remaining(),
        traceparent=_traceparent(metadata),
        deliver=deliver,
        whole=method == "Complete",
        finish=partial(_send_receipt, context),
        accept=accept,
    )


def _traceparent(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The W3C trace context of a call's metadata; empty: none."""
    return next((str(value) for key, value in metadata if key == "traceparent"), "")


def _send_receipt(context: Context, receipt: api.Receipt) -> None:
    context.set_trailing_metadata(((RECEIPT_KEY, receipt.SerializeToString()),))


def _message(part: Part) -> api.GenerateResponse:
    """The part as a message of weft.v1."""
    if isinstance(part, api.Receipt):
        return api.GenerateResponse(receipt=part)
    if isinstance(part, api.PromptEcho):
        return api.GenerateResponse(prompt=part)
    response = api.GenerateResponse()
    delta = response.delta  # Filled in place: the constructor would copy it.
    delta.index, delta.position, delta.attempt = part.index, part.position, part.attempt
    delta.token_ids.extend(part.token_ids)
    delta.text = part.text
    if part.logprobs:
        delta.logprobs.extend(part.logprobs)
    if part.tool_calls:
        delta.tool_calls.extend(part.tool_calls)
    if part.finish_reason:
        delta.finish_reason = part.finish_reason
        if part.stop_string is not None:
            delta.stop_string = part.stop_string
        elif part.stop_token_id is not None:
            delta.stop_token_id = part.stop_token_id
    if part.waiting:
        delta.waiting = True
    return response
