"""The control link to the scheduler: submits jobs, receives placements, models and losses. Knows hashes, never tokens.

Running streams do not depend on it. After a reconnect it submits again all jobs that are still unanswered. While the
scheduler does not answer, `fallback` places jobs. While it is behind, or its queue of a model is full, jobs are refused
here.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
from grpc import aio

from protos import mesh_pb2 as mesh
from protos.mesh_pb2_grpc import SchedulerStub
from services import rpc
from services.errors import WeftError, unavailable
from services.gateway.links.queue_share import QUEUE_FULL, QueueShare
from services.gateway.links.unread_submissions import UnreadSubmissions, scheduler_overloaded
from services.security import mesh_id as mesh_ids
from services.send_queue import SendQueue, SendQueueFull, unjoin

log = structlog.get_logger("dispatch")

Placement = mesh.Assigned | mesh.Joined
Fallback = Callable[[mesh.Submit, bool], mesh.Assigned | None]
"""Places a job without the scheduler, or not. If the second argument is true, only at workers with a working link."""

RESUME_S = 30.0
"""How long an interrupted answer waits for a disconnected scheduler, if no known worker has room meanwhile."""
SILENCE_S = 1.5
"""Seconds without a message after which the scheduler is taken as gone: it sends two heartbeats a second."""
WATCH_S, IDLE_S = 0.1, 0.5
"""Time between two looks at the scheduler, while jobs wait for it and while none does."""
_UNSERVED = frozenset({"NO_WORKER", "MODEL_NOT_FOUND"})
"""Rejections that mean that the scheduler sees no worker of the model. It may be the scheduler that lost them."""
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
        message = mesh.DispatchRequest(submit=self.submit)
        if self.submit.deadline_s > 0:
            passed_s = time.monotonic() - self.submitted_at
            message.submit.deadline_s = max(1e-3, self.submit.deadline_s - passed_s)
        return message

    def start_timer(self, wait_s: float) -> None:
        """Fails the submission in `wait_s` unless the scheduler comes back."""
        self.stop_timer()
        self.timer = asyncio.get_running_loop().call_later(wait_s, self._expire)

    def stop_timer(self) -> None:
        """The scheduler is connected, or the submission is over."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

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
        fallback: Fallback = lambda submit, connected: None,
    ) -> None:
        self._fallback = fallback
        self._heard_at = 0.0
        """When the last message arrived, once the scheduler has sent a heartbeat; 0 before."""
        self._address = address
        self._gateway_id = gateway_id
        self._wait_s = wait_s
        self._on_models = on_models
        self._on_worker_lost = on_worker_lost
        self._mesh_id = mesh_id
        self._refusals = mesh_ids.RefusalLog("scheduler")
        self._submissions: dict[str, _Submission] = {}
        self.settled = 0
        """How many submissions have been answered or withdrawn."""
        self._shares: defaultdict[str, QueueShare] = defaultdict(QueueShare)
        """By the model's name."""
        self._unsent: SendQueue[mesh.DispatchRequest] | None = None
        self._unread: UnreadSubmissions | None = None
        """Of this connection, if the scheduler counts what it reads."""
        self._connected = False
        self._accepts_reports = False
        self._reported = mesh.GatewayReport()
        self._unreachable: frozenset[str] = frozenset()
        self.suspects: frozenset[bytes] = frozenset()
        """Fingerprints of requests under which workers died: none of them is placed without the scheduler."""
        self.models_known = asyncio.Event()

    async def run(self) -> None:
        """Connects, and reconnects after each break, until cancelled."""
        tasks = [asyncio.create_task(self._run()), asyncio.create_task(self._watch())]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _run(self) -> None:
        log.info("connecting to the scheduler", at=self._address)
        async with rpc.link_channel(self._address, "scheduler", unread_bytes=rpc.FEW_UNREAD_BYTES) as channel:
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
        if submit.attempt == 1:  # The client of a later one has part of its answer.
            self.check_room(submit.model, submit.tenant, submit.sheddable)
        pending = _Submission(submit, asyncio.get_running_loop().create_future())
        if (before := self._submissions.get(submit.job_id)) is not None:
            self._remove(before)
        self._submissions[submit.job_id] = pending
        self._shares[submit.model].enter(submit.tenant)
        if not self._send(pending):
            pending.start_timer(self._wait_for(pending))
        if self.silent:
            self._place_locally(pending)
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
                self._remove(pending)

    @property
    def refuses(self) -> bool:
        """Whether new jobs may be refused here: in the last seconds the scheduler was behind, or a queue was full, or
        nearly."""
        now = time.monotonic()
        behind = self._unread is not None and self._unread.limited(now)
        return behind or any(share.bounded(now) for share in self._shares.values())

    def crowding(self, model: str) -> WeftError | None:
        """The refusal of new jobs of a model beyond those that may wait, if more than half of these wait."""
        now, share = time.monotonic(), self._shares.get(model)
        if share is not None and share.mostly_taken(now):
            return share.full()
        crowded = self._unread is not None and self._unread.mostly_taken(now)
        return scheduler_overloaded() if crowded else None

    def refusal(self, model: str, tenant: str, sheddable: bool = False) -> WeftError | None:
        """Why a new job is refused here: the scheduler is behind, or its queue of this model is full, as far as this
        gateway may fill it. None if it is submitted. `tenant` is the hash of the name."""
        return self._refusal(model, lambda share, now: share.refusal(tenant, sheddable, now))

    def refusal_unread(self, model: str, tenant: str) -> WeftError | None:
        """Why a request for this model is not read: its job would be refused. None if there is a place for the job."""
        return self._refusal(model, lambda share, now: share.refusal_unread(tenant, now))

    def _refusal(self, model: str, by_share: Callable[[QueueShare, float], WeftError | None]) -> WeftError | None:
        if self.silent:
            return None
        now, share = time.monotonic(), self._shares.get(model)
        full = by_share(share, now) if share is not None else None
        return full or (self._unread.refusal(now) if self._unread is not None else None)

    def promise(self, model: str) -> None:
        """A request for this model is read: keeps a place for its job while the number of these is bounded."""
        now, share = time.monotonic(), self._shares.get(model)
        if share is not None and share.bounded(now):
            share.promise(now)

    def check_room(self, model: str, tenant: str, sheddable: bool) -> None:
        """Raises WeftError if a new job is refused here."""
        error = self.refusal(model, tenant, sheddable)
        if error is not None:
            raise error

    def withdraw(self, job_id: str) -> None:
        """Gives up a job of this gateway that was placed, and of whose end no worker will report: it was to continue
        at another worker."""
        self._put(mesh.DispatchRequest(withdraw=mesh.Withdraw(job_id=job_id)))

    def report(self, report: mesh.GatewayReport) -> None:
        """Sends the gateway's recent traffic, unless the scheduler has an equal report already or accepts none."""
        if self._accepts_reports and report != self._reported and self._put(mesh.DispatchRequest(report=report)):
            self._reported = report

    def report_survived(self, job_id: str) -> None:
        """Reports that a job on probation has produced tokens."""
        self._put(mesh.DispatchRequest(survived=mesh.Survived(job_id=job_id)))

    def report_unreachable(self, addresses: frozenset[str]) -> None:
        """Reports the workers, by host:port, to which this gateway has no working link; again after each reconnect."""
        self._unreachable = addresses
        if self._accepts_reports:
            self._put(mesh.DispatchRequest(unreachable=mesh.UnreachableWorkers(addresses=sorted(addresses))))

    @property
    def silent(self) -> bool:
        """The scheduler does not answer: there is no connection, or nothing arrives through it."""
        if not self._connected:
            return self.models_known.is_set()
        return self._heard_at > 0 and time.monotonic() - self._heard_at > SILENCE_S

    async def _watch(self) -> None:
        """Places the waiting jobs while the scheduler is silent, until cancelled."""
        last = time.monotonic()
        while True:
            wait_s = WATCH_S if self._submissions else IDLE_S
            await asyncio.sleep(wait_s)
            now = time.monotonic()
            if self._heard_at and now - last > wait_s + WATCH_S:  # The scheduler is not to blame: this did not run.
                self._heard_at += now - last - wait_s
            last = now
            if self._submissions and self.silent:
                for pending in list(self._submissions.values()):
                    self._place_locally(pending)

    def _place_locally(self, pending: _Submission) -> None:
        """Answers a submission without the scheduler if a worker has room, and withdraws it there."""
        if pending.answer.done() or pending.submit.fingerprint in self.suspects or pending.submit.lost_on:
            return
        if (placed := self._fallback(pending.submit, False)) is None:
            return
        log.debug("placed without the scheduler", job_id=pending.submit.job_id)
        pending.answer.set_result(placed)
        self._remove(pending)
        if pending.sent:
            self._put(mesh.DispatchRequest(withdraw=mesh.Withdraw(job_id=pending.submit.job_id)))

    async def _session(self, channel: aio.Channel) -> None:
        unsent = self._unsent = SendQueue[mesh.DispatchRequest](_MOST_UNSENT)
        hello = mesh.GatewayHello(gateway_id=self._gateway_id, mesh_id=self._mesh_id, reads_more=True)
        unsent.put(mesh.DispatchRequest(hello=hello))
        call = SchedulerStub(channel).Dispatch(aiter(unsent), wait_for_ready=True)
        try:
            async for message in call:
                await unjoin(message, self._receive)
                if self._unsent is not unsent:  # It was full: the scheduler does not read.
                    return
        finally:
            call.cancel()

    def _receive(self, message: mesh.DispatchResponse) -> None:
        kind = message.WhichOneof("message")
        if self._heard_at or kind == "heartbeat":
            self._heard_at = time.monotonic()
        if self._unread is not None:
            self._unread.counted(message.submissions_read, time.monotonic())
        if kind == "hello":
            mesh_ids.check(self._mesh_id, message.hello.mesh_id, "scheduler")
            self._refusals.accepted()
            log.info("scheduler connected", epoch=message.hello.epoch, unanswered=len(self._submissions))
            self._connected = True
            self.suspects = frozenset()  # The list of this scheduler follows, unless it is empty.
            if self._unsent is not None:
                self._unsent.joins = message.hello.reads_more
            self._unread = UnreadSubmissions() if message.hello.counts_submissions else None
            self._accepts_reports, self._reported = message.hello.accepts_reports, mesh.GatewayReport()
            if self._unreachable:
                self.report_unreachable(self._unreachable)
            for pending in self._submissions.values():
                self._send(pending)
        elif kind == "suspects":
            self.suspects = frozenset(message.suspects.fingerprints)
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
        self._remove(pending)
        share = self._shares[pending.submit.model]
        if isinstance(answer, mesh.Rejected) and answer.failure.reason == QUEUE_FULL:
            share.refused(answer.failure.retry_after_s, time.monotonic())
        elif isinstance(answer, mesh.Assigned) and answer.retry_after_s > 0:
            share.crowded(answer.retry_after_s, time.monotonic())
        if pending.answer.done():
            return
        if isinstance(answer, mesh.Rejected):
            unserved = answer.failure.reason in _UNSERVED
            placed = self._fallback(pending.submit, True) if unserved else None
            if placed is not None:
                pending.answer.set_result(placed)
            else:
                pending.answer.set_exception(WeftError.from_failure(answer.failure))
        else:
            pending.answer.set_result(answer)

    def _remove(self, pending: _Submission) -> None:
        """The submission waits no more."""
        self.settled += 1
        del self._submissions[pending.submit.job_id]
        self._shares[pending.submit.model].leave(pending.submit.tenant)

    def _send(self, pending: _Submission) -> bool:
        if self._connected and not pending.sent:
            pending.sent = self._put(pending.message())
            if pending.sent:
                pending.stop_timer()
                if self._unread is not None:
                    self._unread.sent(time.monotonic())
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
        self._unsent = self._unread = None
        self._connected = False
        self._heard_at = 0.0
        for share in self._shares.values():
            share.forget()
        for pending in self._submissions.values():
            if pending.sent:  # The timer of an unsent one is running already.
                pending.sent = False
                pending.start_timer(self._wait_for(pending))

    def _wait_for(self, pending: _Submission) -> float:
        """How long a submission waits for the scheduler. The client of a later attempt has part of its answer."""
        return self._wait_s if pending.submit.attempt == 1 else max(self._wait_s, RESUME_S)


def no_scheduler() -> WeftError:
    """The scheduler has been unreachable for too long."""
    return unavailable("NO_SCHEDULER", "the scheduler is not reachable")
