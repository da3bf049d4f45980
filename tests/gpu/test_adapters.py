"""Adapters on the device: the kernels against their definition, and the engine, with graphs, against PEFT."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from kernels.linear.split_k import Tile
from tests.adapters import Recipe, make_adapters, peft_answers
from tests.kernels.adapters import check_adapted_product, check_adapters, check_adapters_are_invariant
from tests.worker.drive import built, job, prompt_of, run


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("tokens", "inputs", "outputs", "rank"),
    [
        (64, 4096, (4096, 1024, 1024), 16),
        (1, 4096, (14336, 14336), 16),
        (300, 14336, (4096,), 64),
        (37, 1100, (99,), 9),
    ],
)
def test_adapters_in_served_and_odd_shapes(
    tokens: int, inputs: int, outputs: tuple[int, ...], rank: int, dtype: torch.dtype
) -> None:
    check_adapters(tokens, inputs, outputs, rank, dtype)


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    check_adapters_are_invariant(77, 4096, (4096, 1024, 1024), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "rank", "gated", "tile"),
    [
        (63, 4096, (4096, 1024, 1024), 16, False, Tile(64, 128, 2, 3)),
        (63, 4096, (4096, 1024, 1024), 16, False, Tile(64, 128)),
        (63, 4096, (14336, 14336), 16, True, Tile(64, 128)),
        (63, 4096, (14336, 14336), 16, True, Tile(128, 64, warps=8)),
        (5, 1096, (1000, 1000), 64, True, Tile(128, 64, warps=8)),
        (40, 14336, (4096,), 16, False, Tile(64, 128, 2)),
        (1, 4096, (14336, 14336), 64, True, Tile(64, 128)),
        (7, 1096, (100,), 32, False, Tile(64, 128, 4, 6)),
        (16, 1096, (100, 100), 9, True, Tile(64, 128)),
    ],
)
def test_products_with_adapters(
    rows: int, inputs: int, outputs: tuple[int, ...], rank: int, gated: bool, tile: Tile, dtype: torch.dtype
) -> None:
    for owned in (0.7, 1.0):
        check_adapted_product(rows, inputs, outputs, rank, dtype, tile=tile, gated=gated, owned=owned)


@pytest.mark.parametrize("deterministic", [False, True])
def test_rows_of_different_adapters_equal_peft(
    deterministic: bool, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    base, prompts = checkpoint("llama"), [prompt_of(length) for length in (1, 17, 90)]
    folders = make_adapters(base, tmp_path, {"poems": Recipe(rank=8), "code": Recipe(seed=2)})
    made = built(base, engine="gpu", dtype="float32", adapter_slots=1, kv_blocks=256, deterministic=deterministic)
    adapters = {name: made.read_adapter(name, str(folder)) for name, folder in folders.items()}
    jobs = [
        job(10 * which + index, prompt, max_tokens=32, logprobs=0, adapter=adapter)
        for which, adapter in enumerate([None, *adapters.values()])
        for index, prompt in enumerate(prompts)
    ]
    answers = run(made.engine, *jobs)
    for which, folder in enumerate([None, *folders.values()]):
        for index, (tokens, logprobs) in enumerate(peft_answers(base, folder, prompts, 32)):
            answer = answers[10 * which + index]
            assert answer.tokens == tokens
            assert max(abs((mine or 0) - its) for mine, its in zip(answer.logprobs, logprobs, strict=True)) < 2e-3
