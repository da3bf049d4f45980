"""Steps that a GPU's runner has in flight: one that was told apart may be more than it has host memory at hand for."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from services.worker.runners.cuda.forward import Computed
from services.worker.runners.cuda.runner import GpuRunner
from services.worker.runners.cuda.upload import STAGING_BUFFERS
from services.worker.runners.step import Words
from tests.worker.test_graphs import runner_of


def answer(slot: int) -> Words:
    """A step of one answer."""
    return np.array([0, 1, 1, slot, 1, 1, -1], np.int32)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> GpuRunner:
    """Computes nothing: the token of each step is the number of those before."""
    made, before = runner_of(), iter(range(99))
    for graphs in made.graphs.captured.values():
        graphs.clear()
    report = torch.zeros(3, dtype=torch.int32)

    def compute(*_: Any) -> Computed:
        report[0] = next(before)
        return Computed(mock.Mock(), mock.Mock(), report)

    monkeypatch.setattr(made.forward, "run", compute)
    monkeypatch.setattr(made._upload, "send", mock.Mock())
    return made


def test_each_of_many_parts_tells_what_it_brought(runner: GpuRunner) -> None:
    steps = [runner.launch(answer(slot)) for slot in range(2 * STAGING_BUFFERS + 1)]
    assert [runner.collect(step).sampled.tokens for step in steps] == [[[number]] for number in range(len(steps))]


def test_no_stage_is_written_to_that_may_still_be_read(runner: GpuRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    monkeypatch.setattr(runner._upload, "_settle", lambda: waits.append(runner._upload._begun))
    before = runner.launch(answer(0))
    for _ in range(2 * STAGING_BUFFERS):
        step = runner.launch(answer(0))
        runner.collect(before)
        before = step
    assert waits == [], "two in flight need not wait"
    with mock.patch.object(runner.forward, "run", side_effect=torch.OutOfMemoryError):
        for _ in range(STAGING_BUFFERS):
            with pytest.raises(torch.OutOfMemoryError):
                runner.launch(answer(1))
    assert waits == [3 * STAGING_BUFFERS], "those that fail have stages, as has the one in flight"
    for _ in range(STAGING_BUFFERS):
        runner.launch(answer(2))
    assert waits == [3 * STAGING_BUFFERS, 4 * STAGING_BUFFERS]
