"""How few tokens a text of a given length may have, read from a tokenizer's file. Knows JSON, no tokenizer.

For most tokenizers of language models a text cannot have fewer tokens than its characters divided by those of the
longest token. Others may drop text or take any of it as one unknown token: for them nothing is claimed.
"""

import json
from collections.abc import Mapping
from typing import Any

_KEEP_TEXT = {"ByteLevel", "Metaspace", "Digits", "Punctuation", "UnicodeScripts"}
"""Pre-tokenizers that split a text and drop nothing of it."""
_SHRINK = {"Prepend": 1, "ByteLevel": 1, "NFC": 4}
"""Normalizers, and how many characters they make one of at most."""


def most_characters(tokenizer_json: str) -> int | None:
    """The most characters of a text that one token stands for; None if it may be any number."""
    try:
        parsed: dict[str, Any] = json.loads(tokenizer_json)
        model, added = parsed["model"], parsed.get("added_tokens") or []
        factor = _shrinks(parsed.get("normalizer"))
        splits = parsed.get("pre_tokenizer")
        if factor is None or not _keeps(splits) or any(token.get("lstrip") or token.get("rstrip") for token in added):
            return None
        if model.get("type") != "BPE" or not (model.get("byte_fallback") or "ByteLevel" in _types(splits)):
            return None
        return factor * max(map(len, (*model["vocab"], *(token["content"] for token in added))))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _parts(step: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The steps of a sequence of steps, or the one step."""
    if step is None:
        return []
    if step["type"] == "Sequence":
        inner = step.get("pretokenizers") or step.get("normalizers") or []
        return [part for each in inner for part in _parts(each)]
    return [step]


def _types(step: Mapping[str, Any] | None) -> set[str]:
    return {str(part["type"]) for part in _parts(step)}


def _keeps(step: Mapping[str, Any] | None) -> bool:
    """Whether a pre-tokenizer drops no text."""
    return all(
        part["type"] in _KEEP_TEXT or (part["type"] == "Split" and part.get("behavior") != "Removed")
        for part in _parts(step)
    )


def _shrinks(step: Mapping[str, Any] | None) -> int | None:
    """How many characters a normalizer makes one of at most; None if that is unknown."""
    factor = 1
    for part in _parts(step):
        kind = part["type"]
        if kind == "Replace":
            pattern = part["pattern"].get("String")
            if pattern is None or len(pattern) > len(part["content"]):
                return None
        elif kind in _SHRINK:
            factor *= _SHRINK[kind]
        else:
            return None
    return factor
