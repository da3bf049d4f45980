"""One client's view of a generation: what was delivered, what is next, and how its time is spent.

Knows the parts of an answer, not how they are sent.
"""

import asyncio
import time
from collections.abc import Sequence

from protos import inference_pb2 as api
from services.gateway.answers import echo
from services.gateway.answers.call import Call, Delta, Part
from services.gateway.answers.generation import Generation
from services.gateway.answers.receipt import Phase, Timeline
from services.gateway.text.journal import Journal
from services.gateway.text.tokenizer import TextModel
from services.gateway.text.tool_calls.parser import CallPiece

clock = time.monotonic
_DETOKENIZE = Phase.DETOKENIZE
"""Python looks a member of an enumeration up as slowly as it calls a function."""
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

    def take(self, text: TextModel) -> list[Part]:
        """Deltas of what is new; the tokens of a delta are of one attempt."""
        journal = self.journal
        parts: list[Part] = []
        total = len(journal.tokens)
        if self.waits != journal.waits:
            self.waits = journal.waits
            if total == self.tokens:
                parts.append(Delta(self.index, total, journal.attempt, waiting=True))
        while not self.ended:
            start = self.tokens
            if start == total and journal.ending is None and not self._has_text():
                break
            attempt, end = journal.attempt_at(start)
            end = min(end, start + _MAX_TOKENS)
            self.tokens = end
            delta = Delta(self.index, start, attempt, journal.tokens[start:end])
            if journal.details:
                delta.logprobs = [
                    echo.position_of(token, detail, text)
                    for token, detail in zip(delta.token_ids, journal.details[start:end], strict=True)
                ]
            if end == total:  # Text is never ahead of its tokens.
                self._complete(delta)
            parts.append(delta)
        return parts

    def take_text(self) -> str | None:
        """The text that is new; None if there is more than text for a client."""
        journal = self.journal
        if journal.ending is not None or journal.call_pieces or self.waits != journal.waits:
            return None
        texts, start = journal.texts, self.texts
        self.tokens, self.texts = len(journal.tokens), len(texts)
        return texts[-1] if self.texts == start + 1 else "".join(texts[start:])

    def _has_text(self) -> bool:
        """There is text of tokens that were taken before."""
        return self.texts < len(self.journal.texts) or self.calls < len(self.journal.call_pieces)

    def _complete(self, delta: Delta) -> None:
        """Adds what belongs to the last tokens: text, tool calls, the ending."""
        journal = self.journal
        delta.text = "".join(journal.texts[self.texts :])
        self.texts = len(journal.texts)
        if self.calls < len(journal.call_pieces):
            delta.tool_calls = [_call_delta(piece) for piece in journal.call_pieces[self.calls :]]
            self.calls = len(journal.call_pieces)
        if journal.ending is not None:
            self.ended = True
            delta.finish_reason = journal.ending.reason
            delta.stop_string, delta.stop_token_id = journal.ending.stop_string, journal.ending.stop_token_id


class Subscriber:
    """A client that follows a generation from its start."""

    __slots__ = (
        "_call", "_cursors", "_echoes", "_generation", "_left", "_loop", "_waits", "_wake", "deadline", "timeline",
    )  # fmt: skip

    def __init__(self, timeline: Timeline, deadline: float, call: Call) -> None:
        """`deadline` is on the clock `time.monotonic`."""
        self.timeline = timeline
        self.deadline = deadline
        self._call = call
        self._generation: Generation | None = None
        self._cursors: list[_Cursor] = []
        self._echoes = False
        """The prompt is still to be sent before the answer."""
        self._left: Sequence[Part] = ()
        """Parts that were taken when the client could not receive them."""
        self._loop = asyncio.get_running_loop()
        self._wake: asyncio.Future[None] = self._loop.create_future()
        self._waits = False
        """`follow` waits for tokens, and has delivered all before them."""

    def notify(self) -> None:
        """There is something to take."""
        generation = self._generation
        if self._wake.done():
            return
        if generation is not None and not generation.done:
            if self._call.whole and not generation.ends_by_text:
                return
            if self._waits and self._call.put is not None and self._put_at_once(generation):
                return
        self._wake.set_result(None)

    def phase_changed(self) -> None:
        """The generation is in another phase."""
        if self._generation is not None and self.timeline.phase in (Phase.TOKENIZE, Phase.REMOTE):
            self.timeline.enter(self._generation.phase)

    async def follow(self, generation: Generation) -> None:
        """Delivers the whole answer. Raises the WeftError that ended the generation.

        Calls `accept` once while the worker computes the first token, if there is time: the door's initial response is
        then sent before the token arrives. It is not called before a worker has the job: a client may repeat a call
        that ended before it was accepted.
        """
        self._generation = generation
        self._echoes = echo.asks(generation.admitted.request)
        timeline, accept = self.timeline, self._call.accept
        if not (generation.continuations or generation.done):  # It has just begun: its first job is written first.
            timeline.enter(generation.phase)
            await self._wake
        while True:
            self._wake = self._loop.create_future()
            done = generation.done
            timeline.enter(Phase.DETOKENIZE)
            generation.advance()
            if parts := [*self._left, *self._take(generation)]:
                accept, self._left = None, ()
                await self._deliver(parts)
            timeline.enter(generation.phase)
            if done:
                break
            if accept is not None and generation.placed:
                timeline.enter(Phase.DELIVER)
                await accept()
                accept = None
                timeline.enter(generation.phase)
            self._waits = True
            await self._wake
            self._waits = False
        timeline.enter(Phase.OWN)
        if generation.error is not None:
            raise generation.error

    async def _deliver(self, parts: Sequence[Part]) -> None:
        put = self._call.put
        for part in parts:
            if put is None or not put(part):
                self.timeline.enter(Phase.DELIVER)
                await self._call.deliver(part)

    def _put_at_once(self, generation: Generation) -> bool:
        """Delivers what is new without a change of task. -> whether the client could take all of it.

        The link's task runs this for one client after the other: an error is that of the call.
        """
        put = self._call.put
        assert put is not None
        try:
            began = clock()
            generation.advance()
            put_text, text = self._call.put_text, None
            if put_text is not None and len(self._cursors) == 1 and not self._echoes:
                text = self._cursors[0].take_text()
            if put_text is None or text is None:
                parts = self._take(generation)
                for place, part in enumerate(parts):
                    if not put(part):
                        self._left = parts[place:]
                        return False
            elif text and not put_text(text):
                self._left = (Delta(0, text=text),)
                return False
            self.timeline.visit(_DETOKENIZE, began)
        except Exception as error:
            self._wake.set_exception(error)
        return True

    def _take(self, generation: Generation) -> Sequence[Part]:
        """What is new, of all continuations."""
        text = generation.text
        if len(self._cursors) < len(generation.continuations):
            self._cursors = [_Cursor(index, each.journal) for index, each in enumerate(generation.continuations)]
        if not self._cursors or text is None:
            return ()
        if not self._echoes:
            if len(self._cursors) == 1:
                return self._cursors[0].take(text)
            return [part for cursor in self._cursors for part in cursor.take(text)]
        request, journal = generation.admitted.request, self._cursors[0].journal
        if not echo.ready(request, journal):  # The answer comes after it.
            return ()
        self._echoes = False
        return [*echo.parts(request, journal, text), *self._take(generation)]


def _call_delta(piece: CallPiece) -> api.ToolCallDelta:
    return api.ToolCallDelta(index=piece.index, id=piece.id, name=piece.name, arguments=piece.arguments)
