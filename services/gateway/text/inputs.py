"""Texts and pairs of texts for encoders to tokens, cut if they are too long. Knows the tokenizer, no task."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Encoding, Tokenizer


@dataclass(frozen=True, slots=True)
class InputText:
    """A text, or a pair of texts."""

    text: str
    second: str | None = None


@dataclass(frozen=True, slots=True)
class InputTokens:
    """The tokens of a text or a pair, special ones included."""

    token_ids: Sequence[int]
    second: int = 0
    """Where the second text of a pair begins; 0: there is none, or the model does not distinguish them."""


def tokenize_input(tokenizer: Tokenizer, text: InputText, most_tokens: int | None) -> InputTokens:
    """most_tokens: the length to which the text, or the longer one of a pair, is cut; None: keep all."""
    if most_tokens is None:
        return _tokens(tokenizer.encode(text.text, text.second))
    first = tokenizer.encode(text.text, add_special_tokens=False)
    second = None if text.second is None else tokenizer.encode(text.second, add_special_tokens=False)
    room = max(0, most_tokens - tokenizer.num_special_tokens_to_add(second is not None))
    if second is None:
        first.truncate(room)
    else:
        _cut_longest(first, second, room)
    return _tokens(tokenizer.post_process(first, second))


def _cut_longest(first: Encoding, second: Encoding, room: int) -> None:
    """The rule "longest first" of the tokenizers library."""
    if len(first) + len(second) <= room:
        return
    shorter, longer = sorted((first, second), key=len)
    kept = min(len(shorter), room // 2)
    shorter.truncate(kept)
    longer.truncate(room - kept)


def _tokens(encoding: Encoding) -> InputTokens:
    segments = encoding.type_ids
    return InputTokens(encoding.ids, segments.index(1) if 1 in segments else 0)
