"""Chat templates: a conversation becomes the text its checkpoint was trained on. Knows Jinja, no tokenizer.

Renders what transformers' `apply_chat_template(..., add_generation_prompt=True)` renders, in a sandbox, with limits on
time and size.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import FrameType
from typing import Any

from grpc import StatusCode
from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.errors import WeftError

MAX_CHARS = 8 << 20
MAX_SECONDS = 2.0


class _TooMuch(TemplateError):
    """The template goes on for too long or makes too much."""


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said; it changes nothing in the text."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller: Callable[[], str]) -> str:
        return caller()


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, which also refuses to multiply texts or numbers beyond the limit."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for many, times in ((left, right), (right, left)):
                if hasattr(many, "__len__") and isinstance(times, int) and len(many) * times > MAX_CHARS:
                    raise _TooMuch
        if operator == "**" and isinstance(right, int) and right > 64:
            raise _TooMuch
        return _bounded(super().call_binop(context, operator, left, right))


class ChatTemplate:
    """The template of one checkpoint. Thread-safe."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        self._template: Any = None
        environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except (TemplateError, RecursionError, SyntaxError):
            return  # Told to those who send chat messages; text prompts work without it.
        # `a ~ b` compiles to a call of these, past the environment: without a bound, 40 doublings take all memory.
        names = self._template.root_render_func.__globals__
        names["str_join"] = lambda parts: _bounded(str_join(parts))
        names["markup_join"] = lambda parts: _bounded(markup_join(parts))

    def render(self, messages: Sequence[tuple[str, str]]) -> str:
        """The text of a conversation of (role, content), up to where the assistant begins. Raises WeftError."""
        if self._template is None:
            raise _refused("the model's chat template does not compile")
        conversation = [{"role": role, "content": content} for role, content in messages]
        names = dict(
            self._special_tokens, messages=conversation, tools=None, documents=None, add_generation_prompt=True
        )
        try:
            return _limited(lambda: self._pieces(names))
        except _TooMuch:
            raise _refused("the model's chat template takes too long or makes too much") from None
        except Exception:
            # Whatever a template does wrong, its message may quote the conversation.
            raise _refused("the model's chat template refuses these messages") from None

    def _pieces(self, names: dict[str, Any]) -> str:
        pieces: list[str] = []
        size = 0
        for piece in self._template.generate(names):
            size += len(piece)
            if size > MAX_CHARS:
                raise _TooMuch
            pieces.append(piece)
        return "".join(pieces)


def _limited(work: Callable[[], str]) -> str:
    """Runs `work`; every line that a template executes on the way looks at the clock, endless loops included."""
    deadline = time.monotonic() + MAX_SECONDS

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_filename != "<template>":
            return None
        if time.monotonic() > deadline:
            raise _TooMuch
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return work()
    finally:
        sys.settrace(before)


def _bounded(value: Any) -> Any:
    if isinstance(value, (str, list, tuple)) and len(value) > MAX_CHARS:
        raise _TooMuch
    return value


def _refused(message: str) -> WeftError:
    return WeftError(StatusCode.INVALID_ARGUMENT, "CHAT_TEMPLATE", message, field="prompt.chat")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter would escape for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
