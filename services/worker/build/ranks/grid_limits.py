"""What a grid of ranks cannot do yet, and what needs one, refused by name at the start. Knows options, no model."""

from services.worker.errors import CheckpointError
from services.worker.options import EngineOptions

_ENGINES = ("auto", "torch", "gpu")


def check_grid(options: EngineOptions) -> None:
    """Raises CheckpointError for an option that ranks do not support, and for one that needs several of them."""
    if options.expert_parallel and options.tensor_parallel == 1:
        raise CheckpointError("WEFT_EXPERT_PARALLEL spreads experts over tensor ranks: set WEFT_TENSOR_PARALLEL, too")
    if options.tensor_parallel * options.pipeline_parallel == 1:
        return
    for wanted, what in (
        (options.engine not in _ENGINES, f"ENGINE={options.engine}: they compute with plain torch or on GPUs"),
        (options.on_gpu and options.host_kv_bytes > 0, "WEFT_HOST_KV_BYTES on GPUs"),
        (
            bool(options.heads or (options.speculate and options.pipeline_parallel > 1)),
            f"WEFT_SPECULATE={options.speculate}",
        ),
        (options.kv_scales != "checkpoint", f"KV_SCALES={options.kv_scales}"),
    ):
        if wanted:
            grid = f"tensor {options.tensor_parallel} x pipeline {options.pipeline_parallel}"
            raise CheckpointError(f"{grid} ranks do not support {what}")
