"""The worker's link to the scheduler: registers the worker, then sends reports. Registers again after every break."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Protocol

import structlog
from grpc import aio

from protos import mesh_pb2 as mesh
from protos import mesh_pb2_grpc as mesh_grpc
from services import hashing, rpc
from services.errors import WeftError
from services.security import mesh_id as mesh_ids
from services.worker.job import Stats
from services.worker.service.adapters import Adapters
from services.worker.service.heartbeat import Progress
from services.worker.service.jobs import Jobs

log = structlog.get_logger("worker.attach")

REPORT_INTERVAL_S = 0.01
"""Shortest time between reports. Ends of jobs free credits, so they are reported as soon as this allows."""
PROGRESS_INTERVAL_S = 0.1
"""Time between reports without ends: each report costs time in the engine's process, and the scheduler counts its own
assignments between reports."""
HEARTBEAT_S = 0.5
RETRY_S = 0.2


class EngineGauges(Protocol):
    """The part of an engine that the link reads."""

    def stats(self) -> Stats:
        """Current counters and gauges."""

    def take_block_events(self) -> tuple[list[bytes], list[bytes]]:
        """Block keys stored and block keys evicted since the last call."""


class Refused(Exception):
    """The scheduler refused this worker."""


class SchedulerLink:
    """Keeps this worker registered until `run` is cancelled."""

    def __init__(
        self,
        address: str,
        hello: mesh.WorkerHello,
        engine: EngineGauges,
        jobs: Jobs,
        progress: Progress,
        adapters: Adapters | None = None,
    ) -> None:
        """`adapters`: those that it reports; None: it serves none."""
        self._adapters = adapters
        self._reported_adapters = mesh.AdapterList()
        self._address = address
        self._hello = hello
        self._engine = engine
        self._jobs = jobs
        self._progress = progress
        self._refusals = mesh_ids.RefusalLog("scheduler")
        self._keys: set[bytes] = set()
        self._changed = asyncio.Event()
        self._urgent = asyncio.Event()

    def changed(self, urgent: bool = True) -> None:
        """Requests a report: as soon as possible, or with the next progress report if not `urgent`."""
        self._changed.set()
        if urgent:
            self._urgent.set()

    async def run(self) -> None:
        """Registers the worker, and again whenever the link breaks. Raises Refused."""
        log.info("connecting to the scheduler", address=self._address)
        async with rpc.link_channel(self._address, "scheduler") as channel:
            stub = mesh_grpc.SchedulerStub(channel)
            while True:
                try:
                    await self._attach_once(stub)
                except (aio.AioRpcError, WeftError) as error:
                    if self._refusals.refused(error, self._address):
                        await asyncio.sleep(mesh_ids.RETRY_S - RETRY_S)
                    elif isinstance(error, aio.AioRpcError):
                        log.info("the link to the scheduler is down; reconnecting", code=error.code().name)
                await asyncio.sleep(RETRY_S)

    async def _attach_once(self, stub: "mesh_grpc.SchedulerAsyncStub") -> None:
        call = stub.Attach(self._messages(), wait_for_ready=True)
        try:
            async for response in call:
                if response.WhichOneof("message") == "refused":
                    raise Refused(response.refused.message)
                mesh_ids.check(self._hello.mesh_id, response.hello.mesh_id, "scheduler")
                self._refusals.accepted()
                log.info("registered at the scheduler", epoch=response.hello.epoch)
        finally:
            call.cancel()

    async def _messages(self) -> AsyncIterator[mesh.AttachRequest]:
        self._take_keys()
        hello = mesh.WorkerHello()
        hello.CopyFrom(self._hello)
        hello.running.extend(self._jobs.running())
        hello.stored_keys = b"".join(self._keys)
        if self._adapters is not None:
            self._reported_adapters = self._adapters.listing()
            hello.adapters.CopyFrom(self._reported_adapters)
        self._jobs.take_ended()
        yield mesh.AttachRequest(hello=hello)
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), HEARTBEAT_S)
            self._changed.clear()
            self._urgent.clear()
            yield mesh.AttachRequest(report=self._report(self._engine.stats()))
            await asyncio.sleep(REPORT_INTERVAL_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._urgent.wait(), PROGRESS_INTERVAL_S - REPORT_INTERVAL_S)

    def _report(self, stats: Stats) -> mesh.WorkerReport:
        report = report_of(stats, self._jobs, self._progress)
        stored, evicted = self._take_keys()
        report.ended.extend(self._jobs.take_ended())
        report.stored_keys = b"".join(stored)
        report.evicted_keys = b"".join(evicted)
        if self._adapters is not None and (listing := self._adapters.listing()) != self._reported_adapters:
            self._reported_adapters = listing
            report.adapters.CopyFrom(listing)
        return report

    def _take_keys(self) -> tuple[list[bytes], list[bytes]]:
        stored, evicted = self._engine.take_block_events()
        self._keys.update(stored)
        self._keys.difference_update(evicted)
        assert all(len(key) == hashing.KEY_BYTES for key in stored)
        return stored, evicted


def report_of(stats: Stats, jobs: Jobs, progress: Progress) -> mesh.WorkerReport:
    """The counters and gauges of a report; block keys and ended jobs are added by the link."""
    return mesh.WorkerReport(
        steps=stats.steps,
        step_s=stats.predicted_step_s,
        running=stats.running,
        waiting=stats.waiting,
        prefill_backlog=stats.prefill_backlog,
        free_blocks=stats.free_blocks,
        cached_blocks=stats.cached_blocks,
        active_blocks=stats.active_blocks,
        prefill_rate=stats.prefill_rate,
        decode_s=stats.decode_s,
        draining=jobs.draining,
        preemptions=stats.preemptions,
        engine_cpu_s=progress.cpu_s(),
        busy=not jobs.idle,
    )
