"""OpenAI's HTTP API: makes Calls of its requests, and sends their outcome as JSON or server-sent events.

Knows HTTP exchanges; `requests` and `answers` know the JSON.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence

from grpc import StatusCode

from protos import inference_pb2 as api
from services.errors import WeftError
from services.gateway.access.authorizer import Authorizer
from services.gateway.answers.call import Call, Deliver, Delta, Finish, Part, Put, PutText
from services.gateway.answers.collect import Collector
from services.gateway.answers.deadline import deadline_exceeded
from services.gateway.answers.serve import AnswerService
from services.gateway.doors.http import Exchange
from services.gateway.doors.http_routes import HttpRoutes
from services.gateway.doors.openai.answers import Format, model_json, receipt_json
from services.gateway.doors.openai.requests import parse, parse_tokenize
from services.gateway.links.catalog import Catalog
from services.validate import check_request_id

RECEIPT_HEADER = b"weft-receipt"
_MOST_RECEIPT_BYTES = 3 << 10
"""Of several receipts in the header: proxies such as nginx take 4 KiB of headers by default."""
_WAITING = b": waiting for a worker\n\n"
"""A comment of server-sent events, which clients skip; it keeps the connection alive."""
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
        routes.add("POST", "/v1/chat/completions", self.chat, answers=True)
        routes.add("POST", "/v1/completions", self.completions, answers=True)
        routes.add("GET", "/v1/models", self.models)
        routes.add("GET", "/v1/models/{name:path}", self.model)
        routes.add("POST", "/tokenize", self.tokenize)

    async def chat(self, exchange: Exchange) -> None:
        """Continues a conversation."""
        await self._generate(exchange, "chat")

    async def completions(self, exchange: Exchange) -> None:
        """Continues a text."""
        await self._generate(exchange, "completions")

    async def models(self, exchange: Exchange) -> None:
        """Lists the models that are served."""
        reply = await self._answers.list_models(api.ListModelsRequest(), exchange.credentials)
        data = [model_json(model, self._started_at) for model in reply.models if model.workers]
        await exchange.reply({"object": "list", "data": data})

    async def model(self, exchange: Exchange) -> None:
        """Describes the model of a name or alias."""
        name = str(exchange.path_params["name"])
        reply = await self._answers.list_models(api.ListModelsRequest(), exchange.credentials)
        for model in reply.models:
            if model.workers and name in (model.name, *model.aliases):
                await exchange.reply(model_json(model, self._started_at))
                return
        raise WeftError(StatusCode.NOT_FOUND, "MODEL_NOT_FOUND", "no model of this name is served", field="model")

    async def tokenize(self, exchange: Exchange) -> None:
        """Converts a prompt or messages to token ids."""
        self._access.permit("Tokenize", exchange.credentials)
        asked, request = parse_tokenize(await exchange.json())
        exchange.param = asked.param
        try:
            async with asyncio.timeout(exchange.remaining_s):
                reply = await exchange.run(self._answers.tokenize(request, exchange.credentials))
        except TimeoutError:
            raise deadline_exceeded() from None
        tokens = list(reply.token_ids)
        await exchange.reply({"count": len(tokens), "tokens": tokens, "token_strs": list(reply.pieces)})

    async def _generate(self, exchange: Exchange, kind: str) -> None:
        self._access.tenant(exchange.credentials)  # Before the body is read.
        asked = parse(kind, await exchange.json())
        exchange.param = asked.param
        request = asked.request
        request_id = request.request_id or os.urandom(16).hex()
        request.request_id = request_id
        form = Format(asked, request_id, int(time.time()), lambda: self._only_model(exchange))
        check_request_id("request_id", request_id)  # Before it is a header.
        exchange.extra.append((_REQUEST_ID_HEADER, request_id.encode()))
        await (self._stream if asked.stream else self._complete)(exchange, asked.requests, form)

    async def _stream(self, exchange: Exchange, requests: Sequence[api.GenerateRequest], form: Format) -> None:
        receipts: list[api.Receipt] = [api.Receipt()] * len(requests)

        writers = [form.at(place) for place in range(len(requests))]

        def deliver(place: int) -> Deliver:
            async def deliver(part: Part) -> None:
                if event := _event(writers[place], part):
                    await exchange.write(event)

            return deliver

        def put(place: int) -> Put:
            def put(part: Part) -> bool:
                stream = exchange.stream
                if stream is None or not stream.ready:
                    return False
                if event := _event(writers[place], part):
                    stream.put(event)
                return True

            return put

        def put_text(place: int) -> PutText:
            text_event = writers[place].text_event

            def put_text(text: str) -> bool:
                stream = exchange.stream
                if stream is None or not stream.ready:
                    return False
                stream.put(text_event(text))
                return True

            return put_text

        def finish(place: int) -> Finish:
            return lambda receipt: receipts.__setitem__(place, receipt)

        try:
            await self._serve(
                "Generate", exchange, requests, deliver, finish, put, put_text if form.text_alone else None
            )
        except BaseException:
            self._note(exchange, receipts)
            raise
        await exchange.end(form.ending(receipts))

    async def _complete(self, exchange: Exchange, requests: Sequence[api.GenerateRequest], form: Format) -> None:
        receipts: list[api.Receipt] = [api.Receipt()] * len(requests)
        collectors = [Collector() for _ in requests]

        def finish(place: int) -> Finish:
            return lambda receipt: receipts.__setitem__(place, receipt)

        try:
            await self._serve("Complete", exchange, requests, lambda place: collectors[place].add, finish)
        finally:
            self._note(exchange, receipts)
        await exchange.reply(form.whole([collector.response for collector in collectors]))

    async def _serve(
        self,
        method: str,
        exchange: Exchange,
        requests: Sequence[api.GenerateRequest],
        deliver: Callable[[int], Deliver],
        finish: Callable[[int], Finish],
        put: Callable[[int], Put] | None = None,
        put_text: Callable[[int], PutText] | None = None,
    ) -> None:
        """Answers all requests at once. The first failure ends the others. Raises WeftError."""
        calls = [
            _call(method, exchange, each, deliver(at), finish(at), put and put(at), put_text and put_text(at))
            for at, each in enumerate(requests)
        ]
        if len(calls) == 1:
            await exchange.run(self._answers.serve(calls[0]))
            return
        await exchange.run(self._serve_all(calls))

    async def _serve_all(self, calls: Sequence[Call]) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for call in calls:
                    group.create_task(self._answers.serve(call))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    def _note(self, exchange: Exchange, receipts: Sequence[api.Receipt]) -> None:
        """Adds the receipts to the response's headers, unless these are sent."""
        if exchange.status:
            return
        lines = [receipt_json(receipt) for receipt in receipts if receipt.request_id]
        while len(lines) > 1 and sum(map(len, lines)) > _MOST_RECEIPT_BYTES:
            lines.pop()
        if lines:
            exchange.extra.append((RECEIPT_HEADER, lines[0] if len(receipts) == 1 else b"[" + b",".join(lines) + b"]"))

    def _only_model(self, exchange: Exchange) -> str:
        """The name of the model that a request without a name means; empty if models have changed since."""
        try:
            return self._catalog.find("", self._access.tenant(exchange.credentials)).card.name
        except WeftError:
            return ""


def _event(form: Format, part: Part) -> bytes:
    """The part as an event; empty if the client gets none."""
    if isinstance(part, Delta):
        return _WAITING if part.waiting else form.event(part)
    return form.echo(part) if isinstance(part, api.PromptEcho) else b""


def _call(
    method: str,
    exchange: Exchange,
    request: api.GenerateRequest,
    deliver: Deliver,
    finish: Finish,
    put: Put | None,
    put_text: PutText | None,
) -> Call:
    return Call(
        method=method,
        protocol="http",
        request=request,
        credentials=exchange.credentials,
        deliver=deliver,
        finish=finish,
        put=put,
        put_text=put_text,
        whole=method == "Complete",
        remaining_s=exchange.remaining_s,
        traceparent=exchange.headers.get("traceparent", ""),
    )
