"""One client's view of a generation: what was delivered, what is next, and how its time is spent.

Knows messages of the public API, not how they are sent.
"""

import asyncio
from collections.abc import Iterator

from protos import inference_pb2 as api
from services.gateway.answers import echo
from services.gateway.answers.call import Accept, Deliver
from services.gateway.answers.generation import Generation
from services.gateway.answers.receipt import Phase, Timeline
from services.gateway.text.journal import Journal
from services.gateway.text.tokenizer import TextModel
from services.gateway.text.tool_calls.parser import CallPiece

_MAX_TOKENS = 256
"""Most tokens of one message: a client that is far behind must still accept its size."""


class _Cursor:
    """How much of one continuation a client has received."""

    __slots__ = ("calls", "ended", "index", "journal", "texts", "tokens", "waits")

    def __init__(self, index: int, journal: Journal) -> None:
        self.index = index
        self.journal = journal
        self.tokens = 0
        self.texts = self.calls = self.waits = 0
        self.ended = False

    def responses(self, text: TextModel) -> Iterator[api.GenerateResponse]:
        """Deltas of what is new; the tokens of a delta are of one attempt."""
        journal = self.journal
        if self.waits != journal.waits:
            self.waits = journal.waits
            at = len(journal.tokens)
            if at == self.tokens:
                delta = api.Delta(index=self.index, position=at, attempt=journal.attempt, waiting=True)
                yield api.GenerateResponse(delta=delta)
        while not self.ended:
            total = len(journal.tokens)
            finishes = journal.ending is not None
            behind = self.texts < len(journal.texts) or self.calls < len(journal.call_pieces)
            if self.tokens == total and not (behind or finishes):
                return
            start = self.tokens
            attempt, end = journal.attempt_at(start)
            end = min(end, start + _MAX_TOKENS)
            self.tokens = end
            response = api.GenerateResponse()
            delta = response.delta  # Filled in place: the constructor would copy it.
            delta.index, delta.position, delta.attempt = self.index, start, attempt
            delta.token_ids.extend(journal.tokens[start:end])
            if journal.details:
                delta.logprobs.extend(
                    echo.position_of(token, detail, text)
                    for token, detail in zip(journal.tokens[start:end], journal.details[start:end], strict=True)
                )
            if end == total:  # Text is never ahead of its tokens.
                delta.text = "".join(journal.texts[self.texts :])
                self.texts = len(journal.texts)
                if self.calls < len(journal.call_pieces):
                    delta.tool_calls.extend(map(_call_delta, journal.call_pieces[self.calls :]))
                    self.calls = len(journal.call_pieces)
                if journal.ending is not None:
                    self.ended = True
                    delta.finish_reason = journal.ending.reason
                    if journal.ending.stop_string is not None:
                        delta.stop_string = journal.ending.stop_string
                    elif journal.ending.stop_token_id is not None:
                        delta.stop_token_id = journal.ending.stop_token_id
            yield response


class Subscriber:
    """A client that follows a generation from its start."""

    def __init__(self, timeline: Timeline, deadline: float) -> None:
        """`deadline` is on the clock `time.monotonic`."""
        self.timeline = timeline
        self.deadline = deadline
        self._generation: Generation | None = None
        self._cursors: list[_Cursor] = []
        self._echoes = False
        """The prompt is still to be sent before the answer."""
        self._loop = asyncio.get_running_loop()
        self._wake: asyncio.Future[None] = self._loop.create_future()

    def notify(self) -> None:
        """There is something to take."""
        if not self._wake.done():
            self._wake.set_result(None)

    def phase_changed(self) -> None:
        """The generation is in another phase."""
        if self._generation is not None and self.timeline.phase in (Phase.TOKENIZE, Phase.REMOTE):
            self.timeline.enter(self._generation.phase)

    async def follow(self, generation: Generation, deliver: Deliver, accept: Accept | None = None) -> None:
        """Delivers the whole answer. Raises the WeftError that ended the generation.

        Calls `accept` once while the worker computes the first token, if there is time: the door's initial response is
        then sent before the token arrives. It is not called before a worker has the job: a client may repeat a call
        that ended before it was accepted.
        """
        self._generation = generation
        self._echoes = echo.asks(generation.admitted.request)
        timeline = self.timeline
        if not (generation.continuations or generation.done):  # It has just begun: its first job is written first.
            timeline.enter(generation.phase)
            await self._wake
        while True:
            self._wake = self._loop.create_future()
            done = generation.done
            timeline.enter(Phase.DETOKENIZE)
            generation.advance()
            for response in self._take(generation):
                accept = None
                timeline.enter(Phase.DELIVER)
                await deliver(response)
                timeline.enter(Phase.DETOKENIZE)
            timeline.enter(generation.phase)
            if done:
                break
            if accept is not None and generation.placed:
                timeline.enter(Phase.DELIVER)
                await accept()
                accept = None
                timeline.enter(generation.phase)
            await self._wake
        timeline.enter(Phase.OWN)
        if generation.error is not None:
            raise generation.error

    def _take(self, generation: Generation) -> Iterator[api.GenerateResponse]:
        if len(self._cursors) < len(generation.continuations):
            self._cursors = [_Cursor(index, each.journal) for index, each in enumerate(generation.continuations)]
        if self._cursors and self._echoes:
            request = generation.admitted.request
            journal = generation.continuations[0].journal
            assert generation.text is not None
            if not echo.ready(request, journal):  # The answer comes after it.
                return
            self._echoes = False
            yield from echo.responses(request, journal, generation.text)
        for cursor in self._cursors:
            assert generation.text is not None
            yield from cursor.responses(generation.text)


def _call_delta(piece: CallPiece) -> api.ToolCallDelta:
    return api.ToolCallDelta(index=piece.index, id=piece.id, name=piece.name, arguments=piece.arguments)
