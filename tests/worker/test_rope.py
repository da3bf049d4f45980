"""Tables of rotary positions: equal to those that transformers computes for each scaling."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from services.worker.models.raw_config import RawConfig
from services.worker.models.rope import rope_tables
from services.worker.models.rope_settings import read_rope

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
