"""How a model is shared out: layers by cost, heads, copies of key/value heads; and what cannot be shared out."""

import os
from pathlib import Path

import pytest

from services.worker.errors import CheckpointError
from services.worker.parallel.placement import cores_beside, cores_of, describe, read_cores
from services.worker.parallel.shards import Sizes, Span, cut, shard_of, stages
from services.worker.parallel.topology import Grid, Place

LLAMA_8B = Sizes(32, 32, 8, 14336, 0, 0, 1, 128256, layer_cost=218e6, head_cost=525e6)


def sizes(**changes: int) -> Sizes:
    values = {
        "layers": 3,
        "heads": 4,
        "kv_heads": 2,
        "neurons": 96,
        "experts": 0,
        "expert_neurons": 0,
        "neuron_unit": 1,
        "vocabulary": 321,
        **changes,
    }
    return Sizes(**values, layer_cost=10.0, head_cost=10.0)


def test_ranks_are_numbered_stage_after_stage() -> None:
    grid = Grid(tensor=2, pipeline=3)
    assert [grid.place(rank) for rank in (0, 1, 2, 5)] == [Place(0, 0), Place(0, 1), Place(1, 0), Place(2, 1)]
    assert [grid.rank(grid.place(rank)) for rank in range(6)] == list(range(6))
    assert (grid.drawing_rank, grid.is_last(4), grid.is_last(3)) == (4, True, False)


def test_the_last_stage_has_fewer_layers_because_it_has_the_head() -> None:
    assert [span.count for span in stages(LLAMA_8B, 2)] == [17, 15]
    assert [span.count for span in stages(LLAMA_8B, 4)] == [9, 9, 9, 5]
    assert stages(sizes(), 3) == [Span(0, 1), Span(1, 2), Span(2, 3)]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_no_other_cut_has_a_cheaper_stage(count: int) -> None:
    costs = [3.0, 1, 4, 1, 5, 9, 2, 6]

    def cheapest(left: list[float], parts: int) -> float:
        if parts == 1:
            return sum(left)
        return min(max(sum(left[:at]), cheapest(left[at:], parts - 1)) for at in range(1, len(left) - parts + 2))

    spans = cut(costs, count)
    assert [number for span in spans for number in range(span.start, span.stop)] == list(range(len(costs)))
    assert max(sum(costs[span.start : span.stop]) for span in spans) == cheapest(costs, count)


def test_tensor_ranks_share_everything_once_and_copy_heads_that_are_too_few() -> None:
    shards = [shard_of(sizes(), Grid(tensor=4), rank) for rank in range(4)]
    for name, total in (("heads", 4), ("neurons", 96), ("vocabulary", 321)):
        spans: list[Span] = [getattr(shard, name) for shard in shards]
        assert [number for span in spans for number in range(span.start, span.stop)] == list(range(total)), name
    assert [shard.kv_heads for shard in shards] == [Span(0, 1), Span(0, 1), Span(1, 2), Span(1, 2)]


def test_groups_of_quantized_weights_stay_together() -> None:
    shards = [shard_of(sizes(neurons=11008, neuron_unit=128), Grid(tensor=4), rank) for rank in range(4)]
    assert [shard.neurons.count for shard in shards] == [21 * 128, 22 * 128, 21 * 128, 22 * 128]
    few = [shard_of(sizes(neurons=128, neuron_unit=128), Grid(tensor=2), rank) for rank in range(2)]
    assert [shard.neurons.count for shard in few] == [64, 64]


def test_tensor_ranks_have_some_neurons_of_every_expert_or_whole_experts() -> None:
    mixture = sizes(experts=7, expert_neurons=96)
    split = [shard_of(mixture, Grid(tensor=4), rank) for rank in range(4)]
    assert [shard.experts for shard in split] == [Span(0, 7)] * 4
    assert [shard.expert_neurons.count for shard in split] == [24] * 4
    spread = [shard_of(mixture, Grid(tensor=4, pipeline=2, spreads_experts=True), rank) for rank in range(8)]
    assert [shard.experts for shard in spread] == 2 * [Span(0, 1), Span(1, 3), Span(3, 5), Span(5, 7)]
    assert [shard.expert_neurons for shard in spread] == [Span(0, 96)] * 8
    assert [shard.neurons for shard in spread[:4]] == [shard.neurons for shard in split], "of layers without experts"


@pytest.mark.parametrize(
    ("grid", "changes", "reason"),
    [
        (Grid(tensor=3), {}, "4 attention heads cannot be shared by 3 tensor ranks"),
        (Grid(tensor=4), {"heads": 12, "kv_heads": 3}, "3 key/value heads cannot be shared by 4 tensor ranks"),
        (Grid(tensor=4), {"neurons": 3}, "the model is too small for 4 tensor ranks"),
        (Grid(pipeline=4), {}, "3 layers cannot be shared by 4 pipeline stages"),
        (Grid(tensor=2, spreads_experts=True), {}, "WEFT_EXPERT_PARALLEL: the model has no experts"),
        (
            Grid(tensor=4, spreads_experts=True),
            {"experts": 3, "expert_neurons": 96},
            "3 experts cannot be spread over 4 tensor ranks",
        ),
        (Grid(tensor=4), {"experts": 8, "expert_neurons": 3}, "the model is too small for 4 tensor ranks"),
    ],
)
def test_a_model_that_cannot_be_shared_is_refused(grid: Grid, changes: dict[str, int], reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        shard_of(sizes(**changes), grid, 0)


def test_ranks_are_pinned_only_where_there_are_several_nodes() -> None:
    nodes = [read_cores("0-3,8-11\n"), read_cores("4-7")]
    assert nodes[0] == {0, 1, 2, 3, 8, 9, 10, 11}
    assert [cores_of(rank, 4, nodes) for rank in range(4)] == [nodes[0], nodes[0], nodes[1], nodes[1]]
    assert cores_of(1, 2, nodes[:1]) == set()
    assert describe(nodes) == "2 ranks: 0 on cores 0-11; 1 on cores 4-7"
    assert describe([set(), set()]) == "2 ranks on one NUMA node, not pinned"


def test_ranks_on_gpus_are_pinned_beside_them(tmp_path: Path) -> None:
    """Unless all cores that the process may use are beside the GPU."""
    own = os.sched_getaffinity(0)
    for gpu, cores in (("0000:17:00.0", f"{min(own)},4096-4099"), ("0000:65:00.0", "0-4099")):
        (tmp_path / gpu).mkdir()
        (tmp_path / gpu / "local_cpulist").write_text(f"{cores}\n")
    beside = cores_beside("0000:17:00.0", tmp_path)
    assert beside == ({min(own)} if len(own) > 1 else set())
    assert cores_beside("0000:65:00.0", tmp_path) == set()
    assert cores_beside("0000:99:00.0", tmp_path) == set()
    line = describe([{4, 5}, set()], ["0000:17:00.0", "0000:65:00.0"])
    assert line == "2 ranks: 0 on cores 4-5, GPU 0000:17:00.0; 1 not pinned, GPU 0000:65:00.0"
