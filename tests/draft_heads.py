"""Draft heads for tests, written by hand: they draw what follows from a token's embedding alone, and a little noise.

For a tiny model whose layers are damped they are often right.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kernels.drafts.draft_heads import ARCHITECTURE, base_digest

NOISE = 0.02
"""Deviation of the weights that read hidden states, and of those of the layer."""


def make_heads(folder: Path, base: Path, noise: float = NOISE, **changed: Any) -> Path:
    """Write heads for a base of Llama's shape, and return the folder. changed: entries of config.json."""
    folder.mkdir(parents=True)
    settings = json.loads((base / "config.json").read_text())
    weights = {name: tensor for file in base.glob("*.safetensors") for name, tensor in load_file(file).items()}
    embedding, width = weights["model.embed_tokens.weight"], settings["hidden_size"]
    heads, dim, neurons = settings["num_attention_heads"], settings["head_dim"], settings["intermediate_size"]
    kv = settings["num_key_value_heads"] * dim
    layers = settings["num_hidden_layers"]
    config = {
        "architectures": [ARCHITECTURE],
        "base": {"digest": base_digest(embedding), "num_hidden_layers": layers, "vocab_size": settings["vocab_size"]},
        "hidden_layers": [1, layers - 1],
        "depth": 4,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        **{name: settings[name] for name in _SAME},
        "num_hidden_layers": 1,
        **changed,
    }
    (folder / "config.json").write_text(json.dumps(config))
    source = torch.Generator().manual_seed(0)

    def noisy(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=source) * noise

    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    tensors = {
        "fuse.weight": noisy(width, 2 * width),
        "fuse_norm.weight": torch.ones(2 * width),
        "combine.weight": torch.cat((torch.eye(width), noisy(width, width)), 1),
        **{f"{name}_norm.weight": torch.ones(width) for name in ("embed", "hidden")},
        **{f"model.layers.0.{name}_layernorm.weight": torch.ones(width) for name in ("input", "post_attention")},
        f"{attention}q_proj.weight": noisy(heads * dim, width),
        f"{attention}k_proj.weight": noisy(kv, width),
        f"{attention}v_proj.weight": noisy(kv, width),
        f"{attention}o_proj.weight": noisy(width, heads * dim),
        f"{mlp}gate_proj.weight": noisy(neurons, width),
        f"{mlp}up_proj.weight": noisy(neurons, width),
        f"{mlp}down_proj.weight": noisy(width, neurons),
        "model.norm.weight": weights["model.norm.weight"],
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


_SAME = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "max_position_embeddings",
)  # fmt: skip
