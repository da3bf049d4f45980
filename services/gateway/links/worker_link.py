"""Run links: one gRPC stream to each worker, shared by all jobs there. Owns job streams; knows token ids, never text.

A link lives as long as its connection. When the connection breaks, all its job streams are lost, retryably, and the
next job for the worker opens a new link. Stream ids are never reused, so a late message for a stream that is gone is
dropped: this fences older attempts.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable

import structlog
from grpc import StatusCode, aio

from protos import mesh_pb2 as mesh
from protos.mesh_pb2_grpc import WorkerStub
from services import mesh_id as mesh_ids
from services import rpc, telemetry
from services.errors import WeftError
from services.gateway.text.journal import Detail
from services.send_queue import SendQueue, SendQueueFull

log = structlog.get_logger("links")
clock = time.monotonic

UNREAD_TOKENS = 64
"""A reader that takes no tokens is notified again after so many."""
WORKER_LOST = "WORKER_LOST"
_NO_POSITION = 1 << 40
"""Expected position of a cancelled stream: every token is before it, and is dropped."""


def worker_lost() -> WeftError:
    """The worker or the connection to it is lost: another attempt may succeed."""
    return WeftError(StatusCode.UNAVAILABLE, WORKER_LOST, "the worker was lost", retry_after_s=1.0, retryable=True)


class JobStream:
    """One job on a link: the tokens that arrived and are not yet taken, in order and without gaps."""

    __slots__ = (
        "_notified", "closed", "details", "end", "expected", "first_at", "last_at", "link", "loss", "notify",
        "opened_at", "stream_id", "tokens", "wants_details", "worker_id",
    )  # fmt: skip

    def __init__(
        self,
        link: "WorkerLink",
        stream_id: int,
        worker_id: str,
        position: int,
        wants_details: bool,
        notify: Callable[[], None],
    ) -> None:
        """`position` is that of the first token; `notify` is called when there are tokens to take."""
        self.link = link
        self.stream_id = stream_id
        self.worker_id = worker_id
        self.expected = position
        self.wants_details = wants_details
        self.notify = notify
        self.tokens: list[int] = []
        self.details: list[Detail] = []
        self.end: mesh.JobEnd | None = None
        self.loss: WeftError | None = None
        self.opened_at = clock()
        self.first_at: float | None = None
        self.last_at = self.opened_at
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._notified = False

    def add(self, position: int, token: int, now: float, detail: Detail | None = None) -> None:
        """Appends the next token. Drops a token of an earlier position; a missing token loses the stream."""
        if position != self.expected:
            if position > self.expected:
                self.link.lose(self, worker_lost())
            return
        self.expected += 1
        self.tokens.append(token)
        if detail is not None:
            self.details.append(detail)
        if self.first_at is None:
            self.first_at = now
        self.last_at = now
        # A reader that is behind is notified once, and then takes many tokens together.
        if not self._notified or len(self.tokens) % UNREAD_TOKENS == 0:
            self._notified = True
            self.notify()

    def take(self) -> tuple[list[int], list[Detail]]:
        """The tokens that arrived since the last call, and their details if they were requested."""
        taken = self.tokens, self.details
        self.tokens, self.details = [], []
        self._notified = False
        return taken

    def close(self, end: mesh.JobEnd | None = None, loss: WeftError | None = None) -> None:
        """Ends the stream: with the job's end, with a loss, or (neither) because it was cancelled."""
        if not self.closed.done():
            self.end, self.loss = end, loss
            self.closed.set_result(None)

    def observed_cost(self) -> mesh.JobCost:
        """The cost as measured at the gateway, for an attempt of which the worker reported none."""
        if self.first_at is None:
            return mesh.JobCost(prefill_s=clock() - self.opened_at)
        return mesh.JobCost(prefill_s=self.first_at - self.opened_at, decode_s=self.last_at - self.first_at)


class WorkerLink:
    """The Run stream to one worker."""

    def __init__(self, address: str, gateway_id: str, mesh_id: str = "") -> None:
        self.alive = True
        self._streams: dict[int, JobStream] = {}
        self._stream_ids = itertools.count(1)
        self._unsent: SendQueue[mesh.RunRequest] = SendQueue()
        self._put(mesh.RunRequest(hello=mesh.GatewayHello(gateway_id=gateway_id, mesh_id=mesh_id)))
        self._session = asyncio.create_task(self._run(address))

    @property
    def idle(self) -> bool:
        """It has no job streams."""
        return not self._streams

    def run(self, job: mesh.Job, worker_id: str, notify: Callable[[], None]) -> JobStream:
        """Sends a job, whose stream id is set here."""
        position = len(job.token_ids) - job.prompt_len
        stream = self._open(worker_id, position, job.sampling.HasField("logprobs"), notify)
        job.stream_id = stream.stream_id
        self._put(mesh.RunRequest(job=job))
        return stream

    def attach(
        self, attach: mesh.AttachJob, worker_id: str, wants_details: bool, notify: Callable[[], None]
    ) -> JobStream:
        """Subscribes to a job that already runs. The stream id of the message is set here."""
        stream = self._open(worker_id, attach.position, wants_details, notify)
        attach.stream_id = stream.stream_id
        self._put(mesh.RunRequest(attach=attach))
        return stream

    def confirm(self, stream: JobStream, placement: int) -> None:
        """Confirms a tentative job, which may have ended."""
        self._put(mesh.RunRequest(confirm=mesh.ConfirmJob(stream_id=stream.stream_id, placement=placement)))

    def abort(self, stream: JobStream) -> None:
        """Cancels a tentative job, also if it has ended: the worker keeps it until it is confirmed or cancelled."""
        self.cancel(stream, 0)
        if stream.end is not None:
            self._put(mesh.RunRequest(cancel=mesh.CancelJob(stream_id=stream.stream_id, position=0)))

    def cancel(self, stream: JobStream, position: int, linger_s: float = 0.0) -> None:
        """Cancels a job of which `position` tokens count. Waits up to `linger_s` for the worker to report the cost."""
        if self._streams.get(stream.stream_id) is not stream:
            return
        self._put(mesh.RunRequest(cancel=mesh.CancelJob(stream_id=stream.stream_id, position=position)))
        stream.expected = _NO_POSITION
        if linger_s > 0:
            asyncio.get_running_loop().call_later(linger_s, self.forget, stream)
        else:
            self.forget(stream)

    def forget(self, stream: JobStream) -> None:
        """Closes a stream; further messages for it are dropped."""
        self._streams.pop(stream.stream_id, None)
        stream.close()

    def lose(self, stream: JobStream, loss: WeftError) -> None:
        """Closes a stream with a loss, and cancels its job: the worker may be alive."""
        if self._streams.pop(stream.stream_id, None) is not None:
            cancel = mesh.CancelJob(stream_id=stream.stream_id, position=stream.expected)
            self._put(mesh.RunRequest(cancel=cancel))
            stream.close(loss=loss)

    def lose_worker(self, worker_id: str) -> None:
        """Loses all streams of this worker."""
        for stream in [stream for stream in self._streams.values() if stream.worker_id == worker_id]:
            self.lose(stream, worker_lost())

    async def close(self) -> None:
        """Closes the link; streams that are still open are lost."""
        self._session.cancel()
        await asyncio.gather(self._session, return_exceptions=True)

    def _open(self, worker_id: str, position: int, wants_details: bool, notify: Callable[[], None]) -> JobStream:
        stream = JobStream(self, next(self._stream_ids), worker_id, position, wants_details, notify)
        self._streams[stream.stream_id] = stream
        return stream

    def _put(self, message: mesh.RunRequest) -> None:
        try:
            self._unsent.put(message)
        except SendQueueFull:
            self._session.cancel()

    async def _run(self, address: str) -> None:
        try:
            async with rpc.link_channel(address) as channel:
                call = WorkerStub(channel).Run(aiter(self._unsent))
                async for message in call:
                    self._receive(message)
        except aio.AioRpcError as error:
            if not mesh_ids.RefusalLog("worker").refused(error, address):
                log.info("link broke", code=error.code().name, jobs=len(self._streams))
        except ValueError as error:
            telemetry.log_exception("a worker sent columns of unequal length", error)
        finally:
            self.alive = False
            streams, self._streams = self._streams, {}
            for stream in streams.values():
                stream.close(loss=worker_lost())

    def _receive(self, message: mesh.RunResponse) -> None:
        now = clock()
        streams = self._streams
        if message.logprobs:
            self._receive_details(message, now)
        else:
            for stream_id, position, token in zip(
                message.stream_ids, message.positions, message.token_ids, strict=True
            ):
                stream = streams.get(stream_id)
                if stream is not None:
                    stream.add(position, token, now)
        for end in message.ends:
            ended = streams.pop(end.stream_id, None)
            if ended is not None:
                ended.close(end)

    def _receive_details(self, message: mesh.RunResponse, now: float) -> None:
        tops = {top.entry: top for top in message.tops}
        columns = zip(message.stream_ids, message.positions, message.token_ids, message.logprobs, strict=True)
        for entry, (stream_id, position, token, logprob) in enumerate(columns):
            stream = self._streams.get(stream_id)
            if stream is None:
                continue
            detail = None
            if stream.wants_details:
                top = tops.get(entry)
                detail = Detail(logprob, top.token_ids, top.logprobs) if top else Detail(logprob)
            stream.add(position, token, now, detail)


class WorkerLinks:
    """The links to all workers, by address."""

    def __init__(self, gateway_id: str, mesh_id: str = "") -> None:
        self._gateway_id = gateway_id
        self._mesh_id = mesh_id
        self._links: dict[str, WorkerLink] = {}

    def to(self, address: str) -> WorkerLink:
        """The link to this worker; a new one if there is none or if the last one broke."""
        link = self._links.get(address)
        if link is None or not link.alive:
            link = self._links[address] = WorkerLink(address, self._gateway_id, self._mesh_id)
        return link

    def lose_worker(self, worker_id: str) -> None:
        """Loses the streams of a worker that the scheduler reported lost, even if its connection is open."""
        for link in self._links.values():
            link.lose_worker(worker_id)

    async def keep(self, addresses: Iterable[str]) -> None:
        """Closes idle links to workers that are no longer served."""
        gone = [address for address in self._links.keys() - set(addresses) if self._links[address].idle]
        await asyncio.gather(*(self._links.pop(address).close() for address in gone))

    async def close(self) -> None:
        """Closes all links."""
        await asyncio.gather(*(link.close() for link in self._links.values()))
