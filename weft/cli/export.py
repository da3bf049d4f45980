"""The command that writes a model for another runtime: export. Knows names of formats, no exporter."""

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.serve import _model_path


class Form(StrEnum):
    """What can be written."""

    ONNX = "onnx"
    TORCH = "torch"


def export(
    form: Annotated[Form, typer.Argument(metavar="FORMAT", help=f"{', '.join(Form)}.", show_default=False)],
    model: Annotated[str, typer.Argument(help="Folder of a checkpoint, or name on the hub.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="Folder to write, which must be empty or absent.", show_default=False)],
) -> None:
    """Write a model's decoder or encoder for another runtime; `weft serve --engine` computes it."""
    # `-m` alone would import from the current folder, whatever lies there.
    path = [] if {"", os.getcwd()} & set(sys.path) else ["-P"]
    command = [sys.executable, *path, "-m", "services.worker.export", form, _model_path(model, "MODEL"), str(out)]
    os.execv(sys.executable, command)
