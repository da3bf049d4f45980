"""Reads INT4 weights as AWQ and GPTQ write them, in words of eight numbers: along the outputs (AWQ) or along the inputs
(GPTQ). Knows the formats' tensors, never how a product is computed.

AWQ: Lin et al. 2023, the GEMM layout of AutoAWQ. GPTQ: Frantar et al. 2022, the layouts of AutoGPTQ and GPTQModel.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.quantized_weights import INT4_ZERO, Int4Weight, pack_int4
from services.worker.errors import CheckpointError
from services.worker.loader.formats.module_tensors import ModuleTensors, unpack_words

_WORD = (torch.int32,)
# Place i of a word holds column _AWQ_ORDER[i] of eight; column j is in place _AWQ_PLACES[j].
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_AWQ_PLACES = tuple(_AWQ_ORDER.index(column) for column in range(8))


@dataclass(frozen=True, slots=True)
class Awq:
    """`quant_method: awq`."""

    group_size: int
    """Inputs that share a scale; -1: all."""
    mark = ("qweight",)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Awq":
        """From quantization_config. Raises CheckpointError."""
        _only_four_bits(settings)
        version = str(settings.get("version", "gemm")).lower()
        if version != "gemm":
            raise CheckpointError(f"AWQ version {version} is not supported; supported is gemm")
        return cls(_group_size(settings))

    def read(self, tensors: ModuleTensors, outputs: int, inputs: int) -> Int4Weight:
        """A module's weight. Raises CheckpointError."""
        group, groups = _groups(tensors, self.group_size, outputs, inputs)
        q = _awq_columns(tensors.take("qweight", _WORD, (inputs, outputs // 8)))
        scale = tensors.take_finite("scales", (groups, outputs))
        zero = _awq_columns(tensors.take("qzeros", _WORD, (groups, outputs // 8)))
        return _canonical(q.T, scale, zero, group, None)


@dataclass(frozen=True, slots=True)
class Gptq:
    """`quant_method: gptq`."""

    group_size: int
    """Inputs that share a scale; -1: all."""
    zero_offset: int
    """Added to each stored zero: version 1 of the format stores zeros less one."""
    ordered: bool
    """Whether groups are formed of inputs in another order (act-order)."""
    mark = ("qweight",)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Gptq":
        """From quantization_config. Raises CheckpointError."""
        _only_four_bits(settings)
        layout = "marlin" if settings.get("is_marlin_format") else settings.get("checkpoint_format") or "gptq"
        if layout not in ("gptq", "gptq_v2"):
            raise CheckpointError(f"GPTQ checkpoint_format {layout} is not supported; supported are gptq and gptq_v2")
        return cls(_group_size(settings), int(layout == "gptq"), settings.get("desc_act") is True)

    def read(self, tensors: ModuleTensors, outputs: int, inputs: int) -> Int4Weight:
        """A module's weight; act-order is undone, so that groups lie together. Raises CheckpointError."""
        group, groups = _groups(tensors, self.group_size, outputs, inputs)
        words = tensors.take("qweight", _WORD, (inputs // 8, outputs))
        scale = tensors.take_finite("scales", (groups, outputs))
        zero = unpack_words(tensors.take("qzeros", _WORD, (groups, outputs // 8)), 4)
        order = None
        if self.ordered or tensors.header("g_idx"):
            order = order_of(tensors, "g_idx", group, inputs)
        q = unpack_words(words.T.contiguous(), 4)
        return _canonical(q, scale, (zero + self.zero_offset).bitwise_and_(15), group, order)


def order_of(tensors: ModuleTensors, name: str, group: int, inputs: int) -> Tensor | None:
    """Which input each stored column belongs to, int32 [K]: columns lie group after group. None: they lie in the order
    of the inputs. Raises CheckpointError if groups are not of equal size."""
    groups = tensors.take(name, (torch.int32, torch.int64), (inputs,)).long()
    expected = torch.arange(inputs, device=groups.device) // group
    if torch.equal(groups, expected):
        return None
    sorted_groups, order = groups.sort(stable=True)
    if not torch.equal(sorted_groups, expected):
        raise tensors.refuse(f"{name} does not give every group {group} inputs")
    return order.int()


def _canonical(q: Tensor, scale: Tensor, zero: Tensor, group: int, order: Tensor | None) -> Int4Weight:
    """The canonical weight of q uint8 [N, K], scale and zero [K / G, N]."""
    if order is not None:
        q = q[:, order]
    plain = bool((zero == INT4_ZERO).all())
    return Int4Weight(
        pack_int4(q.contiguous()), scale.T.contiguous(), None if plain else zero.T.contiguous(), group, order
    )


def _awq_columns(words: Tensor) -> Tensor:
    """Unpack words of AWQ: int32 [rows, N / 8] -> uint8 [rows, N], columns in their order."""
    places = unpack_words(words, 4).view(words.shape[0], -1, 8)
    return places[:, :, list(_AWQ_PLACES)].flatten(1)


def _groups(tensors: ModuleTensors, group_size: int, outputs: int, inputs: int) -> tuple[int, int]:
    """Inputs of a group, and how many groups there are. Raises CheckpointError if the shape cannot be packed so."""
    group = inputs if group_size == -1 else group_size
    if inputs % group or inputs % 8 or outputs % 8:
        raise tensors.refuse(f"{inputs} inputs and {outputs} outputs cannot be packed in groups of {group}")
    return group, inputs // group


def _group_size(settings: Mapping[str, Any]) -> int:
    size = settings.get("group_size", settings.get("q_group_size", 128))
    if not isinstance(size, int) or (size != -1 and (size < 2 or size % 2)):
        raise CheckpointError(
            f"quantization_config: group_size {size} is not supported; supported are -1 and even sizes"
        )
    return size


def _only_four_bits(settings: Mapping[str, Any]) -> None:
    method, bits = settings.get("quant_method"), settings.get("bits", settings.get("w_bit"))
    if bits != 4:
        raise CheckpointError(f"quantization_config: {method} with bits={bits} is not supported; supported is bits=4")
