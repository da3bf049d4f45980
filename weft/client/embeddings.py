"""Builds requests to encoders from Python values. Knows their fields, never how they are used."""

import secrets
from collections.abc import Sequence
from typing import TypedDict

from protos import inference_pb2 as api
from weft.client.requests import cache_policy, naming, several

Input = str | Sequence[int]
"""A text, or token ids."""


class EncodeSettings(TypedDict, total=False):
    """Options of every request to an encoder; protos/inference.proto explains each."""

    model: str
    request_id: str
    truncate: bool
    priority: int
    cache: str


class EmbedSettings(EncodeSettings, total=False):
    """Options of a request for vectors."""

    dimensions: int
    normalize: bool
    prompt_name: str


def embed_request(texts: Sequence[Input], settings: EmbedSettings) -> api.EmbedRequest:
    """Raises TypeError for an unknown option, ValueError for a value that no request can hold."""
    request = api.EmbedRequest(inputs=_inputs(texts), options=_options(settings, EmbedSettings.__annotations__))
    with naming("embed"):
        for name in ("dimensions", "normalize", "prompt_name"):
            if settings.get(name) is not None:
                setattr(request, name, settings[name])
    return request


def rank_request(query: str, documents: Sequence[str], top_n: int, settings: EncodeSettings) -> api.RankRequest:
    """Raises TypeError for an unknown option, ValueError for a value that no request can hold."""
    with naming("rank"):
        options = _options(settings, EncodeSettings.__annotations__)
        return api.RankRequest(query=query, documents=several(documents), top_n=top_n, options=options)


def classify_request(texts: Sequence[Input], settings: EncodeSettings) -> api.ClassifyRequest:
    """Raises TypeError for an unknown option, ValueError for a value that no request can hold."""
    return api.ClassifyRequest(inputs=_inputs(texts), options=_options(settings, EncodeSettings.__annotations__))


def _inputs(texts: Sequence[Input]) -> list[api.Input]:
    if isinstance(texts, str):
        raise TypeError("texts: a list of texts")
    with naming("texts"):
        return [
            api.Input(text=text) if isinstance(text, str) else api.Input(token_ids=api.TokenIds(ids=text))
            for text in texts
        ]


def _options(settings: EncodeSettings, known: object) -> api.EncodeOptions:
    assert isinstance(known, dict)
    unknown = settings.keys() - known.keys()
    if unknown:
        raise TypeError(f"unknown option: {', '.join(sorted(unknown))}")
    with naming("options"):
        return api.EncodeOptions(
            model=settings.get("model", ""),
            request_id=settings.get("request_id") or secrets.token_hex(16),
            truncate=settings.get("truncate", False),
            priority=settings.get("priority", 0),
            cache=cache_policy(settings["cache"]) if settings.get("cache") else api.CACHE_POLICY_UNSPECIFIED,
        )
