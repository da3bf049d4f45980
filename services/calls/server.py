"""gRPC's server of asyncio, which accepts calls in its own way: as soon as they arrive, and those that a gate lets in.

gRPC itself has a task that waits for the next call of each method (github.com/grpc/grpc/pull/43461), and creates two
more for each call, also for one that is refused. Here a call that arrives is a callback, and a refused one nothing but
its status. Knows gRPC's Cython module, whose private parts it uses; no services.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, TypeAlias

import grpc
from grpc import aio
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from services import errors, telemetry

_REQUESTED_CALLS = 16
"""Calls of a method that a server asks gRPC for at a time."""
_LAST_CALLS_S = 1.0
"""Time that a server which stops takes at the most to accept the calls that have arrived."""
_ARRIVAL_S = 0.01
"""Time without another call after which none is left."""
_STOPPING = errors.unavailable("SHUTTING_DOWN", "the server is stopping").status()
_INTERNAL = errors.internal().status()

Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]
Gate: TypeAlias = Callable[[str, Metadata], grpc.Status | None]
"""Is called with the method, "/package.Service/Method", and the metadata of a call that has arrived, before its message
is read -> the status that refuses it, or None."""


def server(interceptors: list[aio.ServerInterceptor], options: list[tuple[str, int]], gate: Gate | None) -> aio.Server:
    """A server whose calls `gate` lets in."""
    made = aio.server(interceptors=interceptors, options=options)
    made._server.gate = gate  # type: ignore[attr-defined]
    return made


class _AioServer(cygrpc.AioServer):  # type: ignore[misc]
    """Starts the calls of methods that generated code has registered. gRPC itself answers those of others."""

    gate: Gate | None = None

    def __init__(self, loop: Any, threads: Any, generic: Any, interceptors: Any, *further: Any) -> None:
        super().__init__(loop, threads, generic, interceptors, *further)
        self._event_loop: asyncio.AbstractEventLoop = loop
        self._interceptors = tuple(interceptors or ())
        self._handlers: dict[str, Any] = {}
        self._resolver = cygrpc._MethodResolver([], self._handlers)
        self._calls: set[Coroutine[Any, None, None]] = set()
        """Those that have begun, which nothing else might refer to."""
        self._arrived = 0
        self._closing = False

    def add_registered_method_handlers(self, handlers: Mapping[str, Any]) -> None:
        """As in gRPC."""
        super().add_registered_method_handlers(handlers)
        self._handlers.update(handlers)

    def _make_request_call_future(self, method: bytes | None) -> "asyncio.Future[Any]":
        """gRPC waits for the next call of each method by this future, once at the start: it gets none."""
        if method is None:
            return super()._make_request_call_future(None)  # type: ignore[no-any-return]
        for _ in range(_REQUESTED_CALLS):
            self._request(method, method.decode())
        return self._event_loop.create_future()

    def _request(self, method: bytes, name: str) -> None:
        """Asks for the next call of a method."""
        _drive(self._request_registered_call(method), partial(self._accept, method, name))

    def _accept(self, method: bytes, name: str, state: Any, error: Exception | None) -> None:
        """Refuses or starts a call, and asks for the next one."""
        if isinstance(error, cygrpc._RequestCallError):  # Those of a server that stops fail.
            if self.is_running() and not self._closing:
                self._request(method, name)
            return
        if error is not None:
            raise error
        self._arrived += 1
        status = self._refusal(name, state)
        if status is None:
            self._start(name, state)
        else:
            _refuse(state, status, self._event_loop)
        self._request(method, name)

    def _refusal(self, name: str, state: Any) -> grpc.Status | None:
        if self._closing:
            return _STOPPING
        if self.gate is None:
            return None
        metadata = cygrpc._ServicerContext(state, None, None, self._event_loop).invocation_metadata()
        try:
            return self.gate(name, metadata)
        except Exception as error:
            telemetry.log_exception("unexpected exception in a gate", error)
            return _INTERNAL

    def _start(self, name: str, state: Any) -> None:
        """Runs a call as gRPC does: a task for its handler, which is cancelled with the call."""
        handling = cygrpc._handle_rpc(name, self._resolver, self._interceptors, state, self._event_loop, False)
        call = cygrpc._schedule_rpc_coro(handling, state, self._event_loop, name)
        self._calls.add(call)
        _drive(call, lambda _, error: self._ended(call, error))

    def _ended(self, call: Coroutine[Any, None, None], error: Exception | None) -> None:
        self._calls.discard(call)
        if error is not None:  # None of a handler, all of which gRPC catches.
            raise error

    async def shutdown(self, grace: float | None) -> None:
        """Accepts the calls that have arrived, for a second at most, and shuts down. gRPC itself would end them with
        CANCELLED."""
        deadline, arrived = time.monotonic() + _LAST_CALLS_S, -1
        while self._arrived != arrived and time.monotonic() < deadline:
            arrived = self._arrived
            await asyncio.sleep(_ARRIVAL_S)
        self._closing = True
        await super().shutdown(grace)


cygrpc.AioServer = _AioServer  # `aio.server` makes servers of this class.


def _refuse(state: Any, status: Any, loop: asyncio.AbstractEventLoop) -> None:
    """Sends the status of a refused call. Without the initial metadata before it, the client would wait."""
    code, trailing = status.code.value[0], tuple(status.trailing_metadata or ())
    initial = cygrpc.SendInitialMetadataOperation((), 0)
    sending = cygrpc._send_error_status_from_server(state, code, status.details, trailing, initial, loop)
    _drive(sending, lambda _, error: None)  # It fails if the client has gone.


def _drive(coroutine: Coroutine[Any, None, Any], then: Callable[[Any, Exception | None], None]) -> None:
    """Runs a coroutine in callbacks of the futures that it awaits, and calls `then` with its result or its error.

    A task would need a turn of the event loop to begin and one to end.
    """
    try:
        future = coroutine.send(None)
    except StopIteration as end:
        then(end.value, None)
    except Exception as error:
        then(None, error)
    else:
        future.add_done_callback(lambda _: _drive(coroutine, then))
