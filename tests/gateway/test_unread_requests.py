"""Requests over HTTP that are refused before they are read: order, bodies and connections, on real sockets."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from services.gateway.doors import http_server
from tests.gateway.fakes import FakeMesh, ask, until
from tests.gateway.http_client import client
from tests.gateway.model import LOREM
from tests.ports import free_port

TEXT: dict[str, Any] = {"prompt": "hello world", "max_tokens": 400, "temperature": 0}
Response = tuple[int, dict[str, str], Any]


class Wire:
    """A connection to the gateway, written and read as bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self._writer = reader, writer

    @classmethod
    @asynccontextmanager
    async def to(cls, mesh: FakeMesh) -> "AsyncIterator[Wire]":
        """An open connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", mesh.http_port)
        try:
            yield cls(reader, writer)
        finally:
            writer.close()

    def send(self, *parts: bytes) -> None:
        """Sends bytes."""
        self._writer.write(b"".join(parts))

    async def response(self) -> Response:
        """Status, headers and JSON of the next response."""
        head = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 20)).decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in head[1:-2])
        body = await asyncio.wait_for(self.reader.readexactly(int(headers["content-length"])), 20)
        return int(head[0].split()[1]), headers, json.loads(body)


def head(body: bytes, *lines: str, version: str = "1.1", path: str = "/v1/completions") -> bytes:
    """The head of a POST request with this body."""
    text = "".join(f"{line}\r\n" for line in ("host: x", f"content-length: {len(body)}", *lines))
    return f"POST {path} HTTP/{version}\r\n{text}\r\n".encode()


MOST = 16 << 20
"""Bytes: more than the buffers of a connection hold."""
BODY = json.dumps(TEXT).encode()
REQUEST = head(BODY) + BODY


@asynccontextmanager
async def busy() -> AsyncIterator[tuple[FakeMesh, Any]]:
    """A gateway whose only place for a call is taken, and the call that has it."""
    async with FakeMesh(http_port=free_port(), gateway_most_calls=1) as mesh:
        mesh.workers[0].hold_at = 1
        running = mesh.stub.Generate(ask())
        await running.read()
        yield mesh, running
        running.cancel()


async def make_room(mesh: FakeMesh, running: Any) -> None:
    """Ends the running call."""
    mesh.workers[0].hold_at = None
    running.cancel()
    await until(lambda: not mesh.workers[0].running)


def assert_refused(response: Response) -> None:
    """The response is the load gate's refusal in OpenAI's form."""
    status, headers, body = response
    assert (status, headers["retry-after"], headers["retry-after-ms"]) == (429, "1", "1000")
    assert headers["content-type"] == "application/json"
    assert headers["date"]
    assert body["error"]["code"] == "gateway_overloaded"
    assert body["error"]["type"] == "rate_limit_error"


async def test_a_refusal_comes_before_the_body_and_the_connection_is_used_again() -> None:
    async with busy() as (mesh, running), Wire.to(mesh) as wire:
        for _ in range(2):
            wire.send(head(BODY))
            assert_refused(await wire.response())
            wire.send(BODY[:5])
            wire.send(BODY[5:])
        await make_room(mesh, running)
        wire.send(REQUEST)
        status, _, body = await wire.response()
        assert (status, body["choices"][0]["text"]) == (200, LOREM)


async def test_a_chunked_body_of_a_refused_request_is_no_request() -> None:
    async with busy() as (mesh, _), Wire.to(mesh) as wire:
        chunked = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        wire.send(chunked, b"%x\r\n%b\r\n" % (len(REQUEST), REQUEST), b"0\r\n\r\n", REQUEST)
        for _ in range(2):
            assert_refused(await wire.response())
        assert (await metric(mesh, "weft_gateway_refused_total")) == 2


async def test_pipelined_requests_are_refused_one_by_one() -> None:
    async with busy() as (mesh, _), Wire.to(mesh) as wire:
        wire.send(REQUEST * 100)
        for _ in range(100):
            assert_refused(await wire.response())
        assert (await metric(mesh, "weft_gateway_refused_total")) == 100
        counted = 'weft_http_seconds_count{route="/v1/completions",status="429"}'
        assert (await metric(mesh, counted)) == 100


async def metric(mesh: FakeMesh, series: str) -> float:
    """The value of a series."""
    async with client(mesh) as http_client:
        lines = (await http_client.get("/metrics")).text.splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == series)


async def test_a_request_behind_a_running_one_is_answered_in_its_turn() -> None:
    async with FakeMesh(http_port=free_port(), gateway_most_calls=1) as mesh, Wire.to(mesh) as wire:
        mesh.workers[0].hold_at = 1
        wire.send(REQUEST, REQUEST)
        await until(lambda: bool(mesh.workers[0].running))
        async with Wire.to(mesh) as other:
            other.send(REQUEST)
            assert_refused(await other.response())
        mesh.workers[0].hold_at = None
        for _ in range(2):
            status, _, body = await wire.response()
            assert (status, body["choices"][0]["text"]) == (200, LOREM)


@pytest.mark.parametrize(
    "request_", [head(BODY, version="1.0"), head(BODY, "connection: close"), head(BODY, "expect: 100-continue")]
)
async def test_a_connection_that_cannot_stay_is_closed_behind_the_refusal(request_: bytes) -> None:
    async with busy() as (mesh, _), Wire.to(mesh) as wire:
        wire.send(request_)
        response = await wire.response()
        assert_refused(response)
        assert response[1]["connection"] == "close"
        assert await asyncio.wait_for(wire.reader.read(), 20) == b""


async def test_a_body_that_never_comes_closes_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_HEAD_S", 0.2)
    async with busy() as (mesh, _), Wire.to(mesh) as wire:
        wire.send(head(BODY), BODY[:5])
        assert_refused(await wire.response())
        assert await asyncio.wait_for(wire.reader.read(), 20) == b""


async def test_a_refusal_has_the_form_of_its_path_and_some_paths_refuse_none() -> None:
    async with busy() as (mesh, _), client(mesh) as http_client:
        for path in ("/v2", "/v2/models/fake", "/v2?x=1"):
            refused = await http_client.get(path)
            assert (refused.status_code, refused.json()["reason"]) == (429, "GATEWAY_OVERLOADED")
        for path in ("/v1/models", "/v1/models/fake"):
            refused = await http_client.get(path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "gateway_overloaded")
        assert (await http_client.get("/health")).status_code == 200
        assert (await http_client.get("/no-such-path")).status_code == 404


async def test_refusals_that_nobody_reads_do_not_pile_up() -> None:
    """The connection is read no further, or it is closed because too many requests wait on it."""
    async with busy() as (mesh, _):
        with socket.create_connection(("127.0.0.1", mesh.http_port)) as flood:
            flood.setblocking(False)
            sent = idle = 0
            while sent < MOST and idle < 100:
                try:
                    sent += flood.send((REQUEST * 100)[sent % len(REQUEST) :])
                    idle = 0
                    await asyncio.sleep(0)  # The server, which shares this loop, reads them.
                except BlockingIOError:
                    idle += 1
                    await asyncio.sleep(0.01)
                except ConnectionError:
                    break
        assert sent < MOST
