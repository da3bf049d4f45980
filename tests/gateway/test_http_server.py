"""The HTTP server accepts many connections in a few turns of its loop, and reads requests that offer a protocol."""

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from typing import Any

import pytest
import uvloop
from starlette.types import Receive, Scope, Send

from services.gateway.doors.http_server import Header, HttpServer, listen

CLIENTS = 64
REQUEST = b"GET / HTTP/1.1\r\nhost: weft\r\n\r\n"


class Counted:
    """Counts the requests that have begun."""

    begun = 0

    def refused(self, method: bytes, target: bytes, headers: Sequence[Header], state: dict[str, Any]) -> None:
        """Refuses none."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers with an empty body."""
        self.begun += 1
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


async def turns_until_all_are_served() -> int:
    """How many turns of the loop it takes to begin the requests of clients that connect at once."""
    app = Counted()
    server = HttpServer(app, listen("127.0.0.1", 0), stall_s=30, drain_s=1, most_connections=2 * CLIENTS)
    await server.start()
    with contextlib.ExitStack() as clients:
        for _ in range(CLIENTS):  # In this thread: none of them is accepted before all have sent their requests.
            client = clients.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            client.sendall(REQUEST)
        turns = 0
        while app.begun < CLIENTS:
            turns += 1
            await asyncio.sleep(0)
    await server.stop()
    return turns


def test_new_connections_are_accepted_in_a_few_turns_of_the_event_loop() -> None:
    assert uvloop.run(turns_until_all_are_served()) < CLIENTS / 2


OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
POST = b"POST /echo HTTP/1.1\r\nhost: weft\r\n"
SIZED = b"content-length: 5\r\n\r\nhello"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"


class Echo(Counted):
    """Answers with the body of the request."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reads all of it first."""
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        length = (b"content-length", b"%d" % len(body))
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": body})


@pytest.mark.parametrize("size", [1, 1 << 16])
@pytest.mark.parametrize("body", [SIZED, CHUNKED])
async def test_an_offer_of_another_protocol_is_declined_and_its_request_served(body: bytes, size: int) -> None:
    server = HttpServer(Echo(), listen("127.0.0.1", 0), stall_s=30, drain_s=1, most_connections=CLIENTS)
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    sent = (POST + OFFER + body) * 2 + POST + OFFER + b"connection: close\r\n" + body
    for start in range(0, len(sent), size):
        writer.write(sent[start : start + size])
        await asyncio.sleep(0)
    received = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    await server.stop()
    assert received.count(b"HTTP/1.1 200 OK\r\n") == received.count(b"\r\n\r\nhello") == 3


class Streamed(Counted):
    """Answers with four parts: two by messages, and those between them by what a stream of events uses."""

    ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the length of the body first if the path is /sized."""
        length = [(b"content-length", b"4")] if scope["path"] == "/sized" else []
        await send({"type": "http.response.start", "status": 200, "headers": length})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        if length:
            await send({"type": "http.response.body", "body": b"bc", "more_body": True})
        else:
            connection = scope["state"]["connection"]
            connection.put(b"b")
            connection.put(b"c")
            connection.flush()
        await send({"type": "http.response.body", "body": b"d"})
        self.ended = True


@pytest.mark.parametrize(
    ("head", "ends"),
    [
        (b"GET / HTTP/1.0\r\n", b"\r\n\r\nabcd"),
        (b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n", b"\r\n\r\nabcd"),
        (b"GET /sized HTTP/1.0\r\n", b"\r\n\r\nabcd"),
        (b"HEAD /sized HTTP/1.0\r\n", b"\r\n\r\n"),
        (b"GET /sized HTTP/1.1\r\nconnection: close\r\n", b"\r\n\r\nabcd"),
        (b"GET / HTTP/1.1\r\nconnection: close\r\n", b"\r\n\r\n1\r\na\r\n1\r\nb\r\n1\r\nc\r\n1\r\nd\r\n0\r\n\r\n"),
    ],
)
async def test_a_client_of_http_1_0_receives_a_stream_without_chunks(head: bytes, ends: bytes) -> None:
    app = Streamed()
    server = HttpServer(app, listen("127.0.0.1", 0), stall_s=30, drain_s=1, most_connections=CLIENTS)
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(head + b"host: weft\r\n\r\n")
    received = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    await server.stop()
    assert app.ended
    assert received.startswith(b"HTTP/1.1 200 OK\r\n")
    assert received.endswith(ends)
    assert received.count(b"connection: close") == 1
    chunked = b" HTTP/1.1" in head and b"/sized" not in head
    assert (b"transfer-encoding: chunked" in received) == chunked


@pytest.mark.parametrize("second", [b"1.1", b"1.0"])
async def test_a_stream_keeps_its_chunks_while_another_request_waits_behind_it(second: bytes) -> None:
    server = HttpServer(Streamed(), listen("127.0.0.1", 0), stall_s=30, drain_s=1, most_connections=CLIENTS)
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(REQUEST + b"GET / HTTP/%b\r\nhost: weft\r\nconnection: close\r\n\r\n" % second)
    received = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    await server.stop()
    chunked = b"1\r\na\r\n1\r\nb\r\n1\r\nc\r\n1\r\nd\r\n0\r\n\r\n"
    bodies = [part.partition(b"\r\n\r\n")[2] for part in received.split(b"HTTP/1.1 200 OK\r\n")[1:]]
    assert bodies == [chunked, chunked if second == b"1.1" else b"abcd"]
