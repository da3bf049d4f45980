"""The routes of HTTP requests to handlers: counts requests, sends their errors, refuses some before they are read.

Knows no model API. Refusals are cheap where a path has no parameters: the server then makes no task for the request.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import orjson
from grpc import StatusCode
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from services import metrics, telemetry
from services.errors import WeftError, internal, unavailable
from services.gateway.access.authorizer import Credentials, Refusal
from services.gateway.doors.http import (
    ClientGone,
    ErrorForm,
    Exchange,
    Header,
    error_body,
    error_headers,
    status_of,
)

Handler = Callable[[Exchange], Awaitable[None]]
Refused = tuple[int, Sequence[Header], bytes]
"""A response: status, headers without the length, body."""
_CHECKED = "checked"
"""In the `state` of a request's scope: it is known not to be refused."""


def _taken(credentials: Credentials) -> None:
    """Refuses nothing."""


class HttpRoutes:
    """Builds the routes of all doors, each request counted and its errors sent."""

    def __init__(self, counts: metrics.Metrics, refusal: Refusal = _taken, answer_refusal: Refusal = _taken) -> None:
        """`refusal` is for all requests, `answer_refusal` instead of it for those that ask for an answer of a model."""
        self._handlers: dict[str, dict[str, Handler]] = {}
        self._refusal, self._answer_refusal = refusal, answer_refusal
        self._refusals: dict[str, Refusal] = {}
        self._forms: dict[str, ErrorForm] = {}
        self._seconds = counts.histogram(
            "weft_http_seconds",
            "Duration of HTTP requests, by route and status.",
            metrics.DURATION_S,
            "route",
            "status",
        )

    def add(self, method: str, path: str, handler: Handler, *, always: bool = False, answers: bool = False) -> None:
        """Adds a route; `path` in Starlette's form. With `always` its requests are never refused before they are read;
        `answers`: they ask for an answer of a model."""
        self._refusals[path] = _taken if always else self._answer_refusal if answers else self._refusal
        self._handlers.setdefault(path, {})[method] = handler

    def form(self, path: str, form: ErrorForm) -> None:
        """Errors of this path and all below it have this form, also where there is no such path."""
        self._forms[f"{path}/"] = form

    def app(self) -> "HttpRouter":
        """The ASGI application."""
        routes, fixed = [], {}
        for path, handlers in self._handlers.items():
            for method, handler in handlers.items():
                endpoint = self._endpoint(path, handler, self._refusals[path])
                routes.append(Route(path, endpoint, methods=[method]))
                if "{" not in path:
                    fixed[method, path] = endpoint
            routes.append(Route(path, self._endpoint(path, _refuse_method(", ".join(handlers)))))
        return HttpRouter(fixed, routes, self._endpoint("other", _not_found))

    def _endpoint(self, route: str, handler: Handler, refusal: Refusal = _taken) -> "_Endpoint":
        return _Endpoint(route, handler, self._seconds, refusal, self._forms)


class HttpRouter(Router):
    """Starlette's router, which compares one path after the other, behind a table of paths without parameters."""

    def __init__(self, fixed: "Mapping[tuple[str, str], _Endpoint]", routes: Sequence[Route], default: ASGIApp) -> None:
        super().__init__(routes, redirect_slashes=False, default=default)
        self._fixed = fixed
        self._targets = {(method.encode(), path.encode()): endpoint for (method, path), endpoint in fixed.items()}

    def refused(self, method: bytes, target: bytes, headers: Sequence[Header], state: dict[str, Any]) -> Refused | None:
        """The response to a request that is refused before it is read; None: it has to be served. `state` of its scope
        notes that it was checked: a request whose path has parameters or a query is checked when it is served."""
        endpoint = self._targets.get((method, target))
        if endpoint is None:
            return None
        state[_CHECKED] = True
        return endpoint.refused(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        endpoint = self._fixed.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        await (super().__call__ if endpoint is None else endpoint)(scope, receive, send)


class _Endpoint:
    """An ASGI application of one handler."""

    def __init__(
        self,
        route: str,
        handler: Handler,
        seconds: metrics.Histogram,
        refusal: Refusal,
        forms: Mapping[str, ErrorForm],
    ) -> None:
        """`forms` of errors by the beginning of the path."""
        self._forms = forms
        self._route = route
        self._refusal = refusal
        self._handler = handler
        self._seconds = seconds

    def refused(self, headers: Sequence[Header]) -> Refused | None:
        """The response to a request with these headers that is refused before it is read, or None."""
        error = self._refusal([value.decode("latin-1") for name, value in headers if name == b"authorization"])
        if error is None:
            return None
        form, status = self._form(self._route) or error_body, status_of(error)
        self._seconds.observe(0.0, self._route, str(status))
        return status, error_headers(error), orjson.dumps(form(error))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            return
        began = time.monotonic()
        exchange = Exchange(scope, receive, send)
        exchange.error_form = self._form(scope["path"])
        try:
            if _CHECKED not in scope["state"] and (refusal := self._refusal(exchange.credentials)) is not None:
                raise refusal
            await self._handler(exchange)
        except WeftError as error:
            error.with_traceback(None)  # Its frames hold the error: only the garbage collector would free both.
            await exchange.fail(error)
        except ClientGone:
            exchange.status = 499  # As nginx counts it.
            exchange.abort()
        except asyncio.CancelledError:
            await exchange.fail(unavailable("SHUTTING_DOWN", "the gateway is stopping"))
        except Exception as error:
            telemetry.log_exception("unexpected exception in a handler", error)
            await exchange.fail(internal())
        finally:
            self._seconds.observe(time.monotonic() - began, self._route, str(exchange.status))

    def _form(self, path: str) -> ErrorForm | None:
        """The form of errors of this path; None: that of OpenAI's API."""
        return next((form for beginning, form in self._forms.items() if f"{path}/".startswith(beginning)), None)


async def _not_found(exchange: Exchange) -> None:
    raise WeftError(StatusCode.NOT_FOUND, "NO_SUCH_PATH", "there is no such path")


def _refuse_method(allowed: str) -> Handler:
    async def refuse(exchange: Exchange) -> None:
        exchange.extra.append((b"allow", allowed.encode()))
        raise WeftError(StatusCode.UNIMPLEMENTED, "METHOD_NOT_ALLOWED", f"this path is for {allowed}")

    return refuse
