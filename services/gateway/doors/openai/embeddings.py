"""OpenAI's `/v1/embeddings`, and `/v1/rerank` as Cohere and Jina have it. Knows JSON and HTTP exchanges."""

import base64
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from protos import inference_pb2 as api
from services.gateway.access.authorizer import Authorizer
from services.gateway.answers.encoding.call import EncodeCall, Request
from services.gateway.answers.encoding.serve import EncodeService
from services.gateway.answers.encoding.vector_bytes import bytes_of
from services.gateway.doors.http import Exchange
from services.gateway.doors.http_routes import HttpRoutes
from services.gateway.doors.openai.answers import receipt_json
from services.gateway.doors.openai.values import (
    MOST_UINT32,
    NO_END_USERS,
    Json,
    check_count,
    check_keys,
    flag,
    ids,
    integer,
    text,
    unknown,
    unsupported,
    without_nulls,
    wrong,
)
from services.validate import MAX_PRIORITY
from services.validate_encode import MAX_INPUTS, EncodeRequest

_RECEIPT_HEADER = b"weft-receipt"
_Body = TypeVar("_Body", api.EmbedRequest, api.RankRequest)
_NAMES = {"inputs": "input", "documents": "documents", "prompt_name": "prompt_name"}


class EmbeddingsDoor:
    """Serves the paths of encoders."""

    def __init__(self, encoding: EncodeService, access: Authorizer) -> None:
        self._encoding, self._access = encoding, access

    def add_to(self, routes: HttpRoutes) -> None:
        """Adds the door's routes."""
        routes.add("POST", "/v1/embeddings", self.embeddings)
        routes.add("POST", "/v1/rerank", self.rerank)

    async def embeddings(self, exchange: Exchange) -> None:
        """A vector for each input."""
        self._access.permit("Embed", exchange.credentials)  # Before the body is read.
        body, request = without_nulls(await exchange.json()), api.EmbedRequest()
        encoding = text("encoding_format", body.pop("encoding_format", "float"))
        if encoding not in ("float", "base64"):
            raise wrong("encoding_format", "float or base64")
        _read(body, request, _EMBED)
        if not request.inputs:
            raise wrong("input", "required: a text or token ids, or a list of these")
        exchange.param = _param
        reply = await exchange.run(self._encoding.embed(_call("Embed", exchange, request)))
        data = [
            {"object": "embedding", "index": place, "embedding": _values(each, encoding)}
            for place, each in enumerate(reply.embeddings)
        ]
        usage = {"prompt_tokens": reply.receipt.prompt_tokens, "total_tokens": reply.receipt.prompt_tokens}
        await exchange.reply({"object": "list", "data": data, "model": reply.receipt.model, "usage": usage})

    async def rerank(self, exchange: Exchange) -> None:
        """The documents in the order of their scores."""
        self._access.permit("Rank", exchange.credentials)
        body, request = without_nulls(await exchange.json()), api.RankRequest()
        returns = flag("return_documents", body.pop("return_documents", False))
        _read(body, request, _RANK)
        exchange.param = _param
        reply = await exchange.run(self._encoding.rank(_call("Rank", exchange, request)))
        results: list[Json] = [{"index": each.index, "relevance_score": each.score} for each in reply.results]
        for result in results if returns else ():
            result["document"] = {"text": request.documents[result["index"]]}
        usage = {"prompt_tokens": reply.receipt.prompt_tokens, "total_tokens": reply.receipt.prompt_tokens}
        head = {"id": reply.receipt.request_id, "model": reply.receipt.model}
        await exchange.reply({**head, "results": results, "usage": usage})


def _values(embedding: api.Embedding, encoding: str) -> object:
    """OpenAI's base64 is of float32, little-endian."""
    if encoding == "float":
        return list(embedding.values)
    return base64.b64encode(bytes_of(embedding)).decode()


def _call(method: str, exchange: Exchange, request: Request) -> EncodeCall[Request]:
    return EncodeCall(
        method=method,
        protocol="http",
        request=request,
        credentials=exchange.credentials,
        finish=partial(_note, exchange),
        remaining_s=exchange.remaining_s,
        traceparent=exchange.headers.get("traceparent", ""),
    )


def _note(exchange: Exchange, receipt: api.Receipt) -> None:
    """Adds the receipt to the response's headers."""
    if not exchange.status:
        exchange.extra.append((_RECEIPT_HEADER, receipt_json(receipt)))


def _param(name: str) -> str:
    """OpenAI's name for a field of weft.v1, such as "options.priority" or "inputs[3].text"."""
    name = name.removeprefix("options.")
    field, bracket, rest = name.partition("[")
    return f"{_NAMES.get(field, field)}{bracket}{rest}"


# ---- fields ----


def _read(body: Json, request: _Body, fields: Mapping[str, Callable[[_Body, str, Any], None]]) -> None:
    """Sets the fields of a request. Raises WeftError for one that there is not."""
    for name, value in body.items():
        if name in fields:
            fields[name](request, name, value)
        elif name in _OPTIONS:
            _OPTIONS[name](request, name, value)
        elif name == "user" and fields is _EMBED:  # A field of OpenAI's.
            raise unsupported(name, NO_END_USERS)
        else:
            raise unknown(name)


def _model(request: EncodeRequest, name: str, value: Any) -> None:
    request.options.model = text(name, value)


def _request_id(request: EncodeRequest, name: str, value: Any) -> None:
    request.options.request_id = text(name, value)


def _truncate(request: EncodeRequest, name: str, value: Any) -> None:
    request.options.truncate = flag(name, value)


def _priority(request: EncodeRequest, name: str, value: Any) -> None:
    request.options.priority = integer(name, value, -MAX_PRIORITY, MAX_PRIORITY)


def _input(request: api.EmbedRequest, name: str, value: Any) -> None:
    """A text, token ids, a list of texts, or a list of lists of token ids."""
    if isinstance(value, str) or (isinstance(value, list) and value and not isinstance(value[0], str | list)):
        value = [value]
    if not isinstance(value, list):
        raise wrong(name, "a text or token ids, or a list of these")
    check_count(name, value, MAX_INPUTS)
    for place, each in enumerate(value):
        if isinstance(each, str):
            request.inputs.add(text=each)
        else:
            request.inputs.add(token_ids=api.TokenIds(ids=ids(f"{name}[{place}]", each)))


def _dimensions(request: api.EmbedRequest, name: str, value: Any) -> None:
    request.dimensions = integer(name, value, 1, MOST_UINT32)


def _normalize(request: api.EmbedRequest, name: str, value: Any) -> None:
    request.normalize = flag(name, value)


def _prompt_name(request: api.EmbedRequest, name: str, value: Any) -> None:
    request.prompt_name = text(name, value)


def _query(request: api.RankRequest, name: str, value: Any) -> None:
    request.query = text(name, value)


def _documents(request: api.RankRequest, name: str, value: Any) -> None:
    """A list of texts, or of objects with a text."""
    if not isinstance(value, list):
        raise wrong(name, "a list of texts")
    check_count(name, value, MAX_INPUTS)
    for place, each in enumerate(value):
        at = f"{name}[{place}]"
        if isinstance(each, dict):
            check_keys(at, each, "text")
            request.documents.append(text(f"{at}.text", each.get("text")))
        else:
            request.documents.append(text(at, each))


def _top_n(request: api.RankRequest, name: str, value: Any) -> None:
    request.top_n = integer(name, value, 1, MOST_UINT32)


_OPTIONS: Mapping[str, Callable[[Any, str, Any], None]] = {
    "model": _model,
    "request_id": _request_id,
    "truncate": _truncate,
    "priority": _priority,
}
_EMBED: Mapping[str, Callable[[api.EmbedRequest, str, Any], None]] = {
    "input": _input,
    "dimensions": _dimensions,
    "normalize": _normalize,
    "prompt_name": _prompt_name,
}
_RANK: Mapping[str, Callable[[api.RankRequest, str, Any], None]] = {
    "query": _query,
    "documents": _documents,
    "top_n": _top_n,
}
