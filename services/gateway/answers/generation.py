"""One generation: all continuations of a request, and the clients that subscribe to it. Knows no protocol.

A task of its own drives it. It outlives each single subscriber, but not the last one.
"""

import asyncio
from typing import Protocol

from protos import inference_pb2 as api
from services import telemetry, validate
from services.errors import WeftError, internal
from services.gateway.answers.admitted import AdmittedRequest
from services.gateway.answers.attempt import Answer
from services.gateway.answers.continuation import Continuation
from services.gateway.answers.job_messages import JobMessages
from services.gateway.answers.receipt import Phase
from services.gateway.backend import Backend
from services.gateway.links.result_cache import ResultKey, deterministic
from services.gateway.text.journal import Journal
from services.gateway.text.stop_strings import StopMatcher
from services.gateway.text.tokenizer import TextModel


class Observer(Protocol):
    """What a generation calls of its subscribers."""

    @property
    def deadline(self) -> float:
        """When the subscriber leaves, on `time.monotonic`; infinite for no deadline."""

    def notify(self) -> None:
        """There is something to take."""

    def phase_changed(self) -> None:
        """The generation is in another phase."""


class Generation:
    """A request while it is answered."""

    def __init__(self, admitted: AdmittedRequest, backend: Backend) -> None:
        self.admitted = admitted
        self.phase = Phase.TOKENIZE
        self.done = False
        self.error: WeftError | None = None
        self.prompt_tokens = 0
        self.continuations: list[Continuation] = []
        self.last: Continuation | None = None
        """The continuation that ended last."""
        self.text: TextModel | None = None
        self.subscribers: set[Observer] = set()
        self.seed = admitted.seed()
        self._backend = backend
        self._task = asyncio.create_task(self._run())

    def deadline(self) -> float:
        """The latest deadline of the current subscribers, on `time.monotonic`."""
        return max((subscriber.deadline for subscriber in self.subscribers), default=0.0)

    @property
    def placed(self) -> bool:
        """A worker has at least one of its continuations."""
        return any(continuation.placed for continuation in self.continuations)

    def advance(self) -> None:
        """Moves the tokens that have arrived to the journals."""
        for continuation in self.continuations:
            continuation.advance()

    async def cancel(self) -> None:
        """Cancels all continuations. Returns once the messages to workers and scheduler are queued."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            with telemetry.start("tokenize", self.admitted.traceparent) as span:
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
            self._notify()

    async def _tokenize(self) -> list[int]:
        admitted = self.admitted
        text = self.text = await self._backend.catalog.text(admitted.served)
        prompt = admitted.request.prompt
        if prompt.WhichOneof("form") == "token_ids":  # Nothing to encode: waking a thread would take longer.
            tokens = text.encode(prompt)
        else:
            tokens = await asyncio.get_running_loop().run_in_executor(self._backend.threads, text.encode, prompt)
        validate.check_tokens(tokens, admitted.request.sampling, admitted.served.card)
        self.prompt_tokens = len(tokens)
        return tokens

    def _plan(self, tokens: list[int]) -> None:
        sampling = api.Sampling()
        sampling.CopyFrom(self.admitted.request.sampling)
        if not sampling.HasField("max_tokens"):
            sampling.max_tokens = validate.default_max_tokens(len(tokens), sampling, self.admitted.served.card)
        sampling.seed = self.seed
        self.continuations = [self._continuation(index, tokens, sampling) for index in range(self.admitted.n)]

    def _continuation(self, index: int, tokens: list[int], sampling: api.Sampling) -> Continuation:
        admitted, request, card = self.admitted, self.admitted.request, self.admitted.served.card
        assert self.text is not None
        key = None
        if deterministic(request.sampling) and not admitted.bypass_cache:
            key = ResultKey(admitted.tenant.salt, card, tokens, sampling, index)
        stops = StopMatcher(sampling.stop, sampling.min_tokens) if sampling.stop else None
        # The answer to a conversation begins a message; any other continues its prompt.
        is_chat = request.prompt.WhichOneof("form") == "chat"
        journal = Journal(tokens, self.text.detokenizer(() if is_chat else tokens), stops)
        answer = Answer(journal, self.deadline, self._notify, self._backend.settings.gateway_cost_wait_s)
        messages = JobMessages(admitted, index, sampling, len(tokens), key)
        return Continuation(self._backend, admitted, answer, messages, key)

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
        for subscriber in self.subscribers:
            subscriber.phase_changed()

    def _notify(self) -> None:
        for subscriber in self.subscribers:
            subscriber.notify()
