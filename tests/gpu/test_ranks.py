"""Ranks on two GPUs answer as one GPU does: families, stages, formats, adapters, large sums, bits."""

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.peers import sums as peer_sums
from services.worker.build.choose import BuiltEngine
from services.worker.build.ranks import gpu_rank
from services.worker.engine.generation import GenerationEngine
from services.worker.parallel.gpu_collectives import GpuCollectives, PeerWords
from services.worker.parallel.topology import Grid
from services.worker.runners.ranks import RanksRunner
from services.worker.structured.compiler import GuidanceForms
from tests.adapters import make_adapters, read_all
from tests.checkpoints import DEMO, make_checkpoint
from tests.gpu.conftest import EngineMaker
from tests.parallel import scenes
from tests.served import WIDE_EXPERTS
from tests.worker.drive import Answer, built, job, open_engine, prompt_of, run
from tests.worker.test_adapters import jobs as adapted_jobs
from tests.worker.test_adapters import recipes
from tests.worker.test_speculation import Replay, guessing, varied_jobs
from tests.worker.test_structured import varied_forms

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

Folder = Callable[[str], Path]
WORDS = 1 << 20
_SEEDS = 12


@contextlib.contextmanager
def built_on_ranks(folder: Path, tensor: int, pipeline: int, **options: Any) -> Iterator[BuiltEngine]:
    """An engine on a grid of processes, and what reads its adapters."""
    settings = {"kv_blocks": 128, "max_batch_size": 16, "engine": "gpu", "dtype": "float32", **options}
    made = built(folder, tensor_parallel=tensor, pipeline_parallel=pipeline, **settings)
    assert isinstance(made.engine.runner, RanksRunner)
    try:
        yield made
    finally:
        made.engine.runner.close()


@contextlib.contextmanager
def on_ranks(folder: Path, tensor: int, pipeline: int, **options: Any) -> Iterator[GenerationEngine]:
    """An engine on a grid of processes."""
    with built_on_ranks(folder, tensor, pipeline, **options) as made:
        yield made.engine


@pytest.mark.parametrize(
    ("shape", "tensor", "pipeline", "scene"),
    [
        ("llama", 2, 1, scenes.chunked),
        ("llama", 2, 1, scenes.cached),
        ("llama", 2, 1, scenes.preempted),
        ("llama", 1, 2, scenes.chunked),
        ("llama", 1, 2, scenes.preempted),
        ("qwen3-moe", 2, 1, scenes.chunked),
        ("gpt2", 2, 1, scenes.cached),
        ("gemma3", 2, 1, scenes.chunked),
        ("gemma3", 1, 2, scenes.cached),
        ("phi3", 2, 1, scenes.preempted),
    ],
)
def test_a_grid_answers_as_one_gpu(
    checkpoint: Folder, engine: EngineMaker, shape: str, tensor: int, pipeline: int, scene: scenes.Scene
) -> None:
    expected = run(engine(shape, kv_blocks=128, max_batch_size=16), *scenes.jobs())
    with on_ranks(checkpoint(shape), tensor, pipeline, **scenes.SCENES[scene]) as grid:
        assert scenes.differences(expected, scene(grid), 2e-4) == []


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_prompts_whose_sums_are_large(checkpoint: Folder, engine: EngineMaker, tensor: int, pipeline: int) -> None:
    """A step of more rows than one exchange has, so that its sums are exchanged in pieces."""
    lengths = (300, 450, 500, 257, 480, 490)
    assert sum(lengths) > gpu_rank._ROWS
    jobs = [job(i, prompt_of(length), max_tokens=6, logprobs=0) for i, length in enumerate(lengths)]
    expected = run(engine("llama"), *jobs)
    with on_ranks(checkpoint("llama"), tensor, pipeline, kv_blocks=256, step_tokens=4096) as grid:
        assert scenes.differences(expected, run(grid, *jobs), 2e-4) == []


@pytest.mark.parametrize(
    ("shape", "scene"), [("mixtral", scenes.chunked), ("qwen3-moe", scenes.cached), ("qwen3-moe", scenes.preempted)]
)
def test_whole_experts_answer_as_one_gpu(
    checkpoint: Folder, engine: EngineMaker, shape: str, scene: scenes.Scene
) -> None:
    expected = run(engine(shape, kv_blocks=128, max_batch_size=16), *scenes.jobs())
    with on_ranks(checkpoint(shape), 2, 1, expert_parallel=True, **scenes.SCENES[scene]) as grid:
        assert scenes.differences(expected, scene(grid), 2e-4) == []


def test_prompts_that_route_many_tokens_to_whole_experts(checkpoint: Folder, engine: EngineMaker) -> None:
    """More entries than one program of the routing sorts, in steps of several sizes."""
    jobs = [job(i, prompt_of(length), max_tokens=6, logprobs=0) for i, length in enumerate((300, 450, 17, 90))]
    expected = run(engine("qwen3-moe"), *jobs)
    with on_ranks(checkpoint("qwen3-moe"), 2, 1, expert_parallel=True, kv_blocks=256, step_tokens=1024) as grid:
        assert scenes.differences(expected, run(grid, *jobs), 2e-4) == []


@pytest.mark.parametrize("kind", ["experts-fp8-blocks", "experts-int4"])
def test_whole_experts_in_fewer_bits(tmp_path: Path, kind: str) -> None:
    """The groups of int4 are as wide as an expert, so that ranks cannot share its neurons."""
    writers = pytest.importorskip("tests.quantized", reason="needs compressed-tensors")
    plain = make_checkpoint(tmp_path / "plain", WIDE_EXPERTS)
    folder, jobs = writers.write(kind, plain, tmp_path).folder, scenes.greedy()
    alone = open_engine(folder, kv_blocks=128, max_batch_size=16, engine="gpu", dtype="bfloat16")
    expected = run(alone, *jobs)
    del alone
    with on_ranks(folder, 2, 1, expert_parallel=True, dtype="bfloat16") as grid:
        assert scenes.differences(expected, run(grid, *jobs), 0.15, tokens=False) == []


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_a_deterministic_grid_of_experts_repeats_every_bit(checkpoint: Folder, expert_parallel: bool) -> None:
    found = []
    for options in ({"step_tokens": 19}, {"step_tokens": 512}):
        settings = {"deterministic": True, "dtype": "bfloat16", "expert_parallel": expert_parallel, **options}
        with on_ranks(checkpoint("qwen3-moe"), 2, 1, **settings) as grid:
            answers = run(grid, *scenes.jobs())
            found.append([(answer.tokens, answer.logprobs) for answer in answers.values()])
    assert found[0] == found[1]


def test_a_deterministic_grid_repeats_every_bit(checkpoint: Folder) -> None:
    """After a restart, in other chunks and batches, in bfloat16."""
    found = []
    for options in ({"step_tokens": 19}, {"step_tokens": 512}):
        with on_ranks(checkpoint("llama"), 2, 1, deterministic=True, dtype="bfloat16", **options) as grid:
            answers = run(grid, *scenes.jobs())
            found.append([(answer.tokens, answer.logprobs) for answer in answers.values()])
    assert found[0] == found[1]


@pytest.mark.parametrize("deterministic", [False, True])
def test_guesses_change_no_answer(checkpoint: Folder, deterministic: bool) -> None:
    """Of a replay that is often right, and of a draft model."""
    jobs, options = varied_jobs(), {"deterministic": deterministic}
    with on_ranks(checkpoint("llama"), 2, 1, **options) as grid:
        plain = run(grid, *jobs)
    for speculate in ("ngram", f"draft:{checkpoint('llama')}"):
        with on_ranks(checkpoint("llama"), 2, 1, speculate=speculate, speculate_depth=4, **options) as grid:
            answers = run(guessing(grid, Replay(plain)) if speculate == "ngram" else grid, *jobs)
            assert 0 < grid.stats().guesses.accepted <= grid.stats().guesses.drafted
        for key, answer in answers.items():
            assert answer.tokens == plain[key].tokens, key
            if deterministic:
                assert (answer.logprobs, answer.tops) == (plain[key].logprobs, plain[key].tops)


def test_guesses_change_no_answer_with_a_form() -> None:
    """Masks reach all ranks behind the guesses."""
    forms, jobs = GuidanceForms((DEMO / "tokenizer.json").read_bytes(), 6144, [0]), varied_forms()

    def answers(**options: Any) -> list[list[int]]:
        with on_ranks(DEMO, 2, 1, deterministic=True, kv_blocks=512, **options) as grid:
            grid.use_forms(forms)
            if options:
                guessing(grid, Replay({one.key: plain[one.key] for one in jobs}, 5))
            else:
                plain.update(run(grid, *jobs))
                return [plain[one.key].tokens for one in jobs]
            found = run(grid, *jobs)
            assert all(found[one.key].ended.cost.accepted_tokens for one in jobs[:3])
            return [found[one.key].tokens for one in jobs]

    plain: dict[int, Answer] = {}
    assert answers() == answers(speculate="ngram")
    forms.close()


def test_rounded_weights(checkpoint: Folder, engine: EngineMaker) -> None:
    jobs = scenes.jobs()
    expected = run(engine("llama", quantize="int8", dtype="bfloat16"), *jobs)
    with on_ranks(checkpoint("llama"), 2, 1, quantize="int8", dtype="bfloat16") as grid:
        assert scenes.differences(expected, run(grid, *jobs), 0.05, tokens=False) == []


@pytest.mark.parametrize(
    ("shape", "tensor", "pipeline", "options"),
    [
        ("llama", 2, 1, {"adapter_slots": 2}),
        ("llama", 2, 1, {"adapter_slots": 1, "step_tokens": 19}),
        ("llama", 1, 2, {"adapter_slots": 2}),
        ("llama", 1, 2, {"adapter_slots": 1}),
        ("phi3", 2, 1, {"adapter_slots": 2}),
        ("gpt2", 2, 1, {"adapter_slots": 2}),
    ],
)
def test_rows_of_different_adapters_are_as_on_one_gpu(
    checkpoint: Folder, tmp_path: Path, shape: str, tensor: int, pipeline: int, options: dict[str, Any]
) -> None:
    """With one slot an adapter makes room for the other one while answers without any go on."""
    folder = checkpoint(shape)
    adapters = make_adapters(folder, tmp_path, recipes(shape))
    settings: dict[str, Any] = {"kv_blocks": 128, "max_batch_size": 16, "engine": "gpu", "dtype": "float32"}
    alone = built(folder, adapter_slots=2, **settings)
    expected = run(alone.engine, *adapted_jobs(read_all(alone.read_adapter, adapters)))
    del alone
    with built_on_ranks(folder, tensor, pipeline, **options) as grid:
        found = run(grid.engine, *adapted_jobs(read_all(grid.read_adapter, adapters)))
    assert scenes.differences(expected, found, 2e-3) == []
    assert len({tuple(found[10 * which + 2].tokens) for which in range(3)}) == 3, "the adapters change nothing"


@pytest.mark.parametrize("options", [{}, {"quantize": "int8"}, {"deterministic": True}], ids=str)
def test_products_with_adapters_in_16_bits(checkpoint: Folder, tmp_path: Path, options: dict[str, Any]) -> None:
    """Prompts are so short that the first step has the kernels of few rows."""
    folder = checkpoint("llama")
    paths = make_adapters(folder, tmp_path, recipes("llama"))
    settings: dict[str, Any] = {"adapter_slots": 2, "dtype": "bfloat16", **options}

    def answers(made: BuiltEngine) -> dict[int, Answer]:
        adapters = [None, *read_all(made.read_adapter, paths).values()]
        cases = enumerate((each, length) for each in adapters for length in (1, 4, 9))
        return run(
            made.engine,
            *(job(key, prompt_of(length), max_tokens=8, logprobs=0, adapter=each) for key, (each, length) in cases),
        )

    alone = built(folder, kv_blocks=128, max_batch_size=16, engine="gpu", **settings)
    expected = answers(alone)
    del alone
    with built_on_ranks(folder, 2, 1, **settings) as grid:
        found = answers(grid)
    assert scenes.differences(expected, found, 0.15, tokens=False) == []


def test_a_deterministic_grid_repeats_every_bit_of_an_adapter(checkpoint: Folder, tmp_path: Path) -> None:
    """After a restart, in other chunks and batches, in bfloat16."""
    folder, found = checkpoint("llama"), []
    adapters = make_adapters(folder, tmp_path, recipes("llama"))
    for options in ({"step_tokens": 19, "adapter_slots": 1}, {"step_tokens": 512, "adapter_slots": 2}):
        with built_on_ranks(folder, 2, 1, deterministic=True, dtype="bfloat16", **options) as grid:
            answers = run(grid.engine, *adapted_jobs(read_all(grid.read_adapter, adapters)))
            found.append([(answer.tokens, answer.logprobs) for answer in answers.values()])
    assert found[0] == found[1]


def _exchange(rank: int, meeting: str, results: Any) -> None:
    torch.cuda.set_device(rank)
    others = GpuCollectives(Grid(tensor=2), rank, Path(meeting), PeerWords(WORDS, WORDS))
    assert others._peers is not None
    for seed in range(_SEEDS):
        draw = torch.Generator().manual_seed(seed)
        dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
        rows, width = (
            int(torch.randint(1, 9, (1,), generator=draw)),
            2 * int(torch.randint(1, 700, (1,), generator=draw)),
        )
        numbers = [torch.randn(rows, width, generator=draw).to(dtype).cuda() for _ in range(3)]
        bias = torch.randn(width, generator=draw).to(dtype).cuda()
        total = torch.full_like(numbers[2], float("nan"))
        peer_sums.add_sum(numbers[rank], others._peers, total, numbers[2], bias if seed % 2 else None)
        wanted = numbers[0].float() + numbers[1].float() + (bias.float() if seed % 2 else 0) + numbers[2].float()
        torch.testing.assert_close(total, wanted.to(dtype))
        assert torch.equal(peer_sums.gather_columns(numbers[rank], others._peers), torch.cat(numbers[:2], 1))
        results.put((seed, total.float().cpu().numpy().tobytes()))
    results.put(None)


def test_sums_are_right_and_the_same_on_both_ranks(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    queues = [spawn.Queue() for _ in range(2)]
    processes = [
        spawn.Process(target=_exchange, args=(rank, str(tmp_path / "meeting"), queues[rank]), daemon=True)
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    found: list[list[Any]] = [[], []]
    for rank, queue in enumerate(queues):
        while (line := queue.get(timeout=120)) is not None:
            found[rank].append(line)
    assert len(found[0]) == _SEEDS
    assert found[0] == found[1]
