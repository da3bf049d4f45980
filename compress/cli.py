"""The `weft compress` command: its methods and flags. What they do is imported when they run."""

import contextlib
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from torch import Tensor

    from compress.quantize import Progress
    from compress.recipe import Recipe

app = typer.Typer(
    name="weft compress",
    help="Make a checkpoint smaller. Each method writes an ordinary Hugging Face folder; an interrupted run goes on.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Granularity(StrEnum):
    """What shares a scale in FP8."""

    CHANNEL = "channel"
    TENSOR = "tensor"
    BLOCK = "block"


Base = Annotated[Path, typer.Argument(help="Folder of the checkpoint.", exists=True, file_okay=False)]
Out = Annotated[Path, typer.Argument(help="Folder to write.")]
Text = Annotated[
    Path | None,
    typer.Option(help="File or folder of text like what the model will read.", exists=True, show_default="stories"),
]
Windows = Annotated[int, typer.Option(min=1, help="Windows of text to calibrate on.")]
Length = Annotated[int, typer.Option(min=16, help="Tokens of each window.")]
Group = Annotated[int, typer.Option(min=8, help="Inputs that share a scale.")]
Symmetric = Annotated[bool, typer.Option(help="Steps without zero points.")]
WINDOWS, LENGTH = 32, 512


@app.command()
def int8(
    base: Base,
    out: Out,
    dynamic: Annotated[bool, typer.Option("--dynamic", help="Round inputs too, token by token: for CPUs.")] = False,
    per_tensor: Annotated[bool, typer.Option("--per-tensor", help="One scale for a whole weight.")] = False,
) -> None:
    """INT8 weights, rounded to nearest; with --dynamic W8A8."""
    from compress.int8 import Int8

    _quantize(base, out, Int8(dynamic, per_tensor))


@app.command()
def fp8(
    base: Base,
    out: Out,
    granularity: Annotated[Granularity, typer.Option(help="What shares a scale.")] = Granularity.CHANNEL,
    static: Annotated[
        bool, typer.Option("--static", help="Calibrated scales of inputs, not each token its own.")
    ] = False,
    kv: Annotated[bool, typer.Option("--kv", help="Calibrated scales of keys and values too.")] = False,
    text: Text = None,
    windows: Windows = WINDOWS,
    length: Length = LENGTH,
) -> None:
    """FP8 weights and inputs."""
    from compress.fp8 import Fp8

    if static and granularity is Granularity.BLOCK:
        _fail("block-wise FP8 has dynamic inputs: leave --static out")
    _quantize(base, out, Fp8(granularity.value, static, kv), text, windows, length)


@app.command()
def awq(
    base: Base,
    out: Out,
    group: Group = 64,
    symmetric: Symmetric = False,
    compensate: Annotated[bool, typer.Option(help="Columns make up for one another's errors.")] = True,
    text: Text = None,
    windows: Windows = WINDOWS,
    length: Length = LENGTH,
) -> None:
    """INT4 weights, those of large inputs scaled up before they are rounded (AWQ)."""
    from compress.awq import Awq

    _quantize(base, out, Awq(group, symmetric, compensate), text, windows, length)


@app.command()
def gptq(
    base: Base,
    out: Out,
    group: Group = 64,
    symmetric: Symmetric = True,
    act_order: Annotated[bool, typer.Option("--act-order", help="Largest inputs first.")] = False,
    text: Text = None,
    windows: Windows = WINDOWS,
    length: Length = LENGTH,
) -> None:
    """INT4 weights, each column making up for the errors of those before it (GPTQ)."""
    from compress.gptq import Gptq

    _quantize(base, out, Gptq(group, symmetric, act_order), text, windows, length)


@app.command()
def smoothquant(
    base: Base,
    out: Out,
    strength: Annotated[float, typer.Option(min=0, max=1, help="How much moves from inputs to weights.")] = 0.5,
    text: Text = None,
    windows: Windows = WINDOWS,
    length: Length = LENGTH,
) -> None:
    """INT8 weights and inputs, outliers smoothed away (SmoothQuant)."""
    from compress.smoothquant import SmoothQuant

    _quantize(base, out, SmoothQuant(strength), text, windows, length)


def _quantize(
    base: Path,
    out: Path,
    recipe: "Recipe",
    text: Path | None = None,
    windows: int = WINDOWS,
    length: int = LENGTH,
) -> None:
    from compress.quantize import quantize

    with errors(), progress() as told:
        quantize(base, out, recipe, _windows(base, text, windows, length) if recipe.calibrated else None, told)
    typer.echo(f"{out}: {_bytes(out):,} bytes of weights, {_bytes(out) / _bytes(base):.1%} of {base}")


@contextlib.contextmanager
def errors() -> Iterator[None]:
    """What keeps a model from being compressed, in one line."""
    from compress.errors import CompressError

    try:
        yield
    except CompressError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        typer.echo("interrupted: the same command goes on from here", err=True)
        raise typer.Exit(130) from None


@contextlib.contextmanager
def progress() -> Iterator["Progress"]:
    """A bar for each phase, on a terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    out = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=out, disable=not out.is_terminal) as bars:
        phases = {}

        def told(phase: str, done: int, total: int) -> None:
            if phase not in phases:
                phases[phase] = bars.add_task(phase, total=total)
            bars.update(phases[phase], completed=done)

        yield told


def _windows(base: Path, text: Path | None, count: int, length: int) -> "Tensor":
    from compress import text as texts

    return texts.windows(texts.read(text or texts.CALIBRATION), base, length, count)


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _fail(message: str) -> NoReturn:
    typer.echo(f"weft compress: {message}", err=True)
    raise typer.Exit(1)
