"""A request that kills every worker that computes it: two deaths in all through any door, and no neighbour is hurt."""

import asyncio
import signal
from pathlib import Path

import httpx
import pytest

from tests.faults.cluster import Cluster, flowing
from tests.faults.history import History
from weft.client.api import Client
from weft.client.errors import WeftError

pytestmark = pytest.mark.asyncio(loop_scope="function")

KILLER = 5999
"""The token id at which the failpoint ends a worker; no other prompt of these tests has it."""
KILLS = {"WEFT_FAILPOINTS": f"engine.step=exit:{KILLER}"}


def deaths(cluster: Cluster) -> int:
    """Workers that have died."""
    codes = [worker.popen.poll() for worker in cluster.workers if worker.popen is not None]
    assert all(code in (None, -signal.SIGKILL) for code in codes), codes
    return sum(code is not None for code in codes)


async def over_grpc(cluster: Cluster, prompt: list[int], gateway: int) -> tuple[str, str]:
    """A plain client, which repeats nothing by itself. -> code and reason."""
    stream = await cluster.send(History(), cluster.plain(gateway), 7, 16, prompt=prompt)
    return stream.code, stream.reason


async def over_http(cluster: Cluster, prompt: list[int], gateway: int) -> tuple[str, str]:
    """OpenAI's API."""
    async with httpx.AsyncClient(timeout=100) as client:
        body = {"model": "weft-story-11m", "prompt": prompt, "max_tokens": 16}
        reply = await client.post(f"{cluster.url(gateway)}/v1/completions", json=body)
        return str(reply.status_code), reply.json()["error"]["code"]


async def by_our_client(cluster: Cluster, prompt: list[int], gateway: int) -> tuple[str, str]:
    """The Python client, which repeats what may be repeated."""
    async with Client(cluster.gateways[gateway].address, deadline_s=60) as client:
        with pytest.raises(WeftError) as caught:
            await client.generate(prompt, max_tokens=16).text()
        return caught.value.code.name, caught.value.reason


DOORS = {"grpc": over_grpc, "http": over_http, "client": by_our_client}
REFUSED = {"grpc": ("INTERNAL", "POISONED"), "http": ("500", "poisoned"), "client": ("INTERNAL", "POISONED")}


@pytest.mark.parametrize("door", DOORS)
async def test_a_poisoned_request_kills_two_workers_and_no_neighbour(door: str, tmp_path: Path) -> None:
    async with Cluster(tmp_path, workers=4, gateways=2, worker_env=KILLS) as cluster:
        history, prompt = History(), [*range(1000, 1020), KILLER]
        neighbours = [cluster.send(history, cluster.plain(), seed, 400) for seed in range(8)]
        await flowing(history.streams, 8)
        assert await DOORS[door](cluster, prompt, 0) == REFUSED[door]
        assert deaths(cluster) == 2
        for other in DOORS:  # Meets every resubmission at once, through any door and gateway.
            assert await DOORS[other](cluster, prompt, 1) == REFUSED[other]
        await asyncio.gather(*neighbours)
        history.assert_whole(tmp_path / "kept")
        assert deaths(cluster) == 2


async def test_a_single_worker_that_is_restarted_dies_twice_at_most(tmp_path: Path) -> None:
    """The case of early attempts: the gateway sends a job to the only worker before the scheduler has placed it."""
    async with Cluster(tmp_path, workers=1, worker_env=KILLS) as cluster:
        worker, prompt, died = cluster.workers[0], [*range(1000, 1020), KILLER], 0
        failing = asyncio.create_task(over_grpc(cluster, prompt, 0))
        assert worker.popen is not None
        while not failing.done() or worker.popen.poll() is not None:
            if worker.popen.poll() is not None:
                assert worker.popen.returncode == -signal.SIGKILL
                died += 1
                worker.start()
            await asyncio.sleep(0.05)
        assert await failing == ("INTERNAL", "POISONED")
        await worker.ready()
        again = await asyncio.gather(*(over_grpc(cluster, prompt, 0) for _ in range(4)))
        assert set(again) == {("INTERNAL", "POISONED")}
        assert worker.popen.poll() is None
        assert died == 2
        history = History()
        await cluster.send(history, cluster.plain(), 3, 16)
        history.assert_whole(tmp_path / "kept")
