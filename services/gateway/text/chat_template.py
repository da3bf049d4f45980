"""Renders a conversation with the chat template of its checkpoint. Knows Jinja, no tokenizer.

The result equals that of transformers' `apply_chat_template(..., add_generation_prompt=True)`. Templates run in a
sandbox, with limits on time and size.
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


class _LimitExceeded(TemplateError):
    """The template takes too long, or produces too much text."""


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training. It does not change the result."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller: Callable[[], str]) -> str:
        return caller()


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with limits on the size of products and concatenations."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for many, times in ((left, right), (right, left)):
                if hasattr(many, "__len__") and isinstance(times, int) and len(many) * times > MAX_CHARS:
                    raise _LimitExceeded
        if operator == "**" and isinstance(right, int) and right > 64:
            raise _LimitExceeded
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
            return  # Requests with chat messages receive an error; text prompts work.
        # `a ~ b` compiles to calls of these, not of the environment: without a limit, 40 doublings exhaust memory.
        names = self._template.root_render_func.__globals__
        names["str_join"] = lambda parts: _bounded(str_join(parts))
        names["markup_join"] = lambda parts: _bounded(markup_join(parts))

    def render(self, messages: Sequence[tuple[str, str]]) -> str:
        """The text of a conversation of (role, content), up to the beginning of the answer. Raises WeftError."""
        if self._template is None:
            raise _refused("the model's chat template does not compile")
        conversation = [{"role": role, "content": content} for role, content in messages]
        names = dict(
            self._special_tokens, messages=conversation, tools=None, documents=None, add_generation_prompt=True
        )
        try:
            return _limited(lambda: self._pieces(names))
        except _LimitExceeded:
            raise _refused("the model's chat template takes too long or produces too much text") from None
        except Exception:
            # The message of any other exception may quote the conversation.
            raise _refused("the model's chat template refuses these messages") from None

    def _pieces(self, names: dict[str, Any]) -> str:
        pieces: list[str] = []
        size = 0
        for piece in self._template.generate(names):
            size += len(piece)
            if size > MAX_CHARS:
                raise _LimitExceeded
            pieces.append(piece)
        return "".join(pieces)


def _limited(work: Callable[[], str]) -> str:
    """Runs `work`, and checks the time at every line that a template executes, also in endless loops."""
    deadline = time.monotonic() + MAX_SECONDS

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_filename != "<template>":
            return None
        if time.monotonic() > deadline:
            raise _LimitExceeded
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return work()
    finally:
        sys.settrace(before)


def _bounded(value: Any) -> Any:
    if isinstance(value, (str, list, tuple)) and len(value) > MAX_CHARS:
        raise _LimitExceeded
    return value


def _refused(message: str) -> WeftError:
    return WeftError(StatusCode.INVALID_ARGUMENT, "CHAT_TEMPLATE", message, field="prompt.chat")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
