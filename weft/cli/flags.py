"""Flags that several commands share, and how a command ends."""

from collections.abc import Coroutine
from enum import StrEnum
from typing import Annotated, Any, NoReturn

import typer


class Caching(StrEnum):
    """What the caches may do for a request."""

    READ_WRITE = "read_write"
    READ_ONLY = "read_only"
    BYPASS = "bypass"


Address = Annotated[str, typer.Option(envvar="WEFT_ADDRESS", help="host:port of the mesh, or https://host:port.")]
ApiKey = Annotated[
    str, typer.Option("--api-key", envvar="WEFT_API_KEY", help="For a mesh that needs one.", show_default=False)
]
Model = Annotated[str, typer.Option(help="Name of the model; empty: the only one that is served.")]
Deadline = Annotated[float | None, typer.Option(help="Seconds that an answer may take.", show_default="none")]
Scheduler = Annotated[str, typer.Option(envvar="WEFT_SCHEDULER_ADDRESS", help="host:port of the mesh's scheduler.")]
RedisUrl = Annotated[
    str,
    typer.Option(
        envvar=["WEFT_REDIS_URL", "REDIS_URL"], help="URL of a Redis to use instead.", show_default="embedded"
    ),
]
LOCAL = "127.0.0.1:50051"
LOCAL_SCHEDULER = "127.0.0.1:50052"


def run(work: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine to its end; Ctrl-C ends the command with exit code 130."""
    import asyncio

    try:
        asyncio.run(work)
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise typer.Exit(130) from None


def fail(message: str, *, usage: bool = False) -> NoReturn:
    """Ends the command with one line on stderr and exit code 1, or 2 for wrong usage."""
    typer.echo(f"weft: {message}", err=True)
    raise typer.Exit(2 if usage else 1)


def no_mesh(address: str) -> str:
    """The message for an address where nothing listens."""
    return f"no mesh at {address}: start one with `weft serve`"
