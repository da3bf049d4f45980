"""Divides the text of one answer into content and tool calls as it arrives. Pure; knows neither tokens nor clients.

Text counts as a call when the name of a given function has been read; what turns out to be no call is content. Space
between content and calls belongs to neither.
"""

import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass

from services.gateway.text.tool_calls.formats import ToolFormat
from services.gateway.text.tool_calls.scanner import CallScanner, NoCall

_SPACE = " \t\r\n"
_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"
_ARGUMENTS, _CALL_ID = "[ARGS]", "[CALL_ID]"
_MOST_NAME = 256


@dataclass(frozen=True, slots=True)
class CallPiece:
    """The next part of a call. Its first one has id and name."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class ToolCallParser:
    """The calls of one answer."""

    def __init__(
        self,
        form: ToolFormat,
        known: Collection[str],
        seed: bytes,
        most: int | None = None,
        calls_alone: bool = False,
    ) -> None:
        """known: the functions' names; seed: what ids are made of; most: calls after which the answer ends.

        calls_alone: the answer has no content; what remains of a call that was cut off is dropped."""
        self._form = form
        self._known = known
        self._seed = seed
        self._most = most
        self._calls_alone = calls_alone
        self._calls = 0
        self._begun = False
        """There was something else than space."""
        self._spaces: list[str] = []
        """Space that belongs to content if more content follows."""
        self._held = ""
        """Behind the space: text that may belong to a call."""
        self._raw: list[str] = []
        """What was read of a call whose name is not known yet."""
        self._scanner: CallScanner | None = None
        self._name: list[str] | None = None
        """A name that is being read, before its arguments."""
        self._between = False
        """The last text was a call: separators may follow."""
        self._content: list[str] = []
        self._pieces: list[CallPiece] = []

    @property
    def done(self) -> bool:
        """The answer has as many calls as it may have."""
        return self._most is not None and self._calls >= self._most and self._scanner is None

    def feed(self, text: str) -> tuple[str, list[CallPiece]]:
        """Adds text. -> content and parts of calls that are certain."""
        for character in text:
            if self.done:
                break
            self._take(character)
        self._pass_arguments()
        return self._taken()

    def flush(self) -> tuple[str, list[CallPiece]]:
        """The answer has ended. -> what was held back."""
        self._pass_arguments()
        if self._scanner is not None or self._name is not None:
            if self._raw:
                self._reject()
            self._scanner = self._name = None
        held = self._release(self._held)
        if not (self._calls and not held.strip(_SPACE)):
            self._content.append(held)
        return self._taken()

    def _taken(self) -> tuple[str, list[CallPiece]]:
        content, pieces = "" if self._calls_alone else "".join(self._content), self._pieces
        self._content, self._pieces = [], []
        return content, pieces

    # ---- one character ----

    def _take(self, character: str) -> None:
        if self._scanner is not None:
            self._read_call(character)
        elif self._name is not None:
            self._read_name(character)
        else:
            self._read_content(character)

    def _read_content(self, character: str) -> None:
        if character in _SPACE and not self._held:
            self._spaces.append(character)
            return
        form, held = self._form, self._held + character
        self._held = held
        if self._between:
            if held in form.separators or held == form.closes:
                self._between = held != form.closes
                self._release(held)
                return
            if form.closes.startswith(held):
                return
            if held[0] == "{" and form.separators:
                self._begin_call(self._release(held))
                return
            self._between = False
        if form.at_start and not self._begun and held[0] == "{":
            self._begin_call(self._release(held))
            return
        opens = held.endswith(form.opens)
        begins = len(held) - len(form.opens) if opens else _begins_at(held, form.opens)
        content = held[:begins].rstrip(_SPACE)
        if content:
            self._begun = True
            self._content.append(self._release(content))
            self._spaces.append(held[len(content) : begins])
        self._held = held[begins:]
        if opens:
            self._begin_call(self._release(form.opens))

    def _release(self, text: str) -> str:
        """The text with the space before it; nothing is held any more."""
        released = "".join(self._spaces) + text
        self._spaces.clear()
        self._held = ""
        return released

    def _begin_call(self, read: str) -> None:
        """A call begins with this text."""
        self._begun, self._between = True, False
        self._raw = [read]
        if self._form.list_or_name and read[-1] != "{":
            self._name = []
            return
        self._scanner = CallScanner(self._known)
        if read[-1] == "{":
            self._scanner.feed("{")

    def _read_name(self, character: str) -> None:
        """Behind the text before a call: a list of calls, or a name."""
        assert self._name is not None
        self._raw.append(character)
        name = self._name
        if not name and character in _SPACE:
            return
        if character == "{" or (not name and character == "["):
            read = "".join(name).removesuffix(_ARGUMENTS).partition(_CALL_ID)[0].strip(_SPACE)
            self._name = None
            self._scanner = CallScanner(self._known)
            if read:
                self._attempt(lambda: self._named(read, character))
            elif character == "{":
                self._scanner.feed(character)
            return
        name.append(character)
        if len(name) > _MOST_NAME:
            self._reject()

    def _named(self, name: str, character: str) -> None:
        assert self._scanner is not None
        self._scanner.named(name)
        self._scanner.feed(character)
        self._note_name()

    def _read_call(self, character: str) -> None:
        scanner = self._scanner
        assert scanner is not None
        if self._raw:
            self._raw.append(character)
        self._attempt(lambda: scanner.feed(character))
        if self._scanner is None:
            return
        self._note_name()
        if scanner.done:
            self._pass_arguments()
            self._scanner, self._between = None, True

    def _attempt(self, work: Callable[[], None]) -> None:
        """Reads on; what turns out to be no call is content."""
        try:
            work()
        except NoCall:
            if self._raw:
                self._reject()
            else:  # The client has the name already: the call ends here.
                self._pass_arguments()
                self._scanner, self._between = None, True

    def _note_name(self) -> None:
        scanner = self._scanner
        if scanner is not None and scanner.name and self._raw:
            self._raw = []
            self._pieces.append(CallPiece(self._calls, self._id(), scanner.name, scanner.take()))
            self._calls += 1

    def _pass_arguments(self) -> None:
        if self._scanner is not None and not self._raw and (arguments := self._scanner.take()):
            self._pieces.append(CallPiece(self._calls - 1, arguments=arguments))

    def _reject(self) -> None:
        self._content.append("".join(self._raw))
        self._raw, self._scanner, self._name = [], None, None

    def _id(self) -> str:
        digest = hashlib.sha256(self._seed + self._calls.to_bytes(4, "little")).digest()
        if self._form.short_ids:
            return "".join(_LETTERS[byte % len(_LETTERS)] for byte in digest[:9])
        return f"call_{digest.hex()[:24]}"


def _begins_at(text: str, marker: str) -> int:
    """Index from which the end of the text may begin the marker."""
    for start in range(max(0, len(text) - len(marker) + 1), len(text)):
        if marker.startswith(text[start:]):
            return start
    return len(text)
