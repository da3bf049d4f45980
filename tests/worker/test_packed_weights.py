"""Models whose plain weights are packed compute what they compute with plain weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernels import plain_cpu
from kernels.plain_cpu import MklProduct, PackedProduct
from services.worker.engine.generation import GenerationEngine
from tests.checkpoints import SHAPES, Shape, make_checkpoint
from tests.encoders import make_encoder
from tests.worker.drive import decoder_of, job, open_engine, prompt_of, run
from tests.worker.test_encoders import ENCODED, build, vectors

MODELS = {
    "llama-bias-rope": SHAPES["llama-bias-rope"],
    "gemma2": SHAPES["gemma2"],
    "gpt2": SHAPES["gpt2"],
    "mixtral": Shape("mixtral", {"num_local_experts": 4, "num_hidden_layers": 2}),
}
PROMPTS = [prompt_of(length, length) for length in (1, 17, 40)]


def pack_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs also the small weights of the tests' models."""
    monkeypatch.setattr(plain_cpu, "PACK_FROM", 1)
    monkeypatch.setattr(plain_cpu, "PACK_FROM_ON_INTEL", 1)


def packed(engine: GenerationEngine) -> set[bool]:
    """Whether the weights of products are packed."""
    return {isinstance(each.linear.weight, PackedProduct) for each in decoder_of(engine).model.projections()}


@pytest.mark.skipif(not plain_cpu.is_supported(torch.float32), reason="torch has no oneDNN here")
@pytest.mark.parametrize("name", MODELS)
def test_packing_changes_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    folder = make_checkpoint(tmp_path, MODELS[name])
    plain = open_engine(folder, kv_blocks=64)
    pack_all(monkeypatch)
    engine, exact = open_engine(folder, kv_blocks=64), open_engine(folder, kv_blocks=64, deterministic=True)
    assert (packed(plain), packed(engine), packed(exact)) == ({False}, {True}, {False})
    jobs = [job(number, prompt, max_tokens=16, logprobs=0) for number, prompt in enumerate(PROMPTS)]
    expected, got = run(plain, *jobs), run(engine, *jobs)
    for number in range(len(PROMPTS)):
        assert got[number].tokens == expected[number].tokens
        np.testing.assert_allclose(
            np.array(got[number].logprobs, float), np.array(expected[number].logprobs, float), atol=2e-4
        )


@pytest.mark.skipif(not plain_cpu.is_supported(torch.float32), reason="torch has no oneDNN here")
def test_packing_changes_no_vector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_encoder(tmp_path)
    expected = vectors(build(folder), ENCODED)
    pack_all(monkeypatch)
    np.testing.assert_allclose(vectors(build(folder), ENCODED), expected, atol=2e-4)


@pytest.mark.skipif(not plain_cpu.has_mkl(), reason="torch has no MKL here")
def test_packing_by_mkl_changes_no_vector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_encoder(tmp_path)
    expected = vectors(build(folder), ENCODED)
    monkeypatch.setattr(plain_cpu, "PACK_FROM", 1)
    monkeypatch.setattr(plain_cpu, "is_intel", lambda: True)
    built = build(folder)
    runner: Any = built.engine.runner
    assert {type(each.linear.weight) for each in runner.model.projections()} == {MklProduct}
    np.testing.assert_allclose(vectors(built, ENCODED), expected, atol=2e-4)
