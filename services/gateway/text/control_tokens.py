"""Keeps the text of control tokens in chat messages ordinary text. Pure; knows neither templates nor tokenizers.

A chat template writes control tokens, such as <|im_end|>, as text around the messages. A message that contains the same
text could end its own turn and begin another one. Three steps prevent this, and change no other token:

1. `escape` replaces the first character of such text in the messages by a character that occurs nowhere else.
2. The template is rendered. All control tokens in the result are the template's own: `unescape` replaces them by secret
   names, and then restores the first characters.
3. A tokenizer in which the control tokens have these names (`rename`) encodes the text. It does not recognize the text
   of the messages as control tokens.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

_ASSISTANT = "assistant"
_OWN_NAMES = frozenset(
    ("role", "content", "name", "tool_calls", "tool_call_id", "id", "type", "function", "arguments", "parameters")
)
"""Names in messages that no client has chosen."""


class ControlTokens:
    """The control tokens of one tokenizer and chat template."""

    def __init__(self, special: Iterable[str], others: Iterable[str]) -> None:
        """`special` are the tokens that the tokenizer marks as special; `others` are further added tokens that the
        template writes. An assistant's message may contain the latter: templates parse them there (</think>)."""
        self._special = _Finder(special)
        self._all = _Finder(chain(self._special.tokens, others))
        secret = _letters(secrets.token_hex(16))
        self.names = {token: f"{secret}{_letters(f'{i:06x}')}" for i, token in enumerate(self._all.tokens)}
        """The secret name of each token: lower-case letters, which no normalizer changes."""

    def escape(self, variables: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, str]]:
        """-> the variables of a template with escaped control tokens in all their texts, and the original of each
        escape character (empty: no change)."""
        texts: list[str] = []
        found = False

        def look(text: str, finder: _Finder) -> str:
            nonlocal found
            texts.append(text)
            found = found or bool(finder.places(text))
            return text

        self._mapped(variables, look)
        if not found:
            return variables, {}
        characters = dict(zip(self._all.first_characters, _unused_characters("".join(texts)), strict=False))
        escaped = self._mapped(variables, lambda text, finder: _replaced(text, finder.places(text), characters))
        return escaped, {escape: character for character, escape in characters.items()}

    def _mapped(self, variables: Mapping[str, Any], change: "Callable[[str, _Finder], str]") -> Mapping[str, Any]:
        """The variables with changed texts. An assistant's message may contain the other added tokens."""

        def of_all(text: str) -> str:
            return change(text, self._all)

        def of_special(text: str) -> str:
            return change(text, self._special)

        changed = {name: _mapped(value, of_all) for name, value in variables.items() if name != "messages"}
        changed["messages"] = [
            _mapped(each, of_special if each["role"] == _ASSISTANT else of_all) for each in variables["messages"]
        ]
        return changed

    def unescape(self, text: str, escapes: Mapping[str, str]) -> str:
        """The rendered text, in which the control tokens have their secret names, and the messages are as they were."""
        named = self._all.pattern.sub(lambda match: self.names[match[0]], text)
        return named.translate({ord(escape): original for escape, original in escapes.items()})

    def rename(self, tokenizer_json: str) -> str:
        """A tokenizer.json in which the control tokens have their secret names, and the same ids."""
        names, content = self.names, json.loads(tokenizer_json)
        for token in content["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        model = content["model"]
        vocab = model["vocab"]
        if isinstance(vocab, dict):
            model["vocab"] = {names.get(token, token): token_id for token, token_id in vocab.items()}
        else:
            model["vocab"] = [[names.get(token, token), score] for token, score in vocab]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        if "merges" in model:  # A merge that makes the text of a control token would restore it.
            model["merges"] = [merge for merge in model["merges"] if not self._makes_control_token(merge)]
        return json.dumps(content)

    def _makes_control_token(self, merge: str | Sequence[str]) -> bool:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        return not {left, right, left + right}.isdisjoint(self.names)


class _Finder:
    """Finds the text of tokens."""

    def __init__(self, tokens: Iterable[str]) -> None:
        # The longest first: of several that begin at one character, the tokenizer takes the longest.
        self.tokens = sorted(dict.fromkeys(filter(None, tokens)), key=len, reverse=True)
        self.first_characters = sorted({token[0] for token in self.tokens})
        alternatives = "|".join(map(re.escape, self.tokens)) or r"(?!)"
        self.pattern = re.compile(alternatives)
        self._starts = re.compile(f"(?={alternatives})", re.DOTALL)
        self._prefixes = {token[:length] for token in self.tokens for length in range(1, len(token))}
        self._longest = max(map(len, self.tokens), default=0)

    def places(self, text: str) -> list[int]:
        """Where tokens begin; also a token whose beginning ends the text, since the next message could complete it."""
        places = [match.start() for match in self._starts.finditer(text)]
        end = len(text.rstrip())
        places += [start for start in range(max(0, end - self._longest + 1), end) if text[start:end] in self._prefixes]
        return places


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A value of JSON with changed texts, names of objects included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_mapped(each, change) for each in value]
    if isinstance(value, dict):
        return {name if name in _OWN_NAMES else change(name): _mapped(each, change) for name, each in value.items()}
    return value


def _replaced(text: str, places: Sequence[int], characters: Mapping[str, str]) -> str:
    if not places:
        return text
    changed = list(text)
    for place in places:
        changed[place] = characters[text[place]]
    return "".join(changed)


def _unused_characters(text: str) -> Iterator[str]:
    """Characters that are not in `text`: Unicode's noncharacters, then private-use characters."""
    present = set(text)
    candidates = map(chr, chain(range(0xFDD0, 0xFDF0), range(0xF0000, 0xFFFFE)))
    return (character for character in candidates if character not in present)


def _letters(hexadecimal: str) -> str:
    return "".join(chr(ord("a") + int(digit, 16)) for digit in hexadecimal)
