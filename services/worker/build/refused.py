"""Options that a model or its engine cannot honour, and why: each is refused by name at the start.

Knows options, no engine. A value that is the default, or asks for nothing, is honoured by all; the longest wait for a
batch is, too, by decoders, whose jobs wait for none.
"""

from collections.abc import Mapping

import structlog

from services.worker.errors import CheckpointError
from services.worker.options import EngineOptions
from services.worker.settings import WorkerSettings

log = structlog.get_logger("worker")

_PACE = dict.fromkeys(("paced_step_ms", "paced_prefill_rate", "paced_acceptance"), "only the paced engine has a pace")
_STORES = ("block_size", "kv_bytes", "kv_blocks", "host_kv_bytes", "kv_dtype", "kv_scales", "fetch_dtype")
_OF_DECODERS: Mapping[str, str] = {
    **dict.fromkeys(_STORES, "it stores no keys and values"),
    "chunk_tokens": "it computes a text in one step",
    "quantize_head": "it has no head that is rounded",
    "exact_inputs": "it rounds no inputs of products",
    **dict.fromkeys(("speculate", "speculate_depth", "draft_quantize"), "it has no tokens to guess"),
    **dict.fromkeys(("adapter_slots", "adapter_rank"), "it computes no adapters"),
    "expert_parallel": "it has no experts",
}
_ENCODER: Mapping[str, str] = {
    "deterministic": "a vector's last bits depend on its batch",
    **dict.fromkeys(("tensor_parallel", "pipeline_parallel"), "it computes on one rank"),
    **_OF_DECODERS,
    **_PACE,
}
_TORCH: Mapping[str, str] = {"exact_inputs": "it is for ENGINE=openvino", **_PACE}
_RUNTIME: Mapping[str, str] = {
    "deterministic": "its numbers depend on the batch",
    **dict.fromkeys(("speculate", "speculate_depth", "draft_quantize"), "it checks no guesses"),
    **dict.fromkeys(("quantize", "quantize_head"), "weights are rounded when they are exported"),
    "exact_inputs": "it multiplies as the exported file says, or with inputs in float32",
    "dtype": "it computes in the format of the exported file, or in float32",
    **dict.fromkeys(("kv_dtype", "kv_scales"), "it stores keys and values as it computes them"),
    **dict.fromkeys(("adapter_slots", "adapter_rank"), "it computes no adapters"),
    **dict.fromkeys(("tensor_parallel", "pipeline_parallel", "expert_parallel"), "it computes on one rank"),
    **_PACE,
}
_RUNTIME_ENCODER: Mapping[str, str] = {name: _RUNTIME[name] for name in ("quantize", "dtype")}
_HONOURED: Mapping[str, tuple[str, ...]] = {
    "compile": ("dtype",),
    "openvino": ("quantize", "quantize_head", "exact_inputs"),
}
"""Of these options of runtimes, those that one of them can honour."""


def of_encoder(options: EngineOptions) -> str:
    """The option that an encoder cannot honour, and why; empty if there is none."""
    return _first(options, _ENCODER)


def of_runtime_encoder(options: EngineOptions) -> str:
    """The option that an encoder can honour but in another runtime, and why; empty if there is none."""
    return _first(options, _RUNTIME_ENCODER)


def of_torch(options: EngineOptions) -> str:
    """The option that a decoder cannot honour with torch, on a CPU or a GPU, and why; empty if there is none."""
    missing = {
        "speculate_depth": "" if options.speculate else "nothing guesses: set WEFT_SPECULATE",
        "draft_quantize": "" if options.draft else "no draft model guesses: set WEFT_SPECULATE=draft:MODEL",
        "adapter_rank": "" if options.adapter_room else "no adapters are served: set MAX_LORAS",
        "fetch_dtype": "WEFT_DETERMINISTIC promises that fetched blocks change no bit" if options.deterministic else "",
    }
    return _first(options, {**_TORCH, **{name: reason for name, reason in missing.items() if reason}})


def of_runtime(options: EngineOptions, engine: str) -> str:
    """The option that a decoder cannot honour in another runtime, and why; empty if there is none."""
    honoured = _HONOURED.get(engine, ())
    return _first(options, {name: reason for name, reason in _RUNTIME.items() if name not in honoured})


def check(who: str, refusal: str) -> None:
    """Raises CheckpointError if there is an option that `who` cannot honour."""
    if refusal:
        raise CheckpointError(f"{who} cannot honour {refusal}")


def without_decoders(settings: WorkerSettings) -> WorkerSettings:
    """Settings of several models for one that is an encoder: what only decoders have is left out, and logged."""
    foreign = _asked(settings, _OF_DECODERS)
    if not foreign:
        return settings
    log.info("settings for other models are left out", names=foreign)
    fields = type(settings).model_fields
    return settings.model_copy(update={name: fields[name].default for name in foreign})


def _first(options: EngineOptions, reasons: Mapping[str, str]) -> str:
    return next((f"{name}: {reasons[name]}" for name in _asked(options, reasons)), "")


def _asked(options: EngineOptions, names: Mapping[str, str]) -> list[str]:
    """Those of these options that ask for something other than the default does."""
    fields = type(options).model_fields
    return [name for name in names if (value := getattr(options, name)) and value != fields[name].default]
