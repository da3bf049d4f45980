"""A tiny model's configuration, for tests that need a shape and no checkpoint."""

from typing import Any

from kernels.operands import Activation, NormKind
from services.worker.models.config import ModelConfig, NormConfig, Rope


def tiny_config(**changes: Any) -> ModelConfig:
    """A Llama of two layers; `changes` are fields of ModelConfig."""
    settings: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 50,
        "hidden_size": 48,
        "intermediate_size": 80,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "norm": NormConfig(NormKind.RMS, 1e-5),
        "activation": Activation.GATED_SILU,
        "context_length": 512,
        "positions": Rope(10_000.0),
        "tied_embeddings": False,
        "qkv_bias": False,
        "output_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        **changes,
    }
    settings.setdefault("windows", (None,) * settings["layers"])
    return ModelConfig(**settings)
