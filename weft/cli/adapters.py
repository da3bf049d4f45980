"""The commands about adapters of a mesh's models: list, load, drop."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from weft.cli.flags import LOCAL_SCHEDULER, Scheduler, fail

app = typer.Typer(
    name="adapters",
    help="List, load and drop low-rank adapters of the models that a mesh serves.",
    no_args_is_help=True,
)
Name = Annotated[str, typer.Argument(help="Name of the adapter; requests name it MODEL:NAME.")]
OfModel = Annotated[str, typer.Option("--model", help="Name of the model.", show_default="the only one")]
Folder = Annotated[Path, typer.Argument(help="Folder that PEFT saved it to, as the workers see it.")]
Result = TypeVar("Result")


@app.command("list")
def list_(model: OfModel = "", scheduler: Scheduler = LOCAL_SCHEDULER) -> None:
    """List the adapters of each worker."""
    from report.console import console
    from weft.cli.terminal import adapters_table
    from weft.launch import adapters

    console().print(adapters_table(_as_admin(adapters.listed(scheduler, model))))


@app.command()
def load(name: Name, folder: Folder, model: OfModel = "", scheduler: Scheduler = LOCAL_SCHEDULER) -> None:
    """Let all workers of a model serve an adapter, while they serve."""
    from weft.launch import adapters

    workers = _as_admin(adapters.load(scheduler, model, name, folder.expanduser().absolute()))
    typer.echo(f"loaded {name} at {', '.join(workers)}")


@app.command()
def drop(name: Name, model: OfModel = "", scheduler: Scheduler = LOCAL_SCHEDULER) -> None:
    """Let no worker of a model serve an adapter any more. Answers that are under way end with it."""
    from weft.launch import adapters

    workers = _as_admin(adapters.drop(scheduler, model, name))
    typer.echo(f"dropped {name} at {', '.join(workers)}")


def _as_admin(work: Coroutine[Any, Any, Result]) -> Result:
    """The result of calls to the inner ports of a mesh. A refusal ends the command with one line."""
    from weft.launch.adapters import AdaptersError
    from weft.launch.admin import assume_admin

    assume_admin()
    try:
        return asyncio.run(work)
    except AdaptersError as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
