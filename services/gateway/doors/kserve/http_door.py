"""The HTTP form of the Open Inference Protocol, /v2: makes Calls of its requests, and sends their outcome as JSON.

Knows HTTP exchanges. `json_form` knows the JSON, and the other files what both forms share.
"""

import orjson
from grpc import StatusCode

from protos import inference_pb2 as api
from protos import kserve_pb2 as kserve
from services.errors import WeftError, invalid
from services.gateway.access.authorizer import Authorizer
from services.gateway.answers.call import Call, Deliver, Part
from services.gateway.answers.collect import Collector
from services.gateway.answers.serve import AnswerService
from services.gateway.doors.http import Exchange
from services.gateway.doors.http_routes import HttpRoutes
from services.gateway.doors.kserve import answers, json_form
from services.gateway.doors.kserve import requests as messages
from services.gateway.doors.kserve.door import KServeModels
from services.gateway.doors.kserve.requests import Asked

_MODEL = "/v2/models/{model}"
_SIZE = "inference-header-content-length"
_BINARY = (b"content-type", b"application/octet-stream")


class KServeHttpDoor:
    """Serves the paths of the protocol."""

    def __init__(self, service: AnswerService, access: Authorizer, models: KServeModels) -> None:
        self._service = service
        self._access = access
        self._models = models

    def add_to(self, routes: HttpRoutes) -> None:
        """Adds the door's routes, whose errors have Triton's form."""
        routes.form("/v2", json_form.error)
        routes.add("GET", "/v2", self.server)
        routes.add("GET", "/v2/health/live", self.live)
        routes.add("GET", "/v2/health/ready", self.ready)
        routes.add("POST", "/v2/repository/index", self.index)
        for base in (_MODEL, f"{_MODEL}/versions/{{version}}"):
            routes.add("GET", base, self.metadata)
            routes.add("GET", f"{base}/ready", self.model_ready)
            routes.add("GET", f"{base}/config", self.config)
            routes.add("POST", f"{base}/infer", self.infer, answers=True)
            routes.add("POST", f"{base}/generate", self.generate, answers=True)
            routes.add("POST", f"{base}/generate_stream", self.generate_stream, answers=True)

    async def live(self, exchange: Exchange) -> None:
        """The process runs. Needs no key."""
        await exchange.reply({"live": True})

    async def ready(self, exchange: Exchange) -> None:
        """Status 200 if a model is served, else 503. Needs no key."""
        await exchange.reply({"ready": self._models.available}, 200 if self._models.available else 503)

    async def server(self, exchange: Exchange) -> None:
        """Name, version and extensions of the server."""
        self._access.permit("ListModels", exchange.credentials)
        await exchange.reply(json_form.described(self._models.server()))

    async def index(self, exchange: Exchange) -> None:
        """The models that are served or being loaded."""
        self._access.permit("ListModels", exchange.credentials)
        ready = json_form.parse_index(_parsed(await exchange.body() or b"{}"))
        found = answers.index(await self._models.list(exchange.credentials), ready)
        await exchange.reply([json_form.described(model) for model in found.models])

    async def metadata(self, exchange: Exchange) -> None:
        """The tensors of a model."""
        await exchange.reply(json_form.described(answers.metadata(await self._find(exchange))))

    async def config(self, exchange: Exchange) -> None:
        """The configuration of a model."""
        await exchange.reply(json_form.described(answers.config(await self._find(exchange)).config))

    async def model_ready(self, exchange: Exchange) -> None:
        """Status 200 if the model is served, else 404."""
        model, version = _named(exchange)
        ready = await self._models.ready(model, version, exchange.credentials)
        await exchange.reply({"name": model, "ready": ready}, 200 if ready else 404)

    async def infer(self, exchange: Exchange) -> None:
        """Answers one request as a whole; its tensors may be bytes behind the JSON."""
        self._access.permit("Complete", exchange.credentials)  # Before the body is read.
        body = await exchange.body()
        size = json_form.header_size(exchange.headers.get(_SIZE), len(body))
        asked, is_binary = json_form.parse(_parsed(body[:size]), *_named(exchange), body[size:])
        asked.raw = is_binary
        head, rest = json_form.response(await self._whole(exchange, asked))
        if not rest:
            await exchange.reply(head)
            return
        data = orjson.dumps(head)
        await exchange.send(data + rest, 200, [_BINARY, (_SIZE.encode(), b"%d" % len(data))])

    async def generate(self, exchange: Exchange) -> None:
        """Answers one request as a whole, in the form of Triton's `generate` extension."""
        self._access.permit("Complete", exchange.credentials)
        asked = json_form.parse_generate(_parsed(await exchange.body()), *_named(exchange))
        await exchange.reply(json_form.generated(await self._whole(exchange, asked)))

    async def generate_stream(self, exchange: Exchange) -> None:
        """The same as server-sent events, one for each part of the answer."""
        self._access.permit("Generate", exchange.credentials)
        asked = json_form.parse_generate(_parsed(await exchange.body()), *_named(exchange))
        replies = answers.Replies(asked, lambda: self._models.only(exchange.credentials))

        async def deliver(part: Part) -> None:
            reply = replies.reply(part)
            if reply is not None:
                event = json_form.generated(reply.infer_response)
                await exchange.write(b"data: " + orjson.dumps(event) + b"\n\n")

        if asked.stream is False:
            event = json_form.generated(await self._whole(exchange, asked, "Generate"))
            await exchange.write(b"data: " + orjson.dumps(event) + b"\n\n")
        else:
            await self._serve(exchange, "Generate", asked, deliver)
        await exchange.end()

    async def _whole(self, exchange: Exchange, asked: Asked, method: str = "Complete") -> kserve.ModelInferResponse:
        if asked.stream and method == "Complete":
            raise invalid(asked.param("stream"), "only generate_stream streams", "UNSUPPORTED_FIELD")
        collector = Collector()
        await self._serve(exchange, method, asked, collector.add, whole=True)
        return answers.Replies(asked, lambda: self._models.only(exchange.credentials)).whole(collector.response)

    async def _serve(
        self, exchange: Exchange, method: str, asked: Asked, deliver: Deliver, *, whole: bool = False
    ) -> None:
        call = Call(
            method=method,
            protocol="http",
            request=asked.request,
            credentials=exchange.credentials,
            deliver=deliver,
            finish=_ignore,
            whole=whole,
            remaining_s=messages.sooner(asked.timeout_s, exchange.remaining_s),
            traceparent=exchange.headers.get("traceparent", ""),
        )
        try:
            await exchange.run(self._service.serve(call))
        except WeftError as error:
            raise messages.renamed(error, asked) from None

    async def _find(self, exchange: Exchange) -> api.Model:
        return await self._models.find(*_named(exchange), exchange.credentials)


def _named(exchange: Exchange) -> tuple[str, str]:
    """Model and version of the path."""
    return str(exchange.path_params["model"]), str(exchange.path_params.get("version", ""))


def _parsed(body: bytes) -> json_form.Json:
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        parsed = None
    if not isinstance(parsed, dict):
        raise WeftError(StatusCode.INVALID_ARGUMENT, "MALFORMED_JSON", "the body is not a JSON object in UTF-8")
    return parsed


def _ignore(receipt: api.Receipt) -> None:
    """Receipts are in traces and metrics alone."""
