"""Translates the JSON of OpenAI's API to messages of weft.v1 and back. Pure: knows neither HTTP nor time.

Every field of a request is honoured, or refused by name: HONOURED and REFUSED list all that OpenAI's clients can send,
and a field in neither list is refused as unknown. null is as good as absent, as in OpenAI's API.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import orjson
from grpc import StatusCode

from protos import inference_pb2 as api
from services.errors import WeftError, invalid
from services.validate import MAX_LOGPROBS

Json: TypeAlias = dict[str, Any]
_MOST_UINT32 = (1 << 32) - 1
_MOST_UINT64 = (1 << 64) - 1
_CACHE_POLICIES = {
    "read_write": api.CACHE_POLICY_READ_WRITE,
    "read_only": api.CACHE_POLICY_READ_ONLY,
    "bypass": api.CACHE_POLICY_BYPASS,
}
_FINISH = {api.FINISH_REASON_STOP: "stop", api.FINISH_REASON_LENGTH: "length"}


@dataclass(slots=True)
class Asked:
    """A request as it was understood."""

    chat: bool
    request: api.GenerateRequest = field(default_factory=api.GenerateRequest)
    stream: bool = False
    usage: bool = False
    """Send the usage in a last chunk of the stream."""
    token_ids: bool = False
    """Send the ids of the tokens beside their text."""

    def param(self, name: str) -> str:
        """OpenAI's name for a field of weft.v1, such as "sampling.max_tokens"."""
        if name.startswith("prompt"):
            return "messages" if self.chat else "prompt"
        name = name.removeprefix("sampling.")
        return "top_logprobs" if self.chat and name == "logprobs" else name


# ---- values ----


def _wrong(name: str, rule: str) -> WeftError:
    return invalid(name, rule)


def _integer(name: str, value: Any, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise _wrong(name, f"an integer from {least} to {most}")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(name, "a number")
    return float(value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, "true or false")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong(name, "a string")
    return value


def _ids(name: str, value: Any) -> list[int]:
    if not isinstance(value, list):
        raise _wrong(name, "a list of token ids")
    return [_integer(name, each, 0, _MOST_UINT32) for each in value]


# ---- fields of a request ----

Setter: TypeAlias = Callable[[Asked, str, Any], None]


def _sampling_number(asked: Asked, name: str, value: Any) -> None:
    setattr(asked.request.sampling, name, _number(name, value))


def _sampling_count(asked: Asked, name: str, value: Any) -> None:
    setattr(asked.request.sampling, name, _integer(name, value, 0, _MOST_UINT32))


def _model(asked: Asked, name: str, value: Any) -> None:
    asked.request.model = _text(name, value)


def _max_tokens(asked: Asked, name: str, value: Any) -> None:
    """`max_tokens` and `max_completion_tokens` are two names of one limit: the lower one holds."""
    limit, sampling = _integer(name, value, 0, _MOST_UINT32), asked.request.sampling
    sampling.max_tokens = min(limit, sampling.max_tokens) if sampling.HasField("max_tokens") else limit


def _top_k(asked: Asked, name: str, value: Any) -> None:
    """-1 keeps all tokens, as 0 does: other servers write it so."""
    asked.request.sampling.top_k = max(0, _integer(name, value, -1, _MOST_UINT32))


def _seed(asked: Asked, name: str, value: Any) -> None:
    asked.request.sampling.seed = _integer(name, value, 0, _MOST_UINT64)


def _n(asked: Asked, name: str, value: Any) -> None:
    asked.request.n = _integer(name, value, 1, _MOST_UINT32)


def _stop(asked: Asked, name: str, value: Any) -> None:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise _wrong(name, "a string or a list of strings")
    asked.request.sampling.stop.extend(_text(name, stop) for stop in stops)


def _stop_token_ids(asked: Asked, name: str, value: Any) -> None:
    asked.request.sampling.stop_token_ids.extend(_ids(name, value))


def _logit_bias(asked: Asked, name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise _wrong(name, "an object from token ids to numbers")
    for key, bias in value.items():
        token = int(key) if key.isascii() and key.isdecimal() and len(key) <= 10 else _MOST_UINT32 + 1
        if token > _MOST_UINT32:
            raise _wrong(name, "its keys are token ids")
        asked.request.sampling.logit_bias[token] = _number(name, bias)


def _chat_logprobs(asked: Asked, name: str, value: Any) -> None:
    if _flag(name, value) and not asked.request.sampling.HasField("logprobs"):
        asked.request.sampling.logprobs = 0


def _top_logprobs(asked: Asked, name: str, value: Any) -> None:
    asked.request.sampling.logprobs = _integer(name, value, 0, MAX_LOGPROBS)


def _ignore_eos(asked: Asked, name: str, value: Any) -> None:
    asked.request.sampling.ignore_eos = _flag(name, value)


def _priority(asked: Asked, name: str, value: Any) -> None:
    asked.request.priority = _integer(name, value, -(1 << 31), (1 << 31) - 1)


def _cache(asked: Asked, name: str, value: Any) -> None:
    if not isinstance(value, str) or value not in _CACHE_POLICIES:
        raise _wrong(name, f"one of {', '.join(_CACHE_POLICIES)}")
    asked.request.cache = _CACHE_POLICIES[value]


def _request_id(asked: Asked, name: str, value: Any) -> None:
    asked.request.request_id = _text(name, value)


def _stream(asked: Asked, name: str, value: Any) -> None:
    asked.stream = _flag(name, value)


def _stream_options(asked: Asked, name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise _wrong(name, "an object")
    for key, flag in value.items():
        if key == "include_usage":
            asked.usage = flag is not None and _flag(f"{name}.{key}", flag)
        elif not (key == "include_obfuscation" and flag in (None, False)):
            raise _unsupported(f"{name}.{key}", "not supported")


def _token_ids(asked: Asked, name: str, value: Any) -> None:
    asked.token_ids = _flag(name, value)


def _text_format(asked: Asked, name: str, value: Any) -> None:
    if value != {"type": "text"}:
        raise _unsupported(name, 'only {"type": "text"} is supported')


def _prompt(asked: Asked, name: str, value: Any) -> None:
    """A string or one list of token ids; a list of one prompt is that prompt."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        asked.request.prompt.text = value
    elif isinstance(value, list) and not any(isinstance(each, str | list) for each in value):
        asked.request.prompt.token_ids.ids.extend(_ids(name, value))
        asked.request.prompt.token_ids.SetInParent()
    else:
        raise _wrong(name, "one string or one list of token ids: send several prompts as several requests")


def _messages(asked: Asked, name: str, value: Any) -> None:
    if not isinstance(value, list):
        raise _wrong(name, "a list of messages")
    chat = asked.request.prompt.chat
    chat.SetInParent()
    for place, message in enumerate(value):
        at = f"{name}[{place}]"
        if not isinstance(message, dict):
            raise _wrong(at, "an object")
        for key, content in message.items():
            if key not in ("role", "content") and content is not None and content != []:
                raise _unsupported(f"{at}.{key}", "not supported")
        if message.get("content") is None:
            raise _wrong(f"{at}.content", "required")
        role = _text(f"{at}.role", message.get("role"))
        chat.messages.add(role=role, content=_content(f"{at}.content", message["content"]))


def _content(name: str, value: Any) -> str:
    """The text of a message: a string, or parts of text, which are joined by line breaks."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _wrong(name, "a string or a list of parts")
    texts = []
    for place, part in enumerate(value):
        at = f"{name}[{place}]"
        if not isinstance(part, dict) or part.get("type") != "text":
            raise _unsupported(f"{at}.type", "only parts of text are supported")
        for key in part.keys() - {"type", "text"}:
            raise _unsupported(f"{at}.{key}", "not supported")
        texts.append(_text(f"{at}.text", part.get("text")))
    return "\n".join(texts)


COMMON: Mapping[str, Setter] = {
    "model": _model,
    "max_tokens": _max_tokens,
    "temperature": _sampling_number,
    "top_p": _sampling_number,
    "presence_penalty": _sampling_number,
    "frequency_penalty": _sampling_number,
    "seed": _seed,
    "n": _n,
    "stop": _stop,
    "logit_bias": _logit_bias,
    "stream": _stream,
    "stream_options": _stream_options,
}
EXTENSIONS: Mapping[str, Setter] = {
    "min_tokens": _sampling_count,
    "top_k": _top_k,
    "min_p": _sampling_number,
    "repetition_penalty": _sampling_number,
    "stop_token_ids": _stop_token_ids,
    "ignore_eos": _ignore_eos,
    "priority": _priority,
    "cache": _cache,
    "request_id": _request_id,
    "return_token_ids": _token_ids,
}
"""Fields of weft.v1 that OpenAI's API does not have; clients send them as `extra_body`."""
HONOURED: Mapping[str, Mapping[str, Setter]] = {
    "chat": {
        **COMMON,
        **EXTENSIONS,
        "messages": _messages,
        "max_completion_tokens": _max_tokens,
        "logprobs": _chat_logprobs,
        "top_logprobs": _top_logprobs,
        "response_format": _text_format,
    },
    "completions": {**COMMON, **EXTENSIONS, "prompt": _prompt, "logprobs": _top_logprobs},
}
"""The fields of each API that are honoured."""
_USER = "Weft keeps no record of end users: give each a tenant and a key instead"
_CACHING = "prompts are cached without it"
REFUSED: Mapping[str, Mapping[str, tuple[Sequence[object], str]]] = {
    "chat": {
        "audio": ((), "not supported"),
        "function_call": (("none",), "tools are not supported"),
        "functions": (([],), "tools are not supported"),
        "metadata": (({},), "not supported"),
        "modalities": ((["text"],), "answers are text"),
        "moderation": ((), "not supported"),
        "parallel_tool_calls": ((), "tools are not supported"),
        "prediction": ((), "not supported"),
        "prompt_cache_key": ((), _CACHING),
        "prompt_cache_options": ((), _CACHING),
        "prompt_cache_retention": ((), _CACHING),
        "reasoning_effort": ((), "not supported"),
        "safety_identifier": ((), _USER),
        "service_tier": (("auto", "default"), "there is one tier: see `priority`"),
        "store": ((False,), "answers are not stored"),
        "tool_choice": (("none",), "tools are not supported"),
        "tools": (([],), "tools are not supported"),
        "user": ((), _USER),
        "verbosity": ((), "not supported"),
        "web_search_options": ((), "not supported"),
    },
    "completions": {
        "best_of": ((1,), "only 1 is supported"),
        "echo": ((False,), "the prompt is not repeated"),
        "suffix": (("",), "not supported"),
        "user": ((), _USER),
    },
}
"""The fields of each API that are refused: values that change nothing and are therefore accepted, and the reason."""


def _unsupported(name: str, reason: str) -> WeftError:
    return invalid(name, reason, "UNSUPPORTED_FIELD")


def _is(value: object, neutral: object) -> bool:
    """Equal, and of one type: in Python 1 equals True."""
    return type(value) is type(neutral) and value == neutral


def _refuse(refused: Mapping[str, tuple[Sequence[object], str]], name: str, value: object) -> None:
    """Raises WeftError unless the value changes nothing."""
    if name not in refused:
        raise WeftError(StatusCode.INVALID_ARGUMENT, "UNKNOWN_FIELD", f"{name}: there is no such field", field=name)
    neutral, reason = refused[name]
    if not any(_is(value, each) for each in neutral):
        raise _unsupported(name, reason)


def parse(kind: str, body: Json) -> Asked:
    """The request of a body; `kind` is "chat" or "completions". Raises WeftError."""
    asked, setters, refused = Asked(kind == "chat"), HONOURED[kind], REFUSED[kind]
    for name, value in body.items():
        if value is None:
            continue
        setter = setters.get(name)
        if setter is None:
            _refuse(refused, name, value)
        else:
            setter(asked, name, value)
    if asked.chat and body.get("top_logprobs") is not None and body.get("logprobs") is not True:
        raise _wrong("top_logprobs", "only where `logprobs` is true")
    if body.get("stream_options") is not None and not asked.stream:
        raise _wrong("stream_options", "only where `stream` is true")
    return asked


def parse_tokenize(body: Json) -> tuple[Asked, api.TokenizeRequest]:
    """The request to tokenize `prompt` or `messages`. Raises WeftError."""
    asked = Asked("messages" in body)
    setters: Mapping[str, Setter] = {"model": _model, "prompt": _prompt, "messages": _messages}
    if "messages" in body and "prompt" in body:
        raise _wrong("prompt", "either it or `messages`")
    for name, value in body.items():
        if name in setters:
            setters[name](asked, name, value)
        else:
            _refuse({}, name, value)
    return asked, api.TokenizeRequest(model=asked.request.model, prompt=asked.request.prompt)


# ---- answers ----


def usage_of(receipt: api.Receipt) -> Json:
    """OpenAI's usage. Cached tokens are those of the prompt that were not computed: of a stored result, all."""
    prompt, completion = receipt.prompt_tokens, receipt.completion_tokens
    cached = prompt if receipt.result_hit else min(prompt, receipt.cached_tokens + receipt.fetched_tokens)
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


def completion_logprobs(places: Iterable[api.PositionLogprobs], offset: int) -> tuple[Json, int]:
    """Log-probabilities as the completions API writes them, and the offset in characters behind the last token.

    Tokens of equal text (incomplete characters) are one key in `top_logprobs`, with the greatest value.
    """
    lists: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for place in places:
        chosen = place.chosen
        lists["tokens"].append(chosen.text)
        lists["token_logprobs"].append(chosen.logprob)
        top: dict[str, float] = {}
        for each in (*place.top, chosen):
            top[each.text] = max(each.logprob, top.get(each.text, each.logprob))
        lists["top_logprobs"].append(top)
        lists["text_offset"].append(offset)
        offset += len(chosen.text)
    return lists, offset


def _stop_reason(part: "api.Delta | api.Choice") -> str | int | None:
    which = part.WhichOneof("stop_reason")
    return None if which is None else part.stop_string if which == "stop_string" else part.stop_token_id


class Format:
    """Writes one answer: whole, or as server-sent events."""

    def __init__(self, asked: Asked, answer_id: str, created: int, only_model: Callable[[], str]) -> None:
        """`created` in seconds since 1970. `only_model`: the model of a request without a name, once it is accepted."""
        self._asked = asked
        self._object = "chat.completion" if asked.chat else "text_completion"
        self._head: Json = {
            "id": f"{'chatcmpl' if asked.chat else 'cmpl'}-{answer_id}",
            "object": f"{self._object}.chunk" if asked.chat and asked.stream else self._object,
            "created": created,
        }
        self._only_model = only_model
        self._wants_logprobs = asked.request.sampling.HasField("logprobs")
        self._begun: set[int] = set()
        self._offsets: dict[int, int] = {}

    def event(self, delta: api.Delta) -> bytes:
        """The chunk of a delta; empty for a delta that carries nothing that the client asked for."""
        asked, index, text = self._asked, delta.index, delta.text
        finish = _FINISH.get(delta.finish_reason, "error") if delta.finish_reason else None
        if not (text or finish or self._wants_logprobs or asked.token_ids):
            return b""
        choice: Json = {"index": index}
        if not asked.chat:
            choice["text"] = text
        elif index in self._begun:
            choice["delta"] = {"content": text} if text else {}
        else:
            self._begun.add(index)
            choice["delta"] = {"role": "assistant", "content": text}
        choice["logprobs"] = self._logprobs(delta) if self._wants_logprobs else None
        choice["finish_reason"] = finish
        self._add_extensions(choice, delta)
        chunk = {**self._named(), "choices": [choice]}
        if asked.usage:
            chunk["usage"] = None
        return b"data: " + orjson.dumps(chunk) + b"\n\n"

    def ending(self, receipt: api.Receipt) -> bytes:
        """The end of the stream: usage if it was asked for, the receipt as a comment, and [DONE]."""
        usage = b""
        if self._asked.usage:
            usage = b"data: " + orjson.dumps({**self._named(), "choices": [], "usage": usage_of(receipt)}) + b"\n\n"
        return usage + b": receipt " + receipt_json(receipt) + b"\n\ndata: [DONE]\n\n"

    def whole(self, response: api.CompleteResponse) -> Json:
        """The whole answer."""
        choices = []
        for part in response.choices:
            choice: Json = {"index": part.index}
            if self._asked.chat:
                choice["message"] = {"role": "assistant", "content": part.text, "refusal": None}
            else:
                choice["text"] = part.text
            choice["logprobs"] = self._logprobs(part) if self._wants_logprobs else None
            choice["finish_reason"] = _FINISH.get(part.finish_reason, "error")
            self._add_extensions(choice, part)
            choices.append(choice)
        return {**self._named(), "choices": choices, "usage": usage_of(response.receipt)}

    def _named(self) -> Json:
        """What every chunk begins with."""
        if "model" not in self._head:
            self._head["model"] = self._asked.request.model or self._only_model()
        return self._head

    def _logprobs(self, part: "api.Delta | api.Choice") -> Json:
        if self._asked.chat:
            return chat_logprobs(part.logprobs)
        lists, self._offsets[part.index] = completion_logprobs(part.logprobs, self._offsets.get(part.index, 0))
        return lists

    def _add_extensions(self, choice: Json, part: "api.Delta | api.Choice") -> None:
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
        "workers": model.workers,
        "chat": model.chat,
    }
