"""Tables of rotary positions: equal to those that transformers computes for each scaling."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from services.worker.models.raw_config import RawConfig
from services.worker.models.registry import family_of
from services.worker.models.rope import rope_tables
from services.worker.models.rope_settings import LinearScaling, Rope, YarnScaling, read_rope

CONTEXT, DIM = 4096, 16
FACTORS = {"short_factor": [1 + i / 5 for i in range(DIM // 2)], "long_factor": [2.0 + i for i in range(DIM // 2)]}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn-whole": {
        "rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 24, "beta_slow": 2,
        "truncate": False, "original_max_position_embeddings": 512,
    },
    "longrope": {"rope_type": "longrope", **FACTORS, "original_max_position_embeddings": 256},
    "longrope-factor": {"rope_type": "longrope", **FACTORS, "factor": 8.0, "original_max_position_embeddings": 512},
}  # fmt: skip


@pytest.mark.parametrize("count", [200, CONTEXT])
@pytest.mark.parametrize("name", SCALINGS)
def test_tables_are_those_of_transformers(name: str, count: int) -> None:
    settings = {"rope_theta": 1e4, **SCALINGS[name]}
    config: Any = LlamaConfig(
        head_dim=DIM, hidden_size=64, num_attention_heads=4, max_position_embeddings=CONTEXT, rope_parameters=settings
    )
    kind = settings["rope_type"]
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=count)
    angles = torch.outer(torch.arange(count).float(), frequencies)
    rope = read_rope(RawConfig({"rope_parameters": settings}), CONTEXT, DIM)
    cos, sin = rope_tables(rope, DIM, count, torch.float32)
    torch.testing.assert_close(cos[:, 0, : DIM // 2], angles.cos() * magnitude, rtol=0, atol=1e-6)
    torch.testing.assert_close(sin[:, 0, DIM // 2 :], angles.sin() * magnitude, rtol=0, atol=1e-6)
    assert torch.equal(sin[:, 0, : DIM // 2], -sin[:, 0, DIM // 2 :])


SHAPE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": DIM, "max_position_embeddings": 2 * CONTEXT, "rms_norm_eps": 1e-6,
    "vocab_size": 320,
}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "kind", "settings"),
    [
        ("LlamaForCausalLM", "llama", {"partial_rotary_factor": None}),
        ("LlamaForCausalLM", "llama", {"rope_parameters": {"rope_type": "default"}, "rope_theta": 777.0}),
        ("MistralForCausalLM", "mistral", {}),
        ("MistralForCausalLM", "mistral", {"sliding_window": None}),
        ("MixtralForCausalLM", "mixtral", {}),
        ("Qwen2ForCausalLM", "qwen2", {"use_sliding_window": True, "max_window_layers": 2}),
        ("Qwen3MoeForCausalLM", "qwen3_moe", {"use_sliding_window": True}),
        ("Gemma3ForCausalLM", "gemma3_text", {}),
        ("Gemma3ForCausalLM", "gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    ],
)
def test_what_config_json_does_not_name_is_what_transformers_takes(
    architecture: str, kind: str, settings: dict[str, Any]
) -> None:
    theirs: Any = AutoConfig.for_model(kind, **SHAPE, **settings)
    ours = family_of(architecture).read_config(RawConfig({"architectures": [architecture], **SHAPE, **settings}))
    full = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)
    assert ours.positions == Rope(full["rope_theta"], LinearScaling(8.0) if "rope_scaling" in settings else None)
    if "sliding_attention" in theirs.rope_parameters:
        assert ours.local_rope == Rope(theirs.rope_parameters["sliding_attention"]["rope_theta"])
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * theirs.num_hidden_layers
    window = getattr(theirs, "sliding_window", None)
    assert ours.windows == tuple(window if each == "sliding_attention" else None for each in kinds)


def test_the_original_context_beside_the_scaling_wins_over_the_one_in_it() -> None:
    settings = {"rope_theta": 1e4, **SCALINGS["yarn"]}
    raw = {"rope_parameters": settings, "original_max_position_embeddings": 512}
    scaling = read_rope(RawConfig(raw), CONTEXT, DIM).scaling
    assert isinstance(scaling, YarnScaling)
    assert scaling.original_context == 512
