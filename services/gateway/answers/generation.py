"""One generation: all continuations of a request, and the clients that listen to it. Knows no gRPC calls.

It is driven by its own task and outlives each single client, but not the last one.
"""

import asyncio
import os
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

from protos import inference_pb2 as api
from protos import mesh_pb2
from services import hashing, telemetry, validate
from services.errors import WeftError, internal
from services.gateway.access.tenants import Tenant
from services.gateway.answers.continuation import Continuation
from services.gateway.answers.receipt import Phase
from services.gateway.backend import Backend
from services.gateway.links.catalog import Served
from services.gateway.links.result_cache import ResultKey, deterministic
from services.gateway.text.journal import Journal, KeyChain
from services.gateway.text.stop_strings import StopMatcher
from services.gateway.text.tokenizer import TextModel


class Listening(Protocol):
    """What a generation wants of those who listen."""

    @property
    def deadline(self) -> float:
        """When it listens no more, on the clock `time.monotonic`; infinite for never."""

    def on_news(self) -> None:
        """There is something to take."""

    def on_phase(self) -> None:
        """What the generation waits for has changed."""


@dataclass(frozen=True)
class AdmittedRequest:
    """A validated request."""

    request: api.GenerateRequest
    request_id: str
    tenant: Tenant
    served: Served
    traceparent: str

    @cached_property
    def body(self) -> bytes:
        """SHA-256 of the request as the client sent it."""
        return hashing.digest(b"weft/body/1", self.request.SerializeToString(deterministic=True))

    @property
    def n(self) -> int:
        """How many continuations."""
        return max(1, self.request.n)


def _seed(order: AdmittedRequest) -> int:
    """The seed of the draws: the request's own, or one that its retries draw again at whatever gateway."""
    request = order.request
    if request.sampling.HasField("seed"):
        return request.sampling.seed
    if request.request_id:
        name = hashing.digest(b"weft/seed/1", order.tenant.salt, request.request_id.encode(), order.body)
        return int.from_bytes(name[:8], "little")
    return int.from_bytes(os.urandom(8), "little")


def _submission(order: AdmittedRequest, job_id: str, key: bytes) -> mesh_pb2.Submit:
    """A job as the scheduler hears of it: all but what changes from attempt to attempt."""
    return mesh_pb2.Submit(
        job_id=job_id,
        model=order.served.card.name,
        tenant=order.tenant.hash,
        priority=order.request.priority,
        identity=key,
        body=order.body,
        traceparent=order.traceparent,
    )


class Generation:
    """A request while it is answered."""

    def __init__(self, order: AdmittedRequest, mesh: Backend, threads: Executor) -> None:
        self.order = order
        self.phase = Phase.TOKENIZE
        self.done = False
        self.error: WeftError | None = None
        self.prompt_tokens = 0
        self.continuations: list[Continuation] = []
        self.last: Continuation | None = None
        self.text: TextModel | None = None
        self.listeners: set[Listening] = set()
        self.seed = _seed(order)
        self._mesh = mesh
        self._threads = threads
        self._task = asyncio.create_task(self._run())

    def deadline(self) -> float:
        """The latest of those who listen now, on the clock `time.monotonic`."""
        return max((listener.deadline for listener in self.listeners), default=0.0)

    @property
    def soon(self) -> bool:
        """Whether the first token of some of it is about to come."""
        return any(continuation.soon for continuation in self.continuations)

    @property
    def greets(self) -> bool:
        """Whether its clients may be greeted: a worker was found for some of it, and will not say when that is best."""
        return any(continuation.greets for continuation in self.continuations)

    def advance(self) -> None:
        """Takes what has come from workers into the journals."""
        for continuation in self.continuations:
            continuation.advance()

    async def cancel(self) -> None:
        """Ends it everywhere. Returns when workers and scheduler have been told."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            with telemetry.start("tokenize", self.order.traceparent) as span:
                tokens = await self._tokenize()
                span.set({"gen_ai.usage.input_tokens": len(tokens)})
            self._plan(tokens)
            self._enter(Phase.REMOTE)
            await self._run_all()
        except WeftError as error:
            self.error = error
        except Exception as error:
            telemetry.log_exception("a generation failed", error)
            self.error = internal()
        finally:
            self.done = True
            self._news()

    async def _tokenize(self) -> list[int]:
        order = self.order
        text = self.text = await self._mesh.catalog.text(order.served)
        prompt = order.request.prompt
        if prompt.WhichOneof("form") == "token_ids":  # Nothing to encode: a thread would take longer to wake.
            tokens = text.encode(prompt)
        else:
            tokens = await asyncio.get_running_loop().run_in_executor(self._threads, text.encode, prompt)
        validate.check_tokens(tokens, order.request.sampling, order.served.card)
        self.prompt_tokens = len(tokens)
        return tokens

    def _plan(self, tokens: list[int]) -> None:
        sampling = api.Sampling()
        sampling.CopyFrom(self.order.request.sampling)
        if not sampling.HasField("max_tokens"):
            sampling.max_tokens = validate.default_max_tokens(len(tokens), sampling, self.order.served.card)
        sampling.seed = self.seed
        self.continuations = [self._continuation(index, tokens, sampling) for index in range(self.order.n)]

    def _continuation(self, index: int, tokens: list[int], sampling: api.Sampling) -> Continuation:
        order, request, card = self.order, self.order.request, self.order.served.card
        assert self.text is not None
        bypass = request.cache == api.CACHE_POLICY_BYPASS
        question = None
        if deterministic(request.sampling) and not bypass:
            question = ResultKey(order.tenant.salt, card, tokens, request.sampling, sampling, index)
        job_id = f"{order.tenant.hash}/{order.request_id}/{index}"
        job = mesh_pb2.Job(
            job_id=job_id,
            boundary=len(tokens),
            sampling=sampling,
            sample_index=index,
            salt=order.tenant.salt,
            bypass_cache=bypass,
            priority=request.priority,
            traceparent=order.traceparent,
        )
        job.sampling.ClearField("stop")
        stops = StopMatcher(sampling.stop, sampling.min_tokens) if sampling.stop else None
        # An answer in a conversation begins a message, any other goes on from its prompt.
        chats = request.prompt.WhichOneof("form") == "chat"
        journal = Journal(tokens, self.text.detokenizer(() if chats else tokens), stops)
        root = hashing.chain_root(order.tenant.salt, card.fingerprint)
        keys = None if bypass or not card.block_size else KeyChain(root, card.block_size)
        return Continuation(
            self._mesh, partial(_submission, order, job_id), job, journal, keys, question, request.cache,
            order.served.lone_address, self.deadline, self._news,
        )  # fmt: skip

    async def _run_all(self) -> None:
        if len(self.continuations) == 1:
            await self._run_one(self.continuations[0])
            return
        tasks = [asyncio.create_task(self._run_one(continuation)) for continuation in self.continuations]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_one(self, continuation: Continuation) -> None:
        try:
            await continuation.run()
        finally:
            self.last = continuation

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        for listener in self.listeners:
            listener.on_phase()

    def _news(self) -> None:
        for listener in self.listeners:
            listener.on_news()
