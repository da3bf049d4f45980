"""The command that embeds texts."""

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.flags import LOCAL, Address, ApiKey, Deadline, Model, fail
from weft.cli.generate import client_of


def embed(
    texts: Annotated[list[str] | None, typer.Argument(help="The texts; without any, the lines of --file.")] = None,
    file: Annotated[Path | None, typer.Option(help="A file with a text in each line; - is standard input.")] = None,
    model: Model = "",
    dimensions: Annotated[int | None, typer.Option(help="Leading numbers of each vector.", show_default="all")] = None,
    prompt_name: Annotated[str | None, typer.Option(help="A prompt of the model.", show_default="its own")] = None,
    truncate: Annotated[bool, typer.Option(help="Cut texts that are too long.")] = False,
    address: Address = LOCAL,
    api_key: ApiKey = "",
    deadline: Deadline = None,
) -> None:
    """Embed texts: a line of JSON for each, a list of numbers."""
    import json

    if bool(texts) == bool(file):
        fail("either texts or --file", usage=True)
    lines = list(texts or ())
    if file is not None:
        try:
            content = typer.get_text_stream("stdin").read() if str(file) == "-" else file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            fail(f"{file} cannot be read: {getattr(error, 'strerror', None) or 'not a text file'}")
        # Not splitlines: a line of text may contain U+2028 or a form feed.
        lines = [line for line in content.split("\n") if line.strip()]
        if not lines:
            fail(f"{file} has no text")
    given = {"dimensions": dimensions, "prompt_name": prompt_name}
    with client_of(address, api_key, deadline) as client:
        chosen = {name: value for name, value in given.items() if value is not None}
        reply = client.embed(lines, model=model, truncate=truncate, **chosen)  # type: ignore[arg-type]
        for each in reply.embeddings:
            typer.echo(json.dumps([round(value, 8) for value in each.values]))
