"""The network that is compressed, transformers' own, in float32 unless asked, and the text on its way through it.

Legend: W windows, T tokens of a window, C width, K inputs of a linear.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.utils import logging

from compress.base import files
from compress.base.experts import expert_linears, split_experts
from compress.base.linears import LINEARS, READERS
from compress.errors import CompressError

_KINDS = ("llama", "mistral", "qwen2", "qwen3")
_SPARSE_KINDS = ("mixtral", "qwen3_moe")
_KNOWN = "known are Llama, Mistral, Qwen2, Qwen3, Mixtral and Qwen3-MoE"
_COMPLAINTS: Mapping[str, str] = {
    "missing_keys": "is missing",
    "mismatched_keys": "has not the shape that config.json says",
    "unexpected_keys": "is not part of this architecture",
}
_LARGEST = 1 << 31
_LONGEST_REASON = 300
_WIDE, _WIDE_GROUP, _NARROW_GROUP = 2048, 128, 32
SEEN = 32
"""Windows that methods are calibrated on before training; training uses all."""


def load(folder: Path, *, with_experts: bool = False, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load a complete checkpoint of a supported architecture in this dtype on the CPU. with_experts: mixtures of
    experts, too, whose experts are split (`compress.base.experts`). Raises CompressError."""
    config = read_config(folder)
    _check_kind(folder, config, with_experts)
    if config.get("quantization_config"):
        raise CompressError(f"{folder} is quantized already: compress the model that it was made from")
    files.check(folder)
    _check_size(folder, config)
    _quiet()
    maker: Any = AutoModelForCausalLM
    how = {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        loaded: tuple[PreTrainedModel, dict[str, Any]] = maker.from_pretrained(folder, **how)
    except Exception as error:  # of any kind: config.json goes to the library unread
        reason = " ".join(str(error).split())[:_LONGEST_REASON] or type(error).__name__
        raise CompressError(f"{folder} cannot be loaded: {reason}") from None
    model, info = loaded
    _check_whole(folder, model, info)
    model.train(False)
    split_experts(layers_of(model), str(config.get("model_type")))
    return model


def _check_whole(folder: Path, model: PreTrainedModel, info: Mapping[str, Any]) -> None:
    """Raises CompressError where transformers would only warn and use random numbers."""
    for what, complaint in _COMPLAINTS.items():
        for found in sorted(info[what], key=str):
            raise CompressError(f"{folder}: tensor {found if isinstance(found, str) else found[0]} {complaint}")
    for name, weight in model.named_parameters():
        if not bool(weight.detach().sum().isfinite()):
            raise CompressError(f"{folder}: tensor {name} holds numbers that are not finite")


def read_config(folder: Path) -> dict[str, Any]:
    """The content of config.json. Raises CompressError."""
    if not (folder / "config.json").exists():
        raise CompressError(f"no checkpoint in {folder}: config.json is missing")
    return files.read_json(folder / "config.json")


def _check_kind(folder: Path, config: Mapping[str, Any], with_experts: bool = False) -> None:
    """Raises CompressError for an unsupported architecture."""
    kind = config.get("model_type")
    if kind in _SPARSE_KINDS:
        if not with_experts:
            methods = "int8 and fp8 without calibration alone"
            raise CompressError(f"{folder}: mixtures of experts are compressed by {methods}")
    elif kind not in _KINDS:
        raise CompressError(f"{folder}: model_type {config.get('model_type')} is not supported; {_KNOWN}")


def _sizes(folder: Path, config: Mapping[str, Any], *names: str) -> list[int]:
    """Positive integers of config.json. Raises CompressError."""
    sizes = []
    for name in names:
        size = config.get(name)
        if type(size) is not int or not 0 < size <= _LARGEST:
            raise CompressError(f"{folder}: config.json: {name} must be a positive whole number; {_KNOWN}")
        sizes.append(size)
    return sizes


def _check_size(folder: Path, config: Mapping[str, Any]) -> None:
    """Raises CompressError before memory is allocated if config.json describes more numbers than the files hold."""
    names = ("hidden_size", "vocab_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    width, tokens, neurons, layers, _ = _sizes(folder, config, *names)
    described, held = (
        width * (tokens + 3 * neurons * layers),
        sum(f.stat().st_size for f in folder.glob("*.safetensors")),
    )
    if held and described > held:
        raise CompressError(
            f"{folder}: config.json speaks of {described:,} numbers or more, its files have {held:,} bytes"
        )


def group_for(folder: Path, asked: int | None) -> int:
    """Inputs that share a scale of INT4; smaller groups for narrow networks.

    Raises CompressError where the inputs of a linear do not part into such groups.
    """
    config = read_config(folder)
    _check_kind(folder, config)
    width, heads, neurons = _sizes(folder, config, "hidden_size", "num_attention_heads", "intermediate_size")
    (dim,) = _sizes(folder, {"head_dim": config.get("head_dim") or width // heads}, "head_dim")
    inputs = sorted({width, heads * dim, neurons})
    wide = width >= _WIDE and not any(each % _WIDE_GROUP for each in inputs)
    group = asked or (_WIDE_GROUP if wide else _NARROW_GROUP)
    if group % 2:
        raise CompressError(f"groups of {group} inputs are odd, and a byte holds two")
    if any(each % group for each in inputs):
        raise CompressError(f"groups of {group} do not divide the inputs of {folder}'s linears: {inputs}")
    return group


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers, first to last."""
    return list(model.get_submodule("model.layers").children())


def outside_layers(model: PreTrainedModel) -> dict[str, Tensor]:
    """Embedding, final norm, and the head unless it is tied."""
    return {name: weight for name, weight in model.named_parameters() if not name.startswith("model.layers.")}


def stored_dtype(config: dict[str, Any]) -> torch.dtype:
    """The number format of a checkpoint's weights. Raises CompressError."""
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise CompressError(f"config.json: dtype {name} is not supported; supported are bfloat16, float16 and float32")
    return dtype


def linears_of(layer: nn.Module) -> tuple[str, ...]:
    """The names of the linears that are rounded: with experts those of attention and of each expert."""
    experts = expert_linears(layer)
    return (*(name for name in LINEARS if not (experts and name.startswith("mlp."))), *experts)


def linear(layer: nn.Module, name: str) -> nn.Linear:
    """A linear of a layer by its name."""
    found = layer.get_submodule(name)
    assert isinstance(found, nn.Linear), name
    return found


def head_dim(layer: nn.Module) -> int:
    """The head dimension of a layer."""
    found = layer.get_submodule("self_attn").head_dim
    assert isinstance(found, int), found
    return found


def compute_device() -> torch.device:
    """The device of computations: the GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextlib.contextmanager
def on_device(layer: nn.Module) -> Iterator[None]:
    """Move the layer to the compute device, and back to host memory afterwards: large networks do not fit on the
    device."""
    layer.to(compute_device())
    try:
        yield
    finally:
        layer.to("cpu")


@dataclass(frozen=True, slots=True)
class Moments:
    """Statistics of the inputs of a linear."""

    gram: Tensor
    """float32 [K, K]: mean of x x^T."""
    mean: Tensor
    """float32 [K]: mean of |x|."""
    largest: Tensor
    """float32 [K]: max of |x|."""


@dataclass(frozen=True, slots=True)
class LayerStats:
    """Statistics of a layer from calibration."""

    inputs: Mapping[str, Moments]
    """Linear name -> statistics of its inputs."""
    key_max: float
    """The largest |key| after rotation."""
    value_max: float


class Stream:
    """The residual stream of all calibration windows, advanced layer by layer. Observed layers must be `on_device`."""

    def __init__(self, model: PreTrainedModel, windows_WT: Tensor) -> None:
        self.layers = layers_of(model)
        self.hidden_WTC = torch.empty(0)
        """Compute the embeddings of all windows."""
        self._how: list[dict[str, Any]] = [{} for _ in self.layers]
        self._begin(model, windows_WT)

    @torch.no_grad()
    def _begin(self, model: PreTrainedModel, windows_WT: Tensor) -> None:
        """Record the arguments, including masks and rotations, with which the model calls its layers."""

        def note(index: int, kwargs: dict[str, Any]) -> None:
            self._how[index] = {name: _brought(value) for name, value in kwargs.items() if name not in _OF_A_CACHE}

        hooks = [
            layer.register_forward_pre_hook(lambda _, __, kwargs, index=index: note(index, kwargs), with_kwargs=True)
            for index, layer in enumerate(self.layers)
        ]
        model(input_ids=windows_WT[:1], use_cache=False)
        for hook in hooks:
            hook.remove()
        embedding = model.get_input_embeddings()
        assert embedding is not None
        self.go_on_from(embedding(windows_WT))

    def go_on_from(self, hidden_WTC: Tensor) -> None:
        """Resume from a saved stream."""
        self.hidden_WTC = hidden_WTC.to(compute_device())

    def advance(self, index: int) -> None:
        """Advance the stream through the layer's current weights."""
        self.hidden_WTC = torch.cat(list(self._through(index)))

    def look(self, index: int) -> LayerStats:
        """Statistics of the layer's linears with its current weights. The stream stays before the layer."""
        layer, sums = self.layers[index], {readers[0]: _Sums() for readers in READERS.values()}
        hooks = [
            linear(layer, name).register_forward_pre_hook(lambda _, args, each=each: each.add(args[0]))
            for name, each in sums.items()
        ]
        keys, values = 0.0, 0.0
        for cache in self._caches(index):
            keys = max(keys, cache.layers[index].keys.abs().max().item())
            values = max(values, cache.layers[index].values.abs().max().item())
        for hook in hooks:
            hook.remove()
        inputs = {name: sums[readers[0]].moments() for readers in READERS.values() for name in readers}
        return LayerStats(inputs, keys, values)

    @torch.no_grad()
    def _through(self, index: int) -> Iterator[Tensor]:
        for hidden in torch.split(self.hidden_WTC, 1):
            yield self.layers[index](hidden, **self._how[index])

    @torch.no_grad()
    def _caches(self, index: int) -> Iterator[Any]:
        for hidden in torch.split(self.hidden_WTC, 1):
            cache = DynamicCache()
            self.layers[index](hidden, **self._how[index], past_key_values=cache, use_cache=True)
            yield cache


class _Sums:
    """Running sums of moments."""

    def __init__(self) -> None:
        self._gram: Tensor | float = 0.0
        self._total: Tensor | float = 0.0
        self._largest = torch.zeros(())
        self._rows = 0

    def add(self, x: Tensor) -> None:
        rows = x.flatten(0, -2).float()
        sizes = rows.abs()
        self._gram = self._gram + rows.T @ rows
        self._total = self._total + sizes.sum(0)
        self._largest = torch.maximum(self._largest, sizes.amax(0))
        self._rows += len(rows)

    def moments(self) -> Moments:
        assert isinstance(self._gram, Tensor)
        if not bool(self._gram.isfinite().all()):
            raise CompressError("a layer computes numbers that are not finite")
        assert isinstance(self._total, Tensor)
        return Moments(self._gram / self._rows, self._total / self._rows, self._largest)


_OF_A_CACHE = ("past_key_values", "use_cache")


def _brought(value: Any) -> Any:
    """An argument of a layer with its tensors moved to the compute device."""
    if isinstance(value, tuple):
        return tuple(map(_brought, value))
    return value.to(compute_device()) if isinstance(value, Tensor) else value


def _quiet() -> None:
    """Silence transformers: runs have progress bars and error lines of their own."""
    its: Any = logging
    its.disable_progress_bar()
    its.set_verbosity_error()
