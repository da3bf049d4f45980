"""Checks at the start that a checkpoint's tokenizer and chat template can be used. Knows no prompt: the gateway, which
gets both from the worker, is what tokenizes and renders.
"""

from jinja2 import Environment, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from tokenizers import Tokenizer

from services.worker.errors import CheckpointError


class _Generation(Extension):
    """`{% generation %}`, which marks the assistant's part of a template, is known to the gateway, too."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def check_tokenizer(tokenizer_json: bytes) -> None:
    """Builds the tokenizer and takes a text there and back, as each gateway will. Raises CheckpointError."""
    try:
        tokenizer = Tokenizer.from_buffer(tokenizer_json)
        tokenizer.decode(tokenizer.encode("a", add_special_tokens=False).ids, skip_special_tokens=False)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # A panic of the library's Rust code is no Exception.
        raise CheckpointError(f"tokenizer.json cannot be used: {error}") from None


def check_template(source: str) -> None:
    """Compiles a chat template; an empty one is none. Raises CheckpointError."""
    try:
        Environment(extensions=[_Generation, loopcontrols]).from_string(source)
    except (TemplateError, RecursionError, SyntaxError) as error:
        raise CheckpointError(f"the chat template does not compile: {error}") from None
