"""Builds messages of the public API from Python values. Knows the fields of a request, never how they are used."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict

from protos import inference_pb2 as api
from weft.client.chat import Message, Tool, add_options, build_message

Prompt = str | Sequence[int] | Sequence[Message] | api.Prompt
"""Text, token ids, or chat messages ({"role": ..., "content": ...})."""


class Options(TypedDict, total=False):
    """Options of a request; protos/inference.proto explains each field and its default."""

    model: str
    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    logit_bias: Mapping[int, float]
    logprobs: int
    ignore_eos: bool
    include_stop_string: bool
    prompt_logprobs: int
    bad_words: Sequence[str]
    bad_token_sequences: Sequence[Sequence[int]]
    tools: Sequence[Tool]
    tool_choice: str | Tool
    parallel_tool_calls: bool
    template_variables: Mapping[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool
    n: int
    echo: bool
    priority: int
    cache: str
    criticality: str
    request_id: str
    speculation: int
    json_schema: Mapping[str, Any] | str
    json_object: bool
    regex: str
    choice: Sequence[str]
    grammar: str


_OF_FORM = ("json_schema", "json_object", "regex", "choice", "grammar")
_OF_REQUEST = {"model", "n", "echo", "priority", "cache", "criticality", "request_id", "speculation"}
_TEXTS = {"stop", "bad_words"}
_OF_CHAT = {
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "template_variables",
    "add_generation_prompt",
    "continue_final_message",
}


def build(prompt: Prompt, options: Options) -> api.GenerateRequest:
    """The request for `prompt`. Raises TypeError for an unknown option, ValueError for a value no request can hold."""
    unknown = options.keys() - Options.__annotations__.keys()
    if unknown:
        raise TypeError(f"unknown option: {', '.join(sorted(unknown))}")
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if "cache" in given:
        given["cache"] = cache_policy(given["cache"])
    if "criticality" in given:
        given["criticality"] = criticality(given["criticality"])
    if "bad_token_sequences" in given:
        with naming("bad_token_sequences"):
            given["bad_token_sequences"] = [api.TokenIds(ids=each) for each in given["bad_token_sequences"]]
    request = api.GenerateRequest(prompt=build_prompt(prompt), sampling=api.Sampling())
    of_chat = {name: given.pop(name) for name in _OF_CHAT & given.keys()}
    if of_chat and not request.prompt.HasField("chat"):
        raise TypeError(f"{min(of_chat)}: for chat messages alone")
    _add_form(request.sampling, {name: given.pop(name) for name in _OF_FORM if name in given})
    for name, value in of_chat.items():
        with naming(name):
            add_options(request.prompt.chat, {name: value})
    for name, value in given.items():
        with naming(name):
            if name in _TEXTS:
                value = several(value)
            if name in _OF_REQUEST:
                request.MergeFrom(api.GenerateRequest(**{name: value}))
            else:
                request.sampling.MergeFrom(api.Sampling(**{name: value}))
    return request


def _add_form(sampling: api.Sampling, given: Mapping[str, Any]) -> None:
    """Sets the form of the answer. Raises TypeError for more than one."""
    if len(given) > 1:
        raise TypeError(f"{', '.join(given)}: an answer has one form")
    for name, value in given.items():
        with naming(name):
            if name == "json_schema" and not isinstance(value, str):
                value = json.dumps(value)
            elif name == "choice":
                value = api.Choices(texts=several(value))
            sampling.structured.MergeFrom(api.Structured(**{name: value}))


def several(value: Sequence[str]) -> Sequence[str]:
    """The value unless it is one text, of which a message would make a list of its characters. Raises TypeError."""
    if isinstance(value, str):
        raise TypeError("a list of texts")
    return value


def build_prompt(prompt: Prompt) -> api.Prompt:
    """The prompt as text, token ids or messages, by its Python type. Raises TypeError for other types, ValueError for
    values that no prompt can hold."""
    if isinstance(prompt, api.Prompt):
        return prompt
    with naming("prompt"):
        if isinstance(prompt, str):
            return api.Prompt(text=prompt)
        if all(isinstance(part, int) for part in prompt):
            return api.Prompt(token_ids=api.TokenIds(ids=[part for part in prompt if isinstance(part, int)]))
        turns = [part for part in prompt if isinstance(part, Mapping)]
        if len(turns) < len(prompt):
            raise TypeError("a text, token ids alone, or messages alone")
        return api.Prompt(chat=api.Chat(messages=map(build_message, turns)))


@contextmanager
def naming(field: str) -> Iterator[None]:
    """Adds the name of the field to errors inside the block."""
    try:
        yield
    except UnicodeError:
        raise ValueError(f"{field}: no text that UTF-8 can hold") from None
    except (TypeError, ValueError) as error:
        raise type(error)(f"{field}: {error}") from None


def cache_policy(name: str) -> "api.CachePolicy.ValueType":
    """The policy read_write, read_only or bypass. Raises ValueError for other names."""
    try:
        return api.CachePolicy.Value(f"CACHE_POLICY_{name.upper()}")
    except ValueError:
        raise ValueError(f"cache: {name!r} is not read_write, read_only or bypass") from None


def criticality(name: str) -> "api.Criticality.ValueType":
    """The criticality default or sheddable. Raises ValueError for other names."""
    try:
        return api.Criticality.Value(f"CRITICALITY_{name.upper()}")
    except ValueError:
        raise ValueError(f"criticality: {name!r} is not default or sheddable") from None


def not_served(address: str, model: str, served: Sequence[str]) -> str:
    """The message for a model (empty: any) that a mesh does not serve, with the names of those that it serves."""
    names = ", ".join(served)
    if not names:
        return f"{address} serves no model yet"
    return f"{address} serves no model {model!r}: it serves {names}"
