"""Adapters on grids of ranks, which are threads here: answers of one process, few slots, refusals, copies of ranks."""

import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from services.worker.errors import CheckpointError
from services.worker.runners import rank_adapters, ranks
from services.worker.runners.base import PreparedPages
from services.worker.runners.rank_adapters import HeldAdapters
from tests.adapters import make_adapters, read_all
from tests.checkpoints import checkpoint
from tests.parallel import scenes
from tests.parallel.threads import grid_built
from tests.worker.drive import built, job, prompt_of, run, solo
from tests.worker.test_adapter_errors import Q, tensors, write
from tests.worker.test_adapters import SHAPES, copies, jobs, recipes

__all__ = ["checkpoint"]

Folder = Callable[[str], Path]
Folders = dict[str, dict[str, Path]]


@pytest.fixture(scope="module")
def folders(checkpoint: Folder, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    into = tmp_path_factory.mktemp("adapters")
    return {shape: make_adapters(checkpoint(shape), into / shape, recipes(shape)) for shape in SHAPES}


@pytest.mark.parametrize(
    ("shape", "tensor", "pipeline", "options", "tolerance"),
    [
        ("llama", 2, 1, {"speculate": "ngram", "speculate_depth": 3}, scenes.TOLERANCE),
        ("llama", 2, 1, {"quantize": "int8"}, 1e-3),
        ("llama", 1, 2, {"step_tokens": 19}, scenes.TOLERANCE),
        ("llama", 2, 2, {"step_tokens": 19}, scenes.TOLERANCE),
        ("gpt2", 2, 1, {"step_tokens": 19}, scenes.TOLERANCE),
        ("phi3", 2, 2, {}, scenes.TOLERANCE),
    ],
)
def test_rows_of_different_adapters_are_as_on_one_process(
    shape: str,
    tensor: int,
    pipeline: int,
    options: dict[str, Any],
    tolerance: float,
    checkpoint: Folder,
    folders: Folders,
) -> None:
    """The adapters of one batch change all products of a layer, or those of attention alone."""
    one = built(checkpoint(shape), kv_blocks=128, max_batch_size=16, threads=1, **options)
    expected = run(one.engine, *jobs(read_all(one.read_adapter, folders[shape])))
    with grid_built(checkpoint(shape), tensor, pipeline, **options) as grid:
        found = run(grid.engine, *jobs(read_all(grid.read_adapter, folders[shape])))
    assert scenes.differences(expected, found, tolerance) == []
    assert len({tuple(found[10 * which + 2].tokens) for which in range(3)}) == 3, "the adapters change nothing"


def test_a_deterministic_grid_repeats_every_bit_of_an_adapter(checkpoint: Folder, folders: Folders) -> None:
    """In other chunks and batches; stages change no bit of one process."""
    settings: dict[str, Any] = {"kv_blocks": 128, "max_batch_size": 16, "threads": 1, "deterministic": True}
    one = built(checkpoint("llama"), **settings)
    expected = run(one.engine, *jobs(read_all(one.read_adapter, folders["llama"])))
    found = []
    for tensor, pipeline, options in ((1, 2, {}), (2, 1, {}), (2, 1, {"step_tokens": 19, "adapter_slots": 1})):
        with grid_built(checkpoint("llama"), tensor, pipeline, **settings, **options) as grid:
            answers = run(grid.engine, *jobs(read_all(grid.read_adapter, folders["llama"])))
        found.append({key: (answer.tokens, answer.logprobs) for key, answer in answers.items()})
    assert found[0] == {key: (answer.tokens, answer.logprobs) for key, answer in expected.items()}
    assert found[1] == found[2]


def test_the_least_recently_used_adapter_makes_room_on_all_ranks(checkpoint: Folder, folders: Folders) -> None:
    """Answers without an adapter go on meanwhile."""
    prompt, plain = prompt_of(9), job(99, prompt_of(30), max_tokens=20)
    with grid_built(checkpoint("llama"), 2, 2, adapter_slots=2) as grid:
        adapters = read_all(grid.read_adapter, folders["llama"])
        many = [*copies(adapters["poems"], 4), adapters["code"]]
        order = [0, 4, 1, 2, 4, 3, 0]
        ordered = [job(key, prompt, max_tokens=6, adapter=many[which]) for key, which in enumerate(order)]
        poem, code = (solo(grid.engine, one).tokens for one in ordered[:2])
        found = run(grid.engine, plain, *ordered)
    assert poem != code
    assert [found[key].tokens for key in range(len(order))] == [code if which == 4 else poem for which in order]
    assert len(found[99].tokens) == 20


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (tensors(inputs=32), "the adapter is of another base: model.layers.0.self_attn.q_proj has matrices"),
        (tensors(outputs=32), "the adapter is of another base: model.layers.0.self_attn.q_proj has matrices"),
        (tensors(Q.replace("0", "3")), "the adapter changes model.layers.3.self_attn.q_proj, which is no product"),
        ({**tensors(), f"{Q}.lora_B.weight": torch.full((64, 4), 3e38)}, "q_proj has numbers that are not finite"),
    ],
)
def test_an_adapter_of_another_base_is_refused_in_the_same_line(
    weights: dict[str, torch.Tensor], message: str, checkpoint: Folder, tmp_path: Path
) -> None:
    folder = write(tmp_path / "adapter", {}, weights)
    settings: dict[str, Any] = {"kv_blocks": 16, "max_batch_size": 4}
    lines = []
    with grid_built(checkpoint("llama"), 2, 1, **settings) as grid:
        for read in (built(checkpoint("llama"), **settings).read_adapter, grid.read_adapter):
            with pytest.raises(CheckpointError, match=message) as refusal:
                read("a", str(folder))
            lines.append(str(refusal.value))
    assert lines[0] == lines[1]


class Watched(HeldAdapters):
    """The copies of a rank that may be counted, and that are made when they may be."""

    made: list["Watched"]
    may_copy: threading.Event

    def __init__(self, pages: PreparedPages) -> None:
        super().__init__(pages)
        self.made.append(self)

    def _prepare(self, contents: Any) -> tuple[Any, int]:
        self.may_copy.wait()
        return super()._prepare(contents)

    @property
    def count(self) -> int:
        return len(self._copies) + len(self._arriving)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> type[Watched]:
    Watched.made, Watched.may_copy = [], threading.Event()
    monkeypatch.setattr(ranks, "HeldAdapters", Watched)
    return Watched


def wait_for(count: int, made: list[Watched]) -> None:
    """Until each rank has this many copies."""
    until = time.monotonic() + 20
    while any(held.count != count for held in made):
        assert time.monotonic() < until, [held.count for held in made]
        time.sleep(0.005)


def test_ranks_copy_beside_the_steps_and_drop_what_is_dropped(
    watched: type[Watched], checkpoint: Folder, folders: Folders
) -> None:
    with grid_built(checkpoint("llama"), 2, 2) as grid:
        adapters = read_all(grid.read_adapter, folders["llama"])
        assert len(solo(grid.engine, job(1, prompt_of(9))).tokens) == 16
        threading.Timer(0.3, watched.may_copy.set).start()
        assert len(solo(grid.engine, job(2, prompt_of(9), adapter=adapters["poems"])).tokens) == 16
        assert len(watched.made) == 3
        wait_for(2, watched.made)
        del adapters["poems"]
        gc.collect()
        wait_for(1, watched.made)
        adapters.clear()
        gc.collect()
        wait_for(0, watched.made)


def test_a_copy_that_rank_0_cannot_make_is_dropped_by_all(
    watched: type[Watched], checkpoint: Folder, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched.may_copy.set()
    with grid_built(checkpoint("llama"), 2, 1) as grid:
        own = grid.engine.runner._rank.adapters  # type: ignore[attr-defined]
        monkeypatch.setattr(own, "prepare", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            read_all(grid.read_adapter, folders["llama"])
        gc.collect()
        wait_for(0, watched.made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_module_arrives_as_it_was_sent(dtype: torch.dtype) -> None:
    a, b = torch.randn(4, 18).to(dtype)[:, 3:14], torch.randn(7, 4).to(dtype)
    name, (its_a, its_b) = rank_adapters.read_module(b"".join(rank_adapters.write_module(9, "layers.0.up", a, b)))
    assert name == "layers.0.up"
    assert torch.equal(its_a, a)
    assert torch.equal(its_b, b)
