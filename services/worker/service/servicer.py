"""Serves weft.v1.Worker: Run links, the tokenizer bundle, profiles and status. Knows jobs, never engines."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog
from grpc import StatusCode, aio

from protos import mesh_pb2 as mesh
from services.errors import WeftError, invalid, unavailable
from services.security import mesh_id as mesh_ids
from services.send_queue import unjoin
from services.worker.engine.base import StepProfile, StepProfiler
from services.worker.service.adapters import Adapters
from services.worker.service.block_lender import BlockLender
from services.worker.service.block_sender import BlockSender
from services.worker.service.heartbeat import HEARTBEAT_S, Progress
from services.worker.service.job_record import Subscriber
from services.worker.service.jobs import Jobs
from services.worker.service.startup import Startup

log = structlog.get_logger("worker.service")

PIECE_BYTES = 1 << 20
"""Size of the pieces in which a bundle or trace is sent."""
MOST_PROFILED_STEPS = 1000


@dataclass(frozen=True, slots=True)
class Loaded:
    """What calls need, available once the model is loaded."""

    jobs: Jobs
    adapters: Adapters
    progress: Progress
    bundle: bytes
    digest: bytes
    report: Callable[[], mesh.WorkerReport]
    profiler: StepProfiler
    blocks: BlockSender
    lender: BlockLender


class WorkerService:
    """weft.v1.Worker."""

    def __init__(self, startup: Startup) -> None:
        self._startup = startup
        self._loaded: Loaded | None = None

    def loaded(self, loaded: Loaded) -> None:
        """Begins to accept calls: the model is loaded."""
        self._loaded = loaded

    def _model(self) -> Loaded:
        if self._loaded is None:
            raise unavailable("LOADING", "the model is still loading")
        return self._loaded

    async def Run(
        self, requests: AsyncIterator[mesh.RunRequest], context: aio.ServicerContext[mesh.RunRequest, mesh.RunResponse]
    ) -> None:
        """A gateway's link: receives jobs, sends tokens, in one message for each engine step or for several."""
        loaded = self._model()
        jobs = loaded.jobs
        first = await anext(requests, None)
        if first is None or first.WhichOneof("message") != "hello":
            raise invalid("message", "the first message must be hello")
        mesh_ids.check(self._startup.mesh_id, first.hello.mesh_id, "gateway")
        link = Subscriber(first.hello.gateway_id)
        log.info("gateway connected", gateway=link.gateway_id)
        reader = asyncio.create_task(_read(jobs, link, requests))
        beating = asyncio.create_task(_beat(loaded.progress, link))
        try:
            async for response in link:
                await context.write(response)
            if link.overrun:
                # The gateway treats the end of the call as the loss of its streams, and sends the next attempts.
                raise unavailable("GATEWAY_TOO_SLOW", "the gateway reads too slowly")
            await reader
        finally:
            reader.cancel()
            beating.cancel()
            jobs.leave(link)
            log.info("gateway disconnected", gateway=link.gateway_id)

    async def FetchBundle(
        self, request: mesh.FetchBundleRequest, context: Any
    ) -> AsyncIterator[mesh.FetchBundleResponse]:
        """Sends the bundle in pieces. NOT_FOUND if the digest belongs to another model."""
        model = self._model()
        if request.digest != model.digest:
            raise WeftError(StatusCode.NOT_FOUND, "BUNDLE_NOT_FOUND", "this worker has a bundle with another digest")
        for start in range(0, len(model.bundle), PIECE_BYTES):
            yield mesh.FetchBundleResponse(data=model.bundle[start : start + PIECE_BYTES])

    async def ReadBlocks(self, request: mesh.ReadBlocksRequest, context: Any) -> AsyncIterator[mesh.ReadBlocksResponse]:
        """Sends KV blocks to another worker."""
        async for response in self._model().blocks.send(request):
            yield response

    async def ShareMemory(
        self, request: mesh.ShareMemoryRequest, context: Any
    ) -> AsyncIterator[mesh.ShareMemoryResponse]:
        """Describes the memory of KV blocks to another worker of this host."""
        async for response in self._model().lender.share(request):
            yield response

    async def LendBlocks(
        self, requests: AsyncIterator[mesh.LendBlocksRequest], context: Any
    ) -> AsyncIterator[mesh.LendBlocksResponse]:
        """Lends KV blocks to another worker of this host."""
        async for response in self._model().lender.lend(requests):
            yield response

    async def Profile(self, request: mesh.ProfileRequest, context: Any) -> AsyncIterator[mesh.ProfileResponse]:
        """Profiles the next steps, and answers when they have ended."""
        if not 1 <= request.steps <= MOST_PROFILED_STEPS:
            raise invalid("steps", f"must be between 1 and {MOST_PROFILED_STEPS}")
        ordered = self._model().profiler.order(request.steps)
        if ordered is None:
            raise WeftError(StatusCode.FAILED_PRECONDITION, "PROFILING", "another call profiles this worker now")
        try:
            observed = await asyncio.wrap_future(ordered)
        finally:
            ordered.cancel()
        profile = await asyncio.to_thread(observed.report)
        yield mesh.ProfileResponse(summary=_summary(profile))
        for start in range(0, len(profile.trace), PIECE_BYTES):
            yield mesh.ProfileResponse(trace=profile.trace[start : start + PIECE_BYTES])

    async def Status(self, request: mesh.StatusRequest, context: Any) -> mesh.StatusResponse:
        """The phase of the start, and the counters once the model is loaded."""
        startup = self._startup
        status = mesh.StatusResponse(phase=startup.phase, done=startup.done, total=startup.total)
        if self._loaded is not None:
            status.report.CopyFrom(self._loaded.report())
        return status

    async def ListAdapters(self, request: mesh.ListAdaptersRequest, context: Any) -> mesh.AdapterList:
        """The adapters that the worker serves."""
        return self._model().adapters.listing()

    async def LoadAdapter(self, request: mesh.LoadAdapterRequest, context: Any) -> mesh.AdapterState:
        """Reads an adapter, and serves it from now on."""
        return await self._model().adapters.load(request.name, request.folder)

    async def DropAdapter(self, request: mesh.DropAdapterRequest, context: Any) -> mesh.DropAdapterResponse:
        """Serves an adapter no longer."""
        self._model().adapters.drop(request.name)
        return mesh.DropAdapterResponse()


def _summary(profile: StepProfile) -> mesh.ProfileSummary:
    host, device = (
        [mesh.ProfilePart(name=name, seconds=seconds) for name, seconds in parts.items()]
        for parts in (profile.host, profile.families)
    )
    return mesh.ProfileSummary(
        steps=profile.steps, seconds=profile.seconds, host=host, device=device, on_gpu=profile.on_gpu
    )


async def _beat(progress: Progress, link: Subscriber) -> None:
    """Sends heartbeats until cancelled, the first one at once."""
    while True:
        link.send_heartbeat(progress.heartbeat(link.received))
        await asyncio.sleep(HEARTBEAT_S)


async def _read(jobs: Jobs, link: Subscriber, requests: AsyncIterator[mesh.RunRequest]) -> None:
    receive = partial(_receive, jobs, link)
    try:
        async for request in requests:
            await unjoin(request, receive)
    finally:
        link.close()


def _receive(jobs: Jobs, link: Subscriber, request: mesh.RunRequest) -> None:
    link.received += 1
    match request.WhichOneof("message"):
        case "job":
            jobs.start(link, request.job)
        case "attach":
            jobs.attach(link, request.attach)
        case "cancel":
            jobs.cancel(link, request.cancel)
        case "confirm":
            jobs.confirm(link, request.confirm)
        case "prefetch":
            jobs.prefetch(request.prefetch)
        case _:
            raise invalid("message", "not a message that a worker accepts")
