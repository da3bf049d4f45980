"""Clients that leave, and services that end under load: nothing stays open, and the logs contain log entries alone."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from grpc import aio

from protos import inference_pb2 as api
from tests.faults.cluster import PROGRESS_S, Cluster, request_of
from tests.faults.footprint import Baseline, Footprint, noise

pytestmark = pytest.mark.asyncio(loop_scope="function")

LENGTH = 2000
"""Tokens of an answer, of which no client reads all."""


class Clients:
    """Clients of every kind of stream, each of which leaves after some messages or stays."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._stub = cluster.plain()
        self.received = 0
        """Streams that have received something."""
        self.tasks: list[asyncio.Task[None]] = []

    def add(self, number: int, leaves_after: int | None) -> None:
        """One client of each kind."""
        kinds = (self._grpc(number, leaves_after), self._watch(leaves_after), self._http(number, leaves_after))
        self.tasks += map(asyncio.create_task, kinds)

    async def all_receive(self) -> None:
        """Waits until every stream has received something."""
        async with asyncio.timeout(PROGRESS_S):
            while self.received < len(self.tasks):  # noqa: ASYNC110 (deltas arrive meanwhile)
                await asyncio.sleep(0.02)

    async def leave(self) -> None:
        """The clients that stayed leave, in the middle of their streams."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.tasks.clear()

    async def _grpc(self, number: int, leaves_after: int | None) -> None:
        await self._follow(self._stub.Generate(request_of(number, LENGTH)), leaves_after)

    async def _watch(self, leaves_after: int | None) -> None:
        await self._follow(self._stub.WatchMesh(api.WatchMeshRequest()), leaves_after and 1)

    async def _http(self, number: int, leaves_after: int | None) -> None:
        body = {"model": "weft-story-11m", "prompt": [5, number], "max_tokens": 300, "stream": True, "ignore_eos": True}
        try:
            async with httpx.AsyncClient(timeout=100) as client:
                url = f"{self._cluster.url()}/v1/completions"
                async with client.stream("POST", url, json=body) as answer:
                    count = 0
                    async for _ in answer.aiter_lines():
                        self.received += count == 0
                        count += 1
                        if count == leaves_after:
                            return
        except httpx.HTTPError:
            return

    async def _follow(self, call: Any, leaves_after: int | None) -> None:
        count = 0
        try:
            async for _ in call:
                self.received += count == 0
                count += 1
                if count == leaves_after:
                    call.cancel()
                    return
        except aio.AioRpcError:
            return


async def test_clients_that_leave_and_services_that_end_leave_nothing_behind(tmp_path: Path) -> None:
    async with Cluster(tmp_path, workers=1, env={"WEFT_DRAIN_S": "0"}) as cluster:
        watched = [cluster.gateways[0], cluster.workers[0], cluster.scheduler]
        warm_up = Clients(cluster)
        warm_up.add(0, 1)
        await asyncio.gather(*warm_up.tasks)
        await warm_up.leave()
        await cluster.hang_up()
        baseline = Baseline()
        assert await baseline.leaks(watched) == []
        clients = Clients(cluster)
        for number in range(12):
            clients.add(number, 1 + number if number % 2 else None)
        await clients.all_receive()
        await clients.leave()
        await cluster.hang_up()
        assert await baseline.leaks(watched) == []
        staying = Clients(cluster)
        for number in range(6):
            staying.add(number, None)
        await staying.all_receive()
        for process in watched:  # The gateway first: each of them ends while streams run through it.
            assert process.kill(signal.SIGTERM) == 0
        await staying.leave()
    assert {process.name: noise(process) for process in cluster.processes} == {
        process.name: [] for process in cluster.processes
    }


async def test_more_descriptors_or_tasks_than_before_are_found() -> None:
    before = Footprint(20, 10)
    assert not Footprint(20, 10).exceeds(before)
    assert Footprint(21, 10).exceeds(before)
    assert Footprint(20, 11).exceeds(before)


async def test_lines_that_are_no_log_entries_are_found(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, workers=0)
    process = cluster.gateways[0]
    lines = ['{"level": "info"}', '{"level": "error", "event": "x"}', "Task was destroyed but it is pending!"]
    process.log.write_text("\n".join(lines))
    assert noise(process) == lines[1:]
