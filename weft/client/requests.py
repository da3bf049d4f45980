"""Builds messages of the public API from Python values. Knows the fields of a request, never how they are used."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict

from protos import inference_pb2 as api

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]] | api.Prompt
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
    n: int
    priority: int
    cache: str
    request_id: str


_OF_REQUEST = {"model", "n", "priority", "cache", "request_id"}


def build(prompt: Prompt, options: Options) -> api.GenerateRequest:
    """The request for `prompt`. Raises TypeError for an unknown option, ValueError for a value no request can hold."""
    unknown = options.keys() - Options.__annotations__.keys()
    if unknown:
        raise TypeError(f"unknown option: {', '.join(sorted(unknown))}")
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if "cache" in given:
        given["cache"] = cache_policy(given["cache"])
    request = api.GenerateRequest(prompt=build_prompt(prompt), sampling=api.Sampling())
    for name, value in given.items():
        with _naming(name):
            if name in _OF_REQUEST:
                request.MergeFrom(api.GenerateRequest(**{name: value}))
            else:
                request.sampling.MergeFrom(api.Sampling(**{name: value}))
    return request


def build_prompt(prompt: Prompt) -> api.Prompt:
    """The prompt as text, token ids or messages, by its Python type. Raises TypeError for other types, ValueError for
    values that no prompt can hold."""
    if isinstance(prompt, api.Prompt):
        return prompt
    with _naming("prompt"):
        if isinstance(prompt, str):
            return api.Prompt(text=prompt)
        if all(isinstance(part, int) for part in prompt):
            return api.Prompt(token_ids=api.TokenIds(ids=[part for part in prompt if isinstance(part, int)]))
        turns = [part for part in prompt if isinstance(part, Mapping)]
        if len(turns) < len(prompt):
            raise TypeError("a text, token ids alone, or messages alone")
        return api.Prompt(chat=api.Chat(messages=[api.ChatMessage(**turn) for turn in turns]))


@contextmanager
def _naming(field: str) -> Iterator[None]:
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


def not_served(address: str, model: str, served: Sequence[str]) -> str:
    """The message for a model (empty: any) that a mesh does not serve, with the names of those that it serves."""
    names = ", ".join(served)
    if not names:
        return f"{address} serves no model yet"
    return f"{address} serves no model {model!r}: it serves {names}"
