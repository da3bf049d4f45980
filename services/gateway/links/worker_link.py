"""Run links: one stream to each worker, shared by all jobs there. Owns rows; knows tokens as numbers, no text.

A link lives as long as its connection. When that breaks, all its rows are lost at once, retryably; the next job for the
worker opens a new one. Row numbers are never used twice, so what a worker sends for a row that is gone is dropped: this
is what fences older attempts.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable

import structlog
from grpc import StatusCode, aio

from protos import mesh_pb2 as mesh
from protos.mesh_pb2_grpc import WorkerStub
from services import rpc, telemetry
from services.errors import WeftError
from services.gateway.text.journal import Detail
from services.send_queue import SendQueue, SendQueueFull

log = structlog.get_logger("links")
clock = time.monotonic

UNREAD = 64  # tokens after which a reader that takes none is told again
_DEAF = 1 << 40  # expected by a row that takes nothing any more: every position is behind it


def lost_worker() -> WeftError:
    """The worker or the way to it is gone: another attempt may succeed."""
    return WeftError(StatusCode.UNAVAILABLE, "WORKER_LOST", "the worker was lost", retry_after_s=1.0, retryable=True)


class JobStream:
    """One job on a link: the tokens that have come and are not yet taken, in order and without gaps."""

    __slots__ = (
        "_told", "closed", "details", "end", "expected", "first_at", "last_at", "link", "loss", "news", "number",
        "opened_at", "soon", "tokens", "wants_details", "worker_id",
    )  # fmt: skip

    def __init__(
        self, link: "WorkerLink", number: int, worker_id: str, position: int, details: bool, news: Callable[[], None]
    ) -> None:
        self.link = link
        self.number = number
        self.worker_id = worker_id
        self.expected = position
        self.wants_details = details
        self.news = news
        self.tokens: list[int] = []
        self.details: list[Detail] = []
        self.end: mesh.JobEnd | None = None
        self.loss: WeftError | None = None
        self.opened_at = clock()
        self.first_at: float | None = None
        self.last_at = self.opened_at
        self.soon = False
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._told = False

    def add(self, position: int, token: int, now: float, detail: Detail | None = None) -> None:
        """Takes a token if it is the next one; what came before is dropped, what is missing loses the row."""
        if position != self.expected:
            if position > self.expected:
                self.link.fail(self, lost_worker())
            return
        self.expected += 1
        self.tokens.append(token)
        if detail is not None:
            self.details.append(detail)
        if self.first_at is None:
            self.first_at = now
            self.link.announces = self.soon
        self.last_at = now
        # A reader that is behind is told once, and then takes many tokens together.
        if not self._told or len(self.tokens) % UNREAD == 0:
            self._told = True
            self.news()

    def expect(self) -> None:
        """The first token is about to come: who waits for it may get ready."""
        if self.first_at is None:
            self.soon = True
            self.news()

    def take(self) -> tuple[list[int], list[Detail]]:
        """The tokens that have come since the last call, and their details if they were asked for."""
        taken = self.tokens, self.details
        self.tokens, self.details = [], []
        self._told = False
        return taken

    def close(self, end: mesh.JobEnd | None = None, loss: WeftError | None = None) -> None:
        """Nothing more comes."""
        if not self.closed.done():
            self.end, self.loss = end, loss
            self.closed.set_result(None)

    def spent(self) -> mesh.JobCost:
        """What the attempt cost as far as the gateway saw it, for when the worker cannot say."""
        if self.first_at is None:
            return mesh.JobCost(prefill_s=clock() - self.opened_at)
        return mesh.JobCost(prefill_s=self.first_at - self.opened_at, decode_s=self.last_at - self.first_at)


class WorkerLink:
    """The stream to one worker."""

    def __init__(self, address: str, gateway_id: str) -> None:
        self.alive = True
        self.announces = False
        """Whether the last first token was announced: so the next will be."""
        self._rows: dict[int, JobStream] = {}
        self._numbers = itertools.count(1)
        self._outbox: SendQueue[mesh.RunRequest] = SendQueue()
        self._put(mesh.RunRequest(hello=mesh.GatewayHello(gateway_id=gateway_id)))
        self._session = asyncio.create_task(self._run(address))

    @property
    def idle(self) -> bool:
        """No job is on it."""
        return not self._rows

    def run(self, job: mesh.Job, worker_id: str, news: Callable[[], None]) -> JobStream:
        """Sends a job; its next position and whether it asks for log-probabilities are in the job."""
        position = len(job.token_ids) - job.boundary
        row = self._open(worker_id, position, job.sampling.HasField("logprobs"), news)
        job.row = row.number
        self._put(mesh.RunRequest(job=job))
        return row

    def attach(
        self, job_id: str, position: int, details: bool, worker_id: str, news: Callable[[], None], traceparent: str
    ) -> JobStream:
        """Asks for the tokens of a job that runs already."""
        row = self._open(worker_id, position, details, news)
        attach = mesh.AttachJob(row=row.number, job_id=job_id, position=position, traceparent=traceparent)
        self._put(mesh.RunRequest(attach=attach))
        return row

    def confirm(self, row: JobStream, placement: int) -> None:
        """A job that was sent ahead is to run, or has run, where it is."""
        self._put(mesh.RunRequest(confirm=mesh.ConfirmJob(row=row.number, placement=placement)))

    def take_back(self, row: JobStream) -> None:
        """A job that was sent ahead is not to be confirmed: the worker forgets it, also if it has ended."""
        self.cancel(row, 0)
        if row.end is not None:
            self._put(mesh.RunRequest(cancel=mesh.CancelJob(row=row.number, position=0)))

    def cancel(self, row: JobStream, position: int, linger_s: float = 0.0) -> None:
        """The job is needed no more, and `position` of its tokens count. For `linger_s` its account may still come."""
        if self._rows.get(row.number) is not row:
            return
        self._put(mesh.RunRequest(cancel=mesh.CancelJob(row=row.number, position=position)))
        row.expected = _DEAF
        if linger_s > 0:
            asyncio.get_running_loop().call_later(linger_s, self.drop, row)
        else:
            self.drop(row)

    def drop(self, row: JobStream) -> None:
        """Forgets a row: what still comes for it is nobody's."""
        self._rows.pop(row.number, None)
        row.close()

    def fail(self, row: JobStream, loss: WeftError) -> None:
        """Loses one row, and tells the worker so: it may be alive."""
        if self._rows.pop(row.number, None) is not None:
            self._put(mesh.RunRequest(cancel=mesh.CancelJob(row=row.number, position=row.expected)))
            row.close(loss=loss)

    def fail_worker(self, worker_id: str) -> None:
        """Loses all rows of this worker."""
        for row in [row for row in self._rows.values() if row.worker_id == worker_id]:
            self.fail(row, lost_worker())

    async def close(self) -> None:
        """Closes the stream; rows that are still open are lost."""
        self._session.cancel()
        await asyncio.gather(self._session, return_exceptions=True)

    def _open(self, worker_id: str, position: int, details: bool, news: Callable[[], None]) -> JobStream:
        row = JobStream(self, next(self._numbers), worker_id, position, details, news)
        self._rows[row.number] = row
        return row

    def _put(self, message: mesh.RunRequest) -> None:
        try:
            self._outbox.put(message)
        except SendQueueFull:
            self._session.cancel()

    async def _run(self, address: str) -> None:
        try:
            async with rpc.link_channel(address) as channel:
                call = WorkerStub(channel).Run(aiter(self._outbox))
                async for message in call:
                    self._receive(message)
        except aio.AioRpcError as error:
            log.info("link broke", code=error.code().name, rows=len(self._rows))
        except ValueError as error:
            telemetry.log_exception("a worker sent what is no step", error)
        finally:
            self.alive = False
            rows, self._rows = self._rows, {}
            for row in rows.values():
                row.close(loss=lost_worker())

    def _receive(self, message: mesh.RunResponse) -> None:
        now = clock()
        rows = self._rows
        if message.logprobs:
            self._receive_details(message, now)
        else:
            for number, position, token in zip(message.rows, message.positions, message.token_ids, strict=True):
                row = rows.get(number)
                if row is not None:
                    row.add(position, token, now)
        for number in message.soon:
            row = rows.get(number)
            if row is not None:
                row.expect()
        for end in message.ends:
            ended = rows.pop(end.row, None)
            if ended is not None:
                ended.close(end)

    def _receive_details(self, message: mesh.RunResponse, now: float) -> None:
        tops = {top.entry: top for top in message.tops}
        columns = zip(message.rows, message.positions, message.token_ids, message.logprobs, strict=True)
        for entry, (number, position, token, logprob) in enumerate(columns):
            row = self._rows.get(number)
            if row is None:
                continue
            detail = None
            if row.wants_details:
                top = tops.get(entry)
                detail = Detail(logprob, top.token_ids, top.logprobs) if top else Detail(logprob)
            row.add(position, token, now, detail)


class WorkerLinks:
    """The links to all workers, by address."""

    def __init__(self, gateway_id: str) -> None:
        self._gateway_id = gateway_id
        self._links: dict[str, WorkerLink] = {}

    def to(self, address: str) -> WorkerLink:
        """The link to this worker, a new one if there is none or the last one broke."""
        link = self._links.get(address)
        if link is None or not link.alive:
            link = self._links[address] = WorkerLink(address, self._gateway_id)
        return link

    def worker_lost(self, worker_id: str) -> None:
        """The scheduler says so: the jobs there need a next attempt, even if the connection stands."""
        for link in self._links.values():
            link.fail_worker(worker_id)

    async def keep(self, addresses: Iterable[str]) -> None:
        """Closes idle links to workers that are no longer served."""
        gone = [address for address in self._links.keys() - set(addresses) if self._links[address].idle]
        await asyncio.gather(*(self._links.pop(address).close() for address in gone))

    async def close(self) -> None:
        """Closes all."""
        await asyncio.gather(*(link.close() for link in self._links.values()))
