"""Reads checkpoints of compressed-tensors, as llm-compressor writes them: packed INT4 and INT8, INT8 and FP8.

Knows the format's configuration and tensors, never how a product is computed.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import regex
import torch
from torch import Tensor

from kernels.quantized_weights import FP8, INT4_ZERO, Int4Weight, Int8Weight, QuantizedWeight, pack_int4
from services.worker.errors import CheckpointError
from services.worker.loader.formats.awq_gptq import order_of
from services.worker.loader.formats.fp8 import read_fp8
from services.worker.loader.formats.module_tensors import ModuleTensors, unpack_words

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense")
_INTEGERS = (torch.int32, torch.int64)
_LONGEST_PATTERN = 500
# Repetition counts may follow one character only: nested counts of groups would take exponential time.
_COUNT = re.compile(r"(?<![)\s])\{[0-9]{1,2}(,[0-9]{0,2})?\}")
_MATCH_S = 0.1


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the modules of one group of the configuration are quantized."""

    targets: tuple[str, ...]
    """Names, ends of names or `re:` patterns of modules; `Linear` stands for all."""
    kind: str
    """int or float."""
    bits: int
    """Bits of a weight's number."""
    group_size: int | None
    """Inputs that share a scale; None: a scale belongs to an output, to a block or to the whole weight."""
    symmetric: bool
    """Whether weights have no zero points."""
    inputs: str
    """How a module's inputs are rounded: none, static (one stored scale) or dynamic (a scale for each token)."""
    ordered: bool
    """Whether groups are formed of inputs in another order (act-order)."""

    @property
    def is_grouped_int8(self) -> bool:
        """Whether weights are 8-bit integers with a scale for each group of inputs."""
        return (self.kind, self.bits) == ("int", 8) and self.group_size is not None

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> "Scheme":
        """From an entry of config_groups. Raises CheckpointError."""
        weights, inputs = group.get("weights") or {}, group.get("input_activations")
        scheme = cls(
            targets=tuple(map(str, group.get("targets") or ())),
            kind=str(weights.get("type", "int")),
            bits=weights.get("num_bits", 8),
            group_size=weights.get("group_size") if weights.get("strategy") in (None, "group") else None,
            symmetric=weights.get("symmetric", True) is True,
            inputs="none" if inputs is None else "dynamic" if inputs.get("dynamic") else "static",
            ordered=weights.get("actorder") in (True, "group", "dynamic"),
        )
        scheme._check(weights, inputs or {})
        return scheme

    def _check(self, weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
        if not isinstance(self.group_size, int | None):
            raise CheckpointError(f"quantization_config: group_size {self.group_size} is not a number")
        if not isinstance(weights.get("symmetric", True), bool):
            raise CheckpointError(f"quantization_config: symmetric {weights['symmetric']} is neither true nor false")
        for target in self.targets:
            _pattern(target)
        strategy = weights.get("strategy") or ("group" if self.group_size else "tensor")
        named = f"{self.kind} weights of {self.bits} bits ({strategy})"
        strategies = {
            ("int", 4): ("group", "channel"),
            ("int", 8): ("tensor", "channel", "group"),
            ("float", 8): ("tensor", "channel", "block"),
        }
        if strategy not in strategies.get((self.kind, self.bits), ()):
            raise CheckpointError(f"quantization_config: {named} are not supported")
        if strategy == "block" and list(weights.get("block_structure") or ()) != [128, 128]:
            raise CheckpointError(f"quantization_config: blocks of {weights.get('block_structure')} are not supported")
        if self.bits == 8 and not self.symmetric:
            raise CheckpointError(f"quantization_config: asymmetric {named} are not supported")
        if self.inputs != "none" and (
            inputs.get("num_bits") != self.bits
            or inputs.get("type", "int") != self.kind
            or not inputs.get("symmetric", True)
            or (self.kind, self.inputs) == ("int", "static")
            or self.bits == 4
            or (self.kind, strategy) == ("int", "group")
        ):
            asymmetric = "" if inputs.get("symmetric", True) else "asymmetric "
            rounded = f"{asymmetric}{self.inputs} {inputs.get('type', 'int')} inputs of {inputs.get('num_bits')} bits"
            raise CheckpointError(f"quantization_config: {named} with {rounded} are not supported")


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """`quant_method: compressed-tensors`."""

    schemes: tuple[Scheme, ...]
    mark = ("weight_packed", "weight_scale")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "CompressedTensors":
        """From quantization_config. Raises CheckpointError."""
        groups = list((settings.get("config_groups") or {}).values())
        for layout in [settings.get("format"), *(group.get("format") for group in groups)]:
            if layout is not None and layout not in _FORMATS:
                raise CheckpointError(f"compressed-tensors format {layout} is not supported")
        if settings.get("quantization_status", "compressed") not in ("compressed", "frozen"):
            raise CheckpointError(f"quantization_status {settings['quantization_status']} is not supported")
        sparsity = (settings.get("sparsity_config") or {}).get("format", "dense")
        if sparsity != "dense":
            raise CheckpointError(f"compressed-tensors sparsity {sparsity} is not supported")
        # Groups without weights describe the calibration of attention's queries, keys and values: see `kv_scales`.
        return cls(tuple(Scheme.of(group) for group in groups if group.get("weights")))

    def read(self, tensors: ModuleTensors, outputs: int, inputs: int) -> QuantizedWeight:
        """A module's weight. Raises CheckpointError."""
        scheme = self._scheme_of(tensors.module)
        if scheme is None:
            raise tensors.refuse("quantization_config does not say how it is quantized")
        if scheme.kind == "float":
            refuse_zero_points(tensors)
            return read_fp8(tensors, "weight_scale", outputs, inputs, static=scheme.inputs == "static")
        if scheme.bits == 4:
            return _read_int4(tensors, scheme, outputs, inputs)
        return _read_int8(tensors, scheme, outputs, inputs)

    def is_grouped_int8(self, module: str) -> bool:
        """Whether a module's weight is of 8-bit integers with a scale for each group of inputs."""
        grouped = [each for each in self.schemes if each.is_grouped_int8]
        return bool(grouped) and self._scheme_of(module) in grouped

    def _scheme_of(self, module: str) -> Scheme | None:
        """A module's scheme: one that names it, else one whose pattern matches, else that of all linear modules."""
        matching = [
            ((target == "Linear", target.startswith("re:"), target), scheme)
            for scheme in self.schemes
            for target in scheme.targets
            if target == "Linear" or is_named(module, target)
        ]
        return min(matching, key=lambda each: each[0], default=(None, None))[1]


def is_named(module: str, target: str) -> bool:
    """Whether a target of the configuration (a name, the end of one, or `re:` and a pattern) matches this module.

    Raises CheckpointError for a pattern that takes too long.
    """
    if pattern := _pattern(target):
        try:
            return pattern.match(module, timeout=_MATCH_S) is not None
        except TimeoutError:
            raise CheckpointError(f"quantization_config: target {target} takes too long to match {module}") from None
    return module == target or module.endswith(f".{target}")


def _pattern(target: str) -> "regex.Pattern[str] | None":
    """A target's pattern, in the syntax of `re`; None: it has none. `regex` compiles it, whose matching takes a limit.

    Raises CheckpointError.
    """
    if not target.startswith("re:"):
        return None
    pattern = target.removeprefix("re:")
    if len(pattern) > _LONGEST_PATTERN or "{" in _COUNT.sub("", pattern):
        limits = f"at most {_LONGEST_PATTERN} characters, and counts below 100 of single ones"
        raise CheckpointError(f"quantization_config: supported are patterns of {limits}, not {target}")
    try:
        re.compile(pattern)
        return regex.compile(pattern)
    except (re.error, regex.error, RecursionError) as error:
        raise CheckpointError(f"quantization_config: target {target} is no pattern: {error}") from None


def _group(tensors: ModuleTensors, scheme: Scheme, inputs: int) -> int:
    """Inputs that share a scale. Raises CheckpointError if the inputs cannot be divided so."""
    group = inputs if scheme.group_size in (None, -1, 0) else int(scheme.group_size or 0)
    if group < 1 or inputs % group or group % 2:
        raise tensors.refuse(f"{inputs} inputs cannot be shared out in groups of {group}")
    return group


def _read_int4(tensors: ModuleTensors, scheme: Scheme, outputs: int, inputs: int) -> Int4Weight:
    group = _group(tensors, scheme, inputs)
    q = _unpacked(tensors, 4, outputs, inputs)
    scale = tensors.take_finite("weight_scale", (outputs, inputs // group))
    zero = None
    if scheme.symmetric:
        refuse_zero_points(tensors)
    else:
        zero = _zeros(tensors, outputs, inputs // group)
    order = None
    if scheme.ordered or tensors.header("weight_g_idx"):
        order = order_of(tensors, "weight_g_idx", group, inputs)
    if order is not None:
        q = q[:, order]
    return Int4Weight(pack_int4(q), scale, zero, group, order)


def _read_int8(tensors: ModuleTensors, scheme: Scheme, outputs: int, inputs: int) -> Int8Weight:
    if tensors.header("weight_packed"):
        values = _unpacked(tensors, 8, outputs, inputs).bitwise_xor(128).view(torch.int8)
    else:
        values = tensors.take("weight", (torch.int8,), (outputs, inputs))
    refuse_zero_points(tensors)
    if scheme.group_size is not None:
        return Int8Weight(values, _group_scales(tensors, scheme, outputs, inputs))
    scale = tensors.take_finite("weight_scale", (), (1,), (1, 1), (outputs,), (outputs, 1)).float().reshape(-1, 1)
    return Int8Weight(values, scale.expand(outputs, 1).contiguous(), scheme.inputs == "dynamic")


def _group_scales(tensors: ModuleTensors, scheme: Scheme, outputs: int, inputs: int) -> Tensor:
    """float32 [N, K / group]. Raises CheckpointError if groups are of inputs in another order."""
    group = _group(tensors, scheme, inputs)
    ordered = scheme.ordered or tensors.header("weight_g_idx")
    if ordered and order_of(tensors, "weight_g_idx", group, inputs) is not None:
        raise tensors.refuse("weights of 8 bits with act-order (weight_g_idx) are not supported")
    return tensors.take_finite("weight_scale", (outputs, inputs // group)).float()


def _unpacked(tensors: ModuleTensors, bits: int, outputs: int, inputs: int) -> Tensor:
    """The packed numbers as they are stored, uint8 [N, K]: signed numbers plus half of their range."""
    if tensors.header("weight_shape"):
        shape = tensors.take("weight_shape", _INTEGERS, (2,)).tolist()
        if shape != [outputs, inputs]:
            raise tensors.refuse(f"weight_shape says {shape}, config.json {[outputs, inputs]}")
    words = tensors.take("weight_packed", (torch.int32,), (outputs, -(-inputs * bits // 32)))
    return unpack_words(words, bits)[:, :inputs].contiguous()


def refuse_zero_points(tensors: ModuleTensors) -> None:
    """Raises CheckpointError if a symmetric weight has zero points other than 0, which some writers store."""
    name = "weight_zero_point"
    if tensors.header(name) and bool(tensors.take(name, (torch.int8, torch.int32, FP8)).float().any()):
        raise tensors.refuse("it has zero points, and quantization_config says that it is symmetric")


def _zeros(tensors: ModuleTensors, outputs: int, groups: int) -> Tensor:
    """Zero points of 4-bit weights, uint8 [N, K / G]. The checkpoint has them packed along the outputs or as signed
    int8."""
    header = tensors.header("weight_zero_point")
    if header is not None and header.dtype == torch.int8:
        plain = tensors.take("weight_zero_point", (torch.int8,), (outputs, groups))
        if bool((plain < -INT4_ZERO).any() or (plain >= INT4_ZERO).any()):
            raise tensors.refuse("its zero points are not of 4 bits")
        return (plain + INT4_ZERO).to(torch.uint8)
    words = tensors.take("weight_zero_point", (torch.int32,), (-(-outputs // 8), groups))
    return unpack_words(words.T.contiguous(), 4)[:, :outputs].T.contiguous()
