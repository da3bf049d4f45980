"""The end of the last layer is computed only for tokens that are sampled from."""

import pytest
import torch
from torch import Tensor

from services.worker.job import EndReason
from services.worker.models.layers import Mlp
from tests.worker.conftest import EngineMaker
from tests.worker.drive import decoder_of, job, prompt_of, run, solo


def test_the_last_mlp_computes_only_sampled_tokens(engine: EngineMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine(step_tokens=64)
    first, last = decoder_of(made).model.layers[0].mlp, decoder_of(made).model.layers[-1].mlp
    passed: dict[object, list[int]] = {first: [], last: []}
    compute = Mlp.__call__

    def noted(mlp: Mlp, x: Tensor) -> None:
        if mlp in passed:
            passed[mlp].append(len(x))
        compute(mlp, x)

    monkeypatch.setattr(Mlp, "__call__", noted)
    assert len(solo(made, job(0, prompt_of(100), max_tokens=3)).tokens) == 3
    assert passed == {first: [64, 36, 1, 1], last: [1, 1, 1]}


def test_a_chunk_without_a_sampled_token_is_still_checked(engine: EngineMaker) -> None:
    """Its keys and values of the last layer are cached, so non-finite ones must fail the job."""
    made = engine(step_tokens=64)
    heads = decoder_of(made).model.config.kv_heads * decoder_of(made).model.config.head_dim
    decoder_of(made).model.layers[-1].attention.qkv.weight[-heads:] = torch.nan
    failed = run(made, job(0, prompt_of(100)), steps=1)[0].ended
    assert failed.error is not None
    assert (failed.reason, failed.error.reason) == (EndReason.ERROR, "NUMERIC")
    assert all(bool(torch.isfinite(layer).all()) for layer in decoder_of(made).kv.layers), (
        "a later owner of the block would read NaN"
    )
