"""Finds the draft model that the options name, and checks that it can guess for the served one. Knows no device."""

import json
from pathlib import Path
from typing import Any

from services.worker.errors import CheckpointError
from services.worker.loader import checkpoint
from services.worker.loader.config import load_config
from services.worker.models.config import ModelConfig
from services.worker.options import EngineOptions

_INT4_INPUTS = 128
"""Inputs that share a scale of int4 where the kernels for few rows read it fastest."""
_TOKENIZER = "tokenizer.json"


def draft_options(options: EngineOptions) -> EngineOptions:
    """The options with which the draft model is loaded: its weights as its checkpoint has them, or rounded as
    draft_quantize says; its keys and values in its own format."""
    changed: dict[str, object] = {
        "quantize": options.draft_quantize,
        "quantize_head": None,
        "kv_dtype": "auto",
        "kv_scales": "checkpoint",
    }
    return options.model_copy(update=changed)


def draft_head(options: EngineOptions, width: int) -> str | None:
    """The format that the head of a draft model of this width is rounded to, one in which products read it as it is:
    guesses need not be exact, and the head may be half of what each of them reads. None: it stays as it is."""
    kind = options.draft_quantize
    if kind is None:
        return None
    if not options.on_gpu:
        return "int8"
    if options.deterministic or options.numerics.dtype == "float32":
        return None
    return kind if kind in ("int8", "fp8") or (kind == "int4" and width % _INT4_INPUTS == 0) else "int8"


def locate_draft(options: EngineOptions, served_dir: Path, served: ModelConfig) -> Path:
    """The folder of the draft model. Raises CheckpointError if its vocabulary is not that of the served model."""
    try:
        found = checkpoint.locate(options.draft)
        config = load_config(found)
    except CheckpointError as error:
        raise CheckpointError(f"the draft model: {error}") from None
    if config.vocab_size != served.vocab_size:
        raise CheckpointError(
            f"the draft model has a vocabulary of {config.vocab_size} tokens, the served model one of "
            f"{served.vocab_size}: a draft must have the same"
        )
    if _vocabulary(found) != _vocabulary(served_dir):
        raise CheckpointError("the draft model's tokenizer is not that of the served model: a draft must have the same")
    return found


def _vocabulary(place: Path) -> Any:
    """What the ids of a checkpoint mean according to its tokenizer.json."""
    path = place / _TOKENIZER
    if not path.is_file():
        return None
    try:
        settings = json.loads(path.read_bytes())
        return settings["model"].get("vocab"), settings.get("added_tokens")
    except (ValueError, KeyError, AttributeError, TypeError):
        raise CheckpointError(f"{_TOKENIZER} cannot be read") from None
