"""Run links: one gRPC stream to each worker, shared by all jobs there. Owns job streams; knows token ids, never text.

A link lives as long as its connection. When the connection breaks, all its job streams are lost, retryably, and the
next job for the worker opens a new link. Stream ids are never reused, so a late message for a stream that is gone is
dropped: this fences older attempts.

The link judges its worker by what it receives (link_health.py). It gives up the streams of a worker that is silent but
keeps the connection: if the worker comes back, its late tokens are dropped, and new jobs may go there again.
"""

import asyncio
import itertools
import math
import time
from collections import deque
from collections.abc import Callable

import structlog
from grpc import ChannelConnectivity, StatusCode, aio

from protos import mesh_pb2 as mesh
from protos.mesh_pb2_grpc import WorkerStub
from services import rpc, telemetry
from services.errors import WeftError
from services.gateway.links.arrivals import Arrivals
from services.gateway.links.link_health import LinkHealth
from services.gateway.links.timers import Timer, Timers
from services.gateway.links.token_pace import StepMeans, TokenPace
from services.gateway.text.journal import Detail
from services.security import mesh_id as mesh_ids
from services.send_queue import SendQueue, SendQueueFull

log = structlog.get_logger("links")
clock = time.monotonic

UNREAD_TOKENS = 64
"""Tokens after which a reader that takes none is notified again."""
WORKER_LOST = "WORKER_LOST"
_NO_STREAM = 0
"""No stream has this id: stream ids begin at 1."""
_NO_POSITION = 1 << 40
"""Expected position of a cancelled stream: every token is before it, and is dropped."""


def worker_lost() -> WeftError:
    """The worker or the connection to it is lost: another attempt may succeed."""
    return WeftError(StatusCode.UNAVAILABLE, WORKER_LOST, "the worker was lost", retry_after_s=1.0, retryable=True)


class JobStream:
    """One job on a link: the tokens that arrived and are not yet taken, in order and without gaps."""

    __slots__ = (
        "_hold_s", "_notified", "_pace", "_timer", "broken", "closed", "details", "end", "expected", "first_at",
        "last_at", "link", "loss", "notify", "number", "opened_at", "scores", "stream_id", "taken_at", "tokens",
        "wants_details", "worker_id",
    )  # fmt: skip

    def __init__(
        self,
        link: "WorkerLink",
        stream_id: int,
        worker_id: str,
        position: int,
        wants_details: bool,
        notify: Callable[[], None],
        hold_s: float,
    ) -> None:
        """`position` is that of the first token; `notify` is called when there are tokens to take. `hold_s`: seconds
        for which tokens of a worker that guesses may be held back so that they are taken at even times."""
        self.link = link
        self.stream_id = stream_id
        self.number = 0
        """The number of its job's message on the link."""
        self.worker_id = worker_id
        self.expected = position
        self.wants_details = wants_details
        self.notify = notify
        self.tokens: list[int] = []
        self.details: list[Detail] = []
        self.scores: list[tuple[int, list[Detail]]] = []
        """Log-probabilities of parts of the prompt, each with the position of its first token."""
        self.end: mesh.JobEnd | None = None
        self.loss: WeftError | None = None
        self.broken = False
        """The connection to the worker broke after its job was sent, and the worker was not draining."""
        self.opened_at = clock()
        self.first_at: float | None = None
        self.last_at = self.opened_at
        self.taken_at = self.opened_at
        """When the last tokens that were taken arrived, or were released."""
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._notified = False
        self._hold_s = hold_s
        self._pace: TokenPace | None = None
        """What holds tokens back; None: they are taken as they arrive."""
        self._timer: Timer | None = None
        """Until it runs, no token is taken."""

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
            self._pace = TokenPace(self._hold_s, self.link.usual_steps) if self._hold_s and self.link.guesses else None
        self.last_at = now
        if self._pace is not None:
            self._pace.arrived(now)
        # A reader that is behind is notified once, and then takes many tokens together.
        if not self._notified or len(self.tokens) % UNREAD_TOKENS == 0:
            self._notified = True
            self.link.arrivals.add(self)

    def take(self) -> tuple[list[int], list[Detail]]:
        """The tokens that arrived since the last call and are not held back, and their details if they were requested.
        Once the stream is closed, all that are left."""
        if self._timer is not None:
            return [], []
        if self._pace is not None and not self.closed.done():
            return self._take_some(self._pace)
        taken = self.tokens, self.details
        self.tokens, self.details = [], []
        self.taken_at = max(self.taken_at, self.last_at)
        self._notified = False
        return taken

    def _take_some(self, pace: TokenPace) -> tuple[list[int], list[Detail]]:
        """The tokens that are due. Notifies the reader when the next ones are."""
        self.taken_at = clock()
        count, wait_s = pace.release(self.taken_at)
        taken = self.tokens[:count], self.details[:count]
        self.tokens, self.details = self.tokens[count:], self.details[count:]
        if wait_s:
            self._timer = self.link.timers.call_later(wait_s, self._waited)
        self._notified = self._timer is not None
        return taken

    def _waited(self) -> None:
        """The next tokens are due, if they have arrived."""
        self._timer, self._notified = None, bool(self.tokens)
        if self.tokens:
            self.notify()

    def close(self, end: mesh.JobEnd | None = None, loss: WeftError | None = None) -> None:
        """Ends the stream: with the job's end, with a loss, or (neither) because it was cancelled."""
        if self.closed.done():
            return
        self.end, self.loss = end, loss
        self.closed.set_result(None)
        if self._pace is not None and self._pace.means.guessed:
            self.link.usual_steps = self._pace.means
        if self._timer is not None:  # No token is held back any more.
            self._timer.cancel()
            self._timer = None
            asyncio.get_running_loop().call_soon(self.notify)

    def observed_cost(self) -> mesh.JobCost:
        """The cost as measured at the gateway, for an attempt of which the worker reported none."""
        if self.first_at is None:
            return mesh.JobCost(prefill_s=clock() - self.opened_at)
        return mesh.JobCost(prefill_s=self.first_at - self.opened_at, decode_s=self.last_at - self.first_at)


class WorkerLink:
    """The Run stream to one worker."""

    def __init__(self, address: str, gateway_id: str, mesh_id: str = "", connect_s: float = 0.5) -> None:
        """`connect_s`: how long connecting may take before the link counts as broken."""
        self.address = address
        self.alive = True
        self.connected = False
        """The worker has answered."""
        self.health = LinkHealth.begin(clock())
        self._connect_s = connect_s
        self.arrivals = Arrivals(clock)
        self.timers = Timers()
        self.usual_steps: StepMeans | None = None
        """Those of the last answer with guesses that has ended."""
        self._sent = 0
        """Messages that were queued after the hello."""
        self._unacknowledged: deque[tuple[int, float]] = deque()
        self._streams: dict[int, JobStream] = {}
        self._stream_ids = itertools.count(1)
        self._unsent: SendQueue[mesh.RunRequest] = SendQueue()
        self._unsent.put(mesh.RunRequest(hello=mesh.GatewayHello(gateway_id=gateway_id, mesh_id=mesh_id)))
        self._session = asyncio.create_task(self._run(address))
        self._session.add_done_callback(lambda _: self.timers.close())

    @property
    def idle(self) -> bool:
        """It has no job streams."""
        return not self._streams

    @property
    def jobs(self) -> int:
        """Number of its job streams."""
        return len(self._streams)

    @property
    def guesses(self) -> bool:
        """The worker guesses tokens."""
        return self.health.last is not None and self.health.last.guesses

    @property
    def usable(self) -> bool:
        """New jobs may go to the worker."""
        return self.alive and not self.health.suspect(clock())

    def watch(self, now: float, patient: bool) -> bool:
        """Loses what is lost by now, as link_health.py defines it. -> whether the worker lost all its streams.

        Asks for an acknowledgement if none is open: that is how a cut in the direction to the worker is found.
        """
        if self.health.dead(now, patient) and self._streams:
            self.lose_all()
            return True
        acknowledged = self.health.last.received if self.health.last is not None else 0
        for stream in list(self._streams.values()):
            if stream.number > acknowledged and self.health.unreceived(stream.opened_at, now, patient):
                self.lose(stream, worker_lost())
        if self.health.judges and not self._unacknowledged:
            self._put(mesh.RunRequest(cancel=mesh.CancelJob(stream_id=_NO_STREAM)))
        return False

    def run(self, job: mesh.Job, worker_id: str, notify: Callable[[], None], hold_s: float = 0.0) -> JobStream:
        """Sends a job, whose stream id is set here. hold_s: as in JobStream."""
        position = len(job.token_ids) - job.prompt_len
        stream = self._open(worker_id, position, job.sampling.HasField("logprobs"), notify, hold_s)
        job.stream_id = stream.stream_id
        stream.number = self._put(mesh.RunRequest(job=job))
        return stream

    def attach(
        self, attach: mesh.AttachJob, worker_id: str, wants_details: bool, notify: Callable[[], None], hold_s: float
    ) -> JobStream:
        """Subscribes to a job that already runs. The stream id of the message is set here. hold_s: as in JobStream."""
        stream = self._open(worker_id, attach.position, wants_details, notify, hold_s)
        attach.stream_id = stream.stream_id
        stream.number = self._put(mesh.RunRequest(attach=attach))
        return stream

    def confirm(self, stream: JobStream, placement: int) -> None:
        """Confirms a tentative job, which may have ended."""
        self._put(mesh.RunRequest(confirm=mesh.ConfirmJob(stream_id=stream.stream_id, placement=placement)))

    def prefetch(self, source: str, block_keys: bytes) -> None:
        """Announces a job whose blocks the worker at `source` computes now."""
        self._put(mesh.RunRequest(prefetch=mesh.Prefetch(source=source, block_keys=block_keys)))

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

    def lose_all(self) -> None:
        """Loses all streams; the connection stays open."""
        log.warning("worker lost", worker=self.address, jobs=len(self._streams))
        for stream in list(self._streams.values()):
            self.lose(stream, worker_lost())

    def lose_worker(self, worker_id: str) -> None:
        """The scheduler has lost this worker. Its streams are lost if the worker sends no heartbeats to judge it by."""
        if not self.health.judges:
            for stream in [stream for stream in self._streams.values() if stream.worker_id == worker_id]:
                self.lose(stream, worker_lost())

    async def close(self) -> None:
        """Closes the link; streams that are still open are lost."""
        self._session.cancel()
        await asyncio.gather(self._session, return_exceptions=True)

    def _open(
        self, worker_id: str, position: int, wants_details: bool, notify: Callable[[], None], hold_s: float
    ) -> JobStream:
        stream = JobStream(self, next(self._stream_ids), worker_id, position, wants_details, notify, hold_s)
        self._streams[stream.stream_id] = stream
        return stream

    def _put(self, message: mesh.RunRequest) -> int:
        """Queues a message. -> its number, from 1."""
        self._sent += 1
        now = clock()
        self._unacknowledged.append((self._sent, now))
        self.health.unacknowledged_at = self._unacknowledged[0][1]
        try:
            self._unsent.put(message)
        except SendQueueFull:
            self._session.cancel()
        return self._sent

    async def _run(self, address: str) -> None:
        try:
            # While this process is behind, tokens wait at the worker, which sends those of several steps together.
            few = rpc.FEW_UNREAD_BYTES
            async with rpc.link_channel(address, "worker", connect_s=self._connect_s, unread_bytes=few) as channel:
                await self._connect(channel)
                call = WorkerStub(channel).Run(aiter(self._unsent))
                async for message in call:
                    self._receive(message)
        except TimeoutError:
            log.info("no connection", worker=address, jobs=len(self._streams))
        except aio.AioRpcError as error:
            if not mesh_ids.RefusalLog("worker").refused(error, address):
                log.info("link broke", code=error.code().name, jobs=len(self._streams))
        except ValueError as error:
            telemetry.log_exception("a worker sent columns of unequal length", error)
        finally:
            self._unsent.close()  # gRPC's task that reads it does not end with the call.
            self._break()

    def _break(self) -> None:
        """The connection has ended: all streams are lost."""
        self.alive = False
        streams, self._streams = self._streams, {}
        died = self.connected and not (self.health.last is not None and self.health.last.draining)
        for stream in streams.values():
            stream.broken = died
            stream.close(loss=worker_lost())

    async def _connect(self, channel: aio.Channel) -> None:
        """Waits for the connection. Raises TimeoutError if the worker refuses it or does not answer in time."""
        async with asyncio.timeout(self._connect_s):
            state = channel.get_state(try_to_connect=True)
            while state is not ChannelConnectivity.READY:
                if state is ChannelConnectivity.TRANSIENT_FAILURE:
                    raise TimeoutError
                await channel.wait_for_state_change(state)
                state = channel.get_state()
        self.connected = True
        now = clock()
        self.health = LinkHealth.begin(now)
        self._unacknowledged = deque((number, now) for number, _ in self._unacknowledged)

    def _acknowledge(self, heartbeat: mesh.WorkerHeartbeat, now: float) -> None:
        self._unsent.joins = heartbeat.reads_more
        unacknowledged = self._unacknowledged
        while unacknowledged and unacknowledged[0][0] <= heartbeat.received:
            unacknowledged.popleft()
        self.health.unacknowledged_at = unacknowledged[0][1] if unacknowledged else math.inf
        self.health.beat(heartbeat, now)

    def _receive(self, message: mesh.RunResponse) -> None:
        now = clock()
        self.health.heard_at = now
        if message.HasField("heartbeat"):
            self._acknowledge(message.heartbeat, now)
        streams = self._streams
        for scores in message.scores:
            scored = streams.get(scores.stream_id)
            if scored is not None:
                scored.scores.append((scores.position, _details(scores)))
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
        self.arrivals.received(now)

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


def _details(scores: mesh.PromptScores) -> list[Detail]:
    tops = {top.entry: top for top in scores.tops}
    return [
        Detail(logprob, tops[entry].token_ids, tops[entry].logprobs) if entry in tops else Detail(logprob)
        for entry, logprob in enumerate(scores.logprobs)
    ]
