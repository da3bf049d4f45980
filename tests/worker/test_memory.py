"""The memory estimate: sizes of weights and KV pool, and advice if they do not fit."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.host import available_memory
from services.worker.build.choose import build_engine
from services.worker.build.memory import MemoryShortage, plan_memory
from services.worker.errors import CheckpointError
from services.worker.loader.config import load_config
from services.worker.models.config import ModelConfig
from services.worker.options import EngineOptions, MemoryPlan
from tests.worker.drive import open_engine

MIB = 2**20
PARAMETERS = 10_000_000


@pytest.fixture
def config(checkpoint: Callable[[str], Path]) -> ModelConfig:
    return load_config(checkpoint("llama"))


def plan(config: ModelConfig, available: int = 10_000 * MIB, **options: Any) -> MemoryPlan:
    made = EngineOptions(**options)
    return plan_memory(config, PARAMETERS * 4, 4, made.block_size * config.kv_bytes_per_token(4), made, available)


def test_a_pool_holds_a_full_batch_of_full_sequences_if_there_is_room(config: ModelConfig) -> None:
    roomy = plan(config)
    assert roomy.kv_tokens == 64 * 512
    assert roomy.concurrency == 64
    assert roomy.kv == (roomy.kv_blocks + 1) * 16 * config.kv_bytes_per_token(4)
    assert roomy.weights == 4 * PARAMETERS


def test_a_pool_takes_at_most_a_quarter_of_scarce_memory(config: ModelConfig) -> None:
    tight = plan(config, 80 * MIB)
    assert tight.kv_tokens < 64 * 512
    assert tight.kv <= (80 * MIB - tight.weights - tight.workspace) / 4


def test_a_configured_size_is_used(config: ModelConfig) -> None:
    assert plan(config, kv_blocks=77).kv_blocks == 77
    by_bytes = plan(config, kv_bytes=3 * MIB)
    assert 0.9 * 3 * MIB < by_bytes.kv <= 3 * MIB
    assert plan(config, max_seq_length=100, kv_blocks=50).concurrency == 8


@pytest.mark.parametrize(
    ("available", "options", "advice"),
    [
        (20 * MIB, {}, "take a smaller model or serve it in bfloat16"),
        (40 * MIB, {}, "lower max_batch_size, step_tokens or max_seq_length"),
        (80 * MIB, {"kv_blocks": 10_000}, "lower kv_blocks or kv_bytes"),
        (1000 * MIB, {"kv_bytes": 100_000}, "lower max_seq_length or raise kv_bytes"),
    ],
)
def test_the_error_of_a_model_that_does_not_fit_has_advice(
    config: ModelConfig, available: int, options: dict[str, Any], advice: str
) -> None:
    with pytest.raises(MemoryShortage) as caught:
        plan(config, available, **options)
    assert advice in str(caught.value)
    assert "MiB" in str(caught.value)


def test_a_context_beyond_the_models_is_refused(config: ModelConfig) -> None:
    with pytest.raises(CheckpointError, match="max_seq_length 600 exceeds the model's context of 512"):
        plan(config, max_seq_length=600)


def test_the_available_memory_is_positive() -> None:
    assert 64 * MIB < available_memory() < 2**50


def test_the_page_cache_of_a_checkpoint_counts_as_available_memory(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{48 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{40 * MIB}\n")
    assert available_memory(tmp_path) == 8 * MIB
    (tmp_path / "memory.stat").write_text(f"anon {8 * MIB}\ninactive_file {30 * MIB}\nactive_file {2 * MIB}\n")
    assert available_memory(tmp_path) == 38 * MIB


def test_a_worker_that_does_not_fit_fails_before_it_reads_weights(checkpoint: Callable[[str], Path]) -> None:
    phases: list[str] = []
    with pytest.raises(MemoryShortage):
        build_engine(
            checkpoint("llama"), EngineOptions(kv_blocks=1 << 40), lambda phase, done, total: phases.append(phase)
        )
    assert "weights" not in phases


def test_the_log_has_size_and_concurrency(checkpoint: Callable[[str], Path], logged: io.StringIO) -> None:
    open_engine(checkpoint("llama"), kv_blocks=64)
    assert "1024 tokens, 2.0 sequences of 512" in logged.getvalue()
