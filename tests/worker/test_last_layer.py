"""The end of the last layer: computed for the tokens that are sampled from, and for nobody else."""

import pytest
import torch
from torch import Tensor

from services.worker.job import EndReason
from services.worker.models.layers import Mlp
from tests.worker.conftest import EngineMaker
from tests.worker.drive import decoder_of, job, prompt_of, run, solo


def test_only_tokens_that_are_sampled_from_pass_it(engine: EngineMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine(step_tokens=64)
    first, last = decoder_of(made).model.layers[0].mlp, decoder_of(made).model.layers[-1].mlp
    passed: dict[Mlp, list[int]] = {first: [], last: []}
    compute = Mlp.__call__

    def noted(mlp: Mlp, x: Tensor) -> None:
        if mlp in passed:
            passed[mlp].append(len(x))
        compute(mlp, x)

    monkeypatch.setattr(Mlp, "__call__", noted)
    assert len(solo(made, job(0, prompt_of(100), max_tokens=3)).tokens) == 3
    assert passed == {first: [64, 36, 1, 1], last: [1, 1, 1]}


def test_a_chunk_that_nobody_samples_from_is_still_watched(engine: EngineMaker) -> None:
    """Keys and values of the last layer are all that is left of its tokens there, and others may find them."""
    made = engine(step_tokens=64)
    heads = decoder_of(made).model.config.kv_heads * decoder_of(made).model.config.head_dim
    decoder_of(made).model.layers[-1].attention.qkv.weight[-heads:] = torch.nan
    failed = run(made, job(0, prompt_of(100)), steps=1)[0].ended
    assert failed.error is not None
    assert (failed.reason, failed.error.reason) == (EndReason.ERROR, "NUMERIC")
    assert all(bool(torch.isfinite(layer).all()) for layer in decoder_of(made).kv.layers), (
        "a later owner would meet NaN"
    )
