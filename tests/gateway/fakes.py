"""The gateway's peers as small real servers on loopback: scheduler, workers and cache with scripted behaviour."""

import asyncio
import contextlib
import hashlib
import time
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias
from unittest import mock

from grpc import aio

from protos import cache_pb2, mesh_pb2
from protos import inference_pb2 as api
from protos.cache_pb2_grpc import CacheServicer, add_CacheServicer_to_server
from protos.inference_pb2_grpc import InferenceStub
from protos.mesh_pb2_grpc import (
    SchedulerServicer,
    WorkerServicer,
    add_SchedulerServicer_to_server,
    add_WorkerServicer_to_server,
)
from services import rpc
from services.errors import WeftError, unavailable
from services.gateway.access.load_gate import LoadGate
from services.gateway.main import gateway
from services.gateway.settings import GatewaySettings
from services.send_queue import SendQueue, unjoin
from tests.gateway.model import ANSWER, BUNDLE, make_card

# The generated stubs have the asynchronous classes in their types only.
if TYPE_CHECKING:
    from protos.inference_pb2_grpc import InferenceAsyncStub

    Stub: TypeAlias = InferenceAsyncStub
else:
    Stub = Any

Context = aio.ServicerContext[Any, Any]


VECTOR = array("f", [0.5, -2.0])
"""What the fake workers compute of each text."""


class FakeScheduler(SchedulerServicer):
    """Assigns every job to the first worker that the job does not avoid, unless `hold` or `decide` is set."""

    def __init__(self) -> None:
        self.models: list[mesh_pb2.ServedModel] = []
        self.workers: list[tuple[str, str]] = []
        self.submits: list[mesh_pb2.Submit] = []
        self.withdrawn: list[str] = []
        self.hold = False
        self.decide: Callable[[mesh_pb2.Submit], mesh_pb2.DispatchResponse | None] | None = None
        self.epoch = 0
        self.hellos = 0
        self.accepts_reports = True
        self.counts_submissions = False
        self.reads_more = True
        self.together: list[int] = []
        """How many messages each message of gRPC had."""
        self.reports: list[mesh_pb2.GatewayReport] = []
        self.overview = mesh_pb2.OverviewResponse()
        self.overviews = 0
        self._unsent: set[SendQueue[mesh_pb2.DispatchResponse]] = set()

    async def Dispatch(  # type: ignore[override]
        self, requests: AsyncIterator[mesh_pb2.DispatchRequest], context: Context
    ) -> None:
        unsent: SendQueue[mesh_pb2.DispatchResponse] = SendQueue()
        reading = asyncio.create_task(self._read(requests, unsent))
        self._unsent.add(unsent)
        try:
            async for message in unsent:
                await context.write(message)
        finally:
            self._unsent.discard(unsent)
            reading.cancel()

    async def Overview(self, request: mesh_pb2.OverviewRequest, context: Context) -> mesh_pb2.OverviewResponse:
        self.overviews += 1
        return self.overview

    async def _read(self, requests: AsyncIterator[mesh_pb2.DispatchRequest], unsent: Any) -> None:
        async for request in unjoined_all(requests, self.together):
            kind = request.WhichOneof("message")
            if kind == "hello":
                self.hellos += 1
                unsent.joins = request.hello.reads_more
                hello = mesh_pb2.SchedulerHello(
                    epoch=self.epoch,
                    accepts_reports=self.accepts_reports,
                    counts_submissions=self.counts_submissions,
                    reads_more=self.reads_more,
                )
                unsent.put(mesh_pb2.DispatchResponse(hello=hello))
                unsent.put(self._models())
            elif kind == "submit":
                self.submits.append(request.submit)
                if not self.hold:
                    self._place(request.submit, unsent)
            elif kind == "report":
                self.reports.append(request.report)
            else:
                self.withdrawn.append(request.withdraw.job_id)

    def _models(self) -> mesh_pb2.DispatchResponse:
        return mesh_pb2.DispatchResponse(models=mesh_pb2.ModelList(models=self.models))

    def _place(self, submit: mesh_pb2.Submit, unsent: Any) -> None:
        answer = self.decide(submit) if self.decide is not None else None
        if answer is None:
            free = [worker for worker in self.workers if worker[0] not in submit.avoid]
            answer = (
                assigned(submit, *free[0]) if free else rejected(submit, unavailable("NO_WORKER", "no worker is left"))
            )
        unsent.put(answer)

    def send(self, message: mesh_pb2.DispatchResponse) -> None:
        """Sends a message to all gateways."""
        for unsent in self._unsent:
            unsent.put(message)

    def serve_models(self, served: list[mesh_pb2.ServedModel]) -> None:
        """Sends another list of models."""
        self.models = served
        self.send(self._models())

    def hang_up(self) -> None:
        """Closes the streams of all gateways."""
        for unsent in self._unsent:
            unsent.close()

    def release(self) -> None:
        """Places all jobs that were held."""
        self.hold = False
        for unsent in self._unsent:
            for submit in self.submits:
                if submit.job_id not in self.withdrawn:
                    self._place(submit, unsent)


async def unjoined_all(requests: AsyncIterator[Any], together: list[int]) -> AsyncIterator[Any]:
    """The messages of a stream, each by itself. together: gets how many each message of gRPC had."""
    async for request in requests:
        together.append(1 + len(request.more))
        received: list[Any] = []
        await unjoin(request, received.append)
        for each in received:
            yield each


def assigned(
    submit: mesh_pb2.Submit, worker_id: str, address: str, queue_s: float = 0.0, placement: int = 0
) -> mesh_pb2.DispatchResponse:
    """The placement of a job."""
    answer = mesh_pb2.Assigned(
        job_id=submit.job_id,
        attempt=submit.attempt,
        worker_id=worker_id,
        address=address,
        queue_s=queue_s,
        placement=placement,
    )
    return mesh_pb2.DispatchResponse(assigned=answer)


def rejected(submit: mesh_pb2.Submit, error: WeftError) -> mesh_pb2.DispatchResponse:
    """The rejection of a job."""
    answer = mesh_pb2.Rejected(job_id=submit.job_id, attempt=submit.attempt, failure=error.failure())
    return mesh_pb2.DispatchResponse(rejected=answer)


@dataclass(eq=False)
class Running:
    """A job at a fake worker."""

    job: mesh_pb2.Job
    tokens: Sequence[int]
    position: int
    subscribers: list[tuple[Any, int]]
    began: float = field(default_factory=time.monotonic)
    first: float = 0.0


class FakeWorker(WorkerServicer):
    """Continues every job with the tokens of `script`, one per step; the jobs of a step share a message. Of texts it
    returns the same vector."""

    def __init__(self, worker_id: str, script: Callable[[mesh_pb2.Job], Sequence[int]]) -> None:
        self.worker_id = worker_id
        self.script = script
        self.step_s = 0.001
        self.first_step_s = 0.0  # before a job's first token
        self.tokens_per_step = 1
        self.hold_at: int | None = None  # position after which all jobs wait
        self.fail_at: tuple[int, WeftError] | None = None
        self.jobs: list[mesh_pb2.Job] = []
        self.attached: list[mesh_pb2.AttachJob] = []
        self.cancelled: list[mesh_pb2.CancelJob] = []
        self.confirmed: list[mesh_pb2.ConfirmJob] = []
        self.ignores_cancels = False
        self.together: list[int] = []
        """How many messages each message of gRPC had."""
        self.running: dict[str, Running] = {}
        self.sent = 0
        self.links: set[SendQueue[mesh_pb2.RunResponse]] = set()
        self.bundle = BUNDLE
        self.hold_bundle = asyncio.Event()
        self.hold_bundle.set()

    @property
    def cancelled_once(self) -> bool:
        """Whether one request came, each of whose jobs was cancelled once. It has two jobs if the early attempt expired
        before the scheduler had answered, as on a busy machine."""
        *early, placed = (job.stream_id for job in self.jobs)
        expired = len(early) <= 1 and all(job.tentative for job in self.jobs[: len(early)])
        return expired and [cancel.stream_id for cancel in self.cancelled] == [*early, placed]

    async def FetchBundle(
        self, request: mesh_pb2.FetchBundleRequest, context: Context
    ) -> AsyncIterator[mesh_pb2.FetchBundleResponse]:
        await self.hold_bundle.wait()
        half = len(self.bundle) // 2
        for data in (self.bundle[:half], self.bundle[half:]):
            yield mesh_pb2.FetchBundleResponse(data=data)

    async def Run(  # type: ignore[override]
        self, requests: AsyncIterator[mesh_pb2.RunRequest], context: Context
    ) -> None:
        unsent: SendQueue[mesh_pb2.RunResponse] = SendQueue()
        reading = asyncio.create_task(self._read(requests, unsent))
        stepping = asyncio.create_task(self._run_steps())
        self.links.add(unsent)
        try:
            async for message in unsent:
                await context.write(message)
        finally:
            self.links.discard(unsent)
            reading.cancel()
            stepping.cancel()

    async def _read(self, requests: AsyncIterator[mesh_pb2.RunRequest], unsent: Any) -> None:
        async for request in unjoined_all(requests, self.together):
            kind = request.WhichOneof("message")
            if kind == "job":
                job = request.job
                self.jobs.append(job)
                position = len(job.token_ids) - job.prompt_len
                self.running[job.job_id] = Running(job, self.script(job), position, [(unsent, job.stream_id)])
            elif kind == "attach":
                self._attach(request.attach, unsent)
            elif kind == "confirm":
                self.confirmed.append(request.confirm)
            elif kind == "cancel":
                self.cancelled.append(request.cancel)
                if not self.ignores_cancels:
                    self._cancel(request.cancel, unsent)

    def _attach(self, attach: mesh_pb2.AttachJob, unsent: Any) -> None:
        self.attached.append(attach)
        running = self.running.get(attach.job_id)
        if running is None:
            gone = unavailable("JOB_NOT_FOUND", "gone").failure()
            end = mesh_pb2.JobEnd(stream_id=attach.stream_id, reason=api.FINISH_REASON_ERROR, failure=gone)
            unsent.put(mesh_pb2.RunResponse(ends=[end]))
            return
        tokens = list(running.tokens)[attach.position : running.position]
        positions = range(attach.position, running.position)
        if tokens:
            stream_ids = [attach.stream_id] * len(tokens)
            unsent.put(mesh_pb2.RunResponse(stream_ids=stream_ids, positions=positions, token_ids=tokens))
        running.subscribers.append((unsent, attach.stream_id))

    def _cancel(self, cancel: mesh_pb2.CancelJob, unsent: Any) -> None:
        for job_id, running in list(self.running.items()):
            if (unsent, cancel.stream_id) in running.subscribers:
                running.subscribers.remove((unsent, cancel.stream_id))
                end = self._end(running, cancel.stream_id)
                end.reason = api.FINISH_REASON_CANCELLED
                unsent.put(mesh_pb2.RunResponse(ends=[end]))
                if not running.subscribers:
                    del self.running[job_id]

    async def _run_steps(self) -> None:
        while True:
            await asyncio.sleep(self.step_s)
            messages: dict[Any, mesh_pb2.RunResponse] = {}
            for running in list(self.running.values()):
                for _ in range(self.tokens_per_step):
                    if running.job.job_id in self.running:
                        self._step(running, messages)
            for unsent, message in messages.items():
                unsent.put(message)

    def _step(self, running: Running, messages: dict[Any, mesh_pb2.RunResponse]) -> None:
        if self.hold_at is not None and running.position >= self.hold_at:
            return
        if not running.first and time.monotonic() < running.began + self.first_step_s:
            return
        tokens, job = running.tokens, running.job
        ends = running.position >= min(len(tokens), job.sampling.max_tokens)
        fails = self.fail_at is not None and running.position >= self.fail_at[0]
        running.first = running.first or time.monotonic()
        for unsent, stream_id in running.subscribers:
            message = messages.setdefault(unsent, mesh_pb2.RunResponse())
            if ends or fails:
                message.ends.append(self._end(running, stream_id))
            else:
                self.add(message, stream_id, running.position, tokens[running.position], job)
        if ends or fails:
            del self.running[job.job_id]
        else:
            running.position += 1
            self.sent += 1

    def add(self, message: mesh_pb2.RunResponse, stream_id: int, position: int, token: int, job: mesh_pb2.Job) -> None:
        """Adds one token of a step to a message."""
        if job.sampling.HasField("logprobs"):
            top = range(job.sampling.logprobs)
            values = [-float(place + 1) for place in top]
            message.tops.append(mesh_pb2.TopTokens(entry=len(message.stream_ids), token_ids=top, logprobs=values))
            message.logprobs.append(-0.5)
        elif any(other.job.sampling.HasField("logprobs") for other in self.running.values()):
            message.logprobs.append(float("nan"))
        message.stream_ids.append(stream_id)
        message.positions.append(position)
        message.token_ids.append(token)

    def _end(self, running: Running, stream_id: int) -> mesh_pb2.JobEnd:
        now = time.monotonic()
        first = running.first or now
        cost = mesh_pb2.JobCost(
            prefill_s=first - running.began,
            decode_s=now - first,
            prefill_tokens=len(running.job.token_ids) - 1,
            cached_tokens=1,
        )
        end = mesh_pb2.JobEnd(stream_id=stream_id, cost=cost)
        if self.fail_at is not None:
            end.reason = api.FINISH_REASON_ERROR
            end.failure.CopyFrom(self.fail_at[1].failure())
        elif running.job.HasField("encode"):
            end.reason = api.FINISH_REASON_STOP
            end.vectors.width, end.vectors.data = len(VECTOR), VECTOR.tobytes() * len(running.job.encode.lengths)
        elif running.position >= running.job.sampling.max_tokens:
            end.reason = api.FINISH_REASON_LENGTH
        else:
            end.reason = api.FINISH_REASON_STOP
            end.stop_token_id = 1
        return end

    def send(self, message: mesh_pb2.RunResponse) -> None:
        """Sends a message to all gateways, valid or not."""
        for unsent in self.links:
            unsent.put(message)


class FakeCache(CacheServicer):
    """A dictionary with a delay."""

    def __init__(self) -> None:
        self.results: dict[bytes, cache_pb2.CachedResult] = {}
        self.delay_s = 0.0
        self.lookups = 0

    async def GetResult(self, request: cache_pb2.GetResultRequest, context: Context) -> cache_pb2.GetResultResponse:
        self.lookups += 1
        await asyncio.sleep(self.delay_s)
        return cache_pb2.GetResultResponse(result=self.results.get(request.key))

    async def PutResult(self, request: cache_pb2.PutResultRequest, context: Context) -> cache_pb2.PutResultResponse:
        self.results[request.key] = request.result
        return cache_pb2.PutResultResponse(stored=True)


async def _never(gate: LoadGate) -> None:
    """Measures nothing."""


class FakeMesh:
    """A real gateway among fake peers. `async with` starts and stops them."""

    def __init__(
        self,
        workers: int = 1,
        *,
        cache: bool = False,
        script: Callable[[mesh_pb2.Job], Sequence[int]] = lambda job: ANSWER,
        card: mesh_pb2.ModelCard | None = None,
        bundle: bytes = BUNDLE,
        http_port: int = 0,
        watches_load: bool = False,
        **settings: Any,
    ) -> None:
        self.http_port = http_port
        self._watches_load = watches_load
        self.card = card or make_card(bundle_digest=hashlib.sha256(bundle).digest())
        # They implement only the methods that a gateway calls.
        self.scheduler = FakeScheduler()  # type: ignore[abstract]
        self.workers = [
            FakeWorker(f"worker-{i}", script)  # type: ignore[abstract]
            for i in range(workers)
        ]
        for worker in self.workers:
            worker.bundle = bundle
        self.cache = FakeCache() if cache else None  # type: ignore[abstract]
        self.servers: dict[str, rpc.Server] = {}
        self._settings = settings
        self._gateway: Any = None
        self.stub: Stub
        self.channel: aio.Channel

    async def __aenter__(self) -> Self:
        for worker in self.workers:
            await self.start(worker.worker_id, "weft.v1.Worker", add_WorkerServicer_to_server, worker)
        if self.cache is not None:
            await self.start("cache", "weft.v1.Cache", add_CacheServicer_to_server, self.cache)
        self.scheduler.workers = [(worker.worker_id, self.address(worker.worker_id)) for worker in self.workers]
        self.scheduler.models = self.served()
        await self.start_scheduler()
        settings = GatewaySettings(
            listen="127.0.0.1:0",
            gateway_http_port=self.http_port,
            scheduler_address=self.address("scheduler"),
            cache_address=self.address("cache") if self.cache else "",
            **({"drain_s": 0} | self._settings),
        )
        self._gateway = gateway(settings)
        # The whole mesh shares this loop with the test: its load is not the gateway's.
        unwatched = contextlib.nullcontext() if self._watches_load else mock.patch.object(LoadGate, "watch", _never)
        with unwatched:
            self.server: rpc.Server = await self._gateway.__aenter__()
        self.channel = aio.insecure_channel(f"127.0.0.1:{self.server.port}")
        self.stub = InferenceStub(self.channel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.channel.close()
        await self.stop_gateway()
        for name in list(self.servers):
            await self.stop(name)

    async def stop_gateway(self) -> None:
        """Stops the gateway as SIGTERM does, if it runs."""
        running, self._gateway = self._gateway, None
        if running is not None:
            await running.__aexit__(None, None, None)

    def served(self) -> list[mesh_pb2.ServedModel]:
        """The model, served by all workers."""
        addresses = [self.address(worker.worker_id) for worker in self.workers]
        return [mesh_pb2.ServedModel(card=self.card, addresses=addresses)]

    def address(self, name: str) -> str:
        """The address of a peer."""
        return f"127.0.0.1:{self.servers[name].port}"

    async def start(self, name: str, full_name: str, add: Any, servicer: Any, address: str = "127.0.0.1:0") -> None:
        """Starts a peer."""
        self.servers[name] = await rpc.serve(address, [rpc.Service(full_name, add, servicer)])

    async def start_scheduler(self, address: str = "127.0.0.1:0") -> None:
        """Starts the scheduler, at the given address again."""
        self.scheduler.epoch += 1
        await self.start("scheduler", "weft.v1.Scheduler", add_SchedulerServicer_to_server, self.scheduler, address)

    async def stop(self, name: str) -> None:
        """Stops a peer at once."""
        await self.servers.pop(name).stop(0)


def ask(text: str = "hello world", **fields: Any) -> api.GenerateRequest:
    """A greedy request; `fields` are those of the sampling or of the request."""
    sampling = {name: fields.pop(name) for name in list(fields) if name in api.Sampling.DESCRIPTOR.fields_by_name}
    sampling = {"temperature": 0.0, "max_tokens": 400} | sampling
    prompt = fields.pop("prompt", api.Prompt(text=text))
    return api.GenerateRequest(prompt=prompt, sampling=api.Sampling(**sampling), **fields)


@dataclass
class Answer:
    """A collected stream."""

    deltas: list[api.Delta] = field(default_factory=list)
    receipt: api.Receipt = field(default_factory=api.Receipt)
    error: aio.AioRpcError | None = None
    trailing: dict[str, Any] = field(default_factory=dict)

    def text(self, index: int = 0) -> str:
        """The text of one continuation."""
        return "".join(delta.text for delta in self.deltas if delta.index == index)

    def ids(self, index: int = 0) -> list[int]:
        """The token ids of one continuation. Checks that positions have neither gaps nor repetitions."""
        ids: list[int] = []
        for delta in self.deltas:
            if delta.index == index:
                assert delta.position == len(ids)
                ids += delta.token_ids
        return ids

    def last(self, index: int = 0) -> api.Delta:
        """The last delta, with the finish reason."""
        return [delta for delta in self.deltas if delta.index == index][-1]

    @property
    def trailing_receipt(self) -> api.Receipt:
        """The receipt in the trailing metadata."""
        return api.Receipt.FromString(self.trailing["weft-receipt-bin"])


async def generate(stub: Stub, request: api.GenerateRequest, **options: Any) -> Answer:
    """Reads the whole stream, also of a call that fails."""
    answer = Answer()
    call = stub.Generate(request, **options)
    try:
        async for message in call:
            if message.HasField("delta"):
                answer.deltas.append(message.delta)
            else:
                answer.receipt = message.receipt
        answer.trailing = dict(await call.trailing_metadata())
    except aio.AioRpcError as error:
        answer.error = error
        answer.trailing = dict(error.trailing_metadata())
    return answer


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Waits until a condition is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        await asyncio.sleep(0.002)
