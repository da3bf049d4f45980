"""Models with random weights in well-known shapes, to measure speed without a checkpoint. Knows configurations only.

`MODEL_NAME=random:llama-3.1-8b` serves one. Its answers are meaningless; its speed is that of the real model.
"""

import atexit
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.worker.errors import CheckpointError

PREFIX = "random:"
_MARK = "random_weights.json"
_TOKENIZER = Path(__file__).parents[3] / "models" / "weft-story-11m" / "tokenizer.json"

_made: set[Path] = set()

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
_LLAMA_1B = {
    **_LLAMA,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "rope_scaling": {**_LLAMA3_ROPE, "factor": 32.0},
}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "llama-3.1-8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_scaling": _LLAMA3_ROPE,
    },
    "llama-3.1-70b": {
        **_LLAMA,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_scaling": _LLAMA3_ROPE,
    },
    "llama-3.2-1b": _LLAMA_1B,
    "pard-llama-3.2-1b": {**_LLAMA_1B, "pard_token": 128255},
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "eos_token_id": 151645,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"],
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "eos_token_id": 2,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "minilm-l6": {
        "architectures": ["BertModel"],
        "vocab_size": 30522,
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "max_position_embeddings": 512,
    },
    "tiny": {
        **_LLAMA,
        "vocab_size": 6144,
        "max_position_embeddings": 4096,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
}


def folder_of(model: str) -> Path:
    """Make a temporary folder with the configuration of `random:NAME` and a tokenizer, no weights. `remove_folders`
    removes it, at the latest when the process exits. Raises CheckpointError."""
    name = model.removeprefix(PREFIX)
    if name not in PRESETS:
        raise CheckpointError(f"no preset {name}; there are {', '.join(PRESETS)}")
    if not _TOKENIZER.is_file():
        raise CheckpointError("models with random weights use the tokenizer of the demo model, which is missing")
    made = Path(tempfile.mkdtemp(prefix="weft-random-"))
    _made.add(made)
    folder = made / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PRESETS[name]))
    (folder / _MARK).write_text(json.dumps({"seed": 0}))
    shutil.copyfile(_TOKENIZER, folder / "tokenizer.json")
    return folder


def remove_folders() -> None:
    """Remove the folders that `folder_of` has made in this process: nothing reads them once a model is loaded."""
    while _made:
        shutil.rmtree(_made.pop(), ignore_errors=True)


atexit.register(remove_folders)


def is_random(folder: Path) -> bool:
    """Whether the folder is of a model with random weights."""
    return (folder / _MARK).is_file()
