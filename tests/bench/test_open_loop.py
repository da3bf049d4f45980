"""The parts of `bench.mesh.open_loop` that need no mesh."""

import argparse
import asyncio
import json
import os
import time
from pathlib import Path

import pytest

from bench.mesh import busy_cores, cores, open_loop
from protos import inference_pb2 as api
from weft.load.http_calls import HttpCalls, HttpError
from weft.load.tally import Tally

ANSWER = b'{"usage": {"prompt_tokens": 1, "completion_tokens": 2}}'


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["grpc@1000", "grpc@x4", "http@x4"], "http@x4"),
        (["grpc@x4"], "grpc@x4"),
        (["closed@256", "http@8", "http@x2", "streams@5000"], ""),
        (list(open_loop.DEFAULT_ROWS), ""),
    ],
)
def test_a_multiple_needs_a_row_of_its_protocol_before_it(names: list[str], found: str) -> None:
    assert open_loop.unfounded(names) == found


@pytest.mark.parametrize("name", ["grpc@1000", "http@2.5", "grpc@x4", "closed@256", "streams@5000"])
def test_a_row_is_a_kind_and_a_size(name: str) -> None:
    assert open_loop.row_name(name) == name


@pytest.mark.parametrize("name", ["grpc", "grpc@", "closed@x4", "streams@1.5", "ftp@1"])
def test_another_row_is_refused(name: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not grpc@RATE"):
        open_loop.row_name(name)


def test_answers_of_the_first_seconds_and_after_the_load_do_not_count() -> None:
    tally = Tally()
    for second in range(8):
        tally.count(second + 0.5, "answered", 10 * second)
    assert open_loop.good_per_s(tally, 6.0) == pytest.approx((30 + 40 + 50) / 3)
    assert open_loop.good_per_s(tally, 2.0) == 0


def test_a_busy_core_computes_at_the_lowest_priority_until_the_end() -> None:
    core = min(os.sched_getaffinity(0))
    with busy_cores.busy([core]) as (process,):
        while os.sched_getscheduler(process.pid) != os.SCHED_IDLE:
            assert process.poll() is None
            time.sleep(0.01)
        assert os.sched_getaffinity(process.pid) == {core}
    assert process.poll() is not None


def test_threads_of_a_physical_core_stay_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for core, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        (tmp_path / f"cpu{core}").write_text(siblings)
    monkeypatch.setattr(cores, "_SIBLINGS", str(tmp_path / "cpu{}"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert cores.divided(2) == ({0, 2}, {1, 3})
    with pytest.raises(SystemExit, match="4 cores of 4"):
        cores.divided(4)


async def test_http_requests_take_turns_on_connections() -> None:
    served: list[int] = []
    bodies: list[dict[str, object]] = []
    open_connections: set[asyncio.StreamWriter] = set()
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_connections.add(writer)
        while head := await reader.readline():
            while (line := await reader.readline()) != b"\r\n":
                head = line  # The last one names the length.
            bodies.append(json.loads(await reader.readexactly(int(head.removeprefix(b"content-length:")))))
            served.append(writer.get_extra_info("peername")[1])
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(ANSWER), ANSWER))
        writer.close()
        await writer.wait_closed()
        open_connections.discard(writer)
        if not open_connections:
            ended.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    calls = HttpCalls(f"{host}:{port}", "", least=3)
    for _ in range(6):
        receipt = await calls.complete(api.GenerateRequest(cache=api.CACHE_POLICY_BYPASS), 5.0)
        assert receipt.completion_tokens == 2
    calls.close()
    await asyncio.wait_for(ended.wait(), 10)
    server.close()
    assert len(set(served)) == 3
    assert served[:3] == served[3:]
    assert [body["cache"] for body in bodies] == ["bypass"] * 6


async def test_a_server_with_too_many_connections_is_an_error_that_is_counted() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    calls = HttpCalls(f"{host}:{port}", "", least=1)
    for _ in range(2):  # The connection is not used again.
        with pytest.raises(HttpError, match=r"^HTTP 503$") as caught:
            await calls.complete(api.GenerateRequest(), 5.0)
        assert not caught.value.refused
    server.close()
