"""Staging buffers of a GPU's runner: a step that is split into parts may need more buffers than there are."""

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
    """A runner without computation: the token of each step is the number of earlier steps."""
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


def test_each_of_many_parts_returns_its_own_tokens(runner: GpuRunner) -> None:
    steps = [runner.launch(answer(slot)) for slot in range(2 * STAGING_BUFFERS + 1)]
    assert [runner.collect(step).sampled.tokens for step in steps] == [[[number]] for number in range(len(steps))]


def test_no_staging_buffer_is_written_while_it_may_be_read(runner: GpuRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    monkeypatch.setattr(runner._upload, "_settle", lambda: waits.append(runner._upload._begun))
    before = runner.launch(answer(0))
    for _ in range(2 * STAGING_BUFFERS):
        step = runner.launch(answer(0))
        runner.collect(before)
        before = step
    assert waits == [], "two steps in flight have free buffers"
    with mock.patch.object(runner.forward, "run", side_effect=torch.OutOfMemoryError):
        for _ in range(STAGING_BUFFERS):
            with pytest.raises(torch.OutOfMemoryError):
                runner.launch(answer(1))
    assert waits == [3 * STAGING_BUFFERS], "failed steps and the one in flight hold buffers"
    for _ in range(STAGING_BUFFERS):
        runner.launch(answer(2))
    assert waits == [3 * STAGING_BUFFERS, 4 * STAGING_BUFFERS]
