"""The `weft compress` command: methods and flags. The implementation is imported when a method runs."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from compress.choices import Granularity, Pattern
from compress.progress import Progress, bars

if TYPE_CHECKING:
    from torch import Tensor

    from compress.quantize.recipe import Recipe

app = typer.Typer(
    name="weft compress",
    help="Compress a checkpoint. Each method writes a Hugging Face folder; an interrupted run can be resumed.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


Base = Annotated[Path, typer.Argument(help="Folder of the checkpoint.", exists=True, file_okay=False)]
Out = Annotated[Path, typer.Argument(help="Folder to write.")]
Text = Annotated[
    Path | None,
    typer.Option(
        help="Calibration text: a file or a folder. Use text like the model's inputs.",
        exists=True,
        show_default="stories",
    ),
]
Windows = Annotated[int, typer.Option(min=1, help="Windows of calibration text.")]
Length = Annotated[int, typer.Option(min=16, help="Tokens of each window.")]
Group = Annotated[
    int | None,
    typer.Option(min=8, help="Inputs that share a scale.", show_default="32; from a width of 2,048 on 128"),
]
Symmetric = Annotated[bool, typer.Option(help="Symmetric quantization, without zero points.")]
WINDOWS, LENGTH, HALF = 32, 512, 0.5


@app.command()
def int8(
    base: Base,
    out: Out,
    dynamic: Annotated[
        bool, typer.Option("--dynamic", help="Quantize inputs too, with a scale per token (W8A8, fast on CPUs).")
    ] = False,
    per_tensor: Annotated[
        bool, typer.Option("--per-tensor", help="One scale per weight instead of one per output.")
    ] = False,
) -> None:
    """INT8 weights, rounded to nearest; with --dynamic also INT8 inputs (W8A8)."""
    from compress.quantize.int8 import Int8

    with _making(base, out) as progress:
        _quantize(base, out, progress, Int8(dynamic, per_tensor))


@app.command()
def fp8(
    base: Base,
    out: Out,
    granularity: Annotated[Granularity, typer.Option(help="What has a scale of its own.")] = Granularity.CHANNEL,
    static: Annotated[
        bool, typer.Option("--static", help="Calibrated static input scales instead of one per token.")
    ] = False,
    kv: Annotated[bool, typer.Option("--kv", help="Also calibrate scales of keys and values.")] = False,
    text: Text = None,
    windows: Windows = WINDOWS,
    length: Length = LENGTH,
) -> None:
    """FP8 weights and inputs."""
    from compress.quantize.fp8 import Fp8

    if static and granularity is Granularity.BLOCK:
        _fail("block-wise FP8 has dynamic inputs: leave --static out")
    with _making(base, out) as progress:
        _quantize(base, out, progress, Fp8(granularity, static, kv), text, windows, length)


@app.command()
def awq(
    base: Base,
    out: Out,
    group: Group = None,
    symmetric: Symmetric = False,
    compensate: Annotated[
        bool, typer.Option(help="Let later columns compensate rounding errors of earlier ones.")
    ] = True,
    text: Text = None,
    windows: Windows = WINDOWS,
    length: Length = LENGTH,
) -> None:
    """INT4 weights; weights of large inputs are scaled up before rounding (AWQ)."""
    from compress.base.network import group_for
    from compress.quantize.awq import Awq

    with _making(base, out) as progress:
        _quantize(base, out, progress, Awq(group_for(base, group), symmetric, compensate), text, windows, length)


@app.command()
def gptq(
    base: Base,
    out: Out,
    group: Group = None,
    symmetric: Symmetric = True,
    act_order: Annotated[
        bool, typer.Option("--act-order", help="Round columns with the largest inputs first.")
    ] = False,
    text: Text = None,
    windows: Windows = WINDOWS,
    length: Length = LENGTH,
) -> None:
    """INT4 weights; each column compensates the errors of those before it (GPTQ)."""
    from compress.base.network import group_for
    from compress.quantize.gptq import Gptq

    with _making(base, out) as progress:
        _quantize(base, out, progress, Gptq(group_for(base, group), symmetric, act_order), text, windows, length)


@app.command()
def smoothquant(
    base: Base,
    out: Out,
    strength: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the outliers' range that moves from inputs to weights.")
    ] = 0.5,
    text: Text = None,
    windows: Windows = WINDOWS,
    length: Length = LENGTH,
) -> None:
    """INT8 weights and inputs, with outliers of inputs moved to the weights (SmoothQuant)."""
    from compress.quantize.smoothquant import SmoothQuant

    with _making(base, out) as progress:
        _quantize(base, out, progress, SmoothQuant(strength), text, windows, length)


Steps = Annotated[int, typer.Option(min=0, help="Training steps.")]
Batch = Annotated[int, typer.Option(min=1, help="Windows per training step.")]
Rate = Annotated[float, typer.Option(help="Learning rate.")]


@app.command()
def qat(
    base: Base,
    out: Out,
    group: Group = None,
    steps: Steps = 100,
    batch: Batch = 4,
    learning_rate: Rate = 2e-4,
    text: Text = None,
    length: Length = LENGTH,
) -> None:
    """INT4 weights: GPTQ, then quantization-aware training."""
    from compress.base.network import group_for
    from compress.quantize.qat import qat as train_rounded
    from compress.training.run import Plan

    with _making(base, out) as progress:
        windows, plan = _windows(base, text, None, length), Plan(steps, batch, learning_rate)
        train_rounded(base, out, windows, plan, progress, group=group_for(base, group))


@app.command()
def prune(
    base: Base,
    out: Out,
    sparsity: Annotated[float, typer.Option(min=0, max=0.99, help="Share of weights to set to zero.")] = HALF,
    pattern: Annotated[
        Pattern, typer.Option(help="2:4 keeps two of every four adjacent weights.")
    ] = Pattern.UNSTRUCTURED,
    wanda: Annotated[
        bool, typer.Option("--wanda/--magnitude", help="Rank by weight times input (Wanda) or by weight alone.")
    ] = True,
    compensate: Annotated[bool, typer.Option(help="Let remaining weights compensate removed ones.")] = True,
    steps: Steps = 0,
    batch: Batch = 4,
    learning_rate: Rate = 5e-4,
    text: Text = None,
    length: Length = LENGTH,
) -> None:
    """Set the least important weights to zero; with --steps, then distill from the base."""
    from compress.prune.sparse import PruneScore
    from compress.prune.sparse import prune as cut
    from compress.training.run import Plan

    if pattern is Pattern.TWO_OF_FOUR and sparsity != HALF:
        _fail(f"2:4 is a sparsity of {HALF}: leave --sparsity {sparsity} out, or the pattern")
    with _making(base, out) as progress:
        windows, plan = _windows(base, text, None, length), Plan(steps, batch, learning_rate)
        cut(base, out, windows, PruneScore(sparsity, pattern, wanda, compensate), plan, progress)


@app.command()
def shrink(
    base: Base,
    out: Out,
    neurons: Annotated[float, typer.Option(min=0, max=0.99, help="Share of each MLP's neurons to remove.")] = 0.25,
    kv_heads: Annotated[int, typer.Option(min=0, help="Key/value heads to remove, with their query heads.")] = 0,
    layers: Annotated[int, typer.Option(min=0, help="Layers to remove.")] = 0,
    steps: Steps = 100,
    batch: Batch = 4,
    learning_rate: Rate = 1e-3,
    text: Text = None,
    length: Length = LENGTH,
) -> None:
    """Remove the least important neurons, heads and layers, then distill from the base."""
    from compress.prune.shrink import Cut
    from compress.prune.shrink import shrink as cut
    from compress.training.run import Plan

    with _making(base, out) as progress:
        windows, plan = _windows(base, text, None, length), Plan(steps, batch, learning_rate)
        cut(base, out, windows, Cut(neurons, kv_heads, layers), plan, progress)


@app.command()
def distill(
    base: Annotated[Path, typer.Argument(metavar="TEACHER", help="Folder of the teacher.", exists=True)],
    student: Annotated[Path, typer.Argument(help="Folder of the student, with the same tokenizer.", exists=True)],
    out: Out,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start from random weights.")] = False,
    temperature: Annotated[float, typer.Option(min=0.1, help="Temperature of both distributions.")] = 1.0,
    hard: Annotated[
        float, typer.Option(min=0, max=1, help="Weight of the cross entropy with the text in the loss.")
    ] = 0.0,
    drafting: Annotated[
        float, typer.Option(min=0, max=1, help="Weight of the rate of rejected drafts in the loss.")
    ] = 0.0,
    parallel: Annotated[
        int | None, typer.Option(min=2, max=8, help="Tokens to guess in one pass (PARD).", show_default="one")
    ] = None,
    mask_token: Annotated[
        int | None,
        typer.Option(
            help="With --parallel: id of the token that stands for unknown ones.",
            show_default="one that the tokenizer lacks, else that which pads or ends texts",
        ),
    ] = None,
    steps: Steps = 1000,
    batch: Batch = 16,
    learning_rate: Rate = 1e-3,
    text: Text = None,
    length: Length = LENGTH,
) -> None:
    """Train a student on its teacher's distributions, for example a draft model."""
    from compress.training.distill import distill as teach
    from compress.training.run import Plan

    if hard + drafting > 1:
        _fail(f"--hard and --drafting are shares of one loss: {hard} + {drafting} is more than 1")
    if mask_token is not None and parallel is None:
        _fail(f"--mask-token {mask_token} needs --parallel: only a parallel draft model reads masks")
    with _making(base, out) as progress:
        windows, plan = _windows(base, text, None, length), Plan(steps, batch, learning_rate, warmup=100)
        aims: dict[str, Any] = {"temperature": temperature, "hard": hard, "drafting": drafting}
        aims |= {"guesses": parallel, "mask_token": mask_token}
        teach(base, student, out, windows, plan, progress, fresh=fresh, **aims)


@app.command()
def heads(
    base: Base,
    out: Out,
    depth: Annotated[int, typer.Option(min=1, max=8, help="Guesses over which the heads are unrolled.")] = 4,
    neurons: Annotated[int | None, typer.Option(min=1, help="Neurons of the MLP.", show_default="the base's")] = None,
    vocabulary: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Train an output head for this number of frequent tokens.",
            show_default="the base's head, all tokens",
        ),
    ] = None,
    steps: Steps = 1000,
    batch: Batch = 8,
    learning_rate: Rate = 1e-3,
    text: Text = None,
    windows: Annotated[int | None, typer.Option(min=1, help="Windows of text.", show_default="all")] = None,
    length: Length = 256,
) -> None:
    """Draft heads: a layer that guesses the base's next tokens from its hidden states (EAGLE-3)."""
    from compress.heads.train import HeadsPlan
    from compress.heads.train import heads as teach
    from compress.training.run import Plan

    with _making(base, out) as progress:
        plan = Plan(steps, batch, learning_rate, warmup=50)
        aim = HeadsPlan(depth, neurons, vocabulary)
        teach(base, out, _windows(base, text, windows, length), aim, plan, progress)


@contextlib.contextmanager
def _making(base: Path, out: Path) -> Iterator[Progress]:
    """Run with progress bars; print the sizes at the end."""
    with errors(), bars() as progress:
        yield progress
    typer.echo(f"{out}: {_bytes(out):,} bytes of weights, {_bytes(out) / _bytes(base):.1%} of {base}")


@contextlib.contextmanager
def errors(program: str = "weft compress") -> Iterator[None]:
    """Turn errors into one line on stderr and exit code 1."""
    from compress.errors import CompressError

    try:
        yield
    except CompressError as error:
        _fail(str(error), program)
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), program)
    except KeyboardInterrupt:
        typer.echo("interrupted: the same command goes on from here", err=True)
        raise typer.Exit(130) from None


def _quantize(
    base: Path,
    out: Path,
    progress: Progress,
    recipe: "Recipe",
    text: Path | None = None,
    windows: int = WINDOWS,
    length: int = LENGTH,
) -> None:
    from compress.quantize.run import quantize

    quantize(base, out, recipe, _windows(base, text, windows, length) if recipe.calibrated else None, progress)


def _windows(base: Path, text: Path | None, count: int | None, length: int) -> "Tensor":
    from compress import text as texts

    return texts.windows(texts.read(text or texts.CALIBRATION), base, length, count)


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _fail(message: str, program: str = "weft compress") -> NoReturn:
    typer.echo(f"{program}: {message}", err=True)
    raise typer.Exit(1)
