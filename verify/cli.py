"""The `weft verify` command: its flags. What it does is imported when it runs."""

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
    """What the candidate is to its base, which says what can be asked of it."""

    QUANTIZED = "quantized"
    CHANGED = "changed"


class Device(StrEnum):
    """What computes."""

    CPU = "cpu"
    CUDA = "cuda"


@app.command()
def verify(
    base: Annotated[Path, typer.Argument(help="Folder of the 16-bit checkpoint.", exists=True, file_okay=False)],
    candidates: Annotated[
        list[Path], typer.Argument(help="Folders of what was made from it, side by side.", exists=True, file_okay=False)
    ],
    kind: Annotated[
        Kind, typer.Option(help="quantized: the same network in fewer bits; changed: pruned or distilled.")
    ] = Kind.QUANTIZED,
    min_cosine: Annotated[float | None, typer.Option(help="Of final hidden states.", show_default="0.99")] = None,
    max_kl: Annotated[float | None, typer.Option(help="Nats a token.", show_default="0.05; changed: 1")] = None,
    max_perplexity_ratio: Annotated[
        float | None, typer.Option(help="Over the base's.", show_default="1.05; changed: 2")
    ] = None,
    min_top1: Annotated[float | None, typer.Option(help="Same likeliest token.", show_default="0.85")] = None,
    max_gain_error: Annotated[
        float | None, typer.Option(help="Of a layer's part or the head.", show_default="0.015")
    ] = None,
    max_row_error: Annotated[
        float | None, typer.Option(help="Of a weight's row, over its linear's median row.", show_default="5")
    ] = None,
    max_row_gain_error: Annotated[
        float | None, typer.Option(help="Of a row or group of a weight, beyond rounding.", show_default="0.15")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="File or folder of held-out text.", exists=True, show_default="stories")
    ] = None,
    windows: Annotated[int, typer.Option(min=1, help="Windows of text.")] = 8,
    length: Annotated[int, typer.Option(min=32, help="Tokens of each window.")] = 512,
    answers: Annotated[int, typer.Option(min=0, help="Greedy answers to compare and to time.")] = 4,
    device: Annotated[Device, typer.Option(help="As a worker serves there: cuda computes in bfloat16.")] = Device.CPU,
    json: Annotated[Path | None, typer.Option(help="Write the result there.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report with plots there.")] = None,
) -> None:
    """Prove that checkpoints are still the model they were made from. The exit code is 1 if one fails a gate."""
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
    with errors(program), bars() as told:
        held_out = texts.windows(texts.read(text or texts.HELD_OUT), base, length, windows)
        try:
            result = command.measure(base, candidates, held_out, min(answers, windows), told, device.value)
        except CheckpointError as error:
            typer.echo(f"{program}: {error}", err=True)
            raise typer.Exit(2) from None
    passes = command.judge(result, limits)
    command.show(result, console())
    with errors(program):
        command.save(result, json, html)
    raise typer.Exit(0 if passes else 1)
