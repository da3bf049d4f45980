"""The harness itself: its proxy cuts links, its checks find what is wrong, failpoints fail where they are armed."""

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from services import failpoints
from tests.faults.cluster import Cluster, flowing, reference, resume, state_of, suspend
from tests.faults.history import History, Stream
from tests.faults.proxy import Proxy, Way
from tests.ports import free_port

pytestmark = pytest.mark.asyncio(loop_scope="function")


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(100):
        writer.write(data)
        await writer.drain()
    writer.close()


@pytest.mark.parametrize("way", Way)
async def test_a_cut_holds_one_direction_until_it_heals(way: Way) -> None:
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with Proxy(free_port(), server.sockets[0].getsockname()[1]) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"before")
        assert await reader.readexactly(6) == b"before"
        proxy.cut(frozenset({way}))
        writer.write(b"during")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(6), 0.2)
        assert proxy.counts.held == 6
        await proxy.heal()
        assert await reader.readexactly(6) == b"during"
        proxy.cut(frozenset({way}))
        assert proxy.counts.held == 0, "the proof of a fault is none of the next"
        writer.close()
    server.close()


async def test_refused_and_late_connections_are_counted() -> None:
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with Proxy(free_port(), server.sockets[0].getsockname()[1]) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"x")
        await reader.readexactly(1)
        proxy.refuse()
        assert await reader.read() == b""
        with pytest.raises(OSError, match="onnect"):
            await asyncio.open_connection("127.0.0.1", proxy.port)
        assert proxy.counts.refused == 1
        writer.close()
        await proxy.heal()
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        proxy.delay(0.1)
        began = asyncio.get_running_loop().time()
        writer.write(b"late")
        assert await reader.readexactly(4) == b"late"
        assert asyncio.get_running_loop().time() - began >= 0.2
        assert proxy.counts.delayed >= 4
        writer.close()
    server.close()


def stream(tokens: list[int], positions: list[int] | None = None, *, code: str = "", finished: bool = True) -> Stream:
    positions = list(range(len(tokens))) if positions is None else positions
    times = [0.01 * at for at in range(len(tokens))]
    return Stream("s", [5, 6, 7], 0.0, tokens, times, positions, [1] * len(tokens), finished, code=code)


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (stream([5, 6, 6, 7], [0, 1, 1, 2]), "repeated positions [1]"),
        (stream([5, 7], [0, 2]), "positions are not contiguous"),
        (stream([5, 6, 8]), "tokens differ from the reference"),
        (stream([5, 6]), "2 tokens instead of 3"),
    ],
)
async def test_each_kind_of_wrong_stream_is_found_and_kept_whole(bad: Stream, problem: str, tmp_path: Path) -> None:
    history = History([stream([5, 6, 7]), bad])
    assert any(problem in found for found in bad.problems())
    assert history.summary()["wrong"] == 1
    kept = history.keep_wrong(tmp_path, {"row": "cut", "seed": 7})
    assert [path.name for path in kept] == ["cut-7-s.json"]
    assert problem in kept[0].read_text()
    with pytest.raises(AssertionError):
        history.assert_whole(tmp_path)


async def test_every_stream_is_completed_refused_or_failed() -> None:
    streams = [stream([5, 6, 7]), stream([], code="UNAVAILABLE", finished=False), stream([5], code="UNAVAILABLE")]
    streams += [stream([], code="INTERNAL", finished=False)]
    summary = History(streams).summary()
    assert (summary["completed"], summary["refused"], summary["failed"]) == (1, 1, 2)


async def test_failpoints_do_nothing_unless_they_are_armed() -> None:
    assert failpoints.ARMED == {}
    failpoints.hit("engine.step", [1])
    point = failpoints.parse("engine.step=exit:42;other=raise")["engine.step"]
    assert point.concerns([41, 42])
    assert not point.concerns([41])
    with pytest.raises(ValueError, match="none of exit, hang, raise"):
        failpoints.parse("engine.step=explode")
    code = "from services import failpoints; failpoints.hit('a', [1]); print('alive', flush=True)"
    assert await run(code, WEFT_FAILPOINTS="a=exit") == (-signal.SIGKILL, b"")
    assert await run(code) == (0, b"alive\n")


async def run(code: str, **env: str) -> tuple[int | None, bytes]:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, env=env, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    return process.returncode, output


async def test_a_killed_worker_is_found_by_the_checker(tmp_path: Path) -> None:
    """The whole chain on real processes: 24 streams, a SIGKILL with proof, references that no mesh computed."""
    async with Cluster(tmp_path, workers=2) as cluster:
        history, stub = History(), cluster.plain()
        tasks = [cluster.send(history, stub, seed, 120) for seed in range(24)]
        await flowing(history.streams, 24)
        assert cluster.workers[0].kill() == -signal.SIGKILL
        await asyncio.gather(*tasks)
        history.assert_whole(tmp_path / "kept")
        assert history.summary()["moved"] >= 8
        suspend(cluster.scheduler)
        assert state_of(cluster.scheduler) == "T"
        resume(cluster.scheduler)
        assert reference(1, 20) != reference(2, 20)
