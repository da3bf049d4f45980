"""A conversation at the terminal. Knows turns and lines, neither calls nor how answers are computed."""

import io
import sys
from collections.abc import Iterator, Mapping

from protos import inference_pb2 as api
from report.console import bold, console
from weft.cli.terminal import speed, write
from weft.client.blocking import SyncClient
from weft.client.errors import WeftError
from weft.client.requests import Options, Prompt


class Conversation:
    """The turns so far as the prompt of the next answer: messages, or one growing text for a model without template."""

    def __init__(self, chat: bool, system: str = "") -> None:
        self._chat = chat
        self._messages: list[Mapping[str, str]] = [{"role": "system", "content": system}] if system else []
        self._text = self._prompt = system

    def ask(self, line: str) -> Prompt:
        """The prompt after the user has written `line`."""
        if self._chat:
            self._messages.append({"role": "user", "content": line})
            return list(self._messages)
        self._prompt = f"{self._text} {line}" if self._text else line
        return self._prompt

    def answered(self, text: str) -> None:
        """Adds the model's answer, whole or interrupted."""
        if self._chat:
            self._messages.append({"role": "assistant", "content": text})
        else:
            self._text = self._prompt + text

    def not_answered(self) -> None:
        """Removes the last question, which failed."""
        if self._chat:
            self._messages.pop()


def run(client: SyncClient, model: api.Model, system: str, options: Options, stats: bool) -> None:
    """Reads questions and writes answers until /exit or the end of the input. Ctrl-C interrupts an answer only."""
    out = console()
    kind = "/exit leaves" if model.chat else "no chat template: it continues what you write; /exit leaves"
    out.print(f"{bold(model.name)} ({kind})", markup=True)
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
                write(delta.text)
            write("\n")
        except KeyboardInterrupt:
            write(" [interrupted]\n")
        except WeftError as error:
            conversation.not_answered()
            out.print(str(error), style="red", markup=False)
            continue
        conversation.answered(text)
        if stats and answer.receipt is not None:
            out.print(speed(answer.receipt), style="dim")


def _lines() -> Iterator[str]:
    """The lines of the input, without line ends, U+FFFD for bytes that are no UTF-8. A terminal shows a prompt."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401 (gives input() its history and editing)
    while True:
        try:
            yield input("> " if interactive else "").strip()
        except (EOFError, KeyboardInterrupt):
            if interactive:
                write("\n")
            return
