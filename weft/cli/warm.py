"""The command that compiles a model's kernels before its first start: warm. Knows names of a worker's settings."""

import os
import sys
from typing import Annotated

import typer

from weft.cli.serve import KvDtype, KvScales, MaxBatchSize, MaxSeqLength, Quantize, _model_path, _one_of, _tokens

Model = Annotated[
    str, typer.Option(envvar="MODEL_NAME", help="Folder of a checkpoint, or name on the hub.", show_default=False)
]


def warm(
    model: Model,
    max_batch_size: MaxBatchSize = None,
    max_seq_length: MaxSeqLength = None,
    quantize: Quantize = None,
    kv_dtype: KvDtype = None,
    kv_scales: KvScales = None,
) -> None:
    """Compile a model's GPU kernels now, so that `weft serve` with the same options starts without compiling."""
    settings = {
        "MODEL_NAME": _model_path(model),
        "MAX_BATCH_SIZE": max_batch_size,
        "MAX_SEQ_LENGTH": _tokens(max_seq_length),
        "QUANTIZE": _one_of("quantize", quantize),
        "KV_DTYPE": _one_of("kv_dtype", kv_dtype),
        "KV_SCALES": _one_of("kv_scales", kv_scales),
    }
    os.environ.update({name: str(value) for name, value in settings.items() if value is not None})
    # `-m` alone would import from the current folder, whatever lies there.
    path = [] if {"", os.getcwd()} & set(sys.path) else ["-P"]
    os.execv(sys.executable, [sys.executable, *path, "-m", "services.worker.warm"])
