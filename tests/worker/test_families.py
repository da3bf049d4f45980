"""The tables of each family: they name and count all tensors of a checkpoint, and split them correctly."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.reference import layers as reference
from services.worker.errors import CheckpointError
from services.worker.loader.config import load_config, read_config
from services.worker.loader.plain import load_weights
from services.worker.loader.tensors import open_checkpoint
from services.worker.models.config import count_parameters
from services.worker.models.decoder import Decoder, Projection
from services.worker.models.family import Part, Split
from services.worker.models.moe import SparseMlp
from services.worker.models.registry import FAMILIES, family_of
from services.worker.runners.cpu.ops import ReferenceOps
from tests.checkpoints import SHAPES


def loaded(folder: Path) -> Decoder:
    """The plain model of a checkpoint."""
    config = load_config(folder)
    model = Decoder(config, ReferenceOps(), torch.float32, 16)
    load_weights(model, open_checkpoint(folder).renamed(model.family.tensor_name), lambda *_: None)
    model.add_norm_offset()
    return model


@pytest.mark.parametrize("shape", SHAPES)
def test_a_models_tensors_are_those_of_its_checkpoint(checkpoint: Callable[[str], Path], shape: str) -> None:
    folder = checkpoint(shape)
    config = load_config(folder)
    stored = open_checkpoint(folder).renamed(family_of(config.architecture).tensor_name)
    destinations = Decoder(config, ReferenceOps(), torch.float32, 16).destinations()
    assert set(destinations) == set(stored.headers)
    for name, views in destinations.items():
        assert {tuple(view.shape) for view in views} == {stored.headers[name].shape}
    assert count_parameters(config) == stored.parameters


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.architectures[0])
def test_a_family_names_each_part_once_and_splits_what_can_be_split(family: object) -> None:
    known = next(each for each in FAMILIES if each is family)
    splits = {names.part: names.split for names in (*known.outside, *known.layer)}
    assert len(splits) == len(known.outside) + len(known.layer)
    rows = {Part.OUTPUT, Part.DOWN, Part.EXPERT_DOWN}
    assert {part for part, split in splits.items() if split is Split.ROW} == rows & splits.keys()
    columns = {Part.EMBEDDING, Part.HEAD, Part.QKV, Part.UP, Part.EXPERT_UP}
    assert {part for part, split in splits.items() if split is Split.COLUMN} == columns & splits.keys()


@pytest.mark.parametrize("shape", SHAPES)
def test_two_ranks_compute_the_mlp_of_one(checkpoint: Callable[[str], Path], shape: str) -> None:
    """Each rank has half of the neurons by the tables, and the sum of both equals the result of one rank; of a mixture
    of experts that holds for each expert."""
    model = loaded(checkpoint(shape))
    layer, config = model.layers[0], model.config
    linears, mlp = layer.linears(), layer.mlp
    parts = (Part.EXPERT_UP, Part.EXPERT_DOWN) if isinstance(mlp, SparseMlp) else (Part.UP, Part.DOWN)
    up, down = (next(each for each in model.projections() if each.linear is linears[part][-1]) for part in parts)
    x = torch.randn(5, config.hidden_size)
    whole = torch.zeros(5, config.hidden_size)
    normed = reference.normalize(x, mlp.norm)
    for rank in range(2):
        weight, bias = shard(up, rank)
        hidden = reference.activate(reference.matmul(normed, weight, bias), config.activation)
        weight, bias = shard(down, rank)
        whole += reference.matmul(hidden, weight, bias)
    if mlp.after_norm is not None:
        whole = reference.normalize(whole, mlp.after_norm)
    expected = x.clone()
    if isinstance(mlp, SparseMlp):
        hidden = reference.activate(reference.matmul(normed, up.linear.weight), config.activation)
        expected += reference.matmul(hidden, down.linear.weight)
    else:
        mlp(expected)
    torch.testing.assert_close(x + whole, expected, rtol=1e-4, atol=1e-4)


def shard(projection: Projection, rank: int) -> tuple[Tensor, Tensor | None]:
    """One of two ranks' weight and bias."""
    linear = projection.linear
    if projection.split is Split.ROW:
        return linear.weight.chunk(2, 1)[rank], linear.bias if rank == 0 else None
    halves = [part.chunk(2)[rank] for part in linear.weight.split(projection.parts)]
    biases = None if linear.bias is None else [part.chunk(2)[rank] for part in linear.bias.split(projection.parts)]  # type: ignore[no-untyped-call]
    return torch.cat(halves), None if biases is None else torch.cat(biases)


def test_two_tensors_of_one_name_are_refused(checkpoint: Callable[[str], Path]) -> None:
    stored = open_checkpoint(checkpoint("llama"))
    with pytest.raises(CheckpointError, match=r"tensor x is in the checkpoint twice, the second time as "):
        stored.renamed(lambda name: "x")


def test_reading_the_config_once_gives_all_settings(checkpoint: Callable[[str], Path]) -> None:
    settings = read_config(checkpoint("qwen2"))
    assert settings.raw["model_type"] == "qwen2"
    assert (settings.model.eos_token_ids, settings.quantization) == ((1,), None)
