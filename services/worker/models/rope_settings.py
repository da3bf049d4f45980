"""How a config.json describes rotary positions (Su et al. 2021) and their scaling. Imports no torch."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from services.worker.errors import CheckpointError
from services.worker.models.raw_config import RawConfig


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All frequencies are divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies are divided by `factor`, high ones are kept, those between are blended (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int
    """Context that the model was first trained for."""


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """As Llama 3's, by the number of rotations within the original context (Peng et al. 2023)."""

    factor: float
    beta_fast: float
    """Rotations above which a frequency is kept."""
    beta_slow: float
    """Rotations below which a frequency is divided by `factor`."""
    truncate: bool
    """The bounds between these are whole dimensions."""
    original_context: int
    attention_factor: float
    """Multiplies cos and sin."""


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """Each frequency has a divisor of its own, found by search (Ding et al. 2024)."""

    short_factors: tuple[float, ...]
    """For contexts up to `original_context`."""
    long_factors: tuple[float, ...]
    """For longer contexts."""
    original_context: int
    attention_factor: float
    """Multiplies cos and sin."""


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """Positions rotate queries and keys."""

    theta: float
    """Base of the frequencies."""
    scaling: RopeScaling | None = None


def read_rope(raw: RawConfig, context_length: int, head_dim: int, theta: float = 10000.0) -> Rope:
    """`rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (before). theta: the base where neither
    names one. Raises CheckpointError."""
    if head_dim % 2:
        raise CheckpointError(f"config.json: head_dim {head_dim} is odd, but positions rotate pairs of dimensions")
    old, new = raw.section("rope_scaling").values, raw.section("rope_parameters").values
    if old and new and old != new:
        raise CheckpointError("config.json: rope_scaling and rope_parameters differ; one of them is enough")
    settings = RawConfig({"rope_theta": raw.get("rope_theta", theta), **(new or old)})
    for place in (raw, settings):
        if place.get("partial_rotary_factor") not in (None, 1):
            raise CheckpointError("partial_rotary_factor is not supported")
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind not in _READERS:
        raise CheckpointError(f"rope scaling {kind} is not supported; supported are {', '.join(_READERS)}")
    original = raw.get("original_max_position_embeddings") or settings.get("original_max_position_embeddings")
    settings = RawConfig({**settings.values, "original_max_position_embeddings": original or context_length})
    return Rope(settings.number("rope_theta"), _READERS[kind](settings, context_length, head_dim))


def _no_scaling(settings: RawConfig, context_length: int, head_dim: int) -> None:
    """The default; also `dynamic`, which scales only beyond the context length, where no answer goes."""


def _read_linear(settings: RawConfig, context_length: int, head_dim: int) -> LinearScaling:
    return LinearScaling(settings.number("factor"))


def _read_llama3(settings: RawConfig, context_length: int, head_dim: int) -> Llama3Scaling:
    return Llama3Scaling(
        settings.number("factor"),
        settings.number("low_freq_factor"),
        settings.number("high_freq_factor"),
        settings.integer("original_max_position_embeddings"),
    )


def _read_yarn(settings: RawConfig, context_length: int, head_dim: int) -> YarnScaling:
    original = settings.integer("original_max_position_embeddings")
    factor = settings.number("factor", context_length / original)
    scale = _yarn_magnitude(factor, 1.0)
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        magnitudes = (_yarn_magnitude(factor, settings.number(name)) for name in ("mscale", "mscale_all_dim"))
        scale = next(magnitudes) / next(magnitudes)
    return YarnScaling(
        factor,
        settings.number("beta_fast", 32.0),
        settings.number("beta_slow", 1.0),
        settings.flag("truncate", default=True),
        original,
        settings.number("attention_factor", scale),
    )


def _yarn_magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _read_longrope(settings: RawConfig, context_length: int, head_dim: int) -> LongRopeScaling:
    original = settings.integer("original_max_position_embeddings")
    factor = settings.number("factor", context_length / original)
    scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRopeScaling(
        _factors(settings, "short_factor", head_dim // 2),
        _factors(settings, "long_factor", head_dim // 2),
        original,
        settings.number("attention_factor", scale),
    )


def _factors(settings: RawConfig, name: str, count: int) -> tuple[float, ...]:
    values = settings.get(name)
    if not isinstance(values, list) or len(values) != count:
        raise CheckpointError(f"config.json: {name} must be a list of {count} numbers")
    return tuple(RawConfig({name: value}).number(name) for value in values)


_READERS: Mapping[str, Callable[[RawConfig, int, int], RopeScaling | None]] = {
    "default": _no_scaling,
    "linear": _read_linear,
    "dynamic": _no_scaling,
    "llama3": _read_llama3,
    "yarn": _read_yarn,
    "longrope": _read_longrope,
    "su": _read_longrope,  # the older name
}
