"""The `weft` command: lists its commands. What they do is imported when they run, so that --help is quick."""

import os
from typing import Annotated

import typer

from weft.cli import adapters, batch, embed, export, generate, measure, serve, warm
from weft.cli.flags import fail

app = typer.Typer(
    name="weft",
    help="Serves large language models in real time as a mesh of small gRPC services.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_DELEGATED = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _print_version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata

        typer.echo(f"weft {importlib.metadata.version('weft')}")
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Serves large language models in real time as a mesh of small gRPC services."""
    if context.invoked_subcommand not in ("serve", "demo"):  # Services log what gRPC reports.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")


app.command()(serve.serve)
app.command("demo")(serve.demonstrate)
app.command()(warm.warm)
app.command()(export.export)
app.command()(generate.generate)
app.command()(generate.chat)
app.command()(embed.embed)
app.command()(generate.models)
app.command()(batch.batch)
app.add_typer(adapters.app)


@app.command()
def key(
    name: Annotated[str, typer.Argument(help="Name of the tenant that the key is for.")],
) -> None:
    """Create an API key and print the lines for the tenants file. The key itself is stored nowhere."""
    import hashlib
    import re
    import secrets

    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
        fail("a tenant's name is 1 to 64 characters of A-Z a-z 0-9 . _ -", usage=True)
    secret = f"weft-{secrets.token_urlsafe(32)}"
    typer.echo("give this key to the tenant; it cannot be shown again:", err=True)
    typer.echo(secret)
    typer.echo("\nadd this to the file that WEFT_TENANTS_FILE names for the gateways:", err=True)
    hashed = hashlib.sha256(secret.encode()).hexdigest()
    typer.echo(f'[[tenant]]\nname = "{name}"\nkeys = ["sha256:{hashed}"]')


app.command()(measure.bench)
app.command()(measure.top)
app.command()(measure.doctor)


@app.command(context_settings=_DELEGATED)
def compress(context: typer.Context) -> None:
    """Make a checkpoint smaller: AWQ, GPTQ, SmoothQuant, FP8, INT8, pruning, distillation."""
    _run_tool("compress", context.args)


@app.command(context_settings=_DELEGATED)
def verify(context: typer.Context) -> None:
    """Check that a compressed checkpoint still computes what the model it was made from computes."""
    _run_tool("verify", context.args)


def _run_tool(name: str, arguments: list[str]) -> None:
    """Run the command line that a package has registered under this name in the entry points `weft.commands`."""
    import importlib.metadata
    import importlib.util

    tools = importlib.metadata.entry_points(group="weft.commands", name=name)
    missing = [] if tools else [name]
    missing += [] if importlib.util.find_spec("compressed_tensors") else ["compressed_tensors"]
    if missing:
        fail(f"{name} needs {missing[0]}, which is not installed: make set-up, or pip install 'weft[compress]'")
    next(iter(tools)).load()(args=arguments, prog_name=f"weft {name}")
