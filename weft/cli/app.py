"""The `weft` command. What its commands do is imported when they run, so that --help is quick."""

import sys
from typing import Annotated

import typer

from weft.cli import generate, measure, serve, warm
from weft.cli.flags import fail

app = typer.Typer(
    name="weft",
    help="Serves large language models in real time as a mesh of small gRPC services.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_DELEGATED = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

app.command()(serve.serve)
app.command("demo")(serve.demonstrate)
app.command()(warm.warm)
app.command()(generate.generate)
app.command()(generate.chat)
app.command()(generate.models)


@app.command()
def key(
    name: Annotated[str, typer.Argument(help="Name of the tenant that it is for.")],
) -> None:
    """Make an API key, and the lines for the file of tenants; the key itself is kept nowhere."""
    import hashlib
    import re
    import secrets

    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
        fail("a tenant's name is 1 to 64 characters of A-Z a-z 0-9 . _ -", usage=True)
    made = f"weft-{secrets.token_urlsafe(32)}"
    typer.echo("for its owner, who alone will have it:", err=True)
    typer.echo(made)
    typer.echo("\nfor the gateways' WEFT_TENANTS_FILE:", err=True)
    hashed = hashlib.sha256(made.encode()).hexdigest()
    typer.echo(f'[[tenant]]\nname = "{name}"\nkeys = ["sha256:{hashed}"]')


app.command()(measure.bench)
app.command()(measure.top)
app.command()(measure.doctor)


@app.command("compress", context_settings=_DELEGATED)
def make_smaller(context: typer.Context) -> None:
    """Make a checkpoint smaller: AWQ, GPTQ, SmoothQuant, FP8, INT8, pruning, distillation."""
    _delegate("compress", context.args)


@app.command("verify", context_settings=_DELEGATED)
def prove(context: typer.Context) -> None:
    """Prove that a compressed checkpoint is still the model it was made from."""
    _delegate("verify", context.args)


def _delegate(package: str, arguments: list[str]) -> None:
    """Becomes another package's command line."""
    import importlib.util
    import runpy

    missing = [name for name in (package, "compressed_tensors") if importlib.util.find_spec(name) is None]
    if missing:
        fail(f"{package} needs {missing[0]}, which is not installed: make set-up, or pip install 'weft[compress]'")
    sys.argv = [f"weft {package}", *arguments]
    runpy.run_module(package, run_name="__main__", alter_sys=True)
