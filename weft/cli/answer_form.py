"""The flags that give an answer a form, as options of a request. Knows files, no mesh."""

from pathlib import Path
from typing import Annotated, Any

import typer

from weft.cli.flags import fail

JsonSchema = Annotated[
    str, typer.Option(metavar="SCHEMA|FILE", help="Answer in JSON under this schema: its text, or a file's name.")
]
JsonObject = Annotated[bool, typer.Option("--json-object", help="Answer with any JSON object.")]
Regex = Annotated[str, typer.Option(help="The answer matches this expression.")]
Choice = Annotated[list[str] | None, typer.Option(help="The answer is this or another --choice; may be repeated.")]
GrammarFile = Annotated[
    str, typer.Option("--grammar", metavar="FILE", help="The answer is a sentence of this grammar: Lark or GBNF.")
]


def form_options(
    json_schema: str, json_object: bool, regex: str, choice: list[str] | None, grammar: str
) -> dict[str, Any]:
    """The options of a request for these flags. Ends the command with one line if there are two, or no such file."""
    given: dict[str, Any] = {
        "json_schema": json_schema,
        "json_object": json_object,
        "regex": regex,
        "choice": choice,
        "grammar": grammar,
    }
    given = {name: value for name, value in given.items() if value}
    if len(given) > 1:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        fail(f"{names}: an answer has one form")
    if json_schema and not json_schema.lstrip().startswith("{"):
        given["json_schema"] = _read(json_schema)
    if grammar:
        given["grammar"] = _read(grammar)
    return given


def _read(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return fail(f"{name}: {getattr(error, 'strerror', None) or 'not a text file'}")
