"""The configuration of a tiny model, for tests that need a shape and no checkpoint."""

from typing import Any

from kernels.operands import Activation, NormKind
from services.worker.models.config import LearnedPositions, ModelConfig, MoeConfig, NormConfig
from services.worker.models.rope_settings import Rope


def tiny_config(**changes: Any) -> ModelConfig:
    """A Llama with two layers; `changes` are fields of ModelConfig."""
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


def moe_settings() -> dict[str, Any]:
    """The fields that make the tiny model a Qwen3-MoE."""
    return {"architecture": "Qwen3MoeForCausalLM", "qk_norm": True, "moe": MoeConfig(4, 2, 32, True, (True, True))}


def gpt2_settings(positions: int) -> dict[str, Any]:
    """The fields that make the tiny model a GPT-2 with this many learned positions."""
    return {
        "architecture": "GPT2LMHeadModel",
        "kv_heads": 4,
        "norm": NormConfig(NormKind.LAYER, 1e-5, has_bias=True),
        "activation": Activation.GELU_TANH,
        "positions": LearnedPositions(positions),
        "tied_embeddings": True,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
    }
