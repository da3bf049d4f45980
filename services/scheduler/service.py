"""The scheduler's doors: links of gateways and workers around one pool. Moves messages and time, decides nothing.

Each link has a reader, which hands its events to the pool at once, and a writer behind a bounded outbox: a peer that
does not read is cut off and delays nobody.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, TypeVar

import structlog
from grpc import StatusCode, aio

from protos import mesh_pb2 as mesh
from protos import mesh_pb2_grpc as mesh_grpc
from services import rpc
from services.errors import WeftError, invalid
from services.scheduler import codec, overview
from services.scheduler.core.pool import Pool
from services.scheduler.messages import (
    Assigned,
    Command,
    DropWorker,
    Joined,
    Refused,
    Rejected,
    ToGateway,
    ToWorker,
)
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.tracing import Waits
from services.send_queue import SendQueue, SendQueueFull

log = structlog.get_logger("scheduler")

TICK_S = 0.05
PAUSE_S = 0.25  # A tick so late means that this process did not run, or did not listen.

Request = TypeVar("Request", mesh.DispatchRequest, mesh.AttachRequest)
Response = TypeVar("Response", mesh.DispatchResponse, mesh.AttachResponse)


class Link(Generic[Response]):
    """One peer's stream: what waits to be said to it, and why it ends."""

    def __init__(self, outbox_limit: int) -> None:
        self.outbox: SendQueue[Response] = SendQueue(outbox_limit)
        self._cut: asyncio.Future[WeftError] = asyncio.get_running_loop().create_future()

    def say(self, message: Response) -> None:
        """Never waits. A peer too far behind is cut off."""
        try:
            self.outbox.put(message)
        except SendQueueFull:
            self.cut(WeftError(StatusCode.ABORTED, "LINK_TOO_SLOW", "the reader of this link is too slow"))

    def cut(self, error: WeftError) -> None:
        """Ends the link now, with this error."""
        if not self._cut.done():
            self._cut.set_result(error)

    async def run(self, hear: "asyncio.Task[None]", context: aio.ServicerContext[Any, Any]) -> None:
        """Writes what is said, until the peer has said its last, the outbox is closed, or the link is cut."""
        # A status after a cancelled first write would send the metadata twice, which ends nothing.
        await context.send_initial_metadata(())
        speak = asyncio.create_task(self._speak(context))
        try:
            ends: list[asyncio.Future[Any]] = [hear, speak, self._cut]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._cut.done():
                raise self._cut.result()
            await (hear if hear.done() else speak)
        finally:
            for task in (hear, speak):
                task.cancel()
            await asyncio.gather(hear, speak, return_exceptions=True)

    async def _speak(self, context: aio.ServicerContext[Any, Any]) -> None:
        async for message in self.outbox:
            await context.write(message)


class SchedulerService(mesh_grpc.SchedulerServicer):
    """`weft.v1.Scheduler` over a pool. A peer that is `outbox_limit` messages behind is cut off."""

    def __init__(self, pool: Pool, clock: Callable[[], float] = time.monotonic, outbox_limit: int = 4096) -> None:
        self._pool = pool
        self._clock = clock
        self._outbox_limit = outbox_limit
        self._gateways: dict[str, Link[mesh.DispatchResponse]] = {}
        self._workers: dict[str, Link[mesh.AttachResponse]] = {}
        self._loading: dict[str, Link[mesh.AttachResponse]] = {}
        self._waits = Waits()
        self.metrics = SchedulerMetrics(pool, lambda: len(self._gateways))

    async def run_clock(self) -> None:
        """Tells the pool the time until cancelled."""
        while True:
            slept_at = self._clock()
            await asyncio.sleep(TICK_S)
            now = self._clock()
            if now - slept_at > PAUSE_S:
                log.warning("paused", seconds=round(now - slept_at, 3))
                self._pool.on_pause(now - slept_at)
            self._perform(self._pool.on_tick(now))

    # ---- gateways ----

    async def Dispatch(  # type: ignore[override]
        self, requests: AsyncIterator[mesh.DispatchRequest], context: aio.ServicerContext[Any, Any]
    ) -> None:
        """Gateway <-> scheduler."""
        gateway_id = (await _first(requests)).hello.gateway_id
        if not gateway_id:
            raise invalid("gateway_id", "is empty")
        link: Link[mesh.DispatchResponse] = Link(self._outbox_limit)
        _replace(self._gateways, gateway_id, link)
        log.info("gateway attached", gateway_id=gateway_id)
        self._perform(self._pool.on_gateway_attached(gateway_id, self._clock()))
        try:
            await link.run(asyncio.create_task(self._hear_gateway(gateway_id, requests)), context)
        finally:
            if self._gateways.get(gateway_id) is link:
                del self._gateways[gateway_id]
                log.info("gateway detached", gateway_id=gateway_id)
                self._waits.leave(gateway_id)
                self._perform(self._pool.on_gateway_detached(gateway_id, self._clock()))

    async def _hear_gateway(self, gateway_id: str, requests: AsyncIterator[mesh.DispatchRequest]) -> None:
        async for request in requests:
            match request.WhichOneof("message"):
                case "submit":
                    self._submit(gateway_id, request.submit)
                case "withdraw":
                    job_id = request.withdraw.job_id
                    self._waits.cancel(gateway_id, job_id)
                    self._perform(self._pool.on_withdraw(gateway_id, job_id, self._clock()))
                case _:
                    raise _unexpected()

    def _submit(self, gateway_id: str, message: mesh.Submit) -> None:
        self._waits.begin(gateway_id, message.job_id, message.traceparent, message.attempt)
        try:
            submit = codec.submit_from(message)
        except WeftError as error:  # One malformed job ends neither the link nor the jobs of others.
            self._waits.answered(gateway_id, message.job_id, {}, error.reason)
            rejected = mesh.Rejected(job_id=message.job_id, attempt=message.attempt, failure=error.failure())
            self._gateways[gateway_id].say(mesh.DispatchResponse(rejected=rejected))
            return
        self._perform(self._pool.on_submit(gateway_id, submit, self._clock()))

    # ---- workers ----

    async def Attach(  # type: ignore[override]
        self, requests: AsyncIterator[mesh.AttachRequest], context: aio.ServicerContext[Any, Any]
    ) -> None:
        """Worker <-> scheduler."""
        first = await _first(requests, "hello", "loading")
        if first.WhichOneof("message") == "loading":
            await self._watch_loading(first.loading, requests, context)
            return
        hello = codec.hello_from(first.hello)
        worker_id = hello.worker_id
        link: Link[mesh.AttachResponse] = Link(self._outbox_limit)
        _replace(self._workers, worker_id, link)
        commands = self._pool.on_worker_attached(hello, self._clock())
        if worker_id in self._loading:
            self._loading[worker_id].outbox.close()
        if worker_id in self._pool.workers:
            log.info("worker attached", worker_id=worker_id, model=hello.card.name, credits=hello.credits)
        self._perform(commands)
        try:
            await link.run(asyncio.create_task(self._hear_worker(worker_id, requests)), context)
        finally:
            if self._workers.get(worker_id) is link:
                del self._workers[worker_id]
                log.info("worker detached", worker_id=worker_id)
                self._perform(self._pool.on_worker_detached(worker_id, self._clock()))

    async def _hear_worker(self, worker_id: str, requests: AsyncIterator[mesh.AttachRequest]) -> None:
        async for request in requests:
            if request.WhichOneof("message") != "report":
                raise _unexpected()
            self._perform(self._pool.on_report(worker_id, codec.report_from(request.report), self._clock()))

    async def _watch_loading(
        self,
        first: mesh.WorkerLoading,
        requests: AsyncIterator[mesh.AttachRequest],
        context: aio.ServicerContext[Any, Any],
    ) -> None:
        """A worker that is being started, until its hello has come on another link or it is gone."""
        loading = codec.loading_from(first)
        worker_id = loading.worker_id
        link: Link[mesh.AttachResponse] = Link(self._outbox_limit)
        _replace(self._loading, worker_id, link)
        log.info("worker loading", worker_id=worker_id, model=loading.model)
        self._perform(self._pool.on_loading(loading, self._clock()))
        try:
            await link.run(asyncio.create_task(self._hear_loading(worker_id, requests)), context)
        finally:
            if self._loading.get(worker_id) is link:
                del self._loading[worker_id]
                self._perform(self._pool.on_loading_ended(worker_id, self._clock()))

    async def _hear_loading(self, worker_id: str, requests: AsyncIterator[mesh.AttachRequest]) -> None:
        async for request in requests:
            if request.WhichOneof("message") != "loading" or request.loading.worker_id != worker_id:
                raise _unexpected()
            self._perform(self._pool.on_loading(codec.loading_from(request.loading), self._clock()))

    # ---- tools ----

    async def Overview(
        self, request: mesh.OverviewRequest, context: aio.ServicerContext[Any, Any]
    ) -> mesh.OverviewResponse:
        """Who is there and what waits."""
        return overview.overview_of(self._pool, len(self._gateways), self._clock())

    # ---- commands ----

    def _perform(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case ToGateway(gateway_id, message):
                    if isinstance(message, Assigned | Joined | Rejected):
                        self._answered(gateway_id, message)
                    if gateway_id in self._gateways:
                        self._gateways[gateway_id].say(codec.to_gateway(message))
                case ToWorker(worker_id, message):
                    link = self._workers[worker_id]
                    link.say(codec.to_worker(message))
                    if isinstance(message, Refused):
                        log.warning("worker refused", worker_id=worker_id, reason=message.failure.reason)
                        link.outbox.close()
                case DropWorker(worker_id, why):
                    log.warning("worker lost", worker_id=worker_id, why=why)
                    if worker_id in self._workers:
                        self._workers[worker_id].cut(
                            WeftError(StatusCode.ABORTED, "WORKER_LOST", "no progress was seen: say hello again")
                        )

    def _answered(self, gateway_id: str, answer: Assigned | Joined | Rejected) -> None:
        log.debug("answered", answer=type(answer).__name__, job_id=answer.job_id)
        match answer:
            case Assigned():
                self.metrics.assigned(answer)
                self._waits.answered(
                    gateway_id,
                    answer.job_id,
                    {"weft.worker": answer.worker_id, "weft.matched_blocks": answer.matched_blocks},
                )
            case Joined():
                self._waits.answered(gateway_id, answer.job_id, {"weft.worker": answer.worker_id, "weft.joined": True})
            case Rejected():
                self._waits.answered(gateway_id, answer.job_id, {}, answer.failure.reason)


def service(pool: Pool) -> tuple[SchedulerService, rpc.Service]:
    """The servicer of a pool, and how it is served."""
    servicer = SchedulerService(pool)
    return servicer, rpc.Service("weft.v1.Scheduler", mesh_grpc.add_SchedulerServicer_to_server, servicer)


async def _first(requests: AsyncIterator[Request], *kinds: str) -> Request:
    """The first message of a link, which must be a hello or one of these kinds. Raises WeftError."""
    first = await anext(requests, None)
    if first is None or first.WhichOneof("message") not in (kinds or ("hello",)):
        raise WeftError(StatusCode.FAILED_PRECONDITION, "HELLO_EXPECTED", "the first message of a link is a hello")
    return first


def _replace(links: dict[str, Link[Response]], peer_id: str, link: Link[Response]) -> None:
    """A peer has a new link: the old one, whose end may not have been noticed yet, ends silently."""
    old = links.get(peer_id)
    links[peer_id] = link
    if old is not None:
        old.cut(WeftError(StatusCode.ABORTED, "LINK_REPLACED", "this peer has a newer link"))


def _unexpected() -> WeftError:
    return WeftError(StatusCode.INVALID_ARGUMENT, "UNEXPECTED_MESSAGE", "this message is not expected here")
