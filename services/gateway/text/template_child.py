"""The process that compiles and renders one chat template. Knows Jinja; imports nothing of the project.

It is run by path, with no environment, and does what its standard input asks: each message is its length (4 bytes,
big-endian) and JSON in UTF-8. The first message is the template, which is answered by the variables that it reads, or
None if it does not compile; each further one holds variables, which are answered by the text. Limits on memory, time
and files hold for the whole process, so they hold in the C code of Python, too; who started it kills it.
"""

import json
import os
import resource
import struct
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, BinaryIO

from jinja2 import meta, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARS = 8 << 20
"""Longest text of a rendering."""
MEMORY_BYTES = 240 << 20
"""Address space of this process."""
CPU_S = 3
"""Processor time of one message, after which the kernel kills this process, also if its parent cannot."""
LENGTH = struct.Struct(">I")


class _LimitExceeded(TemplateError):
    """The template produces too much text."""


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


class Template:
    """A compiled template."""

    def __init__(self, source: str) -> None:
        """Raises TemplateError, RecursionError, SyntaxError or MemoryError if it does not compile."""
        environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template: Any = environment.from_string(source)
        self.reads = meta.find_undeclared_variables(environment.parse(source))
        # `a ~ b` compiles to calls of these, not of the environment: without a limit, 40 doublings exhaust memory.
        names = self._template.root_render_func.__globals__
        names["str_join"] = lambda parts: _bounded(str_join(parts))
        names["markup_join"] = lambda parts: _bounded(markup_join(parts))

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text. Raises _LimitExceeded, and whatever a template may raise."""
        pieces: list[str] = []
        size = 0
        for piece in self._template.generate(variables):
            size += len(piece)
            if size > MAX_CHARS:
                raise _LimitExceeded
            pieces.append(piece)
        return "".join(pieces)


def _bounded(value: Any) -> Any:
    if isinstance(value, (str, list, tuple)) and len(value) > MAX_CHARS:
        raise _LimitExceeded
    return value


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def compiled(source: str) -> tuple[Template | None, dict[str, Any]]:
    """The template and the answer to the first message."""
    try:
        template = Template(source)
    except (TemplateError, RecursionError, SyntaxError, ValueError, OverflowError, TypeError):
        return None, {"reads": None}
    return template, {"reads": sorted(template.reads)}


def answered(template: Template | None, variables: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a further message: "text", or "error": "limit" or "refused"."""
    try:
        return {"text": template.render(variables)} if template is not None else {"error": "refused"}
    except _LimitExceeded:
        return {"error": "limit"}
    except Exception as error:
        if isinstance(error, MemoryError):
            raise
        return {"error": "refused"}  # The message of any other exception may quote the conversation.


def _limit_process() -> None:
    for what, limit in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 16),
    ):
        resource.setrlimit(what, (limit, limit))


def _limit_time() -> None:
    """Gives the next message its processor time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + CPU_S, hard))


def _received(stream: BinaryIO) -> Any:
    """The next message. Ends the process at the end of the input."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        os._exit(0)
    return json.loads(stream.read(LENGTH.unpack(head)[0]).decode("utf-8", "surrogatepass"))


def _send(stream: BinaryIO, answer: Mapping[str, Any]) -> None:
    data = json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass")
    stream.write(LENGTH.pack(len(data)))
    stream.write(data)
    stream.flush()


def main() -> None:
    """Answers messages until the input ends. A process that runs out of memory ends, and is started again."""
    _limit_process()
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # Nothing else may write to the answers.
    try:
        _send(sink, {"started": True})
        _limit_time()
        template, answer = compiled(_received(source))
        _send(sink, answer)
        while True:
            variables = _received(source)
            _limit_time()
            _send(sink, answered(template, variables))
    except (MemoryError, BrokenPipeError):
        os._exit(1)


if __name__ == "__main__":
    main()
