"""One generation: all continuations of a request, and the clients that subscribe to it. Knows no protocol.

A task of its own drives it. It outlives each single subscriber, but not the last one.
"""

import asyncio
import time
from functools import partial
from typing import Protocol

from protos import inference_pb2 as api
from services import hashing, telemetry, validate
from services.errors import WeftError, internal, invalid
from services.forms.form import Form
from services.forms.request import FIELD, check_size
from services.gateway.answers.admitted import AdmittedRequest
from services.gateway.answers.attempt import Answer
from services.gateway.answers.continuation import Continuation
from services.gateway.answers.job_messages import JobMessages
from services.gateway.answers.receipt import Phase
from services.gateway.answers.together import run_together
from services.gateway.backend import Backend
from services.gateway.links.result_cache import ResultKey
from services.gateway.text.conversation import calls_once, tools_of
from services.gateway.text.journal import Journal
from services.gateway.text.stop_strings import StopMatcher
from services.gateway.text.tokenizer import TextModel
from services.validate_chat import calls_required

_TOOLS = "prompt.chat.tools"


class Observer(Protocol):
    """What a generation calls of its subscribers."""

    @property
    def deadline(self) -> float:
        """When the subscriber leaves, on `time.monotonic`; infinite for no deadline."""

    def notify(self) -> None:
        """There is something to take."""

    def phase_changed(self) -> None:
        """The generation is in another phase."""


class Subscribers(set[Observer]):
    """The clients of a generation. Continuations hold this instead of the generation, which holds them: objects that
    hold one another stay in memory until the garbage collector finds them."""

    def deadline(self) -> float:
        """The latest deadline of the current subscribers, on `time.monotonic`."""
        return max((subscriber.deadline for subscriber in self), default=0.0)

    def notify(self) -> None:
        """There is something to take."""
        for subscriber in self:
            subscriber.notify()

    def phase_changed(self) -> None:
        """The generation is in another phase."""
        for subscriber in self:
            subscriber.phase_changed()


class Generation:
    """A request while it is answered."""

    __slots__ = (
        "_backend", "_began", "_form", "_task", "admitted", "continuations", "done", "ends_by_text", "error",
        "last", "phase", "prompt_tokens", "seed", "subscribers", "text",
    )  # fmt: skip

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
        self.subscribers = Subscribers()
        self.seed = admitted.seed()
        self.ends_by_text = False
        """A stop string or a tool call may end the answer: its text must be read while it grows."""
        self._form: api.Structured | None = None
        """The form of an answer that must consist of tool calls."""
        self._began = time.monotonic()
        self._backend = backend
        self._task = asyncio.create_task(self._run())

    @property
    def placed(self) -> bool:
        """A worker has at least one of its continuations."""
        return any(continuation.placed for continuation in self.continuations)

    @property
    def retried(self) -> bool:
        """An attempt of a continuation was lost, and another one followed."""
        return any(continuation.journal.attempt > 1 for continuation in self.continuations)

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
            self.error = self._named(error)
        except Exception as error:
            telemetry.log_exception("a generation failed", error)
            self.error = internal()
        finally:
            self.done = True
            self.subscribers.notify()

    async def _tokenize(self) -> list[int]:
        admitted = self.admitted
        text = self.text = await self._backend.catalog.text(admitted.served)
        most = admitted.served.card.context_length
        tokens = await self._backend.encoder.encode(text, admitted.request.prompt, admitted.tenant.name, most)
        validate.check_tokens(tokens, admitted.request.sampling, admitted.served.card)
        self.prompt_tokens = len(tokens)
        if calls_required(admitted.request.prompt.chat):
            await self._require_calls(text)
        return tokens

    async def _require_calls(self, text: TextModel) -> None:
        """Makes the answer consist of tool calls. Raises WeftError if their grammar cannot be compiled."""
        plain, own = text.call_grammars(self.admitted.request.prompt.chat)
        self._form = api.Structured(grammar=own)
        check_size(self._form, _TOOLS)
        await self._backend.forms.check(Form("grammar", plain), _TOOLS)

    def _named(self, error: WeftError) -> WeftError:
        """The error of a worker; one of a form that is made of the tools names these."""
        if self._form is None or error.field != FIELD:
            return error
        return invalid(_TOOLS, error.message.removeprefix(f"{FIELD}: "), error.reason)

    def _plan(self, tokens: list[int]) -> None:
        sampling = api.Sampling()
        sampling.CopyFrom(self.admitted.request.sampling)
        if not sampling.HasField("max_tokens"):
            sampling.max_tokens = validate.default_max_tokens(len(tokens), sampling, self.admitted.served.card)
        sampling.seed = self.seed
        if self._form is not None:
            sampling.structured.CopyFrom(self._form)
        if sampling.bad_words:
            assert self.text is not None
            sequences = self.text.sequences_of(sampling.bad_words)
            validate.check_bad_words(sequences)
            sampling.bad_token_sequences.extend(api.TokenIds(ids=each) for each in sequences)
            sampling.ClearField("bad_words")
            validate.check_sampling(sampling, self.admitted.served.card)
        self.ends_by_text = bool(sampling.stop) or bool(tools_of(self.admitted.request.prompt.chat))
        self.continuations = [self._continuation(index, tokens, sampling) for index in range(self.admitted.n)]

    def _continuation(self, index: int, tokens: list[int], sampling: api.Sampling) -> Continuation:
        admitted, request, card = self.admitted, self.admitted.request, self.admitted.served.card
        assert self.text is not None
        key = None
        if admitted.repeatable:
            key = ResultKey(admitted.tenant.salt, card, tokens, sampling, index, calls_once(request.prompt.chat))
        journal = self._journal(index, tokens, sampling)
        answer = Answer(
            journal,
            self.subscribers.deadline,
            self.subscribers.notify,
            traffic=partial(self._backend.metrics.traffic.model, card.name),
            began=self._began,
            cost_wait_s=self._backend.settings.gateway_cost_wait_s,
            # An answer that its text may end is read at once, or its end would be found later.
            hold_s=0.0 if self.ends_by_text else self._backend.settings.gateway_hold_s,
        )
        messages = JobMessages(admitted, index, sampling, tokens, key)
        return Continuation(self._backend, admitted, answer, messages, key)

    def _journal(self, index: int, tokens: list[int], sampling: api.Sampling) -> Journal:
        prompt, text = self.admitted.request.prompt, self.text
        assert text is not None
        stops = StopMatcher(sampling.stop, sampling.min_tokens, sampling.include_stop_string) if sampling.stop else None
        # The answer to a conversation begins a message, unless it continues one; any other continues its prompt.
        begins = prompt.WhichOneof("form") == "chat" and not prompt.chat.continue_final_message
        before = () if begins else tokens
        if not tools_of(prompt.chat) or text.tool_format is None:
            return Journal(tokens, text.detokenizer(before), stops)
        calls = text.tool_calls(prompt.chat, hashing.digest(b"weft/call/1", self.admitted.body, bytes([index])))
        return Journal(tokens, text.detokenizer(before, text.tool_format.markers), stops, calls)

    async def _run_all(self) -> None:
        if len(self.continuations) == 1:
            await self._run_one(self.continuations[0])
            return
        await run_together(self._run_one(continuation) for continuation in self.continuations)

    async def _run_one(self, continuation: Continuation) -> None:
        try:
            await continuation.run()
        finally:
            self.last = continuation

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self.subscribers.phase_changed()
