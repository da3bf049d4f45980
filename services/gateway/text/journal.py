"""The journal of one continuation: all that recovery and its clients need. Pure; knows no clock and no network.

After the loss of a worker an ordinary job of prompt and tokens so far continues the answer: a loss costs only time.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from protos import inference_pb2 as api
from services.gateway.text.stop_strings import StopMatcher
from services.gateway.text.tokenizer import Detokenizer
from services.gateway.text.tool_calls.parser import CallPiece, ToolCallParser
from services.hashing import block_keys


@dataclass(frozen=True, slots=True)
class Detail:
    """Log-probabilities at one position: of the token, and ids and values of the most likely ones."""

    logprob: float
    top_ids: Sequence[int] = ()
    top_logprobs: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a continuation ended."""

    reason: "api.FinishReason.ValueType"
    stop_string: str | None = None
    stop_token_id: int | None = None


class Journal:
    """Prompt, tokens so far with the attempt that produced each, and their text and tool calls."""

    __slots__ = (
        "_calls", "_detokenizer", "_starts", "_stops", "attempt", "call_pieces", "details", "ending", "prompt",
        "prompt_details", "texts", "tokens", "waits",
    )  # fmt: skip

    def __init__(
        self,
        prompt: Sequence[int],
        detokenizer: Detokenizer,
        stops: StopMatcher | None,
        calls: ToolCallParser | None = None,
    ) -> None:
        self.prompt = prompt
        self.tokens: list[int] = []
        self.details: list[Detail] = []
        self.texts: list[str] = []
        self.call_pieces: list[CallPiece] = []
        self.prompt_details: list[Detail] = []
        """Log-probabilities of the prompt's tokens but the first, as far as they are known."""
        self.attempt = 0
        self.ending: Ending | None = None
        self.waits = 0
        """How often its clients were to be informed that the answer waits for a worker."""
        self._detokenizer = detokenizer
        self._stops = stops
        self._calls = calls
        self._starts: list[tuple[int, int]] = []  # (position, attempt) where each attempt's tokens begin

    def begin_attempt(self) -> None:
        """Begins the next attempt; the first one is 1."""
        self.attempt += 1
        self._starts.append((len(self.tokens), self.attempt))

    def attempt_at(self, position: int) -> tuple[int, int]:
        """The attempt that produced the token at `position`, and the position after the last token that it produced."""
        end = len(self.tokens)
        if self._starts and position >= self._starts[-1][0]:
            return self.attempt, end
        for start, attempt in reversed(self._starts):
            if start <= position:
                return attempt, end
            end = start
        return 1, end

    def extend(self, tokens: Sequence[int], details: Sequence[Detail] = ()) -> None:
        """Appends tokens up to the one that completes a stop string or the last tool call, which ends the answer."""
        if self.ending is not None:
            return
        feed, stops, calls = self._detokenizer.feed, self._stops, self._calls
        if stops is None and calls is None:  # No text ends the answer.
            for token in tokens:
                if text := feed(token):
                    self.texts.append(text)
            self.tokens += tokens
            if details:
                self.details += details
            return
        kept, texts = len(tokens), []
        for index, token in enumerate(tokens):
            text = feed(token)
            if stops is not None:
                text = stops.feed(text)
                if stops.found is not None:
                    kept = index + 1
                    self.ending = Ending(api.FINISH_REASON_STOP, stop_string=stops.found)
            if calls is not None:
                text = self._divide(calls, text)
                if calls.done and self.ending is None:
                    kept = index + 1
                    self.ending = Ending(api.FINISH_REASON_STOP)
            if text:
                texts.append(text)
            if self.ending is not None:
                break
        self.texts += texts
        self.tokens += tokens[:kept]
        self.details += details[:kept]

    def score(self, position: int, details: Sequence[Detail]) -> None:
        """Appends log-probabilities of the prompt from the token at this position on; known ones do not count."""
        self.prompt_details += details[len(self.prompt_details) + 1 - position :]

    def end(self, ending: Ending) -> None:
        """Ends the answer, and releases the text that was held back, up to a stop string in it."""
        if self.ending is not None:
            return
        text = self._detokenizer.flush()
        if self._stops is not None:
            text = self._stops.flush(text)
            if self._stops.found is not None:
                ending = Ending(api.FINISH_REASON_STOP, stop_string=self._stops.found)
        self.ending = ending
        if self._calls is not None:
            text = self._divide(self._calls, text)
        if text:
            self.texts.append(text)

    def _divide(self, calls: ToolCallParser, text: str) -> str:
        """Moves tool calls out of the text, and releases what was held back if the answer has ended. -> the rest."""
        text, pieces = calls.feed(text)
        self.call_pieces += pieces
        if self.ending is not None:
            rest, pieces = calls.flush()
            text += rest
            self.call_pieces += pieces
        return text

    def context(self) -> list[int]:
        """Prompt and answer so far: the tokens of the next attempt's job."""
        return [*self.prompt, *self.tokens]


class KeyChain:
    """The block keys of a growing sequence; each is computed once."""

    def __init__(self, root: bytes, block_size: int) -> None:
        self._last = root
        self._block_size = block_size
        self._hashed = 0
        self._joined = bytearray()

    def extend_to(self, token_ids: Sequence[int]) -> bytes:
        """The concatenated keys of the whole blocks of `token_ids`, which must extend the previous sequence."""
        for key in block_keys(token_ids[self._hashed :], self._block_size, self._last):
            self._last = key
            self._joined += key
            self._hashed += self._block_size
        return bytes(self._joined)


def packed(token_ids: Sequence[int]) -> bytes:
    """Token ids as bytes, for hashing."""
    return array("I", token_ids).tobytes()
