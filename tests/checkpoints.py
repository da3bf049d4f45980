"""Checkpoints for tests: the demo model, and tiny models with random weights that are written when a test needs them.

Knows shapes, never engines.
"""

import io
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

DEMO = Path(__file__).parents[1] / "models" / "weft-story-11m"
SMALL_DEMO = DEMO.with_name("weft-story-2m")
Damage = Callable[[Path], object]
"""What is done to a folder before it is read."""
VOCAB = 320
CONTEXT = 512
BOS, EOS = 0, 1
_CONFIGS: Mapping[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "mixtral": MixtralConfig,
    "qwen3-moe": Qwen3MoeConfig,
    "gpt2": GPT2Config,
    "gemma2": Gemma2Config,
    "gemma3": Gemma3TextConfig,
    "phi3": Phi3Config,
}
_LLAMA_SHAPE: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
_SHAPES: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT},
}
"""Settings of the tiny model for families whose config fields differ from Llama's."""


@dataclass(frozen=True)
class Shape:
    """A tiny model of one family."""

    family: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Config fields that differ from those of the tiny default model."""
    damped: float = 1.0
    """Factor of what layers add to the residual stream: the less it is, the more the last token decides the next."""
    shard_bytes: int | None = None
    """Largest size of a weights file in bytes; None for a single file."""


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + index / 10 for index in range(8)],
    "long_factor": [1.0 + index for index in range(8)],
    "original_max_position_embeddings": CONTEXT,
}
SHAPES: Mapping[str, Shape] = {
    "llama": Shape("llama"),
    "llama-damped": Shape("llama", damped=0.004),
    "llama-tied-sharded": Shape("llama", {"tie_word_embeddings": True, "rope_parameters": YARN}, shard_bytes=150_000),
    "llama-bias-rope": Shape("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3_ROPE}),
    "mistral-window": Shape("mistral", {"sliding_window": 24, "head_dim": 24}),
    "qwen2": Shape("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": Shape("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3": Shape("qwen3", {"head_dim": 32}, shard_bytes=150_000),
    "phi3": Shape("phi3", {"rope_parameters": LONGROPE, "sliding_window": 40, "pad_token_id": 0}),
    "gemma2": Shape(
        "gemma2",
        {
            "sliding_window": 24,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": Shape(
        "gemma3",
        {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 24,
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
            },
            "tie_word_embeddings": True,
        },
    ),
    "mixtral": Shape("mixtral", {"num_local_experts": 4, "sliding_window": 40}, shard_bytes=150_000),
    "qwen3-moe": Shape(
        "qwen3-moe",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "mlp_only_layers": [1]},
    ),
    "gpt2": Shape("gpt2", shard_bytes=150_000),
    "gpt2-erf-untied": Shape("gpt2", {"activation_function": "gelu", "n_inner": 100, "tie_word_embeddings": False}),
}


def make_checkpoint(folder: Path, shape: Shape | str = "llama", seed: int = 0) -> Path:
    """Writes config, weights and tokenizer of a tiny random model to `folder`, and returns the folder.

    The weights are scaled so that answers vary and the best token is clear: the median difference between the two
    largest logits exceeds 0.1.
    """
    shape = SHAPES[shape] if isinstance(shape, str) else shape
    torch.manual_seed(seed)
    config = _CONFIGS[shape.family](
        **{
            "vocab_size": VOCAB,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "initializer_range": 0.2,
            **_SHAPES.get(shape.family, _LLAMA_SHAPE),
            **shape.settings,
        }
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(std=0.05)
            elif "norm" in name or ".ln_" in name:
                weight.uniform_(0.7, 1.3)
                weight.mul_(3 if name in ("model.norm.weight", "transformer.ln_f.weight") else 1)
            elif any(part in name for part in ("embed_tokens", "lm_head", "wte", "wpe")):
                weight.normal_(std=0.1)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(shape.damped)
    model.save_pretrained(folder, max_shard_size=shape.shard_bytes or "5GB")
    tokenizer, settings = _gpt2_tokenizer() if shape.family == "gpt2" else _llama_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from a name to the folder of that tiny checkpoint, or of the demo model."""

    @cache
    def folder(name: str) -> Path:
        return SMALL_DEMO if name == "demo" else make_checkpoint(tmp_path_factory.mktemp(name), name)

    return folder


def _llama_tokenizer() -> tuple[Tokenizer, dict[str, str]]:
    """A tokenizer and its settings. Every encoded text begins with <s>."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    return make_tokenizer(), settings


def _gpt2_tokenizer() -> tuple[Tokenizer, dict[str, str]]:
    """A tokenizer like GPT-2's and its settings: one special token, with which no encoded text begins."""
    tokenizer = _byte_level_bpe(["<|endoftext|>"])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    names = ("bos_token", "eos_token", "unk_token")
    return tokenizer, {"tokenizer_class": "GPT2Tokenizer", **dict.fromkeys(names, "<|endoftext|>")}


def make_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer of VOCAB ids; ids 0 and 1 are <s> and </s>."""
    tokenizer = _byte_level_bpe(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return tokenizer


def _byte_level_bpe(special: list[str]) -> Tokenizer:
    """A byte-level BPE tokenizer of VOCAB ids; the first ids are these special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the weft is what is woven through the warp, thread after thread " * 8], trainer)
    return tokenizer


def pipe(name: str) -> Damage:
    """Replaces a file by a named pipe without a writer, which blocks a reader."""

    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return damage


def sentencepiece_model(**settings: Any) -> bytes:
    """A tokenizer.model of VOCAB ids in which bytes are pieces; `settings` are those of SentencePiece's trainer."""
    import sentencepiece

    made = io.BytesIO()
    lines = ["the weft is what is woven through the warp, thread after thread", "a warp holds, a weft crosses: 12"]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines * 8),
        model_writer=made,
        vocab_size=VOCAB,
        **{"model_type": "bpe", "byte_fallback": True, "hard_vocab_limit": False, "minloglevel": 2, **settings},
    )
    return made.getvalue()
