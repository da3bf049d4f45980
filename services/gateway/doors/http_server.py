"""The gateway's HTTP/1.1 server: its port, and the limits of connections and headers. Knows no requests.

It runs in the gateway's own event loop, so that a token reaches the socket without a change of thread. A request that
is refused before it is read costs no task: its response is written when its headers are complete.
"""

import asyncio
import contextlib
import logging
import math
import socket
import ssl
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import httptools
import uvicorn
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from services.process import refuse_to_serve

_MOST_HEADER_BYTES = 32 << 10
_HEAD_S = 20.0
"""Longest time until the headers of a request are complete."""
_IDLE_S = 75
"""How long a connection without a request stays open: longer than clients keep theirs, or requests would be lost."""
_DATE_S = 1.0
"""How old the date of a response may be."""
_MOST_PIPELINED = 32
"""Most requests that wait on one connection for the one before them."""
_ACCEPTED_AT_A_TURN = 8
"""Connections that are accepted in a turn of the event loop. uvloop accepts one for each socket that listens; each
further socket costs a connection 5 us."""
_TOO_MANY_CONNECTIONS = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
)


Header = tuple[bytes, bytes]


class Application(Protocol):
    """What is served: an ASGI application that may refuse requests before they are read."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""

    def refused(
        self, method: bytes, target: bytes, headers: Sequence[Header], state: dict[str, Any]
    ) -> tuple[int, Sequence[Header], bytes] | None:
        """The response to a request of which only the head has arrived: status, headers without the length, body. None:
        it has to be served. `state` is that of its scope."""


class Outbox:
    """Bytes to be written once the event loop has served all streams that a message of a worker has tokens for. Each
    write wakes its client, which may take the processor and its caches from the streams that follow."""

    def __init__(self) -> None:
        self.unsent: list[tuple[asyncio.Transport, bytes]] = []

    def flush(self) -> None:
        """Writes everything, but for clients that have gone meanwhile."""
        unsent, self.unsent = self.unsent, []
        for transport, data in unsent:
            if not transport.is_closing():  # A closed one raises an error, with which all others would be lost.
                transport.write(data)


class _Parser(httptools.HttpRequestParser):
    """Reads requests that offer another protocol, such as `Upgrade: h2c` of Java's client, as those that do not.

    HttpRequestParser ends such a request behind its headers: it takes the body for data of the other protocol.
    """

    def __init__(self, protocol: "_Protocol") -> None:
        super().__init__(protocol)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # As uvicorn's own.
        self._protocol = protocol

    def feed_data(self, data: Any) -> None:
        parser, protocol = self, self._protocol
        while True:
            try:
                httptools.HttpRequestParser.feed_data(parser, data)
                return
            except httptools.HttpParserUpgrade as offer:
                if protocol.declined_head is None:
                    raise
                data = protocol.declined_head + data[offer.args[0] :]
                protocol.parser = parser = _Parser(protocol)  # This one may have read `connection: close`.


class _Protocol(HttpToolsProtocol):
    """A connection with limits: bytes of the headers, and the time until they are complete."""

    ready = True
    """The client takes data: little is buffered, and the connection is open."""
    lost = False
    """The connection is closed."""
    chunks = True
    """The client of the running request knows chunks."""
    outbox: Outbox
    """Of all connections of the server."""
    application: Application
    most_connections = 0
    """Open connections of the server beyond which a new one gets status 503 at once."""
    _timer: asyncio.TimerHandle | None = None
    _on_lost: Callable[[], None] | None = None
    _header_bytes = 0
    _in_head = True
    _discards = False
    """The request that arrives was refused: its body is not read."""
    declined_head: bytes | None = None
    """The head of the request that arrives without its offer of another protocol; None if it has none."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.parser = _Parser(self)
        self._expect_headers()
        if len(self.connections) > self.most_connections:
            transport.write(_TOO_MANY_CONNECTIONS)
            transport.close()

    def put(self, data: bytes) -> None:
        """Sends a chunk of the running response, behind what it has sent, when the event loop's turn ends."""
        outbox = self.outbox
        if not outbox.unsent:
            self.loop.call_soon(outbox.flush)
        outbox.unsent.append((self.transport, b"%x\r\n%b\r\n" % (len(data), data) if self.chunks else data))

    def flush(self) -> None:
        """Sends what `put` was given now: what follows is written directly."""
        self.outbox.flush()

    def abort(self) -> None:
        """Closes the connection at once."""
        self.ready = False
        self.transport.abort()

    def pause_writing(self) -> None:
        self.ready = False
        super().pause_writing()

    def resume_writing(self) -> None:
        self.ready = True
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ready, self.lost = False, True
        self._stop_timer()
        super().connection_lost(exc)
        # The request holds this connection: without this, both would wait for the garbage collector.
        self.cycle = self.scope = None  # type: ignore[assignment]
        if self._on_lost is not None:
            self._on_lost()

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Calls `on_lost` when the connection is lost."""
        self._on_lost = on_lost
        self.flow.resume_reading()  # While nothing is read, nothing shows that the client is gone.

    def unwatch(self, on_lost: Callable[[], None]) -> None:
        """Does not call `on_lost` any more. The next request of the connection may have its own already."""
        if self._on_lost is on_lost:
            self._on_lost = None

    @property
    def has_body(self) -> bool:
        """The body of the running request has arrived."""
        return self.cycle is not None and not self.cycle.more_body

    def data_received(self, data: bytes) -> None:
        in_head = self._in_head
        super().data_received(data)
        # The parser reports a header when it is complete, and keeps what it has of it until then.
        if in_head and self._in_head and not self.transport.is_closing():
            self._header_bytes += len(data)
            if self._header_bytes > _MOST_HEADER_BYTES:
                self.send_400_response("Headers too large.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes, self._in_head, self._discards, self.declined_head = 0, True, False, None
        self.scope["state"]["connection"] = self
        self._expect_headers()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and any(name == b"upgrade" for name, _ in self.headers):
            self.declined_head = self._head_without_offer()
            return
        self._in_head = False
        if len(self.pipeline) >= _MOST_PIPELINED:
            raise ValueError("too many requests at once")  # As above.
        self._discards = self._refuse()
        if not self._discards:  # Else the timer goes on until the body has arrived.
            self._stop_timer()
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._discards:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.declined_head is not None:  # The parser reads it again.
            return
        if not self._discards:
            super().on_message_complete()
            return
        self._stop_timer()
        if not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(_IDLE_S, self.timeout_keep_alive_handler)

    def _refuse(self) -> bool:
        """Answers the request whose headers are complete if it is refused before it is read -> whether it was. Behind
        another request, or if the client does not take data, it is checked when it is served."""
        if self.transport.is_closing():
            return True
        if not self.ready or (self.cycle is not None and not self.cycle.response_complete):
            return False
        refused = self.application.refused(self.parser.get_method(), self.url, self.headers, self.scope["state"])
        if refused is None:
            return False
        status, headers, body = refused
        # A client that waits for `100 Continue` may send its body or not: it looks like another request.
        stays = self.parser.should_keep_alive() and not self.expect_100_continue
        lines = [*self.server_state.default_headers, (b"content-length", b"%d" % len(body)), *headers]
        if not stays:
            lines.append((b"connection", b"close"))
        self.transport.write(
            b"%b%b\r\n%b" % (STATUS_LINE[status], b"".join(b"%b: %b\r\n" % each for each in lines), body)
        )
        if not stays:
            self.transport.close()
        return True

    def _head_without_offer(self) -> bytes:
        first = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        kept = [b"%b: %b" % each for each in self.headers if each[0] != b"upgrade"]
        return b"\r\n".join([first, *kept, b"", b""])

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > _MOST_HEADER_BYTES:
            raise ValueError("headers too large")  # The parser ends the connection with status 400.

    def _expect_headers(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(_HEAD_S, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _without_chunks(send: Send) -> Send:
    """Sends responses to a client of HTTP/1.0, which knows no chunks: one without a length ends with the connection."""
    cycle = cast(Any, send).__self__  # The connection's own may be that of a request that waits for this one.

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            cycle.chunked_encoding, cycle.expected_content_length = False, sys.maxsize
        elif not message.get("more_body"):
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return sent


class _Server(uvicorn.Server):
    """Leaves the signals of the process to the gateway."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening, self.leaving = asyncio.Event(), asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to listen."""
        await super().startup(sockets)
        self.listening.set()

    async def main_loop(self) -> None:
        """Sets the date of responses once a second until the server is to end; uvicorn's own loop runs ten times."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DATE_S):
                    await self.leaving.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        """Captures none."""
        yield


class HttpServer:
    """A listening HTTP server."""

    def __init__(
        self,
        app: Application,
        listener: socket.socket,
        stall_s: float,
        drain_s: float,
        most_connections: int,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`stall_s`: longest time that a client takes no data; `drain_s`: time that `stop` gives to requests; `tls`:
        None for a plain port."""
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux. Accepted sockets inherit both options.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_s * 1000))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL + 1)  # It would log the text of exceptions.
        self.port = int(listener.getsockname()[1])
        self._listener = listener

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["http_version"] == "1.0":
                scope["state"]["connection"].chunks, send = False, _without_chunks(send)
            await app(scope, receive, send)

        config = uvicorn.Config(
            serve,
            http=type(
                "_Limited", (_Protocol,), {"most_connections": most_connections, "outbox": Outbox(), "application": app}
            ),
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=math.ceil(drain_s),
        )
        config.load()
        config.ssl = tls
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begins to serve."""
        copies = [self._listener.dup() for _ in range(_ACCEPTED_AT_A_TURN - 1)]
        self._serving = asyncio.create_task(self._server.serve([self._listener, *copies]))
        await self._server.listening.wait()

    async def stop(self) -> None:
        """Accepts no connections, gives running requests their time, and closes what is left."""
        if self._serving is None:
            self._listener.close()
            return
        self._server.should_exit = True
        self._server.leaving.set()
        await self._serving
        left: Sequence[asyncio.Task[None]] = list(self._server.server_state.tasks)
        await asyncio.gather(*left, return_exceptions=True)
        for connection in list(self._server.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()


def listen(host: str, port: int, shares_port: bool = False) -> socket.socket:
    """Binds the address; port 0 takes a free port. The process ends with one line on stderr if it is taken.

    With `shares_port` other processes of this user may listen at it, too.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shares_port:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        refuse_to_serve(f"WEFT_GATEWAY_HTTP_PORT {port}: {error.strerror}")
    listener.setblocking(False)
    return listener
