"""Which captured step serves which: the rules, which need no GPU."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from kernels import kv_pages
from services.worker.models.decoder import Decoder
from services.worker.runners.cuda import graphs as graphs_module
from services.worker.runners.cuda.graphs import Graph
from services.worker.runners.cuda.ops import InvariantTritonOps, TritonOps
from services.worker.runners.cuda.runner import GpuRunner
from services.worker.runners.cuda.step_words import Kind, Sizes, StepRows
from services.worker.runners.step import Rows
from tests.tiny_config import tiny_config

HALF = torch.float16


def runner_of(
    slots: int = 16, ops: TritonOps | None = None, window: int | None = None, stored: torch.dtype = HALF
) -> GpuRunner:
    """For a tiny model, with a graph of each size that would be captured on a Hopper."""
    config = tiny_config(layers=1, head_dim=64, windows=(window,))
    ops = ops or TritonOps()
    runner = GpuRunner(Decoder(config, ops, HALF, 512), ops, 16, slots, 512, 512, stored)
    with mock.patch.object(graphs_module, "is_hopper", return_value=True):
        for sizes, kind in runner.graphs.wanted():
            runner.graphs.captured[kind].insert(0, Graph(sizes, mock.Mock(), mock.Mock()))
    return runner


def taken(runner: GpuRunner, lengths: list[int], contexts: list[int]) -> tuple[Sizes, Kind]:
    """Sizes and kind of the graph that serves such a step, in which the last row samples."""
    slots, samples = list(range(len(lengths))), [0] * (len(lengths) - 1) + [1]
    rows = StepRows(Rows(slots, lengths, samples, np.zeros(sum(lengths), np.int32)), contexts)
    graph = runner.graphs.find(*rows.sizes[:2], rows.kind)
    assert graph is not None
    return graph.sizes, next(
        kind for kind, graphs in runner.graphs.captured.items() if any(one is graph for one in graphs)
    )


def test_steps_whose_rows_see_few_keys_have_graphs_of_their_own() -> None:
    runner = runner_of()
    assert taken(runner, [128], [128]) == ((128, 8, 8), Kind.BRIEF)
    assert taken(runner, [40], [128]) == ((64, 8, 8), Kind.BRIEF), "behind a short prefix"
    assert taken(runner, [1, 63, 1], [99, 63, 128]) == ((128, 8, 8), Kind.BRIEF), "beside young answers"


def test_other_steps_do_not_take_them() -> None:
    runner = runner_of()
    assert taken(runner, [1], [7]) == ((1, 1, 1), Kind.ANSWERS)
    assert taken(runner, [40], [129]) == ((64, 8, 8), Kind.ANY), "one key too many"
    assert taken(runner, [1, 63, 1], [99, 63, 129]) == ((128, 8, 8), Kind.ANY), "beside an answer that sees more"
    assert taken(runner, [70, 70], [70, 70]) == ((192, 8, 8), Kind.ANY), "too many tokens"
    assert taken(runner, [10] * 9, [10] * 9) == ((128, 16, 16), Kind.ANY), "too many rows"
    assert taken(runner, [400], [400]) == ((512, 8, 8), Kind.ANY), "no graph holds 448"
    assert taken(runner_of(slots=4), [60], [60]) == ((64, 4, 4), Kind.BRIEF)


def test_steps_that_keep_the_gpu_busy_for_long_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs_module, "EAGER_BYTES", 250 * 12 * 48 * (48 + 20) * 2)
    runner = runner_of()
    assert taken(runner, [190], [190]) == ((192, 8, 8), Kind.ANY)
    assert runner.graphs.find(193, 1, Kind.ANY) is None


@pytest.mark.parametrize(
    "other", [{"ops": InvariantTritonOps()}, {"window": 100}, {"stored": kv_pages.FP8}], ids=lambda it: next(iter(it))
)
def test_what_their_kernel_does_not_serve_has_none(other: dict[str, Any]) -> None:
    assert taken(runner_of(**other), [128], [128]) == ((128, 8, 8), Kind.ANY)


def test_other_devices_have_none() -> None:
    assert all(kind is not Kind.BRIEF for _, kind in runner_of().graphs.wanted())
