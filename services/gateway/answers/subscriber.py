"""One client's view of a generation: what it was told already, what comes next, and where its time went.

Knows messages of the public API, not how they are sent.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator

from protos import inference_pb2 as api
from services.gateway.answers.generation import Generation
from services.gateway.answers.receipt import Phase, Timeline
from services.gateway.text.journal import Detail, Journal
from services.gateway.text.tokenizer import TextModel

# A client that is far behind gets its tokens in messages that it accepts.
_MAX_TOKENS = 256

Deliver = Callable[[api.GenerateResponse], Awaitable[object]]
Greet = Callable[[], Awaitable[object]]


class _Cursor:
    """How far into one continuation a client is."""

    __slots__ = ("ended", "index", "journal", "texts", "tokens")

    def __init__(self, index: int, journal: Journal) -> None:
        self.index = index
        self.journal = journal
        self.tokens = 0
        self.texts = 0
        self.ended = False

    def responses(self, text: TextModel) -> Iterator[api.GenerateResponse]:
        """What is new, all tokens of one attempt in one delta."""
        journal = self.journal
        while not self.ended:
            total = len(journal.tokens)
            finishes = journal.ending is not None
            if self.tokens == total and self.texts == len(journal.texts) and not finishes:
                return
            start = self.tokens
            attempt, end = journal.attempt_at(start)
            end = min(end, start + _MAX_TOKENS)
            self.tokens = end
            response = api.GenerateResponse()
            delta = response.delta  # Filled in place: given to the constructor it would be copied.
            delta.index, delta.position, delta.attempt = self.index, start, attempt
            delta.token_ids.extend(journal.tokens[start:end])
            if journal.details:
                delta.logprobs.extend(
                    _logprobs(token, detail, text)
                    for token, detail in zip(journal.tokens[start:end], journal.details[start:end], strict=True)
                )
            if end == total:  # Text is never ahead of its tokens.
                delta.text = "".join(journal.texts[self.texts :])
                self.texts = len(journal.texts)
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
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Future[None] = self._loop.create_future()

    def on_news(self) -> None:
        """There is something to take."""
        if not self._news.done():
            self._news.set_result(None)

    def on_phase(self) -> None:
        """What the generation waits for has changed."""
        if self._generation is not None and self.timeline.phase in (Phase.TOKENIZE, Phase.REMOTE):
            self.timeline.enter(self._generation.phase)

    async def follow(self, generation: Generation, deliver: Deliver, greet: Greet | None = None) -> None:
        """Delivers everything, from the start to the end. Raises the WeftError that ended the generation.

        While there is nothing to deliver the client is greeted once: what begins every answer need not wait for it, and
        if the token will be announced, the client has it just behind its greeting. But not before a worker was found: a
        call that ends without a greeting may be tried again by gRPC itself.
        """
        self._generation = generation
        timeline, rehearses = self.timeline, True
        if not (generation.continuations or generation.done):  # It has just begun: first of all its job is written.
            timeline.enter(generation.phase)
            await self._news
        while True:
            self._news = self._loop.create_future()
            done = generation.done
            timeline.enter(Phase.DETOKENIZE)
            generation.advance()
            for response in self._take(generation):
                greet, rehearses = None, False
                timeline.enter(Phase.DELIVER)
                await deliver(response)
                timeline.enter(Phase.DETOKENIZE)
            timeline.enter(generation.phase)
            if done:
                break
            if greet is not None and generation.greets:
                timeline.enter(Phase.DELIVER)
                await greet()
                greet = None
                timeline.enter(generation.phase)
            if rehearses and generation.soon:
                rehearses = False
                _rehearse(generation)
            await self._news
        timeline.enter(Phase.OWN)
        if generation.error is not None:
            raise generation.error

    def _take(self, generation: Generation) -> Iterator[api.GenerateResponse]:
        if len(self._cursors) < len(generation.continuations):
            self._cursors = [_Cursor(index, each.journal) for index, each in enumerate(generation.continuations)]
        for cursor in self._cursors:
            assert generation.text is not None
            yield from cursor.responses(generation.text)


def _rehearse(generation: Generation) -> None:
    """Makes a message that nobody is sent, as the first token's will be made."""
    text = generation.text
    assert text is not None
    journal = Journal((), text.detokenizer(), None)
    journal.begin_attempt()
    journal.extend(generation.continuations[0].journal.prompt[-1:])
    for response in _Cursor(0, journal).responses(text):
        response.SerializeToString()


def _logprobs(token: int, detail: Detail, text: TextModel) -> api.PositionLogprobs:
    place = api.PositionLogprobs()
    place.chosen.token_id, place.chosen.text, place.chosen.logprob = token, text.piece(token), detail.logprob
    for top_id, top_logprob in zip(detail.top_ids, detail.top_logprobs, strict=True):
        place.top.add(token_id=top_id, text=text.piece(top_id), logprob=top_logprob)
    return place
