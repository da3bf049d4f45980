"""The gRPC servicer of the scheduler: streams of gateways and workers around one core. Moves messages, decides nothing.

Each stream has a reader, which applies its messages to the core at once, and a writer behind a bounded queue.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, TypeVar

import structlog
from grpc import StatusCode, aio

from protos import mesh_pb2 as mesh
from protos import mesh_pb2_grpc as mesh_grpc
from services import rpc
from services.errors import WeftError, invalid
from services.scheduler import codec, overview
from services.scheduler.core.messages import (
    Assigned,
    Command,
    DropWorker,
    GatewayMessage,
    Joined,
    Refused,
    Rejected,
    ToGateway,
    ToWorker,
    WorkerMessage,
)
from services.scheduler.core.scheduler import SchedulerCore
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.peer_stream import PeerStream, replace_stream
from services.scheduler.tracing import QueueSpans
from services.security import mesh_id as mesh_ids
from services.send_queue import unjoin

log = structlog.get_logger("scheduler")

TICK_S = 0.05
HEARTBEAT_S = 0.5
"""Time between two heartbeats to each gateway."""
PAUSE_S = 0.25
"""A tick that is this late means that the process was stopped or did not read its streams."""

Request = TypeVar("Request", mesh.DispatchRequest, mesh.AttachRequest)


class SchedulerService(mesh_grpc.SchedulerServicer):
    """`weft.v1.Scheduler` over a core. A peer that is `queue_limit` messages behind is disconnected."""

    def __init__(
        self,
        core: SchedulerCore,
        clock: Callable[[], float] = time.monotonic,
        queue_limit: int = 4096,
        mesh_id: str = "",
    ) -> None:
        self._core = core
        self._mesh_id = mesh_id
        self._clock = clock
        self._queue_limit = queue_limit
        self._gateways: dict[str, PeerStream[mesh.DispatchResponse]] = {}
        self._workers: dict[str, PeerStream[mesh.AttachResponse]] = {}
        self._loading: dict[str, PeerStream[mesh.AttachResponse]] = {}
        self._submissions: dict[str, int] = {}
        """How many each attached gateway has sent on its stream."""
        self._reports: dict[str, mesh.GatewayReport] = {}
        """The last report of each attached gateway; of one that has sent none, only its id."""
        self._spans = QueueSpans()
        self.metrics = SchedulerMetrics(core, lambda: len(self._gateways))

    async def run_clock(self) -> None:
        """Sends a tick to the core every 50 ms until cancelled."""
        beat_at = 0.0
        while True:
            slept_at = self._clock()
            await asyncio.sleep(TICK_S)
            now = self._clock()
            if now - slept_at > PAUSE_S:
                log.warning("the scheduler was paused", seconds=round(now - slept_at, 3))
                self._core.on_pause(now - slept_at)
            self._perform(self._core.on_tick(now))
            if now - beat_at >= HEARTBEAT_S:
                beat_at = now
                for gateway_id in self._gateways:
                    self._send(gateway_id, mesh.DispatchResponse(heartbeat=mesh.SchedulerHeartbeat()))

    # ---- gateways ----

    async def Dispatch(  # type: ignore[override]
        self, requests: AsyncIterator[mesh.DispatchRequest], context: aio.ServicerContext[Any, Any]
    ) -> None:
        """Serves the stream of a gateway."""
        hello = (await _first(requests)).hello
        gateway_id = hello.gateway_id
        if not gateway_id:
            raise invalid("gateway_id", "is empty")
        self._check_mesh(hello.mesh_id, "gateway", gateway_id)
        stream: PeerStream[mesh.DispatchResponse] = PeerStream(self._queue_limit, joins=hello.reads_more)
        replace_stream(self._gateways, gateway_id, stream)
        self._reports[gateway_id], self._submissions[gateway_id] = mesh.GatewayReport(gateway_id=gateway_id), 0
        log.info("gateway attached", gateway_id=gateway_id)
        self._perform(self._core.on_gateway_attached(gateway_id, self._clock()))
        try:
            await stream.run(asyncio.create_task(self._read_gateway(gateway_id, requests)), context)
        finally:
            if self._gateways.get(gateway_id) is stream:
                del self._gateways[gateway_id], self._reports[gateway_id], self._submissions[gateway_id]
                log.info("gateway detached", gateway_id=gateway_id)
                self._spans.cancel_all(gateway_id)
                self._perform(self._core.on_gateway_detached(gateway_id, self._clock()))

    async def _read_gateway(self, gateway_id: str, requests: AsyncIterator[mesh.DispatchRequest]) -> None:
        receive = partial(self._receive, gateway_id)
        async for request in requests:
            await unjoin(request, receive)

    def _receive(self, gateway_id: str, request: mesh.DispatchRequest) -> None:
        match request.WhichOneof("message"):
            case "submit":
                self._submit(gateway_id, request.submit)
            case "withdraw":
                job_id = request.withdraw.job_id
                self._spans.cancel(gateway_id, job_id)
                self._perform(self._core.on_withdraw(gateway_id, job_id, self._clock()))
            case "report":
                request.report.gateway_id = gateway_id
                self._reports[gateway_id] = request.report
            case "survived":
                self._perform(self._core.on_survived(gateway_id, request.survived.job_id, self._clock()))
            case "unreachable":
                addresses = frozenset(request.unreachable.addresses)
                self._perform(self._core.on_unreachable(gateway_id, addresses, self._clock()))
            case _:
                raise _unexpected()

    def _submit(self, gateway_id: str, message: mesh.Submit) -> None:
        self._submissions[gateway_id] += 1
        self._spans.begin(gateway_id, message.job_id, message.traceparent, message.attempt)
        try:
            submit = codec.submit_from(message)
        except WeftError as error:  # A malformed job ends neither the stream nor the other jobs on it.
            self._spans.end(gateway_id, message.job_id, {}, error.reason)
            rejected = mesh.Rejected(job_id=message.job_id, attempt=message.attempt, failure=error.failure())
            self._send(gateway_id, mesh.DispatchResponse(rejected=rejected))
            return
        self._perform(self._core.on_submit(gateway_id, submit, self._clock()))

    # ---- workers ----

    async def Attach(  # type: ignore[override]
        self, requests: AsyncIterator[mesh.AttachRequest], context: aio.ServicerContext[Any, Any]
    ) -> None:
        """Serves the stream of a worker, or that of a worker that is still starting."""
        first = await _first(requests, "hello", "loading")
        if first.WhichOneof("message") == "loading":
            await self._serve_loading(first.loading, requests, context)
            return
        hello = codec.hello_from(first.hello)
        worker_id = hello.worker_id
        self._check_mesh(first.hello.mesh_id, "worker", worker_id)
        stream: PeerStream[mesh.AttachResponse] = PeerStream(self._queue_limit)
        replace_stream(self._workers, worker_id, stream)
        commands = self._core.on_worker_attached(hello, self._clock())
        if worker_id in self._loading:
            self._loading[worker_id].finish()
        if worker_id in self._core.state.workers:
            log.info("worker attached", worker_id=worker_id, model=hello.card.name, credits=hello.credits)
        self._perform(commands)
        try:
            await stream.run(asyncio.create_task(self._read_worker(worker_id, requests)), context)
        finally:
            if self._workers.get(worker_id) is stream:
                del self._workers[worker_id]
                log.info("worker detached", worker_id=worker_id)
                self._perform(self._core.on_worker_detached(worker_id, self._clock()))

    async def _read_worker(self, worker_id: str, requests: AsyncIterator[mesh.AttachRequest]) -> None:
        async for request in requests:
            if request.WhichOneof("message") != "report":
                raise _unexpected()
            self._perform(self._core.on_report(worker_id, codec.report_from(request.report), self._clock()))

    async def _serve_loading(
        self,
        first: mesh.WorkerLoading,
        requests: AsyncIterator[mesh.AttachRequest],
        context: aio.ServicerContext[Any, Any],
    ) -> None:
        """Serves a starting worker until its hello has arrived on another stream, or until the worker is gone."""
        loading = codec.loading_from(first)
        worker_id = loading.worker_id
        self._check_mesh(first.mesh_id, "worker", worker_id)
        stream: PeerStream[mesh.AttachResponse] = PeerStream(self._queue_limit)
        replace_stream(self._loading, worker_id, stream)
        log.info("worker loading", worker_id=worker_id, model=loading.model)
        self._perform(self._core.on_loading(loading, self._clock()))
        try:
            await stream.run(asyncio.create_task(self._read_loading(worker_id, requests)), context)
        finally:
            if self._loading.get(worker_id) is stream:
                del self._loading[worker_id]
                self._perform(self._core.on_loading_ended(worker_id, self._clock()))

    async def _read_loading(self, worker_id: str, requests: AsyncIterator[mesh.AttachRequest]) -> None:
        async for request in requests:
            if request.WhichOneof("message") != "loading" or request.loading.worker_id != worker_id:
                raise _unexpected()
            self._perform(self._core.on_loading(codec.loading_from(request.loading), self._clock()))

    def _check_mesh(self, mesh_id: str, peer: str, peer_id: str) -> None:
        """Raises WeftError for a hello of another mesh."""
        try:
            mesh_ids.check(self._mesh_id, mesh_id, peer)
        except WeftError:
            log.warning("refused: another mesh", peer=peer_id, its_mesh=mesh_id[:64])
            raise

    # ---- tools ----

    async def Overview(
        self, request: mesh.OverviewRequest, context: aio.ServicerContext[Any, Any]
    ) -> mesh.OverviewResponse:
        """Workers, models and queues as of now."""
        return overview.overview_of(self._core.state, self._reports.values(), self._clock())

    # ---- commands ----

    def _perform(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case ToGateway(gateway_id, message):
                    self._send_to_gateway(gateway_id, message)
                case ToWorker(worker_id, message):
                    self._send_to_worker(worker_id, message)
                case DropWorker(worker_id, why):
                    log.warning("worker lost", worker_id=worker_id, why=why)
                    if worker_id in self._workers:
                        self._workers[worker_id].abort(
                            WeftError(StatusCode.ABORTED, "WORKER_LOST", "this worker made no progress: register again")
                        )

    def _send_to_gateway(self, gateway_id: str, message: GatewayMessage) -> None:
        if isinstance(message, Assigned | Joined | Rejected):
            self._record_answer(gateway_id, message)
        if gateway_id in self._gateways:
            self._send(gateway_id, codec.to_gateway(message, self._mesh_id))

    def _send(self, gateway_id: str, message: mesh.DispatchResponse) -> None:
        message.submissions_read = self._submissions[gateway_id]
        self._gateways[gateway_id].send(message)

    def _send_to_worker(self, worker_id: str, message: WorkerMessage) -> None:
        stream = self._workers[worker_id]
        stream.send(codec.to_worker(message, self._mesh_id))
        if isinstance(message, Refused):
            log.warning("worker refused", worker_id=worker_id, reason=message.failure.reason)
            stream.finish()

    def _record_answer(self, gateway_id: str, answer: Assigned | Joined | Rejected) -> None:
        """Counts an answer and ends the queue span of its job."""
        log.debug("job answered", answer=type(answer).__name__, job_id=answer.job_id)
        match answer:
            case Assigned():
                self.metrics.assigned(answer)
                self._spans.end(
                    gateway_id,
                    answer.job_id,
                    {"weft.worker": answer.worker_id, "weft.matched_blocks": answer.matched_blocks},
                )
            case Joined():
                self._spans.end(gateway_id, answer.job_id, {"weft.worker": answer.worker_id, "weft.joined": True})
            case Rejected():
                self._spans.end(gateway_id, answer.job_id, {}, answer.failure.reason)


def service(core: SchedulerCore, mesh_id: str = "") -> tuple[SchedulerService, rpc.Service]:
    """The servicer of a core, and its entry for `rpc.serve`."""
    servicer = SchedulerService(core, mesh_id=mesh_id)
    return servicer, rpc.Service("weft.v1.Scheduler", mesh_grpc.add_SchedulerServicer_to_server, servicer)


async def _first(requests: AsyncIterator[Request], *kinds: str) -> Request:
    """The first message of a stream, which must be a hello or one of these kinds. Raises WeftError."""
    first = await anext(requests, None)
    if first is None or first.WhichOneof("message") not in (kinds or ("hello",)):
        raise WeftError(StatusCode.FAILED_PRECONDITION, "HELLO_EXPECTED", "the first message of a link must be a hello")
    return first


def _unexpected() -> WeftError:
    return WeftError(StatusCode.INVALID_ARGUMENT, "UNEXPECTED_MESSAGE", "this message is not expected here")
