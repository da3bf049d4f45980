"""Translates answers of weft.v1 to the JSON of OpenAI's API. Pure: knows neither HTTP nor time."""

import copy
import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import orjson

from protos import inference_pb2 as api
from services.gateway.answers.call import Delta
from services.gateway.doors.openai.values import Asked, Json

Continued = TypeVar("Continued", Delta, api.Choice)
_NO_ECHO = api.PromptEcho()
_FINISH = {api.FINISH_REASON_STOP: "stop", api.FINISH_REASON_LENGTH: "length"}


def usage_of(*receipts: api.Receipt) -> Json:
    """OpenAI's usage. Cached tokens are those of the prompts that were not computed: of a stored result, all."""
    prompt, completion, cached = 0, 0, 0
    for receipt in receipts:
        prompt += receipt.prompt_tokens
        completion += receipt.completion_tokens
        found = receipt.cached_tokens + receipt.fetched_tokens
        cached += receipt.prompt_tokens if receipt.result_hit else min(receipt.prompt_tokens, found)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def receipt_json(receipt: api.Receipt) -> bytes:
    """The receipt as one line of ASCII: the fields of weft.v1's Receipt that are not zero, times in seconds."""
    fields: Json = {each.name: value for each, value in receipt.ListFields()}
    fields["timings"] = {each.name: round(value, 6) for each, value in receipt.timings.ListFields()}
    fields["workers"] = list(receipt.workers)
    fields["finish_reason"] = api.FinishReason.Name(receipt.finish_reason).removeprefix("FINISH_REASON_").lower()
    line = orjson.dumps(fields)
    return line if line.isascii() else json.dumps(fields, separators=(",", ":")).encode()


def _bytes(text: str) -> list[int] | None:
    """The bytes of a token, unless it ends or begins within a character."""
    return None if "\ufffd" in text else list(text.encode())


def _chat_entry(token: api.TokenLogprob) -> Json:
    return {"token": token.text, "logprob": token.logprob, "bytes": _bytes(token.text)}


def chat_logprobs(places: Iterable[api.PositionLogprobs]) -> Json:
    """Log-probabilities as the chat API writes them."""
    content = [
        {**_chat_entry(place.chosen), "top_logprobs": [_chat_entry(each) for each in place.top]} for place in places
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(places: Iterable[api.PositionLogprobs], offset: int, prompt: str = "") -> tuple[Json, int]:
    """Log-probabilities as the completions API writes them, and the offset in characters behind the last token.

    `prompt` is the prompt's text, if it has the first tokens. Tokens of equal text (incomplete characters) are one key
    in `top_logprobs`, with the greatest value.
    """
    lists: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for place in places:
        chosen = place.chosen
        lists["tokens"].append(chosen.text)
        if math.isnan(chosen.logprob):  # The first token of a prompt.
            lists["token_logprobs"].append(None)
            lists["top_logprobs"].append(None)
            lists["text_offset"].append(offset)
            offset += _first_length(chosen.text, prompt)
            continue
        lists["token_logprobs"].append(chosen.logprob)
        top: dict[str, float] = {}
        for each in (*place.top, chosen):
            top[each.text] = max(each.logprob, top.get(each.text, each.logprob))
        lists["top_logprobs"].append(top)
        lists["text_offset"].append(offset)
        offset += len(chosen.text)
    return lists, offset


def _first_length(token: str, prompt: str) -> int:
    """Characters of a prompt that its first token stands for: 0 for one that the tokenizer has added."""
    return next((len(text) for text in (token, token.lstrip()) if prompt.startswith(text)), 0)


def _stop_reason(part: Delta | api.Choice) -> str | int | None:
    if isinstance(part, Delta):
        return part.stop_token_id if part.stop_string is None else part.stop_string
    which = part.WhichOneof("stop_reason")
    return None if which is None else part.stop_string if which == "stop_string" else part.stop_token_id


def _call(call: api.ToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _call_piece(part: api.ToolCallDelta) -> Json:
    if not part.name:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {"index": part.index, "id": part.id, "type": "function", "function": function}


def _nothing_of(part: Continued) -> Continued:
    """The part without its tokens: only its end counts."""
    return type(part)(index=part.index, finish_reason=part.finish_reason and api.FINISH_REASON_LENGTH)


class Format:
    """Writes one answer: whole, or as server-sent events."""

    __slots__ = (
        "_asked", "_begun", "_calling", "_closing", "_first", "_frames", "_head", "_object", "_offsets", "_only_model",
        "_opening", "_wants_logprobs",
    )  # fmt: skip

    def __init__(self, asked: Asked, answer_id: str, created: int, only_model: Callable[[], str]) -> None:
        """`created` in seconds since 1970. `only_model`: the model of a request without a name, once it is accepted."""
        self._asked = asked
        self._object = "chat.completion" if asked.chat else "text_completion"
        self._head: Json = {
            "id": f"{'chatcmpl' if asked.chat else 'cmpl'}-{answer_id}",
            "object": f"{self._object}.chunk" if asked.chat and asked.stream else self._object,
            "created": created,
        }
        self._opening = b""
        self._closing = b'],"usage":null}\n\n' if asked.usage else b"]}\n\n"
        """What stands before and behind the choice of a chunk."""
        self._only_model = only_model
        self._wants_logprobs = asked.request.sampling.HasField("logprobs")
        self._first = 0
        """Index of the first choice."""
        self._begun: set[int] = set()
        self._calling: set[int] = set()
        """Choices with tool calls."""
        self._offsets: dict[int, int] = {}
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        """What stands before and behind the text of a choice in a chunk without anything else."""

    def echo(self, prompt: api.PromptEcho) -> bytes:
        """The chunks of a part of the prompt, one for each choice."""
        chunks = []
        for index in range(max(1, self._asked.request.n)):
            choice: Json = {"index": self._first + index, "text": prompt.text, "finish_reason": None}
            choice["logprobs"] = self._scored(index, prompt.logprobs, prompt.text) if self._wants_logprobs else None
            if self._asked.token_ids:
                choice["token_ids"] = list(prompt.token_ids)
            chunks.append(self._chunk(choice))
        return b"".join(chunks)

    def event(self, delta: Delta) -> bytes:
        """The chunk of a delta; empty for a delta that carries nothing that the client asked for."""
        if self._asked.prompt_alone:
            delta = _nothing_of(delta)
        asked, index, text = self._asked, delta.index, delta.text
        if delta.tool_calls:
            self._calling.add(index)
        finish = self._finish(delta) if delta.finish_reason else None
        if not (delta.tool_calls or finish or self._wants_logprobs or asked.token_ids):
            if not text:
                return b""
            if frame := self._frames.get(index):
                return frame[0] + orjson.dumps(text) + frame[1]
            self._frames[index] = self._frame(index)
        choice: Json = {"index": self._first + index}
        if not asked.chat:
            choice["text"] = text
        else:
            choice["delta"] = self._chat_delta(delta)
        choice["logprobs"] = self._logprobs(delta) if self._wants_logprobs else None
        choice["finish_reason"] = finish
        if finish or asked.token_ids:
            self._add_extensions(choice, delta)
        return self._chunk(choice)

    @property
    def text_alone(self) -> bool:
        """The client asked for nothing of a token but its text."""
        return not (self._wants_logprobs or self._asked.token_ids or self._asked.prompt_alone)

    def text_event(self, text: str) -> bytes:
        """The chunk of text of the only choice, if text is all that the client asked for."""
        if frame := self._frames.get(0):
            return frame[0] + orjson.dumps(text) + frame[1]
        return self.event(Delta(0, text=text))

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and behind the text in later chunks that bring nothing else."""
        place: Json = {"index": self._first + index}
        place.update({"delta": {"content": ""}} if self._asked.chat else {"text": ""})
        before, _, after = self._chunk({**place, "logprobs": None, "finish_reason": None}).rpartition(b'""')
        return before, after

    def _chunk(self, choice: Json) -> bytes:
        if not self._opening:  # It is the same for all chunks: only the choice is written for each.
            self._opening = b"data: " + orjson.dumps(self._named())[:-1] + b',"choices":['
        return self._opening + orjson.dumps(choice) + self._closing

    def _chat_delta(self, delta: Delta) -> Json:
        made: Json = {"content": delta.text} if delta.text else {}
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            made = {"role": "assistant", "content": delta.text or (None if delta.tool_calls else "")}
        if delta.tool_calls:
            made["tool_calls"] = [_call_piece(part) for part in delta.tool_calls]
        return made

    def _finish(self, part: Delta | api.Choice) -> str:
        called = part.index in self._calling and part.finish_reason == api.FINISH_REASON_STOP
        return "tool_calls" if called else _FINISH.get(part.finish_reason, "error")

    def ending(self, receipts: Sequence[api.Receipt]) -> bytes:
        """The end of the stream: usage if it was asked for, a receipt for each prompt as a comment, and [DONE]."""
        usage = b""
        if self._asked.usage:
            usage = b"data: " + orjson.dumps({**self._named(), "choices": [], "usage": self._usage(receipts)}) + b"\n\n"
        comments = b"".join(b": receipt " + receipt_json(receipt) + b"\n\n" for receipt in receipts)
        return usage + comments + b"data: [DONE]\n\n"

    def whole(self, responses: Sequence[api.CompleteResponse]) -> Json:
        """The whole answer to all prompts."""
        choices = [choice for place, each in enumerate(responses) for choice in self.at(place)._choices(each)]
        return {**self._named(), "choices": choices, "usage": self._usage([each.receipt for each in responses])}

    def at(self, place: int) -> "Format":
        """The writer of the choices of the prompt at this place."""
        if not place:
            return self
        other = copy.copy(self)
        other._first = place * max(1, self._asked.request.n)
        other._begun, other._calling, other._offsets, other._frames = set(), set(), {}, {}
        return other

    def _usage(self, receipts: Sequence[api.Receipt]) -> Json:
        usage = usage_of(*receipts)
        if self._asked.prompt_alone:
            usage["completion_tokens"], usage["total_tokens"] = 0, usage["prompt_tokens"]
        return usage

    def _scored(self, index: int, places: Sequence[api.PositionLogprobs], prompt: str = "") -> Json:
        lists, self._offsets[index] = completion_logprobs(places, self._offsets.get(index, 0), prompt)
        return lists

    def _choices(self, response: api.CompleteResponse) -> list[Json]:
        choices, echo = [], response.prompt
        for part in response.choices:
            if self._asked.prompt_alone:
                part = _nothing_of(part)
            choice: Json = {"index": self._first + part.index}
            if self._asked.chat:
                choice["message"] = {"role": "assistant", "content": part.text, "refusal": None}
                if part.tool_calls:
                    self._calling.add(part.index)
                    choice["message"]["content"] = part.text or None
                    choice["message"]["tool_calls"] = [_call(each) for each in part.tool_calls]
            else:
                choice["text"] = echo.text + part.text
            choice["logprobs"] = self._logprobs(part, echo) if self._wants_logprobs else None
            choice["finish_reason"] = self._finish(part)
            self._add_extensions(choice, part)
            if self._asked.token_ids and echo.token_ids:
                choice["token_ids"] = [*echo.token_ids, *part.token_ids]
            choices.append(choice)
        return choices

    def _named(self) -> Json:
        """What every chunk begins with."""
        if "model" not in self._head:
            self._head["model"] = self._asked.request.model or self._only_model()
        return self._head

    def _logprobs(self, part: Delta | api.Choice, echo: api.PromptEcho = _NO_ECHO) -> Json:
        """Those of the part, behind those of the echoed prompt."""
        if self._asked.chat:
            return chat_logprobs(part.logprobs)
        return self._scored(part.index, [*echo.logprobs, *part.logprobs], echo.text)

    def _add_extensions(self, choice: Json, part: Delta | api.Choice) -> None:
        reason = _stop_reason(part)
        if reason is not None:
            choice["stop_reason"] = reason
        if self._asked.token_ids:
            choice["token_ids"] = list(part.token_ids)


def model_json(model: api.Model, created: int) -> Json:
    """A model as `/v1/models` lists it."""
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "weft",
        "max_model_len": model.context_length,
        "aliases": list(model.aliases),
        "parent": model.base or None,
        "workers": model.workers,
        "chat": model.chat,
        "tasks": list(model.tasks),
    }
