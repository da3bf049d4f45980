"""Whole experts spread over ranks: a grid answers as one process does, and each rank reads its own experts alone."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.worker.build.encoders.assemble import build_encoder
from services.worker.build.ranks.grid import own_part
from services.worker.build.weights import WeightSource, open_source
from services.worker.errors import CheckpointError
from services.worker.models.sharding import config_of, sizes_of
from services.worker.options import EngineOptions
from services.worker.parallel.shards import Shard, shard_of
from services.worker.parallel.topology import Grid
from tests import quantized
from tests.checkpoints import Shape, checkpoint, make_checkpoint
from tests.parallel import scenes
from tests.parallel.threads import grid_engine
from tests.served import UNEVEN_EXPERTS, WIDE_EXPERTS
from tests.worker.drive import open_engine, run
from tests.worker.test_moe import edit, stacked

__all__ = ["checkpoint"]

Folder = Callable[[str], Path]
_EXPERT = re.compile(r"model\.layers\.(\d+)\..*\.experts\.(\d+)\.(.*)")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts whose weights have groups and blocks."""
    return make_checkpoint(tmp_path_factory.mktemp("wide") / "plain", WIDE_EXPERTS)


@pytest.mark.parametrize(
    ("shape", "tensor", "pipeline", "scene"),
    [
        ("mixtral", 2, 1, scenes.preempted),
        ("mixtral", 4, 1, scenes.chunked),
        ("qwen3-moe", 2, 1, scenes.cached),
        ("qwen3-moe", 2, 2, scenes.chunked),
    ],
)
def test_spread_experts_answer_as_one_process(
    checkpoint: Folder, shape: str, tensor: int, pipeline: int, scene: scenes.Scene
) -> None:
    folder = checkpoint(shape)
    expected = scenes.one_process(folder)
    assert scenes.compare(folder, tensor, pipeline, expected, [scene], expert_parallel=True) == []


def test_experts_need_not_divide_by_the_ranks(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "uneven", UNEVEN_EXPERTS)
    expected = scenes.one_process(folder)
    assert scenes.compare(folder, 4, 1, expected, [scenes.chunked], expert_parallel=True) == []
    with pytest.raises(CheckpointError, match="the model is too small for 4 tensor ranks"), grid_engine(folder, 4):
        pass


@pytest.mark.parametrize(("kind", "tolerance"), [("experts-fp8-blocks", 1e-4), ("experts-int8", 1e-3)])
def test_experts_in_fewer_bits_answer_as_one_process(wide: Path, tmp_path: Path, kind: str, tolerance: float) -> None:
    """A CPU rounds the inputs of INT8 to 16 bits."""
    folder = quantized.write(kind, wide, tmp_path).folder
    expected = scenes.one_process(folder)
    with grid_engine(folder, 2, expert_parallel=True) as engine:
        assert scenes.differences(expected, run(engine, *scenes.jobs()), tolerance) == []


def test_groups_that_neurons_would_divide_are_whole_in_whole_experts(wide: Path, tmp_path: Path) -> None:
    folder = quantized.write("experts-int4", wide, tmp_path).folder
    with (
        pytest.raises(CheckpointError, match="64 inputs cannot be shared out in groups of 128"),
        grid_engine(folder, 2),
    ):
        pass
    expected = run(open_engine(folder, kv_blocks=128, max_batch_size=16, threads=1), *scenes.greedy())
    with grid_engine(folder, 2, expert_parallel=True) as engine:
        assert scenes.differences(expected, run(engine, *scenes.greedy()), 0.15, tokens=False) == []


def sources(folder: Path, grid: Grid) -> tuple[WeightSource, list[tuple[Shard, WeightSource]]]:
    """The source of a model, and of each rank its share and the source of its part."""
    source = open_source(folder, EngineOptions())
    sizes = sizes_of(source.config, quantized=source.reader is not None)
    shards = [shard_of(sizes, grid, rank) for rank in range(grid.ranks)]
    return source, [(shard, own_part(source, shard)) for shard in shards]


def headers_of(source: WeightSource) -> dict[str, Any]:
    assert source.checkpoint is not None
    return {name: header for name, header in source.checkpoint.headers.items() if _EXPERT.fullmatch(name)}


@pytest.mark.parametrize("kind", ["plain", "stacked", "experts-int4", "experts-fp8-blocks"])
def test_a_rank_reads_its_own_experts_alone(wide: Path, tmp_path: Path, kind: str) -> None:
    """Whole tensors, in any format; and every tensor of an expert is read by one rank."""
    folder = wide
    if kind == "stacked":
        folder = make_checkpoint(
            tmp_path / "mixtral", Shape("mixtral", {"num_local_experts": 4, "num_hidden_layers": 2})
        )
        edit(folder, stacked)
    elif kind != "plain":
        folder = quantized.write(kind, wide, tmp_path).folder
    source, ranks = sources(folder, Grid(2 if kind == "stacked" else 4, spreads_experts=True))
    read = dict[str, Any]()
    for shard, own in ranks:
        config = config_of(source.config, shard)
        assert config.moe is not None
        assert config.moe.own == range(shard.experts.start, shard.experts.stop)
        for name, header in headers_of(own).items():
            found = _EXPERT.fullmatch(name)
            assert found is not None
            expert = f".experts.{int(found[2]) + shard.experts.start}."
            whole = re.sub(r"\.experts\.\d+\.", expert, name)
            assert whole not in read
            read[whole] = header
    for name, header in headers_of(source).items():
        its = read.pop(name)
        assert (its.part, its.shape, its.offset, its.place) == (None, header.shape, header.offset, header.place)
    assert read == {}


def test_a_deterministic_grid_of_experts_repeats_every_bit(checkpoint: Folder) -> None:
    """After a restart, in other chunks; stages change no bit."""
    found = []
    for pipeline, options in ((1, {"step_tokens": 19}), (2, {})):
        with grid_engine(
            checkpoint("qwen3-moe"), 2, pipeline, deterministic=True, expert_parallel=True, **options
        ) as engine:
            answers = run(engine, *scenes.jobs())
            found.append([(answer.tokens, answer.logprobs) for answer in answers.values()])
    assert found[0] == found[1]


def test_spread_experts_are_refused_where_there_is_nothing_to_spread(checkpoint: Folder, tmp_path: Path) -> None:
    mixtral, tensor_alone = checkpoint("mixtral"), "WEFT_EXPERT_PARALLEL spreads experts over tensor ranks"
    for options in ({}, {"pipeline_parallel": 2}, {"engine": "paced"}):
        with pytest.raises(CheckpointError, match=f"^{tensor_alone}: set WEFT_TENSOR_PARALLEL, too$"):
            open_engine(mixtral, expert_parallel=True, **options)
    for folder, reason in (
        (checkpoint("llama"), "WEFT_EXPERT_PARALLEL: the model has no experts"),
        (few_experts(mixtral, tmp_path / "few"), "3 experts cannot be spread over 4 tensor ranks"),
    ):
        with pytest.raises(CheckpointError, match=f"^{reason}$"), grid_engine(folder, 4, expert_parallel=True):
            pass
    with pytest.raises(CheckpointError, match="an encoder cannot honour expert_parallel: it has no experts"):
        build_encoder(tmp_path, EngineOptions(expert_parallel=True), lambda *_: None)


def few_experts(mixtral: Path, folder: Path) -> Path:
    """A folder whose config.json says that a layer has three experts."""
    folder.mkdir()
    for path in mixtral.iterdir():
        (folder / path.name).symlink_to(path)
    settings = json.loads((mixtral / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**settings, "num_local_experts": 3}))
    return folder
