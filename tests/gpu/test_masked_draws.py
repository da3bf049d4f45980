"""Draws under masks on a GPU: captured ones are those that are launched kernel by kernel."""

from typing import Any

import pytest
import torch

from services.worker.runners.cuda.runner import GpuRunner
from services.worker.structured.compiler import GuidanceForms
from tests.checkpoints import SMALL_DEMO
from tests.worker.drive import open_engine, run
from tests.worker.test_structured import fits, text_of, varied_forms

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_captured_draws_are_those_of_single_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside free answers, in batches of all sizes while answers end, with penalties, stop tokens and
    log-probabilities."""
    forms, jobs = GuidanceForms((SMALL_DEMO / "tokenizer.json").read_bytes(), 6144, [0]), varied_forms()
    found, launched = [], []
    for captured in (True, False):
        settings: dict[str, Any] = {"dtype": "float32", "deterministic": True, "kv_blocks": 512}
        made = open_engine(SMALL_DEMO, engine="gpu", **settings)
        made.use_forms(forms)
        assert isinstance(made.runner, GpuRunner)
        draws = made.runner._masked
        assert draws._graphs, "no draws were captured"
        if not captured:
            draws._graphs.clear()
        single, count = draws._launch, [0]

        def launch(*arguments: Any, single: Any = single, count: list[int] = count) -> Any:
            count[0] += 1
            return single(*arguments)

        monkeypatch.setattr(draws, "_launch", launch)
        found.append(run(made, *jobs))
        launched.append(count[0])
        made.check_integrity()
    assert launched[0] < launched[1] / 2, launched
    for one in jobs:
        by_graph, single_launches = found[0][one.key], found[1][one.key]
        assert by_graph.tokens == single_launches.tokens, one.key
        assert (by_graph.logprobs, by_graph.tops) == (single_launches.logprobs, single_launches.tops), one.key
        if one.params.structured is not None and by_graph.ended.reason.value == "stop":
            assert fits(one.params.structured, text_of(by_graph))
    forms.close()
