"""The control link to the scheduler: submits jobs, receives placements, models and losses. Knows hashes, never tokens.

Running streams do not depend on it. After a reconnect it submits again all jobs that are still unanswered.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
from grpc import aio

from protos import mesh_pb2 as mesh
from protos.mesh_pb2_grpc import SchedulerStub
from services import mesh_id as mesh_ids
from services import rpc
from services.errors import WeftError, unavailable
from services.send_queue import SendQueue, SendQueueFull

log = structlog.get_logger("dispatch")

Placement = mesh.Assigned | mesh.Joined

_MOST_UNSENT = 1 << 16
"""Unsent messages after which the scheduler counts as stalled. Bursts are smaller: a request has up to 16 jobs, and all
unanswered jobs are submitted again after a reconnect."""


@dataclass(eq=False, slots=True)
class _Submission:
    """A job that waits for its placement. While there is no scheduler, a timer bounds the wait."""

    submit: mesh.Submit
    answer: asyncio.Future[Placement]
    submitted_at: float = field(default_factory=time.monotonic)
    sent: bool = False
    timer: asyncio.TimerHandle | None = None

    def message(self) -> mesh.DispatchRequest:
        """The message, with the seconds that are left until the deadline now."""
        submit = mesh.Submit()
        submit.CopyFrom(self.submit)
        if submit.deadline_s > 0:
            submit.deadline_s = max(1e-3, submit.deadline_s - (time.monotonic() - self.submitted_at))
        return mesh.DispatchRequest(submit=submit)

    def start_timer(self, wait_s: float) -> None:
        """Fails the submission in `wait_s` unless the scheduler comes back."""
        self.timer = asyncio.get_running_loop().call_later(wait_s, self._expire)

    def stop_timer(self) -> None:
        """The scheduler is connected, or the submission is over."""
        if self.timer is not None:
            self.timer.cancel()

    def _expire(self) -> None:
        if not self.answer.done():
            self.answer.set_exception(no_scheduler())


class SchedulerLink:
    """One reconnecting stream to the scheduler."""

    def __init__(
        self,
        address: str,
        gateway_id: str,
        wait_s: float,
        on_models: Callable[[mesh.ModelList], None],
        on_worker_lost: Callable[[str], None],
        mesh_id: str = "",
    ) -> None:
        self._address = address
        self._gateway_id = gateway_id
        self._wait_s = wait_s
        self._on_models = on_models
        self._on_worker_lost = on_worker_lost
        self._mesh_id = mesh_id
        self._refusals = mesh_ids.RefusalLog("scheduler")
        self._submissions: dict[str, _Submission] = {}
        self._unsent: SendQueue[mesh.DispatchRequest] | None = None
        self._connected = False
        self.models_known = asyncio.Event()

    async def run(self) -> None:
        """Connects, and reconnects after each break, until cancelled."""
        log.info("connecting to the scheduler", at=self._address)
        async with rpc.link_channel(self._address) as channel:
            while True:
                pause_s = 0.05
                try:
                    await self._session(channel)
                except (aio.AioRpcError, WeftError) as error:
                    if self._refusals.refused(error, self._address):
                        pause_s = mesh_ids.RETRY_S
                    elif isinstance(error, aio.AioRpcError):
                        log.info("scheduler disconnected", code=error.code().name, unanswered=len(self._submissions))
                finally:
                    self._disconnected()
                await asyncio.sleep(pause_s)

    async def submit(self, submit: mesh.Submit) -> Placement:
        """Waits for the placement of a job. Cancelling withdraws the job. Raises WeftError."""
        pending = _Submission(submit, asyncio.get_running_loop().create_future())
        self._submissions[submit.job_id] = pending
        if not self._send(pending):
            pending.start_timer(self._wait_s)
        try:
            return await pending.answer
        except asyncio.CancelledError:
            # The answer may have arrived in the same instant: its credit must be returned as well.
            if pending.sent and self._submissions.get(submit.job_id, pending) is pending:
                self._put(mesh.DispatchRequest(withdraw=mesh.Withdraw(job_id=submit.job_id)))
            raise
        finally:
            pending.stop_timer()
            if self._submissions.get(submit.job_id) is pending:
                del self._submissions[submit.job_id]

    async def _session(self, channel: aio.Channel) -> None:
        unsent = self._unsent = SendQueue[mesh.DispatchRequest](_MOST_UNSENT)
        unsent.put(mesh.DispatchRequest(hello=mesh.GatewayHello(gateway_id=self._gateway_id, mesh_id=self._mesh_id)))
        call = SchedulerStub(channel).Dispatch(aiter(unsent), wait_for_ready=True)
        try:
            async for message in call:
                self._receive(message)
                if self._unsent is not unsent:  # It was full: the scheduler does not read.
                    return
        finally:
            call.cancel()

    def _receive(self, message: mesh.DispatchResponse) -> None:
        kind = message.WhichOneof("message")
        if kind == "hello":
            mesh_ids.check(self._mesh_id, message.hello.mesh_id, "scheduler")
            self._refusals.accepted()
            log.info("scheduler connected", epoch=message.hello.epoch, unanswered=len(self._submissions))
            self._connected = True
            for pending in self._submissions.values():
                self._send(pending)
        elif kind == "models":
            self._on_models(message.models)
            self.models_known.set()
        elif kind == "worker_lost":
            self._on_worker_lost(message.worker_lost.worker_id)
        elif kind == "assigned":
            self._answer(message.assigned)
        elif kind == "joined":
            self._answer(message.joined)
        elif kind == "rejected":
            self._answer(message.rejected)

    def _answer(self, answer: Placement | mesh.Rejected) -> None:
        pending = self._submissions.get(answer.job_id)
        if pending is None or pending.submit.attempt != answer.attempt:
            return  # Withdrawn meanwhile: the scheduler frees the credit when it reads the Withdraw.
        del self._submissions[answer.job_id]
        if pending.answer.done():
            return
        if isinstance(answer, mesh.Rejected):
            pending.answer.set_exception(WeftError.from_failure(answer.failure))
        else:
            pending.answer.set_result(answer)

    def _send(self, pending: _Submission) -> bool:
        if self._connected and not pending.sent:
            pending.sent = self._put(pending.message())
            if pending.sent:
                pending.stop_timer()
        return pending.sent

    def _put(self, message: mesh.DispatchRequest) -> bool:
        if self._unsent is None or not self._connected:
            return False
        try:
            self._unsent.put(message)
        except SendQueueFull:
            self._disconnected()
            return False
        return True

    def _disconnected(self) -> None:
        if self._unsent is not None:
            self._unsent.close()
        self._unsent = None
        self._connected = False
        for pending in self._submissions.values():
            if pending.sent:  # The timer of an unsent one is running already.
                pending.sent = False
                pending.start_timer(self._wait_s)


def no_scheduler() -> WeftError:
    """The scheduler has been unreachable for too long."""
    return unavailable("NO_SCHEDULER", "the scheduler is not reachable")
