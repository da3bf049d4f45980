"""Reads one call as its JSON arrives, character by character. Pure; knows no text around it.

The arguments are passed on as the model wrote them, as soon as the name of the function is known.
"""

import json
from collections.abc import Callable, Collection, Generator
from typing import TypeAlias

Reading: TypeAlias = Generator[None, str, None]
Value: TypeAlias = Generator[None, str, str]
_SPACE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")
_MOST_NAME = 256
"""Characters of a key or name after which a text counts as no call."""


class NoCall(Exception):
    """The text is no call of a known function."""


class CallScanner:
    """One call: {"name": NAME, "arguments": OBJECT}, or after `named` the arguments alone."""

    def __init__(self, known: Collection[str]) -> None:
        """known: the names of the functions that may be called."""
        self._known = known
        self._waiting: list[str] = []
        self._back = ""
        self._reading: Reading = self._object()
        self._argued = False
        self.name = ""
        """The function's name; empty until it is known."""
        self.done = False
        next(self._reading)

    def named(self, name: str) -> None:
        """The name was read elsewhere: what follows are the arguments. Raises NoCall."""
        self._accept(name)
        self._reading = self._only_arguments()
        next(self._reading)

    def feed(self, character: str) -> None:
        """Takes the next character. Raises NoCall."""
        try:
            self._reading.send(character)
        except StopIteration:
            self.done = True
            if not self._argued:
                self._waiting.append("{}")

    def take(self) -> str:
        """The arguments that arrived since the last call, once the name is known."""
        if not self.name:
            return ""
        taken = "".join(self._waiting)
        self._waiting.clear()
        return taken

    def _accept(self, name: str) -> None:
        if name not in self._known:
            raise NoCall
        self.name = name

    # ---- readers: each ends with the last character of what it reads ----

    def _next(self) -> Value:
        """The next character that is no space."""
        while True:
            character, self._back = self._back, ""
            if not character:
                character = yield
            if character not in _SPACE:
                return character

    def _object(self) -> Reading:
        if (yield from self._next()) != "{":
            raise NoCall
        while True:
            key = yield from self._string((yield from self._next()))
            if (yield from self._next()) != ":":
                raise NoCall
            first = yield from self._next()
            if key == "name":
                self._accept((yield from self._string(first)))
            elif key in _ARGUMENTS and not self._argued:
                yield from self._arguments(first)
            else:
                yield from self._value(first, lambda _: None)
            after = yield from self._next()
            if after == "}":
                break
            if after != ",":
                raise NoCall
        if not self.name:
            raise NoCall

    def _only_arguments(self) -> Reading:
        first = yield from self._next()
        if first != "{":
            raise NoCall
        yield from self._arguments(first)

    def _arguments(self, first: str) -> Reading:
        if first == '"':  # Some models write the object as a string.
            self._waiting.append((yield from self._string(first, most=None)))
        else:
            yield from self._value(first, self._waiting.append)
        self._argued = True

    def _string(self, first: str, most: int | None = _MOST_NAME) -> Value:
        if first != '"':
            raise NoCall
        raw = [first]
        yield from self._raw_string(raw.append, lambda: len(raw), most)
        try:
            text = str(json.loads("".join(raw), strict=False))
        except ValueError:
            raise NoCall from None
        # JSON may have half of a character, as \ud83d, which no message can hold.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _raw_string(
        self, take: Callable[[str], object], count: Callable[[], int] = lambda: 0, most: int | None = None
    ) -> Reading:
        """The rest of a string, behind its first quotation mark."""
        escaped = False
        while True:
            character = yield
            take(character)
            if most is not None and count() > most:
                raise NoCall
            if character == '"' and not escaped:
                return
            escaped = character == "\\" and not escaped

    def _value(self, first: str, take: Callable[[str], object]) -> Reading:
        """Any value."""
        take(first)
        if first == '"':
            yield from self._raw_string(take)
        elif first in "{[":
            depth = 1
            while depth:
                character = yield
                take(character)
                if character == '"':
                    yield from self._raw_string(take)
                depth += (character in "{[") - (character in "}]")
        else:
            while True:
                character = yield
                if character in ",}]" or character in _SPACE:
                    self._back = character
                    return
                take(character)
