"""Compares a candidate's weights with its base's row by row. Knows checkpoints and rounding, no text and no outputs.

One damaged row hardly changes a model's outputs, so the weights themselves are compared. Methods such as AWQ and
SmoothQuant move factors between a norm or a linear and the linears that read it: an honest weight is base * column
factor * row factor, rounded. Column factors after a norm are the quotient of the two norms' weights. Column factors
after a linear (`o_proj`, `down_proj`) are estimated from all rows, and the rows of that linear (`v_proj`, `up_proj`)
must have the inverse: a row that was scaled without its readers is damaged.

For each row, after these factors are divided out:

- `error`: |candidate - base|, divided by the same norm after honest rounding of the base's row to the candidate's
  format, divided by the linear's median of this quotient (if above 1). Every method of `weft compress` measured below 2
  on the demo model; exchanged int4 rows 8 or more.
- `gain error`: let g = <candidate, base> / <base, base>, of a row, and of each group of a row in formats with groups,
  divided by the median over all rows (inputs that are always 0 may be rounded to anything). Honest rounding of n
  numbers with relative error e deviates from 1 by a bias below e^2 and by noise with deviation e / sqrt(n). The gain
  error is |g - 1| less e^2 + 6 e / sqrt(n), with the linear's median e. Every method measured below 0.04; scales that
  are wrong by half 0.3 or more.

Legend: N outputs, K inputs, B groups of a row, G inputs of a group.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from compress.base.linears import READERS
from compress.choices import Granularity
from compress.progress import Progress
from compress.quantize.rounding import round_fp8, round_int8
from kernels.quantized_weights import (
    FP8_BLOCK,
    QUANTIZERS,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    Weight,
    dequantize,
    quantize_int4,
)
from services.worker.errors import CheckpointError
from services.worker.loader.config import read_config
from services.worker.loader.family_tensors import open_family
from services.worker.loader.formats.module_tensors import ModuleTensors, Tensors
from services.worker.loader.formats.registry import StoredWeights, WeightReader, reader_of
from services.worker.loader.tensors import FLOATS
from verify.served import Served

KEPT = 10
"""Worst rows that are reported."""
_LAYER = re.compile(r"(model\.layers\.(\d+)\.)(.+)")
_MAKERS = {reader: maker for maker, readers in READERS.items() for reader in readers}
_SHARED_READERS = {maker: readers[0] for maker, readers in READERS.items() if not maker.endswith("norm")}
_LEAST_FACTOR = 1e-3
_BF16_ERROR = 2.0**-9
"""Relative error of a plain weight that was written in bf16."""
_SIGMAS = 6.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of a linear, or one group of a row."""

    module: str
    row: int
    error: float
    gain_error: float
    gain: float
    group: int | None = None

    def __str__(self) -> str:
        layer = _LAYER.match(self.module)
        where = f"layer {layer[2]} {layer[3]}" if layer else self.module
        where += f" row {self.row}" + ("" if self.group is None else f" group {self.group}")
        return f"{where}: gain {self.gain:.3g}, error {self.error:.3g} x the median row's"


@dataclass(slots=True)
class RowErrors:
    """The figures of one candidate, and its worst rows."""

    error: float = 0.0
    gain_error: float = 0.0
    worst: list[Finding] = field(default_factory=list)

    def add(self, findings: list[Finding]) -> None:
        """Count the worst rows of one linear."""
        self.error = max([self.error, *(each.error for each in findings)])
        self.gain_error = max([self.gain_error, *(each.gain_error for each in findings)])
        self.worst = sorted([*self.worst, *findings], key=_badness, reverse=True)[:KEPT]


def compare_rows(base: Served, candidate: Served, progress: Progress) -> RowErrors | None:
    """Compare linear after linear, reading both checkpoints; None if the linears have other shapes.

    Memory: two linears of each model in float32. Raises CheckpointError.
    """
    shapes = _shapes(base)
    if shapes != _shapes(candidate):
        return None
    found, config, device = RowErrors(), base.config, base.device
    with _opened(base, device) as before, _opened(candidate, device) as after:
        for done, (module, shape) in enumerate(shapes.items()):
            progress("rows", done, len(shapes))
            weight_NK = dequantize(before.linear(module, shape), torch.float32)
            rounded = after.linear(module, shape)
            column_K = _column_factor(module, shape, weight_NK, rounded, before, after)
            row_N = torch.ones(shape[0], device=device)
            if reader := _reader(module):
                row_N = 1 / _reader_factor(reader, shapes[reader], before, after)
                heads = config.kv_heads if reader.endswith("self_attn.o_proj") else 1
                row_N = row_N.view(heads, -1, shape[0] // heads).mean(1).flatten()
            found.add(_worst(module, weight_NK, rounded, column_K, row_N))
    progress("rows", len(shapes), len(shapes))
    return found


def _shapes(model: Served) -> dict[str, tuple[int, int]]:
    """Linear module -> (outputs, inputs), in the order of the layers."""
    return {
        module: (outputs, projection.linear.inputs)
        for projection in model.model.projections()
        for module, outputs in zip(projection.modules, projection.outputs, strict=True)
    }


@dataclass(frozen=True, slots=True)
class _Weights:
    """The weights of one checkpoint, read when they are asked for."""

    reader: WeightReader | None
    tensors: Tensors
    transposed: frozenset[str]
    """Linears whose plain weights are stored as [K, N]."""

    def linear(self, module: str, shape: tuple[int, int]) -> Weight:
        """A linear's weight [N, K] in its stored format. Raises CheckpointError."""
        tensors = ModuleTensors(self.tensors, module)
        if self.reader:
            return self.reader.read(tensors, *shape)
        transposed = module in self.transposed
        weight = tensors.take_finite("weight", shape[::-1] if transposed else shape)
        return weight.t() if transposed else weight

    def norm(self, module: str, size: int) -> Tensor | None:
        """A norm's weight in float32; None if the checkpoint has none of this name and size."""
        header = self.tensors.headers.get(f"{module}.weight")
        if header is None or header.shape != (size,) or header.dtype not in FLOATS:
            return None
        return self.tensors.fetch(f"{module}.weight").float()


@contextmanager
def _opened(model: Served, device: torch.device) -> Iterator[_Weights]:
    folder, transposed = model.folder, set[str]()
    for projection in model.model.projections():
        transposed.update(projection.modules if projection.transposed else ())
    try:
        config = read_config(folder)
        reader = reader_of(config.quantization, None)
        checkpoint = open_family(folder, config.model)
        with checkpoint.opened() as read:
            assert reader is None or isinstance(reader, StoredWeights)
            tensors = Tensors(checkpoint.headers, lambda name: read(name).to(device))
            yield _Weights(reader, tensors, frozenset(transposed))
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from None


# ---- factors that honest methods move between a maker and its readers ----


def _column_factor(
    module: str, shape: tuple[int, int], weight_NK: Tensor, rounded: Weight, before: _Weights, after: _Weights
) -> Tensor:
    """What the candidate's columns were multiplied by [K]."""
    layer = _LAYER.match(module)
    maker = "model.norm" if module == "lm_head" else f"{layer[1]}{_MAKERS.get(layer[3], '')}" if layer else ""
    if maker.endswith("norm"):
        old, new = before.norm(maker, shape[1]), after.norm(maker, shape[1])
        if old is None or new is None:
            return torch.ones(shape[1], device=weight_NK.device)
        return torch.where((old == 0) | (new == 0), 1, old / torch.where(new == 0, 1, new))
    if layer and layer[3] in _SHARED_READERS.values():
        return _estimated_factor(weight_NK, dequantize(rounded, torch.float32))
    return torch.ones(shape[1], device=weight_NK.device)


def _reader(module: str) -> str | None:
    """The linear that reads what this linear makes, where factors may move between the two."""
    layer = _LAYER.match(module)
    return f"{layer[1]}{_SHARED_READERS[layer[3]]}" if layer and layer[3] in _SHARED_READERS else None


def _reader_factor(module: str, shape: tuple[int, int], before: _Weights, after: _Weights) -> Tensor:
    weight_NK = dequantize(before.linear(module, shape), torch.float32)
    return _estimated_factor(weight_NK, dequantize(after.linear(module, shape), torch.float32))


def _estimated_factor(weight_NK: Tensor, rounded_NK: Tensor) -> Tensor:
    """Least squares of each column over all rows, every row weighed alike; 1 where nothing can be estimated."""
    size_N1 = weight_NK.norm(dim=1, keepdim=True).clamp_min(1e-30)
    unit_NK = weight_NK / size_N1
    factor_K = (unit_NK * (rounded_NK / size_N1)).sum(0) / unit_NK.square().sum(0).clamp_min(1e-30)
    return torch.where(factor_K > _LEAST_FACTOR, factor_K, 1)


# ---- one linear ----


def _worst(module: str, weight_NK: Tensor, rounded: Weight, column_K: Tensor, row_N: Tensor) -> list[Finding]:
    """The rows and groups of rows of one linear that are furthest from honest rounding."""
    factor_NK = column_K * row_N[:, None]
    folded_NK, found_NK = weight_NK * factor_NK, dequantize(rounded, torch.float32)
    off_N = ((found_NK - folded_NK) / factor_NK).norm(dim=1)
    honest_N = ((_honestly_rounded(folded_NK, rounded) - folded_NK) / factor_NK).norm(dim=1)
    size_N, found_NK = weight_NK.norm(dim=1), found_NK / factor_NK
    floor_N = _BF16_ERROR * (size_N + 1e-3 * size_N.median()) + 1e-30
    excess_N = off_N / (honest_N.square() + floor_N.square()).sqrt()
    error_N = excess_N / excess_N.median().clamp_min(1)
    relative = float((off_N / size_N.clamp_min(1e-30)).median())
    findings = []
    for group in filter(None, (weight_NK.shape[1], _group(rounded))):
        whole = group == weight_NK.shape[1]
        weight_NBG, found_NBG = (_grouped(numbers, rounded, group) for numbers in (weight_NK, found_NK))
        gain_NB, gain_error_NB = _gains(weight_NBG, found_NBG, relative)
        places = {*_top(gain_error_NB.flatten()), *(_top(error_N) if whole else ())}
        for row, number in (divmod(place, gain_NB.shape[1]) for place in sorted(places)):
            gain, gain_error = float(gain_NB[row, number]), float(gain_error_NB[row, number])
            findings.append(Finding(module, row, float(error_N[row]), gain_error, gain, None if whole else number))
    return findings


def _gains(weight_NBG: Tensor, found_NBG: Tensor, relative: float) -> tuple[Tensor, Tensor]:
    """The gain of each row's groups and its error, both [N, B]."""
    norms_NB = weight_NBG.square().sum(2)
    least = 1e-6 * norms_NB.median().clamp_min(1e-30)
    gain_NB = torch.where(norms_NB > least, (weight_NBG * found_NBG).sum(2) / norms_NB.clamp_min(1e-30), 1)
    usual_B = gain_NB.median(0).values
    gain_NB = gain_NB / torch.where((usual_B > 0.5) & (usual_B < 2), usual_B, 1)
    honest = relative**2 + _SIGMAS * relative / weight_NBG.shape[2] ** 0.5
    alive_B = usual_B > 0.5 if weight_NBG.shape[1] > 1 else torch.ones_like(usual_B, dtype=torch.bool)
    return gain_NB, torch.where(alive_B, (gain_NB - 1).abs().sub(honest).clamp_min(0), 0)


def _honestly_rounded(weight_NK: Tensor, like: Weight) -> Tensor:
    """The weight rounded to nearest in another weight's format, with scales of its own."""
    if isinstance(like, Int8Weight):
        if like.group:
            return round_int8(weight_NK.reshape(-1, like.group)).dequantize(torch.float32).view_as(weight_NK)
        return round_int8(weight_NK, per_tensor=_is_one(like.scale)).dequantize(torch.float32)
    if isinstance(like, Fp8Weight):
        one = Granularity.TENSOR if _is_one(like.scale) else Granularity.CHANNEL
        return round_fp8(weight_NK, Granularity.BLOCK if like.blockwise else one).dequantize(torch.float32)
    if isinstance(like, Int4Weight):
        stored_NK = weight_NK if like.order is None else weight_NK[:, like.order]
        rounded_NK = quantize_int4(stored_NK, like.group).dequantize(torch.float32)
        return rounded_NK if like.order is None else rounded_NK[:, like.order.argsort()]
    if isinstance(like, Tensor):
        return weight_NK
    return QUANTIZERS["nf4"](weight_NK).dequantize(torch.float32)


def _is_one(scale: Tensor) -> bool:
    return bool((scale == scale.flatten()[0]).all())


def _group(weight: Weight) -> int:
    """Inputs that share a scale; 0: all of a row."""
    if isinstance(weight, Int8Weight | Int4Weight):
        return weight.group
    return FP8_BLOCK if isinstance(weight, Fp8Weight) and weight.blockwise else 0


def _grouped(numbers_NK: Tensor, weight: Weight, group: int) -> Tensor:
    """The numbers [N, B, G] of the groups that share a scale; an incomplete last group is left out."""
    if isinstance(weight, Int4Weight) and weight.order is not None:
        numbers_NK = numbers_NK[:, weight.order]
    whole = numbers_NK.shape[1] // group * group
    return numbers_NK[:, :whole].reshape(len(numbers_NK), -1, group)


def _top(values: Tensor) -> list[int]:
    return values.topk(min(KEPT, len(values))).indices.tolist()


def _badness(finding: Finding) -> float:
    return finding.gain_error + finding.error / 100
