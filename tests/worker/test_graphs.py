"""The rules that choose a captured graph for a step; no GPU is needed."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from kernels import kv_pages
from services.worker.models.decoder import Decoder
from services.worker.runners.cuda import graphs as graphs_module
from services.worker.runners.cuda.drafts.draft_model import GpuDraftModel
from services.worker.runners.cuda.graphs import Graph
from services.worker.runners.cuda.ops import InvariantTritonOps, TritonOps
from services.worker.runners.cuda.runner import GpuRunner
from services.worker.runners.cuda.step_words import Kind, Sizes, StepRows
from services.worker.runners.step import DEVICE_CATCH_UP_TOKENS, Rows
from tests.tiny_config import tiny_config

HALF = torch.float16


def runner_of(
    slots: int = 16, ops: TritonOps | None = None, window: int | None = None, stored: torch.dtype = HALF
) -> GpuRunner:
    """A runner of a tiny model, with a graph of each size that is captured on a Hopper."""
    config = tiny_config(layers=1, head_dim=64, windows=(window,))
    ops = ops or TritonOps()
    runner = GpuRunner(Decoder(config, ops, HALF, 512), ops, 16, slots, 512, 512, stored)
    with mock.patch.object(graphs_module, "is_hopper", return_value=True):
        for sizes, kind in runner.graphs.wanted():
            runner.graphs.captured[kind].insert(0, Graph(sizes, mock.Mock(), mock.Mock()))
    return runner


def taken(runner: GpuRunner, lengths: list[int], contexts: list[int]) -> tuple[Sizes, Kind]:
    """Sizes and kind of the graph for a step with these rows, of which the last one samples."""
    slots, samples = list(range(len(lengths))), [0] * (len(lengths) - 1) + [1]
    rows = StepRows(Rows(slots, lengths, samples, np.zeros(sum(lengths), np.int32)), contexts)
    graph = runner.graphs.find(*rows.sizes[:2], rows.kind)
    assert graph is not None
    return graph.sizes, next(
        kind for kind, graphs in runner.graphs.captured.items() if any(one is graph for one in graphs)
    )


def test_steps_with_short_contexts_have_separate_graphs() -> None:
    runner = runner_of()
    assert taken(runner, [128], [128]) == ((128, 8, 8), Kind.SHORT_CONTEXT)
    assert taken(runner, [40], [128]) == ((64, 8, 8), Kind.SHORT_CONTEXT), "after a short prefix"
    assert taken(runner, [1, 63, 1], [99, 63, 128]) == ((128, 8, 8), Kind.SHORT_CONTEXT), (
        "beside answers with a short context"
    )


def test_few_tokens_and_rows_have_graphs_of_their_size() -> None:
    runner = runner_of(slots=64)
    assert taken(runner, [9], [300]) == ((16, 8, 8), Kind.ANY)
    assert taken(runner, [1] * 7 + [20], [300] * 8) == ((32, 8, 8), Kind.ANY)
    assert taken(runner, [1] * 15 + [8], [300] * 16) == ((32, 24, 24), Kind.ANY)
    assert taken(runner, [1] * 23 + [300], [300] * 24) == ((384, 24, 24), Kind.ANY)
    assert taken(runner, [1] * 24 + [8], [300] * 25) == ((64, 64, 64), Kind.ANY)
    assert taken(runner, [1] * 15 + [400], [400] * 16) == ((512, 64, 64), Kind.ANY), "few rows, but many tokens"


def test_other_steps_do_not_use_these_graphs() -> None:
    runner = runner_of()
    assert taken(runner, [1], [7]) == ((1, 1, 1), Kind.ANSWERS)
    assert taken(runner, [40], [129]) == ((64, 8, 8), Kind.ANY), "the context is one key too long"
    assert taken(runner, [1, 63, 1], [99, 63, 129]) == ((128, 8, 8), Kind.ANY), "beside an answer with a longer context"
    assert taken(runner, [70, 70], [70, 70]) == ((192, 8, 8), Kind.ANY), "too many tokens"
    assert taken(runner, [10] * 9, [10] * 9) == ((128, 16, 16), Kind.ANY), "too many rows"
    assert taken(runner, [400], [400]) == ((512, 8, 8), Kind.ANY), "no graph has 448 tokens"
    assert taken(runner_of(slots=4), [60], [60]) == ((64, 4, 4), Kind.SHORT_CONTEXT)


def test_long_steps_have_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs_module, "EAGER_BYTES", 250 * 12 * 48 * (48 + 20) * 2)
    runner = runner_of()
    assert taken(runner, [190], [190]) == ((192, 8, 8), Kind.ANY)
    assert runner.graphs.find(193, 1, Kind.ANY) is None


def test_ranks_that_wait_for_one_another_have_graphs_of_long_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs_module, "EAGER_BYTES", 250 * 12 * 48 * (48 + 20) * 2)
    monkeypatch.setattr(graphs_module, "LARGE_TOKENS", (128, 512))
    ops = TritonOps()
    ops.waits_for_ranks = True
    runner = runner_of(ops=ops)
    assert taken(runner, [190], [190]) == ((192, 8, 8), Kind.ANY)
    assert taken(runner, [448], [448]) == ((512, 8, 8), Kind.ANY)
    assert runner.graphs.find(447, 1, Kind.ANY) is None, "it would fill too little of a graph"
    assert runner_of().graphs.find(448, 1, Kind.ANY) is None, "nothing is to be waited for"


@pytest.mark.parametrize(
    "other", [{"ops": InvariantTritonOps()}, {"window": 100}, {"stored": kv_pages.FP8}], ids=lambda it: next(iter(it))
)
def test_shapes_that_the_kernel_does_not_support_have_no_graph(other: dict[str, Any]) -> None:
    assert taken(runner_of(**other), [128], [128]) == ((128, 8, 8), Kind.ANY)


def test_other_devices_have_no_such_graphs() -> None:
    assert all(kind is not Kind.SHORT_CONTEXT for _, kind in runner_of().graphs.wanted())


@pytest.mark.parametrize(
    ("rows", "guesses", "sizes"),
    [
        (1, 4, (5, 1, 5)),
        (1, 5, (8, 1, 8)),
        (1, 8, (9, 1, 9)),
        (3, 2, (12, 4, 12)),
        (9, 1, (32, 16, 32)),
        (16, 8, (144, 16, 144)),
    ],
)
def test_steps_with_guesses_have_graphs_by_rows_and_depth(rows: int, guesses: int, sizes: Sizes) -> None:
    config = tiny_config(layers=1, head_dim=64)
    runner = GpuRunner(Decoder(config, TritonOps(), HALF, 512), TritonOps(), 16, 16, 512, 512, HALF, guesses=8)
    for wanted, longest in runner.graphs.wanted_guesses():
        runner.graphs.captured[Kind.GUESSES].insert(0, Graph(wanted, mock.Mock(), mock.Mock(), longest))
    graph = runner.graphs.find_guesses(rows, guesses)
    assert graph is not None
    assert graph.sizes == sizes
    assert guesses <= graphs_module.most_guesses(rows, 8)


def test_guesses_are_limited_to_captured_steps() -> None:
    assert [graphs_module.most_guesses(rows, 8) for rows in (1, 16, 32, 33, 64, 65, 256)] == [8, 8, 8, 4, 4, 0, 0]
    assert runner_of().graphs.wanted_guesses() == [], "without speculation there are none"


def draft_of(slots: int, step_tokens: int) -> GpuDraftModel:
    ops = TritonOps()
    model = Decoder(tiny_config(layers=1, head_dim=64, windows=(None,)), ops, HALF, 512)
    return GpuRunner(model, ops, 16, slots, 512, step_tokens, HALF, guesses=8).use_draft(model, HALF)


@pytest.mark.parametrize(("slots", "step_tokens"), [(64, 2048), (256, 8192), (64, 500), (3, 100), (64, 40)])
def test_what_a_draft_catches_up_has_a_graph(slots: int, step_tokens: int) -> None:
    """Of up to 64 rows, and with at most twice the tokens, or 64."""
    found = draft_of(slots, step_tokens)._catch_up_sizes()
    assert found == sorted(found, reverse=True)
    assert all(rows <= tokens for tokens, rows, _ in found)
    for tokens in range(1, min(step_tokens, DEVICE_CATCH_UP_TOKENS) + 1):
        for rows in range(1, min(tokens, slots, 64) + 1):
            size = min(held[0] for held in found if tokens <= held[0] and rows <= held[1])
            assert size <= max(64, 2 * tokens)


@pytest.mark.parametrize(
    ("lengths", "taken"),
    [([1], (64, 8, 0)), ([8] * 8, (64, 8, 0)), ([1] * 9, (64, 64, 0)), ([1, 64], (128, 8, 0)), ([65], (128, 8, 0)),
     ([600], None)],
)  # fmt: skip
def test_a_draft_catches_up_with_the_smallest_graph(lengths: list[int], taken: Sizes | None) -> None:
    draft = draft_of(64, 512)
    graphs = {sizes: mock.Mock() for sizes in draft._catch_up_sizes()}
    draft._catch_ups = {**graphs}
    with mock.patch.object(draft, "_compute") as computed, mock.patch.object(draft, "_send_rows") as sent:
        draft._catch_up({slot: (3, [5] * length) for slot, length in enumerate(lengths)})
    assert [sizes for sizes, graph in graphs.items() if graph.called] == ([taken] if taken else [])
    assert [call.args[1] for call in sent.call_args_list] == [taken or (sum(lengths), len(lengths), 0)]
    assert computed.called == (taken is None)
