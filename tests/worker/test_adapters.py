"""Adapters in the engine: equal to PEFT in mixed batches, never shared in the prefix cache, paged, alone in waiting."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.engine.generation import GenerationEngine
from services.worker.job import Adapter, Job
from services.worker.runners.cpu.runner import CpuRunner
from tests.adapters import Recipe, make_adapters, peft_answers
from tests.worker.drive import Answer, built, decoder_of, job, prompt_of, run, solo

TOKENS = 24
PROMPTS = [prompt_of(length) for length in (1, 17, 50)]
ATTENTION = {"llama": ["q_proj", "o_proj"], "phi3": ["qkv_proj"], "gpt2": ["c_attn"]}
SHAPES = ("llama", "phi3", "gpt2")


def recipes(shape: str) -> dict[str, Recipe]:
    transposed = {"fan_in_fan_out": True} if shape == "gpt2" else {}
    return {
        "poems": Recipe(rank=8, alpha=16, settings=transposed),
        "code": Recipe(rank=4, modules=ATTENTION[shape], seed=2, settings={"use_rslora": True, **transposed}),
    }


@pytest.fixture(scope="module")
def folders(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path]]:
    into = tmp_path_factory.mktemp("adapters")
    return {shape: make_adapters(checkpoint(shape), into / shape, recipes(shape)) for shape in SHAPES}


Open = Callable[..., tuple[GenerationEngine, dict[str, Adapter]]]


@pytest.fixture(scope="module")
def opened(checkpoint: Callable[[str], Path], folders: dict[str, dict[str, Path]]) -> Open:
    """A function opened(shape, **options) that opens a small engine and reads the adapters of its model."""

    def make(shape: str = "llama", **options: Any) -> tuple[GenerationEngine, dict[str, Adapter]]:
        made = built(checkpoint(shape), **{"kv_blocks": 256, "max_batch_size": 16, **options})
        return made.engine, {name: made.read_adapter(name, str(folder)) for name, folder in folders[shape].items()}

    return make


def jobs(adapters: dict[str, Adapter], **settings: Any) -> list[Job]:
    """A greedy job for each prompt: with each adapter and, key 0 and up, without."""
    chosen = [None, *adapters.values()]
    return [
        job(10 * which + index, prompt, max_tokens=TOKENS, logprobs=0, adapter=adapter, **settings)
        for which, adapter in enumerate(chosen)
        for index, prompt in enumerate(PROMPTS)
    ]


def bits(answers: dict[int, Answer]) -> dict[int, tuple[list[int], list[float | None]]]:
    return {key: (answer.tokens, answer.logprobs) for key, answer in answers.items()}


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_different_adapters_in_one_batch_equal_peft(
    shape: str, opened: Open, checkpoint: Callable[[str], Path], folders: dict[str, dict[str, Path]]
) -> None:
    engine, adapters = opened(shape)
    chunked, same = opened(shape, step_tokens=16)
    assert [adapter.fingerprint for adapter in same.values()] == [each.fingerprint for each in adapters.values()]
    whole, pieces = run(engine, *jobs(adapters)), run(chunked, *jobs(same))
    assert engine.stats().steps < TOKENS + 5, "the rows were not batched"
    for which, folder in enumerate([None, *folders[shape].values()]):
        expected = peft_answers(checkpoint(shape), folder, PROMPTS, TOKENS)
        for index, (tokens, logprobs) in enumerate(expected):
            for answers in (whole, pieces):
                answer = answers[10 * which + index]
                assert answer.tokens == tokens
                assert max(abs((mine or 0) - its) for mine, its in zip(answer.logprobs, logprobs, strict=True)) < 2e-4
    assert len({tuple(whole[10 * which + 2].tokens) for which in range(3)}) == 3, "the adapters change nothing"


def test_adapters_share_no_prefix(opened: Open) -> None:
    engine, adapters = opened()
    prompt = prompt_of(50, seed=3)
    for adapter in [None, *adapters.values()]:
        first = solo(engine, job(1, prompt, max_tokens=8, adapter=adapter))
        again = solo(engine, job(1, prompt, max_tokens=8, adapter=adapter))
        assert (first.ended.cost.cached_tokens, again.ended.cost.cached_tokens) == (0, 48)
        assert again.tokens == first.tokens


def test_in_deterministic_mode_other_adapters_change_no_bit(opened: Open) -> None:
    engine, adapters = opened(deterministic=True, prefix_cache=False)
    expected = {one.key: solo(engine, one) for one in jobs(adapters)}
    assert bits(run(engine, *jobs(adapters))) == bits(expected)
    small, same = opened(deterministic=True, kv_blocks=14, step_tokens=19)
    assert bits(run(small, *jobs(same))) == bits(expected)
    assert small.stats().preemptions > 0
    moved = [
        Job(one.key, [*one.token_ids, *expected[one.key].tokens[:9]], one.prompt_len, one.params, adapter=one.adapter)
        for one in jobs(same)
    ]
    continued = run(small, *moved)
    assert all(answer.tokens == expected[key].tokens[9:] for key, answer in continued.items())


def test_guesses_change_no_token_of_an_adapter(opened: Open) -> None:
    engine, adapters = opened()
    guessing, same = opened(speculate="ngram", speculate_depth=3)
    plain, guessed = run(engine, *jobs(adapters)), run(guessing, *jobs(same))
    assert {key: each.tokens for key, each in guessed.items()} == {key: each.tokens for key, each in plain.items()}
    assert guessing.stats().guesses.accepted > 0


def copies(adapter: Adapter, count: int) -> list[Adapter]:
    """Adapters of equal weights and different fingerprints."""
    return [Adapter(f"{i}", bytes([i]) * 32, adapter.rank, adapter.nbytes, adapter.weights) for i in range(count)]


def test_the_least_recently_used_adapter_makes_room(opened: Open) -> None:
    engine, adapters = opened(adapter_slots=2)
    many = copies(adapters["poems"], 5)

    def use(*chosen: int) -> None:
        answers = run(engine, *(job(key, prompt_of(9), max_tokens=4, adapter=many[key]) for key in chosen))
        assert {tuple(answer.tokens) for answer in answers.values()} == {tuple(expected)}

    expected = solo(engine, job(0, prompt_of(9), max_tokens=4, adapter=adapters["poems"])).tokens
    use(0, 1)
    assert engine.stats().resident == (many[0].fingerprint, many[1].fingerprint)
    use(0)
    use(2)
    assert engine.stats().resident == (many[0].fingerprint, many[2].fingerprint)
    use(*range(5))  # More than there is room for: some wait until others have ended.


class SlowPages:
    """`AdapterPages` whose loads last until they are let through."""

    def __init__(self, pages: object) -> None:
        self.pages, self.slots = pages, 2
        self.begun: list[str] = []
        self.complete = False

    def load(self, slot: int, adapter: Adapter) -> None:
        self.begun.append(adapter.name)
        self.pages.load(slot, adapter)  # type: ignore[attr-defined]

    def loaded(self, slot: int) -> bool:
        return self.complete


def test_a_cold_adapter_waits_for_its_load_alone(opened: Open) -> None:
    loaded, adapters = opened()
    runner = loaded.runner
    assert isinstance(runner, CpuRunner)
    pages = SlowPages(runner.adapters)
    engine = GenerationEngine(loaded.options, loaded.memory, runner, (), adapter_pages=pages)
    cold, other = job(1, prompt_of(9), max_tokens=6, adapter=adapters["poems"]), job(2, prompt_of(20), max_tokens=30)
    answers = run(engine, cold, other, steps=10)
    assert (len(answers[1].tokens), pages.begun) == (0, ["poems"])
    assert len(answers[2].tokens) >= 9
    pages.complete = True
    rest = run(engine, steps=None)
    assert len(rest[1].tokens) == 6
    assert rest[1].ended.cost.queue_s > 0


@pytest.mark.parametrize("quantize", ["int8", "int4", "fp8", "nf4"])
def test_adapters_add_to_quantized_products(quantize: str, opened: Open) -> None:
    engine, adapters = opened(quantize=quantize)
    model, runner = decoder_of(engine).model, engine.runner
    assert isinstance(runner, CpuRunner)
    assert runner.adapters is not None
    runner.adapters.load(1, adapters["poems"])
    runner.adapters.load(2, adapters["code"])
    layer, x = model.layers[1], torch.randn(5, model.config.hidden_size)
    plain = layer.attention.qkv.norm_matmul(x, layer.attention.norm)
    model._adapted.step = runner.adapters.of_tokens(torch.tensor([0, 1, 2, 1, 0]).numpy())
    adapted = layer.attention.qkv.norm_matmul(x, layer.attention.norm)
    expected, inputs = plain.clone(), model.ops.normalize(x, layer.attention.norm)
    for name, rows in (("poems", [1, 3]), ("code", [2])):
        for delta in adapters[name].weights[4]:  # four products in each layer
            expected[rows, delta.begin : delta.begin + len(delta.b)] += inputs[rows] @ delta.a.T @ delta.b.T
    assert torch.allclose(adapted, expected, atol=1e-5)
    assert not torch.allclose(adapted[1:4], plain[1:4], atol=1e-2)
    answers = run(engine, *jobs(adapters))
    assert len({tuple(answers[10 * which + 2].tokens) for which in range(3)}) == 3


def test_an_engine_without_room_refuses_the_job(opened: Open) -> None:
    _, adapters = opened()
    bare, _ = opened_without_adapters(opened)
    end = solo(bare, job(1, prompt_of(3), adapter=adapters["poems"])).ended
    assert end.error is not None
    assert (end.error.code, end.error.reason) == ("UNIMPLEMENTED", "ADAPTERS_UNSUPPORTED")


def opened_without_adapters(opened: Open) -> tuple[GenerationEngine, None]:
    loaded, _ = opened()
    return GenerationEngine(loaded.options, loaded.memory, loaded.runner, ()), None
