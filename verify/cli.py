"""The `weft verify` command: its flags. The implementation is imported when it runs."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="weft verify",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Kind(StrEnum):
    """How the candidate was made from its base, which selects the gates."""

    QUANTIZED = "quantized"
    CHANGED = "changed"


class Device(StrEnum):
    """The device that computes."""

    CPU = "cpu"
    CUDA = "cuda"


Base = Annotated[Path, typer.Argument(help="Folder of the 16-bit checkpoint.", exists=True, file_okay=False)]
Candidates = Annotated[
    list[Path] | None,
    typer.Argument(help="Folders of checkpoints made from the base.", exists=True, file_okay=False),
]
Drafts = Annotated[
    list[str] | None,
    typer.Option(help="draft:MODEL or heads:PATH: how often the base accepts its guesses, by depth; repeatable."),
]


class Format(StrEnum):
    """How a worker rounds weights."""

    INT8 = "int8"
    INT4 = "int4"
    FP8 = "fp8"
    NF4 = "nf4"


Rounded = Annotated[
    list[Format] | None,
    typer.Option(help="Of an encoder: compare it with itself, its weights rounded so as they load; repeatable."),
]
Depth = Annotated[int, typer.Option(min=1, max=8, help="Guesses a step of each --draft.")]
MadeHow = Annotated[Kind, typer.Option(help="quantized: the same network in fewer bits; changed: pruned or distilled.")]
LeastCosine = Annotated[float | None, typer.Option(help="Least cosine of final hidden states.", show_default="0.99")]
MostDivergence = Annotated[
    float | None, typer.Option(help="Most KL divergence, nats per token.", show_default="0.05; changed: 1")
]
MostPerplexity = Annotated[
    float | None, typer.Option(help="Most perplexity relative to the base.", show_default="1.05; changed: 2")
]
LeastAgreement = Annotated[
    float | None, typer.Option(help="Least share of equal most likely tokens.", show_default="0.85")
]
MostGainError = Annotated[
    float | None, typer.Option(help="Most gain error of a layer's part or the head.", show_default="0.015")
]
MostRowError = Annotated[
    float | None, typer.Option(help="Most error of a weight's row, over the median row's.", show_default="5")
]
MostRowGainError = Annotated[
    float | None, typer.Option(help="Most gain error of a row or group of a weight.", show_default="0.15")
]
HeldOutText = Annotated[
    Path | None, typer.Option(help="File or folder of held-out text.", exists=True, show_default="stories")
]
Windows = Annotated[int, typer.Option(min=1, help="Windows of held-out text.")]
Length = Annotated[int, typer.Option(min=32, help="Tokens of each window.")]
Answers = Annotated[int, typer.Option(min=0, help="Greedy answers to compare and time.")]
OnDevice = Annotated[Device, typer.Option(help="cpu computes in float32, cuda in bfloat16, as a worker does.")]
JsonFile = Annotated[Path | None, typer.Option(dir_okay=False, help="Write the result to this file.")]
HtmlFile = Annotated[Path | None, typer.Option(dir_okay=False, help="Write a report with plots to this file.")]


@app.command()
def verify(
    base: Base,
    candidates: Candidates = None,
    quantize: Rounded = None,
    draft: Drafts = None,
    depth: Depth = 4,
    kind: MadeHow = Kind.QUANTIZED,
    min_cosine: LeastCosine = None,
    max_kl: MostDivergence = None,
    max_perplexity_ratio: MostPerplexity = None,
    min_top1: LeastAgreement = None,
    max_gain_error: MostGainError = None,
    max_row_error: MostRowError = None,
    max_row_gain_error: MostRowGainError = None,
    text: HeldOutText = None,
    windows: Windows = 8,
    length: Length = 512,
    answers: Answers = 4,
    device: OnDevice = Device.CPU,
    json: JsonFile = None,
    html: HtmlFile = None,
) -> None:
    """Compare checkpoints with the model they were made from, and measure drafts. The exit code is 1 if a checkpoint
    fails a gate."""
    from compress import text as texts
    from compress.cli import errors
    from compress.progress import bars
    from report.console import console
    from services.worker.errors import CheckpointError
    from verify import command
    from verify.gates import LIMITS

    asked = {
        "cosine": min_cosine,
        "kl": max_kl,
        "perplexity_ratio": max_perplexity_ratio,
        "top1": min_top1,
        "gain_error": max_gain_error,
        "row_error": max_row_error,
        "row_gain_error": max_row_gain_error,
    }
    limits = {**LIMITS[kind.value], **{name: limit for name, limit in asked.items() if limit is not None}}
    program = "weft verify"
    for name in draft or ():
        if not name.startswith(("draft:", "heads:")):
            raise typer.BadParameter(f"{name!r} is neither draft:MODEL nor heads:PATH", param_hint="--draft")
    if not candidates and not draft and not quantize:
        raise typer.BadParameter(
            "name a checkpoint, or a --draft, or for an encoder --quantize", param_hint="CANDIDATES"
        )
    if _is_text_model(base):
        if draft or html:
            raise typer.BadParameter("an encoder has no drafts and no report: leave out --draft and --html")
        formats = [each.value for each in quantize or ()]
        least = {"cosine": limits.get("cosine", 0.99)}
        raise typer.Exit(
            _verify_encoder(base, candidates or [], formats, text, windows, length, device.value, least, json)
        )
    if quantize:
        raise typer.BadParameter("--quantize is for encoders: `weft compress` writes checkpoints of other models")
    with errors(program), bars() as progress:
        held_out = texts.windows(texts.read(text or texts.HELD_OUT), base, length, windows)
        try:
            result = command.measure(
                base, candidates or [], held_out, min(answers, windows), progress, device.value, draft or [], depth
            )
        except CheckpointError as error:
            typer.echo(f"{program}: {error}", err=True)
            raise typer.Exit(2) from None
    passes = command.judge(result, limits)
    command.show(result, console())
    with errors(program):
        command.save(result, json, html)
    raise typer.Exit(0 if passes else 1)


def _is_text_model(folder: Path) -> bool:
    from services.worker.errors import CheckpointError
    from services.worker.loader.sentence_folder import is_text_model

    try:
        return is_text_model(folder)
    except CheckpointError:
        return False  # loading it reports what is wrong


def _verify_encoder(
    base: Path,
    candidates: list[Path],
    formats: list[str],
    text: Path | None,
    windows: int,
    length: int,
    device: str,
    limits: dict[str, float],
    json: Path | None,
) -> int:
    """-> the exit code."""
    from compress import text as texts
    from compress.cli import errors
    from report.console import console
    from services.worker.errors import CheckpointError
    from verify import command, encoders

    program = "weft verify"
    with errors(program):
        try:
            held_out = texts.read(text or texts.HELD_OUT)
            result = encoders.measure(base, candidates, formats, held_out, windows, length, device)
        except CheckpointError as error:
            typer.echo(f"{program}: {error}", err=True)
            return 2
        passes = command.judge(result, limits)
        encoders.show(result, console())
        command.save(result, json, None)
    return 0 if passes else 1
