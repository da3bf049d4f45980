"""The gRPC service inference.GRPCInferenceService (KServe's Open Inference Protocol): makes Calls of its requests.

Knows gRPC contexts. `requests` and `answers` know the messages.
"""

import importlib.metadata
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

from grpc import StatusCode, aio

from protos import inference_pb2 as api
from protos import kserve_pb2 as kserve
from services import telemetry, validate
from services.errors import WeftError, internal
from services.gateway.access.authorizer import Authorizer, Credentials
from services.gateway.answers.call import Call, Deliver, Finish, Part
from services.gateway.answers.collect import Collector
from services.gateway.answers.serve import AnswerService
from services.gateway.doors.grpc_gate import RECEIPT_KEY, credentials_of
from services.gateway.doors.kserve import answers
from services.gateway.doors.kserve import requests as messages
from services.gateway.doors.kserve.requests import Asked
from services.gateway.doors.request_stream import RequestStream, StreamLimits
from services.gateway.links.catalog import Catalog

Context: TypeAlias = aio.ServicerContext[Any, Any]
NAME = "inference.GRPCInferenceService"
EXTENSIONS = ("model_configuration", "model_repository", "parameters", "binary_tensor_data", "generate")


class KServeModels:
    """The protocol's metadata of models and the server, for gRPC and HTTP."""

    def __init__(self, service: AnswerService, access: Authorizer, catalog: Catalog) -> None:
        self._service = service
        self._access = access
        self._catalog = catalog

    @property
    def available(self) -> bool:
        """At least one model is served."""
        return self._catalog.available

    def server(self) -> kserve.ServerMetadataResponse:
        """Name, version and extensions of the server."""
        return kserve.ServerMetadataResponse(name="weft", version=_version(), extensions=EXTENSIONS)

    async def list(self, credentials: Credentials) -> "list[api.Model]":
        """The models that a tenant may use. Raises WeftError."""
        return list((await self._service.list_models(api.ListModelsRequest(), credentials)).models)

    async def ready(self, name: str, version: str, credentials: Credentials) -> bool:
        """Whether a model is served. Raises WeftError."""
        models = await self.list(credentials)
        known = version in ("", messages.VERSION)
        return known and any(model.workers and name in (model.name, *model.aliases) for model in models)

    async def find(self, name: str, version: str, credentials: Credentials) -> api.Model:
        """A model that is served. Raises WeftError."""
        models = await self.list(credentials)  # First: it also checks the credentials.
        messages.check_version(version)
        for model in models:
            if model.workers and name in (model.name, *model.aliases):
                return model
        raise WeftError(StatusCode.NOT_FOUND, "MODEL_NOT_FOUND", "name: no model of this name is served", field="name")

    def only(self, credentials: Credentials) -> str:
        """The name of the model that a request without a name means; empty if models have changed since."""
        try:
            return self._catalog.find("", self._access.tenant(credentials)).card.name
        except WeftError:
            return ""


class KServeService:
    """Serves inference.GRPCInferenceService."""

    def __init__(self, service: AnswerService, models: KServeModels, streams: StreamLimits) -> None:
        """`streams`: what holds for streams of requests."""
        self._service = service
        self._models = models
        self._streams = streams

    async def ServerLive(self, request: kserve.ServerLiveRequest, context: Context) -> kserve.ServerLiveResponse:
        """The process runs."""
        return kserve.ServerLiveResponse(live=True)

    async def ServerReady(self, request: kserve.ServerReadyRequest, context: Context) -> kserve.ServerReadyResponse:
        """Whether at least one model is served."""
        return kserve.ServerReadyResponse(ready=self._models.available)

    async def ModelReady(self, request: kserve.ModelReadyRequest, context: Context) -> kserve.ModelReadyResponse:
        """Whether a model is served."""
        validate.check_known(request, "request")
        ready = await self._models.ready(request.name, request.version, _credentials(context))
        return kserve.ModelReadyResponse(ready=ready)

    async def ServerMetadata(
        self, request: kserve.ServerMetadataRequest, context: Context
    ) -> kserve.ServerMetadataResponse:
        """Name, version and extensions of the server."""
        return self._models.server()

    async def ModelMetadata(
        self, request: kserve.ModelMetadataRequest, context: Context
    ) -> kserve.ModelMetadataResponse:
        """The tensors of a model."""
        validate.check_known(request, "request")
        return answers.metadata(await self._models.find(request.name, request.version, _credentials(context)))

    async def ModelConfig(self, request: kserve.ModelConfigRequest, context: Context) -> kserve.ModelConfigResponse:
        """The configuration of a model."""
        validate.check_known(request, "request")
        return answers.config(await self._models.find(request.name, request.version, _credentials(context)))

    async def RepositoryIndex(
        self, request: kserve.RepositoryIndexRequest, context: Context
    ) -> kserve.RepositoryIndexResponse:
        """The models that are served or being loaded."""
        validate.check_known(request, "request")
        _refuse_repository(request.repository_name)
        return answers.index(await self._models.list(_credentials(context)), request.ready)

    async def RepositoryModelLoad(
        self, request: kserve.RepositoryModelLoadRequest, context: Context
    ) -> kserve.RepositoryModelLoadResponse:
        """Refused."""
        raise not_managed()

    async def RepositoryModelUnload(
        self, request: kserve.RepositoryModelUnloadRequest, context: Context
    ) -> kserve.RepositoryModelUnloadResponse:
        """Refused."""
        raise not_managed()

    async def ModelInfer(self, request: kserve.ModelInferRequest, context: Context) -> kserve.ModelInferResponse:
        """Answers one request as a whole."""
        asked = messages.parse(request)
        if asked.stream:
            raise messages.renamed(_only_streamed(), asked)
        collector = Collector()

        def finish(receipt: api.Receipt) -> None:
            context.set_trailing_metadata(((RECEIPT_KEY, receipt.SerializeToString()),))

        call = _call("Complete", asked, context, collector.add, finish, whole=True)
        try:
            await self._service.serve(call)
        except WeftError as error:
            raise messages.renamed(error, asked) from None
        return answers.Replies(asked, lambda: self._models.only(call.credentials)).whole(collector.response)

    async def ModelStreamInfer(self, requests: AsyncIterator[kserve.ModelInferRequest], context: Context) -> None:
        """Answers the requests of a stream, each as they come. An error ends its request alone."""
        errors_end = dict(context.invocation_metadata() or ()).get("triton_grpc_error") == "true"
        stream = RequestStream(context, self._streams)
        await stream.run(requests, _InferStream(self._service, self._models, stream, errors_end).answer)


class _InferStream:
    """The requests of one call of ModelStreamInfer."""

    def __init__(self, service: AnswerService, models: KServeModels, stream: RequestStream, errors_end: bool) -> None:
        """`errors_end`: the first error ends the call with its status, as callers may ask Triton."""
        self._service = service
        self._models = models
        self._stream = stream
        self._errors_end = errors_end

    async def answer(self, request: kserve.ModelInferRequest) -> None:
        """Answers one of them. Raises WeftError if it ends the call."""
        refused = self._stream.refusal()
        if refused is not None:
            await self._fail(request, None, refused)
            return
        asked: Asked | None = None
        try:
            asked = messages.parse(request)
            await (self._whole if asked.stream is False else self._parts)(asked)
        except WeftError as error:
            await self._fail(request, asked, error)
        except Exception as error:
            telemetry.log_exception("unexpected exception in a request of a stream", error)
            await self._stream.write(answers.failed(asked, request.id, internal()))

    async def _fail(self, request: kserve.ModelInferRequest, asked: Asked | None, error: WeftError) -> None:
        """Answers a request with its error. Raises WeftError if the error ends the call."""
        named = messages.renamed(error, asked)
        if self._errors_end or error.code is StatusCode.ABORTED:  # Of a caller that does not read.
            raise named from None
        await self._stream.write(answers.failed(asked, request.id, named))

    async def _parts(self, asked: Asked) -> None:
        replies = answers.Replies(asked, self._only_model)

        async def deliver(part: Part) -> None:
            reply = replies.reply(part)
            if reply is not None:
                await self._stream.write(reply)

        await self._service.serve(_call("Generate", asked, self._stream.context, deliver, _ignore))

    async def _whole(self, asked: Asked) -> None:
        collector = Collector()
        await self._service.serve(_call("Generate", asked, self._stream.context, collector.add, _ignore, whole=True))
        whole = answers.Replies(asked, self._only_model).whole(collector.response)
        whole.parameters[answers.FINAL].bool_param = True
        await self._stream.write(kserve.ModelStreamInferResponse(infer_response=whole))

    def _only_model(self) -> str:
        return self._models.only(self._stream.credentials)


def _version() -> str:
    """The version of Weft; empty if it runs from its source without being installed."""
    try:
        return importlib.metadata.version("weft")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _ignore(receipt: api.Receipt) -> None:
    """A stream has many requests and one trailing metadata: their receipts are in traces and metrics alone."""


def _credentials(context: Context) -> Credentials:
    return credentials_of(context.invocation_metadata())


def _call(
    method: str, asked: Asked, context: Context, deliver: Deliver, finish: Finish, *, whole: bool = False
) -> Call:
    metadata = tuple(context.invocation_metadata() or ())
    return Call(
        method=method,
        protocol="grpc",
        request=asked.request,
        credentials=credentials_of(metadata),
        deliver=deliver,
        finish=finish,
        whole=whole,
        remaining_s=messages.sooner(asked.timeout_s, context.time_remaining()),
        traceparent=str(dict(metadata).get("traceparent", "")),
    )


def _only_streamed() -> WeftError:
    return WeftError(
        StatusCode.INVALID_ARGUMENT, "UNSUPPORTED_FIELD", "stream: only ModelStreamInfer streams", field="stream"
    )


def _refuse_repository(name: str) -> None:
    if name:
        raise WeftError(
            StatusCode.NOT_FOUND,
            "REPOSITORY_NOT_FOUND",
            "repository_name: there is one repository, without a name",
            field="repository_name",
        )


def not_managed() -> WeftError:
    """Models are not loaded by request."""
    return WeftError(
        StatusCode.UNIMPLEMENTED, "NOT_MANAGED", "models are loaded when workers start: see `weft serve --model`"
    )
