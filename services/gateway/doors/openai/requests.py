"""Translates the JSON of OpenAI's requests to messages of weft.v1. Pure: knows neither HTTP nor time.

Every field of a request is honoured, or refused by name: HONOURED and REFUSED list all that OpenAI's clients can send,
and a field in neither list is refused as unknown. null is as good as absent, as in OpenAI's API.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from protos import inference_pb2 as api
from services.errors import invalid
from services.gateway.doors.openai.conversation import chat_flag, finish, messages, template_variables, thinking
from services.gateway.doors.openai.structured import GUIDED, guided, response_format, structured_outputs
from services.gateway.doors.openai.tools import check_strict, tool_choice, tools
from services.gateway.doors.openai.values import (
    MOST_UINT32,
    MOST_UINT64,
    NO_END_USERS,
    Asked,
    Json,
    check_count,
    flag,
    ids,
    integer,
    number,
    text,
    unknown,
    unsupported,
    without_nulls,
    wrong,
)
from services.validate import (
    MAX_BAD_SEQUENCES,
    MAX_BIASES,
    MAX_LOGPROBS,
    MAX_REQUEST_ID_CHARS,
    MAX_SPECULATION,
)

MOST_PROMPTS = 64
"""Most prompts of one request."""
_CACHE_POLICIES = {
    "read_write": api.CACHE_POLICY_READ_WRITE,
    "read_only": api.CACHE_POLICY_READ_ONLY,
    "bypass": api.CACHE_POLICY_BYPASS,
}
_CRITICALITIES = {"default": api.CRITICALITY_DEFAULT, "sheddable": api.CRITICALITY_SHEDDABLE}

Setter: TypeAlias = Callable[[Asked, str, Any], None]


def _sampling_number(asked: Asked, name: str, value: Any) -> None:
    setattr(asked.request.sampling, name, number(name, value))


def _sampling_count(asked: Asked, name: str, value: Any) -> None:
    setattr(asked.request.sampling, name, integer(name, value, 0, MOST_UINT32))


def _model(asked: Asked, name: str, value: Any) -> None:
    asked.request.model = text(name, value)


def _max_tokens(asked: Asked, name: str, value: Any) -> None:
    """`max_tokens` and `max_completion_tokens` are two names of one limit: the lower one holds."""
    limit, sampling = integer(name, value, 0, MOST_UINT32), asked.request.sampling
    if not sampling.HasField("max_tokens") or limit < sampling.max_tokens:
        sampling.max_tokens, asked.limit_field = limit, name


def _top_k(asked: Asked, name: str, value: Any) -> None:
    """-1 keeps all tokens, as 0 does: other servers write it so."""
    asked.request.sampling.top_k = max(0, integer(name, value, -1, MOST_UINT32))


def _seed(asked: Asked, name: str, value: Any) -> None:
    asked.request.sampling.seed = integer(name, value, 0, MOST_UINT64)


def _n(asked: Asked, name: str, value: Any) -> None:
    asked.request.n = integer(name, value, 1, MOST_UINT32)


def _stop(asked: Asked, name: str, value: Any) -> None:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise wrong(name, "a string or a list of strings")
    asked.request.sampling.stop.extend(text(name, stop) for stop in stops)


def _stop_token_ids(asked: Asked, name: str, value: Any) -> None:
    asked.request.sampling.stop_token_ids.extend(ids(name, value))


def _logit_bias(asked: Asked, name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise wrong(name, "an object from token ids to numbers")
    check_count(name, value, MAX_BIASES)
    for key, bias in value.items():
        token = int(key) if key.isascii() and key.isdecimal() and len(key) <= 10 else MOST_UINT32 + 1
        if token > MOST_UINT32:
            raise wrong(name, "its keys are token ids")
        asked.request.sampling.logit_bias[token] = number(name, bias)


def _chat_logprobs(asked: Asked, name: str, value: Any) -> None:
    if flag(name, value) and not asked.request.sampling.HasField("logprobs"):
        asked.request.sampling.logprobs = 0


def _top_logprobs(asked: Asked, name: str, value: Any) -> None:
    asked.request.sampling.logprobs = integer(name, value, 0, MAX_LOGPROBS)


def _ignore_eos(asked: Asked, name: str, value: Any) -> None:
    asked.request.sampling.ignore_eos = flag(name, value)


def _include_stop(asked: Asked, name: str, value: Any) -> None:
    asked.request.sampling.include_stop_string = flag(name, value)


def _bad_words(asked: Asked, name: str, value: Any) -> None:
    if not isinstance(value, list):
        raise wrong(name, "a list of strings")
    asked.request.sampling.bad_words.extend(text(name, word) for word in value)


def _bad_sequences(asked: Asked, name: str, value: Any) -> None:
    if not isinstance(value, list):
        raise wrong(name, "a list of lists of token ids")
    check_count(name, value, MAX_BAD_SEQUENCES)
    for each in value:
        asked.request.sampling.bad_token_sequences.add(ids=ids(name, each))


def _priority(asked: Asked, name: str, value: Any) -> None:
    asked.request.priority = integer(name, value, -(1 << 31), (1 << 31) - 1)


def _speculation(asked: Asked, name: str, value: Any) -> None:
    asked.request.speculation = integer(name, value, 0, MAX_SPECULATION)


def _cache(asked: Asked, name: str, value: Any) -> None:
    if not isinstance(value, str) or value not in _CACHE_POLICIES:
        raise wrong(name, f"one of {', '.join(_CACHE_POLICIES)}")
    asked.request.cache = _CACHE_POLICIES[value]


def _criticality(asked: Asked, name: str, value: Any) -> None:
    if not isinstance(value, str) or value not in _CRITICALITIES:
        raise wrong(name, f"one of {', '.join(_CRITICALITIES)}")
    asked.request.criticality = _CRITICALITIES[value]


def _request_id(asked: Asked, name: str, value: Any) -> None:
    asked.request.request_id = text(name, value)


def _stream(asked: Asked, name: str, value: Any) -> None:
    asked.stream = flag(name, value)


def _stream_options(asked: Asked, name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise wrong(name, "an object")
    for key, given in value.items():
        if key == "include_usage":
            asked.usage = given is not None and flag(f"{name}.{key}", given)
        elif not (key == "include_obfuscation" and given in (None, False)):
            raise unsupported(f"{name}.{key}", "not supported")


def _token_ids(asked: Asked, name: str, value: Any) -> None:
    asked.token_ids = flag(name, value)


def _prompt(asked: Asked, name: str, value: Any) -> None:
    """A string, a list of token ids, or a list of either."""
    several = isinstance(value, list) and bool(value) and isinstance(value[0], str | list)
    if several:
        check_count(name, value, MOST_PROMPTS)
    prompts = [_one_prompt(name, each) for each in (value if several else [value])]
    asked.request.prompt.CopyFrom(prompts[0])
    asked.prompts = prompts if len(prompts) > 1 else []


def _one_prompt(name: str, value: Any) -> api.Prompt:
    if isinstance(value, str):
        return api.Prompt(text=value)
    if not isinstance(value, list) or any(isinstance(each, str | list) for each in value):
        raise wrong(name, "a string, a list of token ids, or a list of either")
    return api.Prompt(token_ids=api.TokenIds(ids=ids(name, value)))


def _echo(asked: Asked, name: str, value: Any) -> None:
    asked.request.echo = flag(name, value)


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
_EXTENSIONS: Mapping[str, Setter] = {
    "min_tokens": _sampling_count,
    "top_k": _top_k,
    "min_p": _sampling_number,
    "repetition_penalty": _sampling_number,
    "stop_token_ids": _stop_token_ids,
    "ignore_eos": _ignore_eos,
    "include_stop_str_in_output": _include_stop,
    "bad_words": _bad_words,
    "bad_token_sequences": _bad_sequences,
    "priority": _priority,
    "speculation": _speculation,
    "cache": _cache,
    "criticality": _criticality,
    "request_id": _request_id,
    "return_token_ids": _token_ids,
    "structured_outputs": structured_outputs,
    **dict.fromkeys(GUIDED, guided),
}
_CHAT_EXTENSIONS: Mapping[str, Setter] = {
    "chat_template_kwargs": template_variables,
    "enable_thinking": thinking,
    "add_generation_prompt": chat_flag,
    "continue_final_message": chat_flag,
}
EXTENSIONS: Mapping[str, Mapping[str, Setter]] = {
    "chat": {**_EXTENSIONS, **_CHAT_EXTENSIONS},
    "completions": _EXTENSIONS,
}
"""Fields that OpenAI's API does not have: those of weft.v1 and a usual variable of chat templates. Clients send them as
`extra_body`."""
HONOURED: Mapping[str, Mapping[str, Setter]] = {
    "chat": {
        **COMMON,
        **EXTENSIONS["chat"],
        "messages": messages,
        "max_completion_tokens": _max_tokens,
        "logprobs": _chat_logprobs,
        "top_logprobs": _top_logprobs,
        "response_format": response_format,
        "tools": tools,
        "tool_choice": tool_choice,
        "parallel_tool_calls": chat_flag,
    },
    "completions": {
        **COMMON,
        **EXTENSIONS["completions"],
        "prompt": _prompt,
        "logprobs": _top_logprobs,
        "echo": _echo,
    },
}
"""The fields of each API that are honoured."""
_CACHING = "prompts are cached without it"
REFUSED: Mapping[str, Mapping[str, tuple[Sequence[object], str]]] = {
    "chat": {
        "audio": ((), "not supported"),
        "function_call": (("none",), "use `tool_choice`"),
        "functions": (([],), "use `tools`"),
        "metadata": (({},), "not supported"),
        "modalities": ((["text"],), "answers are text"),
        "moderation": ((), "not supported"),
        "prediction": ((), "not supported"),
        "prompt_cache_key": ((), _CACHING),
        "prompt_cache_options": ((), _CACHING),
        "prompt_cache_retention": ((), _CACHING),
        "reasoning_effort": ((), "not supported"),
        "safety_identifier": ((), NO_END_USERS),
        "service_tier": (("auto", "default"), "there is one tier: see `priority`"),
        "store": ((False,), "answers are not stored"),
        "user": ((), NO_END_USERS),
        "verbosity": ((), "not supported"),
        "web_search_options": ((), "not supported"),
    },
    "completions": {
        "best_of": ((1,), "only 1 is supported"),
        "suffix": (("",), "not supported"),
        "user": ((), NO_END_USERS),
    },
}
"""The fields of each API that are refused: values that change nothing and are therefore accepted, and the reason."""


def _is(value: object, neutral: object) -> bool:
    """Equal, and of one type: in Python 1 equals True."""
    return type(value) is type(neutral) and value == neutral


def _refuse(refused: Mapping[str, tuple[Sequence[object], str]], name: str, value: object) -> None:
    """Raises WeftError unless the value changes nothing."""
    if name not in refused:
        raise unknown(name)
    neutral, reason = refused[name]
    if not any(_is(value, each) for each in neutral):
        raise unsupported(name, reason)


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
    finish(asked)
    _check_prompt(asked, "messages" if asked.chat else "prompt", "required")
    _check_request_id(asked)
    if asked.request.echo:
        _echo_prompt(asked)
    if asked.chat and body.get("top_logprobs") is not None and body.get("logprobs") is not True:
        raise wrong("top_logprobs", "only where `logprobs` is true")
    check_strict(asked)
    if body.get("stream_options") is not None and not asked.stream:
        raise wrong("stream_options", "only where `stream` is true")
    return asked


def _check_request_id(asked: Asked) -> None:
    """With several prompts, the id needs room for the suffix of each. Raises WeftError."""
    last = f"-{len(asked.prompts) - 1}"
    most = MAX_REQUEST_ID_CHARS - len(last)
    if asked.prompts and len(asked.request.request_id) > most:
        raise wrong("request_id", f"at most {most} characters with {len(asked.prompts)} prompts: {last} is added to it")


def _check_prompt(asked: Asked, name: str, rule: str) -> None:
    if not asked.request.HasField("prompt"):
        raise invalid(name, rule, "EMPTY_PROMPT")


def _echo_prompt(asked: Asked) -> None:
    """`logprobs` covers an echoed prompt, too. With `max_tokens` 0 the prompt is all that is asked for."""
    sampling = asked.request.sampling
    if sampling.HasField("logprobs"):
        sampling.prompt_logprobs = sampling.logprobs
    if sampling.HasField("max_tokens") and sampling.max_tokens == 0:
        sampling.max_tokens, asked.prompt_alone = 1, True


def parse_tokenize(body: Json) -> tuple[Asked, api.TokenizeRequest]:
    """The request to tokenize `prompt` or `messages`. Raises WeftError."""
    body = without_nulls(body)
    asked = Asked("messages" in body)
    setters: Mapping[str, Setter] = {"model": _model, "prompt": _prompt, "messages": messages}
    if asked.chat:
        setters = {**setters, **_CHAT_EXTENSIONS}
    if "messages" in body and "prompt" in body:
        raise wrong("prompt", "either it or `messages`")
    for name, value in body.items():
        if name in setters:
            setters[name](asked, name, value)
        else:
            raise unknown(name)
    finish(asked)
    _check_prompt(asked, "prompt", "either it or `messages` is required")
    if asked.prompts:
        raise wrong("prompt", "one prompt")
    return asked, api.TokenizeRequest(model=asked.request.model, prompt=asked.request.prompt)
