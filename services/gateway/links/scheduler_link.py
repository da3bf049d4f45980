"""The control link to the scheduler: asks for workers, hears of models and losses. Knows lengths and hashes, no tokens.

Running streams never depend on it. After a break it says hello again and repeats what is still unanswered.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
from grpc import aio

from protos import mesh_pb2 as mesh
from protos.mesh_pb2_grpc import SchedulerStub
from services import rpc
from services.errors import WeftError, unavailable
from services.send_queue import SendQueue, SendQueueFull

log = structlog.get_logger("dispatch")

Placement = mesh.Assigned | mesh.Joined

_MOST_UNSENT = 1 << 16
"""A scheduler that is so many messages behind does not read. Fewer may come at once: a request is up to 16 jobs, and
after a break all that are unanswered are said again."""


@dataclass(eq=False, slots=True)
class _Ask:
    """A submission that waits for its answer: said to the scheduler, or until its patience ends."""

    submit: mesh.Submit
    answer: asyncio.Future[Placement]
    asked_at: float = field(default_factory=time.monotonic)
    sent: bool = False
    patience: asyncio.TimerHandle | None = None

    def message(self) -> mesh.DispatchRequest:
        """The submission as of now: its deadline has come nearer."""
        submit = mesh.Submit()
        submit.CopyFrom(self.submit)
        if submit.deadline_s > 0:
            submit.deadline_s = max(1e-3, submit.deadline_s - (time.monotonic() - self.asked_at))
        return mesh.DispatchRequest(submit=submit)

    def expect(self, wait_s: float) -> None:
        """Gives the scheduler its time to come back."""
        self.patience = asyncio.get_running_loop().call_later(wait_s, self._give_up)

    def expect_no_more(self) -> None:
        """The scheduler is there, or nobody waits any more."""
        if self.patience is not None:
            self.patience.cancel()

    def _give_up(self) -> None:
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
    ) -> None:
        self._address = address
        self._gateway_id = gateway_id
        self._wait_s = wait_s
        self._on_models = on_models
        self._on_worker_lost = on_worker_lost
        self._asks: dict[str, _Ask] = {}
        self._outbox: SendQueue[mesh.DispatchRequest] | None = None
        self._greeted = False
        self.models_known = asyncio.Event()

    async def run(self) -> None:
        """Keeps the stream until it is cancelled."""
        log.info("looking for the scheduler", at=self._address)
        async with rpc.link_channel(self._address) as channel:
            while True:
                try:
                    await self._session(channel)
                except aio.AioRpcError as error:
                    log.info("scheduler is away", code=error.code().name, unanswered=len(self._asks))
                finally:
                    self._disconnected()
                await asyncio.sleep(0.05)

    async def place(self, submit: mesh.Submit) -> Placement:
        """A worker for a job, as soon as there is one. Cancelling it withdraws the job. Raises WeftError."""
        ask = _Ask(submit, asyncio.get_running_loop().create_future())
        self._asks[submit.job_id] = ask
        if not self._send(ask):
            ask.expect(self._wait_s)
        try:
            return await ask.answer
        except asyncio.CancelledError:
            # The answer may have come in the same instant: its credit, too, is to be given back.
            if ask.sent and self._asks.get(submit.job_id, ask) is ask:
                self._put(mesh.DispatchRequest(withdraw=mesh.Withdraw(job_id=submit.job_id)))
            raise
        finally:
            ask.expect_no_more()
            if self._asks.get(submit.job_id) is ask:
                del self._asks[submit.job_id]

    async def _session(self, channel: aio.Channel) -> None:
        outbox = self._outbox = SendQueue[mesh.DispatchRequest](_MOST_UNSENT)
        outbox.put(mesh.DispatchRequest(hello=mesh.GatewayHello(gateway_id=self._gateway_id)))
        call = SchedulerStub(channel).Dispatch(aiter(outbox), wait_for_ready=True)
        async for message in call:
            self._receive(message)
            if self._outbox is not outbox:  # It was full: a scheduler that reads nothing is as good as none.
                call.cancel()
                return

    def _receive(self, message: mesh.DispatchResponse) -> None:
        kind = message.WhichOneof("message")
        if kind == "hello":
            log.info("scheduler is here", epoch=message.hello.epoch, unanswered=len(self._asks))
            self._greeted = True
            for ask in self._asks.values():
                self._send(ask)
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
        ask = self._asks.get(answer.job_id)
        if ask is None or ask.submit.attempt != answer.attempt:
            return  # Withdrawn meanwhile: the scheduler frees its credit when it reads the Withdraw.
        del self._asks[answer.job_id]
        if ask.answer.done():
            return
        if isinstance(answer, mesh.Rejected):
            ask.answer.set_exception(WeftError.from_failure(answer.failure))
        else:
            ask.answer.set_result(answer)

    def _send(self, ask: _Ask) -> bool:
        if self._greeted and not ask.sent:
            ask.sent = self._put(ask.message())
            if ask.sent:
                ask.expect_no_more()
        return ask.sent

    def _put(self, message: mesh.DispatchRequest) -> bool:
        if self._outbox is None or not self._greeted:
            return False
        try:
            self._outbox.put(message)
        except SendQueueFull:
            self._disconnected()
            return False
        return True

    def _disconnected(self) -> None:
        if self._outbox is not None:
            self._outbox.close()
        self._outbox = None
        self._greeted = False
        for ask in self._asks.values():
            if ask.sent:  # Who waits for a scheduler already waits no longer for its next failure.
                ask.sent = False
                ask.expect(self._wait_s)


def no_scheduler() -> WeftError:
    """There is no scheduler to ask."""
    return unavailable("NO_SCHEDULER", "the scheduler is not reachable")
