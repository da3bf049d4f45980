"""The worker's door: the Run link of each gateway, and the tokenizer bundle by digest. Knows jobs, not engines."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import structlog
from grpc import StatusCode, aio

from protos import mesh_pb2 as mesh
from services.errors import WeftError, invalid, unavailable
from services.worker.engine.profiling import Profile, Profiler
from services.worker.service.jobs import Jobs, Listener
from services.worker.service.startup import Startup

log = structlog.get_logger("worker.service")

PIECE_BYTES = 1 << 20
MOST_PROFILED = 1000


@dataclass(frozen=True, slots=True)
class Loaded:
    """What there is once the model is loaded."""

    jobs: Jobs
    bundle: bytes
    digest: bytes
    report: Callable[[], mesh.WorkerReport]
    profiler: Profiler


class WorkerService:
    """weft.v1.Worker."""

    def __init__(self, startup: Startup) -> None:
        self._startup = startup
        self._loaded: Loaded | None = None

    def loaded(self, loaded: Loaded) -> None:
        """The model is there: calls are welcome."""
        self._loaded = loaded

    def _model(self) -> Loaded:
        if self._loaded is None:
            raise unavailable("LOADING", "the model is still loading")
        return self._loaded

    async def Run(
        self, requests: AsyncIterator[mesh.RunRequest], context: aio.ServicerContext[mesh.RunRequest, mesh.RunResponse]
    ) -> None:
        """A gateway's link: jobs come in, tokens go out, a message for each engine step or several."""
        jobs = self._model().jobs
        first = await anext(requests, None)
        if first is None or first.WhichOneof("message") != "hello":
            raise invalid("message", "the first message is hello")
        link = Listener(first.hello.gateway_id)
        log.info("gateway linked", gateway=link.gateway_id)
        reader = asyncio.create_task(_read(jobs, link, requests))
        try:
            async for response in link:
                await context.write(response)
            if link.overrun:
                # The gateway takes the end of the call as the loss of its rows and brings the next attempts.
                raise unavailable("GATEWAY_TOO_SLOW", "the gateway reads too slowly")
            await reader
        finally:
            reader.cancel()
            jobs.leave(link)
            log.info("gateway gone", gateway=link.gateway_id)

    async def FetchBundle(
        self, request: mesh.FetchBundleRequest, context: Any
    ) -> AsyncIterator[mesh.FetchBundleResponse]:
        """The bundle in pieces. NOT_FOUND if the digest is another model's."""
        model = self._model()
        if request.digest != model.digest:
            raise WeftError(StatusCode.NOT_FOUND, "BUNDLE_NOT_FOUND", "this worker has another bundle")
        for start in range(0, len(model.bundle), PIECE_BYTES):
            yield mesh.FetchBundleResponse(data=model.bundle[start : start + PIECE_BYTES])

    async def Profile(self, request: mesh.ProfileRequest, context: Any) -> AsyncIterator[mesh.ProfileResponse]:
        """The next steps under observation; the answer comes when they are over."""
        if not 1 <= request.steps <= MOST_PROFILED:
            raise invalid("steps", f"is not between 1 and {MOST_PROFILED}")
        ordered = self._model().profiler.order(request.steps)
        if ordered is None:
            raise WeftError(StatusCode.FAILED_PRECONDITION, "PROFILING", "somebody profiles this worker now")
        try:
            observed = await asyncio.wrap_future(ordered)
        finally:
            ordered.cancel()
        profile = await asyncio.to_thread(observed.report)
        yield mesh.ProfileResponse(summary=_summary(profile))
        for start in range(0, len(profile.trace), PIECE_BYTES):
            yield mesh.ProfileResponse(trace=profile.trace[start : start + PIECE_BYTES])

    async def Status(self, request: mesh.StatusRequest, context: Any) -> mesh.StatusResponse:
        """How far the start is, and the counters once it is over."""
        startup = self._startup
        status = mesh.StatusResponse(phase=startup.phase, done=startup.done, total=startup.total)
        if self._loaded is not None:
            status.report.CopyFrom(self._loaded.report())
        return status


def _summary(profile: Profile) -> mesh.ProfileSummary:
    host, device = (
        [mesh.ProfilePart(name=name, seconds=seconds) for name, seconds in parts.items()]
        for parts in (profile.host, profile.families)
    )
    return mesh.ProfileSummary(
        steps=profile.steps, seconds=profile.seconds, host=host, device=device, on_gpu=profile.on_gpu
    )


async def _read(jobs: Jobs, link: Listener, requests: AsyncIterator[mesh.RunRequest]) -> None:
    try:
        async for request in requests:
            match request.WhichOneof("message"):
                case "job":
                    jobs.start(link, request.job)
                case "attach":
                    jobs.attach(link, request.attach)
                case "cancel":
                    jobs.cancel(link, request.cancel)
                case "confirm":
                    jobs.confirm(link, request.confirm)
                case _:
                    raise invalid("message", "not a message of this link")
    finally:
        link.close()
