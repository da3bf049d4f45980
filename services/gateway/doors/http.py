"""One HTTP request and its response: credentials, body, events, errors. Knows no model API and no routes.

Errors have the form that OpenAI's clients read: {"error": {"message", "type", "param", "code"}}.
"""

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol, TypeVar

import orjson
from grpc import StatusCode
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from services.errors import WeftError, invalid
from services.gateway.access.authorizer import Credentials
from services.rpc import PUBLIC_MESSAGE_BYTES

T = TypeVar("T")

MOST_BODY_BYTES = PUBLIC_MESSAGE_BYTES
"""Largest body of a request, as of a gRPC message: 1 MiB."""
_MOST_DISCARDED_BYTES = 16 << 20
"""Bytes of a larger body that are read and discarded, so that its sender reads the refusal instead of a reset."""
_BODY_S = 60.0
"""Longest time until the body of a request is complete."""
_ERROR_EVENT_S = 2.0
"""Longest time that an error takes to be sent in a stream that has begun."""

STATUS: dict[StatusCode, int] = {
    StatusCode.INVALID_ARGUMENT: 400,
    StatusCode.FAILED_PRECONDITION: 400,
    StatusCode.OUT_OF_RANGE: 400,
    StatusCode.UNAUTHENTICATED: 401,
    StatusCode.PERMISSION_DENIED: 403,
    StatusCode.NOT_FOUND: 404,
    StatusCode.ALREADY_EXISTS: 409,
    StatusCode.RESOURCE_EXHAUSTED: 429,
    StatusCode.UNIMPLEMENTED: 501,
    StatusCode.UNAVAILABLE: 503,
    StatusCode.ABORTED: 503,
    StatusCode.DEADLINE_EXCEEDED: 504,
}
"""HTTP status of each code of a WeftError; 500 for the others."""
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_CODES = {
    "CONTEXT_EXCEEDED": "context_length_exceeded",
    "KEY_REQUIRED": "invalid_api_key",
    "KEY_UNKNOWN": "invalid_api_key",
    "RATE_LIMITED": "rate_limit_exceeded",
}
"""OpenAI's own codes; the others are the reasons of weft.v1 in lower case."""
_STATUS_OF_REASON = {"BODY_TOO_LARGE": 413, "METHOD_NOT_ALLOWED": 405, "BODY_TIMEOUT": 408}
_JSON = (b"content-type", b"application/json")
_EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
_NOT_STORED = (b"cache-control", b"no-cache")
Header = tuple[bytes, bytes]
ErrorForm = Callable[[WeftError], object]
"""Makes the JSON of an error."""


class Connection(Protocol):
    """What the server offers of a request's connection, beside ASGI."""

    ready: bool
    """The client takes data: little is buffered."""
    lost: bool
    """The connection is closed."""

    @property
    def has_body(self) -> bool:
        """The body of the running request has arrived."""

    def put(self, data: bytes) -> None:
        """Sends a chunk of a response in chunks, soon. Only while the client is `ready`. Costs a tenth of ASGI."""

    def flush(self) -> None:
        """Sends what `put` was given now. To be called before anything is sent otherwise."""

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Calls `on_lost` when the connection is lost."""

    def unwatch(self, on_lost: Callable[[], None]) -> None:
        """Does not call `on_lost` any more."""

    def abort(self) -> None:
        """Closes the connection at once."""


class ClientGone(Exception):
    """The client disconnected before its response was complete."""


class Exchange:
    """One request and its response."""

    __slots__ = (
        "_connection", "_ended", "_gone", "_receive", "_send", "credentials", "error_form", "extra", "headers",
        "is_head", "param", "path_params", "status", "stream",
    )  # fmt: skip

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers = Headers(scope=scope)
        self.path_params: dict[str, Any] = scope.get("path_params", {})
        self.is_head: bool = scope["method"] == "HEAD"
        """The client wants the headers of the response alone; the server sends no body."""
        self.status = 0
        """Status of the response; 0 until it has begun."""
        self.extra: list[Header] = []
        """Further headers of the response, also of an error."""
        self.param: Callable[[str], str] = str
        """From a field of weft.v1, as errors name it, to the field of the request."""
        self.error_form: ErrorForm | None = None
        """Makes the body of an error; None: in the form of OpenAI's API."""
        self.credentials: Credentials = self.headers.getlist("authorization")
        """The values of the `authorization` headers."""
        self._receive = receive
        self._send = send
        self._connection: Connection = scope["state"]["connection"]
        self.stream: Connection | None = None
        """The connection, once a stream has begun: where it is `ready`, it takes events at once."""
        self._ended = False
        self._gone = False

    @property
    def remaining_s(self) -> float | None:
        """The header `x-request-timeout`: seconds until the caller's deadline. Raises WeftError."""
        given = self.headers.get("x-request-timeout")
        if given is None:
            return None
        with contextlib.suppress(ValueError):
            seconds = float(given)
            if seconds > 0 and math.isfinite(seconds):
                return seconds
        raise invalid("x-request-timeout", "a number of seconds above 0")

    async def json(self) -> dict[str, Any]:
        """The body, which must be a JSON object in UTF-8. Raises WeftError and ClientGone."""
        try:
            parsed = orjson.loads(await self.body())
        except orjson.JSONDecodeError:
            raise WeftError(StatusCode.INVALID_ARGUMENT, "MALFORMED_JSON", "the body is not JSON in UTF-8") from None
        if not isinstance(parsed, dict):
            raise WeftError(StatusCode.INVALID_ARGUMENT, "MALFORMED_JSON", "the body is not a JSON object")
        return parsed

    async def body(self) -> bytes:
        """The whole body. Raises WeftError and ClientGone."""
        body, size = bytearray(), 0
        limit = contextlib.nullcontext() if self._connection.has_body else asyncio.timeout(_BODY_S)
        try:
            async with limit:
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    size += len(message["body"])
                    if size <= MOST_BODY_BYTES:
                        body += message["body"]
                    if not message.get("more_body") or size > _MOST_DISCARDED_BYTES:
                        break
        except TimeoutError:
            raise WeftError(StatusCode.INVALID_ARGUMENT, "BODY_TIMEOUT", "the body did not arrive in time") from None
        if size > MOST_BODY_BYTES:
            self.extra.append((b"connection", b"close"))
            message_ = f"the body has more than {MOST_BODY_BYTES} bytes"
            raise WeftError(StatusCode.INVALID_ARGUMENT, "BODY_TOO_LARGE", message_)
        return bytes(body)

    async def run(self, work: Awaitable[T]) -> T:
        """Awaits `work`, and cancels it when the client disconnects. Raises ClientGone. The body has been read."""
        task, connection = asyncio.current_task(), self._connection
        assert task is not None

        def on_lost() -> None:
            if not (self._ended or self._gone):
                self._gone = True
                task.cancel()

        connection.watch(on_lost)
        if connection.lost:
            on_lost()
        try:
            return await work
        except asyncio.CancelledError:
            if self._gone and not task.uncancel():
                raise ClientGone from None
            raise
        finally:
            connection.unwatch(on_lost)

    async def reply(self, payload: object, status: int = 200, headers: Iterable[Header] = ()) -> None:
        """Sends the whole response as JSON."""
        await self.send(orjson.dumps(payload), status, [_JSON, *headers])

    async def send(self, body: bytes, status: int, headers: Iterable[Header]) -> None:
        """Sends the whole response; `headers` have its content type."""
        self.status = status
        # The length in a 304 is that of the body which the client has, never 0.
        length = [] if status == 304 else [(b"content-length", b"%d" % len(body))]
        start = {"type": "http.response.start", "status": status, "headers": [*length, *self.extra, *headers]}
        self._ended = True
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body})

    async def write(self, data: bytes) -> None:
        """Sends events, after the headers if they are the first. Returns once the client can take more."""
        if self.status:
            self._connection.flush()
        else:
            await self._begin()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _begin(self) -> None:
        self.status = 200
        headers = [_EVENTS, _NOT_STORED, *self.extra]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        self.stream = self._connection

    async def end(self, data: bytes = b"") -> None:
        """Ends a stream with its last events."""
        if self.status:
            self._connection.flush()
        else:
            await self._begin()
        self._ended = True
        await self._send({"type": "http.response.body", "body": data})

    async def fail(self, error: WeftError) -> None:
        """Sends an error: as the response, or as the last event of a stream that has begun."""
        body = orjson.dumps(error_body(error, self.param) if self.error_form is None else self.error_form(error))
        if not self.status:
            await self.send(body, status_of(error), error_headers(error))
        elif not self._ended:
            try:
                async with asyncio.timeout(0 if error.code is StatusCode.ABORTED else _ERROR_EVENT_S):
                    await self.end(b"data: " + body + b"\n\n")
            except TimeoutError:
                self.abort()

    def abort(self) -> None:
        """Closes the connection at once, whatever is left to send."""
        self._ended = True
        self._connection.abort()


def error_body(error: WeftError, param: Callable[[str], str] = str) -> dict[str, Any]:
    """An error in OpenAI's form."""
    status, field, message = status_of(error), error.field, error.message
    name = param(field) if field else None
    if name is not None and message.startswith(f"{field}:"):
        message = name + message[len(field) :]
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    code = _CODES.get(error.reason, error.reason.lower())
    return {"error": {"message": message, "type": kind, "param": name, "code": code}}


def status_of(error: WeftError) -> int:
    """The HTTP status of an error. A field that does not exist is the caller's mistake, as in OpenAI's API."""
    if error.reason in _STATUS_OF_REASON:
        return _STATUS_OF_REASON[error.reason]
    return 400 if error.reason == "UNKNOWN_FIELD" else STATUS.get(error.code, 500)


def error_headers(error: WeftError) -> list[Header]:
    """The content type of an error, and when to try again: `retry-after` in seconds, rounded up, and `retry-after-ms`,
    which OpenAI's clients read."""
    status = status_of(error)
    if status not in (429, 503):
        return [_JSON, (b"www-authenticate", b"Bearer")] if status == 401 else [_JSON]
    wait_s = error.retry_after_s or 1.0
    return [_JSON, (b"retry-after", b"%d" % math.ceil(wait_s)), (b"retry-after-ms", b"%d" % math.ceil(wait_s * 1000))]
