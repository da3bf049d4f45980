"""Requests while the scheduler is away, and answers that wait for a worker."""

import asyncio
import signal
from pathlib import Path

import httpx
import pytest

from tests.faults.cluster import Cluster, flowing, resume, steady, suspend
from tests.faults.history import History

pytestmark = pytest.mark.asyncio(loop_scope="function")


async def test_a_restart_and_a_hang_of_the_scheduler_fail_no_plain_client(tmp_path: Path) -> None:
    async with Cluster(tmp_path, workers=2, gateways=2) as cluster:
        history, stub = History(), cluster.plain()
        async with steady(cluster, history, stub, rate=10):
            await asyncio.sleep(1.0)
            for _ in range(2):
                assert cluster.scheduler.kill() == -signal.SIGKILL
                await asyncio.sleep(1.5)
                cluster.scheduler.start()
                await cluster.scheduler.ready()
                await asyncio.sleep(1.0)
            suspend(cluster.scheduler)
            await asyncio.sleep(4.0)
            resume(cluster.scheduler)
            await asyncio.sleep(1.0)
        assert len(history.streams) >= 80
        history.assert_whole(tmp_path / "kept")


async def test_a_new_request_reaches_a_worker_that_only_the_scheduler_lost(tmp_path: Path) -> None:
    async with Cluster(tmp_path, workers=1) as cluster:
        history, stub = History(), cluster.plain()
        await cluster.send(history, stub, 1, 8)
        cluster.link("worker-0", "scheduler").refuse()
        await cluster.listed(0)
        await asyncio.gather(*(cluster.send(history, stub, seed, 8) for seed in range(2, 6)))
        assert cluster.link("worker-0", "scheduler").counts.refused
        history.assert_whole(tmp_path / "kept")


async def test_running_answers_wait_for_a_loading_worker_and_their_clients_see_it(tmp_path: Path) -> None:
    """The only worker dies. New requests are refused with a delay; answers under way continue at the next worker."""
    async with Cluster(tmp_path, workers=1) as cluster:
        history, stub = History(), cluster.plain()
        tasks = [cluster.send(history, stub, seed, 200) for seed in range(8)]
        over_http = asyncio.create_task(read_events(cluster.url(), begun := asyncio.Event()))
        await flowing(history.streams, 8)
        await begun.wait()
        assert cluster.workers[0].kill() == -signal.SIGKILL
        await asyncio.sleep(6.0)
        refused = await cluster.send(other := History(), stub, 99, 8)
        assert (refused.code, refused.reason) == ("UNAVAILABLE", "NO_WORKER")
        assert refused.retry_after_s > 0
        assert other.summary()["refused"] == 1
        worker = cluster.add_worker()
        await cluster.listen(worker)
        worker.start()
        await asyncio.gather(*tasks)
        history.assert_whole(tmp_path / "kept")
        assert history.summary()["moved"] == 8
        assert all(stream.waited for stream in history.streams)
        events = await over_http
        assert b": waiting for a worker" in events
        assert events.endswith(b"data: [DONE]")


async def read_events(url: str, begun: asyncio.Event) -> bytes:
    """The events of one completion over HTTP. begun: set when the first one has arrived."""
    body = {"model": "weft-story-11m", "prompt": [5, 6, 7], "max_tokens": 200, "stream": True, "ignore_eos": True}
    events = b""
    async with (
        httpx.AsyncClient(timeout=100) as client,
        client.stream("POST", f"{url}/v1/completions", json=body) as response,
    ):
        async for chunk in response.aiter_bytes():
            events += chunk
            if b"data: " in events:
                begun.set()
    return events.strip()


async def test_a_gateway_is_ready_without_workers(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, workers=0)
    cluster.gateways[0].health = "weft.v1.Gateway"
    async with cluster:
        refused = await cluster.send(History(), cluster.plain(), 1, 8)
        assert refused.code == "UNAVAILABLE"
        assert refused.retry_after_s > 0
