"""Checks at the start that a checkpoint's tokenizer and chat template can be used. Knows no prompt: the gateway, which
gets both from the worker, is what tokenizes and renders.
"""

import os
import subprocess
import sys
from pathlib import Path

from jinja2 import Environment, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from services.worker.errors import CheckpointError

_CHILD = Path(__file__).with_name("tokenizer_child.py")
_PASSED_ON = ("PATH", "LD_LIBRARY_PATH")
_MOST_S = 60.0
"""The process's own limit of processor time is shorter; this one is for a process that waits."""
_TOO_MUCH = "tokenizer.json cannot be used: building it takes too much time or memory"
_OF_THE_GATEWAY = ("tojson",)
"""Filters that the gateway adds to Jinja's."""


class _Generation(Extension):
    """`{% generation %}`, which marks the assistant's part of a template, is known to the gateway, too."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def check_tokenizer(tokenizer_json: bytes) -> None:
    """Builds the tokenizer in a process with limits, and takes a text there and back. Raises CheckpointError."""
    environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    try:
        done = subprocess.run(
            [sys.executable, "-I", str(_CHILD)],
            input=tokenizer_json,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_MOST_S,
            env={**environment, "RAYON_NUM_THREADS": "1"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CheckpointError(_TOO_MUCH) from None
    if done.returncode != 0:
        raise CheckpointError(_TOO_MUCH)
    if reason := " ".join(done.stdout.decode(errors="replace").split()):
        raise CheckpointError(f"tokenizer.json cannot be used: {reason}")


def check_template(source: str) -> None:
    """Parses a chat template; an empty one is none. Raises CheckpointError.

    It is not compiled: that computes constants, such as 9 ** 9 ** 9, for as long as they take.
    """
    environment = Environment(extensions=[_Generation, loopcontrols])
    try:
        parsed = environment.parse(source)
        known = {**environment.filters, **dict.fromkeys(_OF_THE_GATEWAY)}
        unknown = [each.name for each in parsed.find_all(nodes.Filter) if each.name not in known]
    except (TemplateError, RecursionError, SyntaxError) as error:
        raise CheckpointError(f"the chat template does not compile: {error}") from None
    if unknown:
        raise CheckpointError(f"the chat template does not compile: No filter named {unknown[0][:64]!r}.")
