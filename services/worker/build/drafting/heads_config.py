"""Reads what draft heads say of themselves and of their base. Knows a folder's config.json, no weights."""

from dataclasses import replace
from pathlib import Path

from kernels.drafts.draft_heads import ARCHITECTURE
from services.worker.errors import CheckpointError
from services.worker.loader.files import _read_json
from services.worker.models.draft_heads import HeadsConfig
from services.worker.models.families.llama import FAMILY
from services.worker.models.raw_config import RawConfig

_LAYER_ARCHITECTURE = "LlamaForCausalLM"
_MOST_DEPTH = 8


def read_heads(place: Path) -> HeadsConfig:
    """The config.json of draft heads. Raises CheckpointError."""
    if not place.is_dir():
        raise CheckpointError(f"no folder of draft heads at {place}")
    raw = RawConfig(_read_json(place / "config.json"))
    if raw.architecture != ARCHITECTURE:
        raise CheckpointError(f"{place} holds no draft heads: its architecture is {raw.architecture}")
    layer = FAMILY.read_config(RawConfig({**raw.values, "architectures": [_LAYER_ARCHITECTURE]}))
    if layer.layers != 1:
        raise CheckpointError(f"config.json: draft heads have one layer, not {layer.layers}")
    base = raw.section("base")
    vocab, layers = base.integer("vocab_size"), base.layers("num_hidden_layers")
    raw.integer("depth", most=_MOST_DEPTH)
    tokens = _ascending(raw, "draft_tokens", vocab) if raw.get("draft_tokens") is not None else ()
    if layer.vocab_size != (len(tokens) or vocab) or layer.tied_embeddings == bool(tokens):
        raise CheckpointError("config.json: vocab_size, tie_word_embeddings and draft_tokens contradict each other")
    hidden = _ascending(raw, "hidden_layers", layers)
    return HeadsConfig(replace(layer, eos_token_ids=()), hidden, tokens, vocab, layers, str(base.get("digest")))


def _ascending(raw: RawConfig, name: str, end: int) -> tuple[int, ...]:
    """A list of whole numbers below `end`, each larger than the one before it, at least one."""
    values = raw.get(name)
    whole = isinstance(values, list) and all(type(value) is int for value in values)
    if not whole or not values or values != sorted(set(values)) or not 0 <= values[0] <= values[-1] < end:
        raise CheckpointError(f"config.json: {name} must be ascending whole numbers below {end}")
    return tuple(values)
