"""OpenAI's HTTP API: makes Calls of its requests, and sends their outcome as JSON or server-sent events.

Knows HTTP exchanges. `openai_messages` knows the JSON.
"""

import os
import time

from grpc import StatusCode

from protos import inference_pb2 as api
from services.errors import WeftError, invalid
from services.gateway.access.authorizer import Authorizer
from services.gateway.answers.call import Call, Deliver, Finish
from services.gateway.answers.collect import Collector
from services.gateway.answers.serve import AnswerService
from services.gateway.doors import openai_messages as messages
from services.gateway.doors.http import Exchange, HttpRoutes
from services.gateway.links.catalog import Catalog

RECEIPT_HEADER = b"weft-receipt"
_REQUEST_ID_HEADER = b"x-request-id"


class OpenAIDoor:
    """Serves the paths of OpenAI's API."""

    def __init__(self, answers: AnswerService, access: Authorizer, catalog: Catalog) -> None:
        self._answers = answers
        self._access = access
        self._catalog = catalog
        self._started_at = int(time.time())

    def add_to(self, routes: HttpRoutes) -> None:
        """Adds the door's routes."""
        routes.add("POST", "/v1/chat/completions", self.chat)
        routes.add("POST", "/v1/completions", self.completions)
        routes.add("POST", "/v1/embeddings", self.embeddings)
        routes.add("GET", "/v1/models", self.models)
        routes.add("GET", "/v1/models/{name:path}", self.model)
        routes.add("POST", "/tokenize", self.tokenize)

    async def chat(self, exchange: Exchange) -> None:
        """Continues a conversation."""
        await self._generate(exchange, "chat")

    async def completions(self, exchange: Exchange) -> None:
        """Continues a text."""
        await self._generate(exchange, "completions")

    async def embeddings(self, exchange: Exchange) -> None:
        """Refused: no model embeds."""
        self._access.tenant(exchange.credentials)
        await exchange.json()
        raise invalid("model", "no model embeds", "EMBEDDINGS_UNSUPPORTED")

    async def models(self, exchange: Exchange) -> None:
        """Lists the models that are served."""
        reply = await self._answers.list_models(api.ListModelsRequest(), exchange.credentials)
        data = [messages.model_json(model, self._started_at) for model in reply.models if model.workers]
        await exchange.reply({"object": "list", "data": data})

    async def model(self, exchange: Exchange) -> None:
        """Describes the model of a name or alias."""
        name = str(exchange.path_params["name"])
        reply = await self._answers.list_models(api.ListModelsRequest(), exchange.credentials)
        for model in reply.models:
            if model.workers and name in (model.name, *model.aliases):
                await exchange.reply(messages.model_json(model, self._started_at))
                return
        raise WeftError(StatusCode.NOT_FOUND, "MODEL_NOT_FOUND", "no model of this name is served", field="model")

    async def tokenize(self, exchange: Exchange) -> None:
        """Converts a prompt or messages to token ids."""
        self._access.permit("Tokenize", exchange.credentials)
        asked, request = messages.parse_tokenize(await exchange.json())
        exchange.param = asked.param
        reply = await exchange.run(self._answers.tokenize(request, exchange.credentials))
        tokens = list(reply.token_ids)
        await exchange.reply({"count": len(tokens), "tokens": tokens, "token_strs": list(reply.pieces)})

    async def _generate(self, exchange: Exchange, kind: str) -> None:
        self._access.tenant(exchange.credentials)  # Before the body is read.
        asked = messages.parse(kind, await exchange.json())
        exchange.param = asked.param
        request = asked.request
        request_id = request.request_id or os.urandom(16).hex()
        request.request_id = request_id
        form = messages.Format(asked, request_id, int(time.time()), lambda: self._only_model(exchange))
        if request_id.isascii() and request_id.isprintable():
            exchange.extra.append((_REQUEST_ID_HEADER, request_id.encode()))
        await (self._stream if asked.stream else self._complete)(exchange, request, form)

    async def _stream(self, exchange: Exchange, request: api.GenerateRequest, form: messages.Format) -> None:
        async def deliver(response: api.GenerateResponse) -> None:
            if response.HasField("receipt"):
                await exchange.write(form.ending(response.receipt))
            elif event := form.event(response.delta):
                await exchange.write(event)

        def finish(receipt: api.Receipt) -> None:
            """Delivered already, unless the call failed before the stream began."""
            if not exchange.status:
                exchange.extra.append((RECEIPT_HEADER, messages.receipt_json(receipt)))

        await exchange.run(self._answers.serve(_call("Generate", exchange, request, deliver, finish)))
        await exchange.end()

    async def _complete(self, exchange: Exchange, request: api.GenerateRequest, form: messages.Format) -> None:
        def finish(receipt: api.Receipt) -> None:
            exchange.extra.append((RECEIPT_HEADER, messages.receipt_json(receipt)))

        collector = Collector()
        await exchange.run(self._answers.serve(_call("Complete", exchange, request, collector.add, finish)))
        await exchange.reply(form.whole(collector.response))

    def _only_model(self, exchange: Exchange) -> str:
        """The name of the model that a request without a name means; empty if models have changed since."""
        try:
            return self._catalog.find("", self._access.tenant(exchange.credentials)).card.name
        except WeftError:
            return ""


def _call(method: str, exchange: Exchange, request: api.GenerateRequest, deliver: Deliver, finish: Finish) -> Call:
    return Call(
        method=method,
        protocol="http",
        request=request,
        credentials=exchange.credentials,
        deliver=deliver,
        finish=finish,
        remaining_s=exchange.remaining_s,
        traceparent=exchange.headers.get("traceparent", ""),
    )
