"""A conversation at the terminal. Knows turns and lines, neither calls nor how answers are made."""

import io
import sys
from collections.abc import Iterator, Mapping

from protos import inference_pb2 as api
from report.console import console
from weft.cli.terminal import say, speed
from weft.client.blocking import SyncClient
from weft.client.errors import WeftError
from weft.client.requests import Options, Prompt


class Conversation:
    """What was said, as the prompt of the next answer: messages, or one growing text for models without a template."""

    def __init__(self, chat: bool, system: str = "") -> None:
        self._chat = chat
        self._messages: list[Mapping[str, str]] = [{"role": "system", "content": system}] if system else []
        self._text = self._asked = system

    def ask(self, line: str) -> Prompt:
        """The prompt that follows when the user says `line`."""
        if self._chat:
            self._messages.append({"role": "user", "content": line})
            return list(self._messages)
        self._asked = f"{self._text} {line}" if self._text else line
        return self._asked

    def answered(self, text: str) -> None:
        """The model has said `text`, perhaps only in part."""
        if self._chat:
            self._messages.append({"role": "assistant", "content": text})
        else:
            self._text = self._asked + text

    def not_answered(self) -> None:
        """The last question failed: it is forgotten."""
        if self._chat:
            self._messages.pop()


def run(client: SyncClient, model: api.Model, system: str, options: Options, stats: bool) -> None:
    """Asks and answers until /exit or the end of the input. Ctrl-C ends the answer under way, not the conversation."""
    out = console()
    kind = "/exit leaves" if model.chat else "no chat template: it continues what you write; /exit leaves"
    out.print(f"[bold]{model.name}[/bold] ({kind})")
    conversation = Conversation(model.chat, system)
    for line in _lines():
        if line == "/exit":
            break
        if not line:
            continue
        answer, text = client.generate(conversation.ask(line), **options), ""
        try:
            for delta in answer:
                text += delta.text
                say(delta.text)
            say("\n")
        except KeyboardInterrupt:
            say(" [interrupted]\n")
        except WeftError as error:
            conversation.not_answered()
            out.print(str(error), style="red", markup=False)
            continue
        conversation.answered(text)
        if stats and answer.receipt is not None:
            out.print(speed(answer.receipt), style="dim")


def _lines() -> Iterator[str]:
    """What the user types, without the ends of lines, U+FFFD for bytes that are no text; a terminal is prompted."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401 (gives input() its history and editing)
    while True:
        try:
            yield input("> " if interactive else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
