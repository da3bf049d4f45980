"""The lower bounds on time by which rows of the bare loop are scored."""

import pytest

from bench.engine.limits import Limits, limits_for
from services.worker.loader import presets
from services.worker.loader.config import load_config
from services.worker.models.config import count_embeddings, count_parameters


def limits(model: str) -> Limits:
    """The limits of one H200 for a 16-bit model."""
    config = load_config(presets.folder_of(f"random:{model}"))
    embedding = 0 if config.tied_embeddings else config.vocab_size * config.hidden_size
    weights = 2.0 * (count_parameters(config) - embedding)
    ceilings = {"read": 4.3e12, "matmul": 790e12, "fp8": 1580e12, "sustained": 700e12}
    return limits_for(config, weights, ceilings, fp8=False)


@pytest.mark.parametrize(("batch", "ms"), [(1, 3.56), (8, 4.00), (32, 5.54), (128, 11.7)])
def test_the_floor_of_a_memory_bound_step_is_its_reading_time(batch: int, ms: float) -> None:
    assert limits("llama-3.1-8b").decode_s(batch, 2100) * 1e3 == pytest.approx(ms, rel=0.01)


def test_the_floor_of_a_compute_bound_operator_is_its_multiplying_time() -> None:
    found = limits("llama-3.1-8b")
    reading = (found.weights + 256 * 2100 * found.kv_token) / found.read
    multiplying = 2 * 256 * found.matrix_numbers / found.matmul
    assert found.decode_s(256, 2100) == pytest.approx(multiplying + 256 * 2100 * found.kv_token / found.read)
    assert found.decode_s(256, 2100) > max(reading, multiplying)


def test_prefill_reads_the_head_once() -> None:
    found = limits("llama-3.2-1b")
    head = 2 * found.config.vocab_size * found.config.hidden_size / found.read
    multiplied = 2 * 2000 * (found.matrix_numbers - found.config.vocab_size * found.config.hidden_size)
    attended = 2 * found.config.layers * found.config.heads * found.config.head_dim * 2000**2
    assert found.prefill_s(2000) == pytest.approx(head + (multiplied + attended) / found.matmul)


@pytest.mark.parametrize("bits", [16, 4])
def test_experts_have_their_part_of_the_bytes(bits: int) -> None:
    config = load_config(presets.folder_of("random:mixtral-8x7b"))
    head, layers = count_embeddings(config) // 2, count_parameters(config) - count_embeddings(config)
    ceilings = {"read": 4.3e12, "matmul": 790e12, "fp8": 1580e12}
    found = limits_for(config, layers * bits / 8 + 2 * head, ceilings, fp8=False)
    assert found.experts == pytest.approx(32 * 8 * 3 * 4096 * 14336 * bits / 8)
    assert found.touched(1) == pytest.approx(2 / 8)
