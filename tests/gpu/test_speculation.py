"""Guessed tokens change no answer on a GPU: with graphs, two steps in flight, pauses, penalties, drafts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from bench.speculation import equality
from bench.speculation.demo import prompts
from compress.cli import app
from services.worker.engine.generation import GenerationEngine
from services.worker.runners.cuda.drafts.heads import GpuHeads
from services.worker.runners.cuda.runner import GpuRunner
from services.worker.speculative.speculation import Speculation
from services.worker.structured.compiler import GuidanceForms
from tests.checkpoints import DEMO, SMALL_DEMO, Shape, make_checkpoint
from tests.draft_heads import make_heads
from tests.gpu.conftest import EngineMaker
from tests.parallel_drafts import with_mask
from tests.worker.drive import job, open_engine, prompt_of, run
from tests.worker.test_speculation import PARAMS, Replay
from tests.worker.test_structured import varied_forms

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TOKENS = 40


def guessing(engine: GenerationEngine, proposer: Any, depth: int = 4) -> GenerationEngine:
    engine.speculation = Speculation(proposer, depth, overlaps=True)
    return engine


@pytest.mark.parametrize("shape", ["llama", "mistral-window", "qwen3", "gpt2"])
@pytest.mark.parametrize("deterministic", [True, False])
def test_answers_are_those_of_plain_decoding(shape: str, deterministic: bool, engine: EngineMaker) -> None:
    """In float32 the best token and the noise decide by more than the last bits: equal without the mode, too."""
    jobs = [
        job(key, prompt_of(5 + 13 * (key % 4), key), max_tokens=TOKENS, sample_index=key % 3, **params)
        for key, params in enumerate([*PARAMS.values()] * 2)
    ]
    plain = run(engine(shape, deterministic=deterministic), *jobs)
    made = guessing(engine(shape, deterministic=deterministic, speculate="ngram"), Replay(plain))
    answers = run(made, *jobs)
    for key, answer in answers.items():
        assert answer.tokens == plain[key].tokens, key
        if deterministic:
            assert (answer.logprobs, answer.tops) == (plain[key].logprobs, plain[key].tops)
    assert 0 < made.stats().guesses.accepted < made.stats().guesses.drafted


@pytest.mark.parametrize("wrong", [10_000, 5])
def test_guesses_change_no_answer_with_a_form(wrong: int) -> None:
    """Beside free answers, with penalties, stop tokens and log-probabilities behind the masks."""
    forms, jobs = GuidanceForms((SMALL_DEMO / "tokenizer.json").read_bytes(), 6144, [0]), varied_forms()

    def opened(**options: Any) -> GenerationEngine:
        settings: dict[str, Any] = {"engine": "gpu", "dtype": "float32", "deterministic": True, "kv_blocks": 512}
        made = open_engine(SMALL_DEMO, **settings, **options)
        made.use_forms(forms)
        return made

    plain = run(opened(), *jobs)
    for depth in (4, None):
        made = opened(speculate="ngram")
        made.speculation = Speculation(Replay(plain, wrong), depth, overlaps=True)
        answers = run(made, *jobs)
        for one in jobs:
            guessed, expected = answers[one.key], plain[one.key]
            assert guessed.tokens == expected.tokens, one.key
            assert (guessed.logprobs, guessed.tops) == (expected.logprobs, expected.tops), one.key
            assert guessed.ended.reason == expected.ended.reason
        if depth:
            formed = [answers[one.key].ended.cost for one in jobs[:3]]
            assert all(cost.accepted_tokens for cost in formed)
    forms.close()


@pytest.mark.parametrize("depth", range(1, 9))
def test_every_depth_and_number_of_rows_has_the_same_answers(depth: int, engine: EngineMaker) -> None:
    made = engine("llama", deterministic=True, speculate="ngram")
    for rows in (1, 2, 3, 7, 16, 33):
        jobs = [job(key, prompt_of(9 + key, key), max_tokens=20, temperature=key % 2, seed=key) for key in range(rows)]
        made.speculation = None
        plain = run(made, *jobs)
        answers = run(guessing(made, Replay(plain), depth), *jobs)
        assert [answers[key].tokens for key in range(rows)] == [plain[key].tokens for key in range(rows)]


@pytest.fixture(scope="module")
def heads(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads for `llama-damped`, often right."""
    return make_heads(tmp_path_factory.mktemp("heads") / "heads", checkpoint("llama-damped"))


@pytest.fixture(scope="module")
def parallel(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A parallel draft model for `llama`, whose first guess is always right."""
    return with_mask(checkpoint("llama"), tmp_path_factory.mktemp("parallel") / "draft")


@pytest.mark.parametrize("speculate", ["ngram", "suffix", "draft", "parallel draft", "heads"])
def test_random_requests_are_equal(
    speculate: str, checkpoint: Callable[[str], Path], heads: Path, parallel: Path
) -> None:
    drafts = {"draft": f"draft:{checkpoint('qwen3')}", "parallel draft": f"draft:{parallel}", "heads": f"heads:{heads}"}
    name = drafts.get(speculate, speculate)
    folder = checkpoint("llama-damped" if speculate == "heads" else "llama")
    for depth in (4, None):
        wrong, line = equality.compare(
            folder, 120, engine="gpu", dtype="float32", speculate=name, speculate_depth=depth
        )
        assert wrong == 0, line


def differences_to_a_cpu(folder: Path, jobs: list[Any], **options: Any) -> list[float]:
    """For each of four places the share of its guesses that were right on the GPU, less that on the CPU; in float32.
    The guesses are not all at the same positions: the GPU makes none beside prompts."""
    found = []
    for engine in ("gpu", "torch"):
        settings: dict[str, Any] = {"kv_blocks": 512, "dtype": "float32", "speculate_depth": 4, **options}
        made = open_engine(folder, engine=engine, **settings)
        run(made, *jobs)
        counts = made.stats().guesses
        assert counts.drafted > 2000
        found.append([a / max(d, 1) for a, d in zip(counts.accepted_at[:4], counts.drafted_at[:4], strict=True)])
    gpu, cpu = found
    assert gpu[0] > 0.1, "hardly a guess is right"
    return [mine - other for mine, other in zip(gpu, cpu, strict=True)]


def test_heads_are_as_often_right_as_on_a_cpu(checkpoint: Callable[[str], Path], heads: Path) -> None:
    jobs = [job(key, prompt_of(9 + 5 * key, key), max_tokens=200, temperature=key % 2, seed=key) for key in range(16)]
    differences = differences_to_a_cpu(checkpoint("llama-damped"), jobs, speculate=f"heads:{heads}")
    assert max(map(abs, differences)) < 0.06, differences


def test_heads_that_a_gpu_trained_are_as_often_right_as_on_a_cpu(tmp_path: Path) -> None:
    flags = ["--steps", "300", "--windows", "128", "--length", "96", "--neurons", "512", "--vocabulary", "2048"]
    trained = CliRunner().invoke(app, ["heads", str(DEMO), str(tmp_path / "heads"), *flags], catch_exceptions=False)
    assert trained.exit_code == 0, trained.output
    begun = enumerate(prompts(DEMO))
    jobs = [job(key, prompt, max_tokens=200, temperature=key % 2, seed=key) for key, prompt in begun]
    differences = differences_to_a_cpu(DEMO, jobs, speculate=f"heads:{tmp_path / 'heads'}", max_seq_length=256)
    assert max(map(abs, differences)) < 0.06, differences


def test_a_draft_is_as_often_right_as_on_a_cpu() -> None:
    """Also where its guesses were made behind the step before, of which some were wrong."""
    begun = enumerate(prompts(DEMO))
    jobs = [job(key, prompt, max_tokens=200, temperature=key % 2, seed=key) for key, prompt in begun]
    differences = differences_to_a_cpu(DEMO, jobs, speculate=f"draft:{SMALL_DEMO}", max_seq_length=256)
    assert max(map(abs, differences)) < 0.06, differences


def test_a_parallel_draft_is_as_often_right_as_on_a_cpu(checkpoint: Callable[[str], Path], parallel: Path) -> None:
    jobs = [job(key, prompt_of(9 + 5 * key, key), max_tokens=200, temperature=key % 2, seed=key) for key in range(16)]
    differences = differences_to_a_cpu(checkpoint("llama"), jobs, speculate=f"draft:{parallel}")
    assert max(map(abs, differences)) < 0.06, differences


def test_blocks_from_elsewhere_have_no_hidden_states(checkpoint: Callable[[str], Path], heads: Path) -> None:
    """As a prefix that host memory or another worker brings: the states are zeros, and answers are equal."""
    folder = checkpoint("llama-damped")
    options: dict[str, Any] = {"engine": "gpu", "dtype": "float32", "deterministic": True, "kv_blocks": 64}
    engine = open_engine(folder, **options, speculate=f"heads:{heads}", speculate_depth=4)
    whole = prompt_of(80)
    run(engine, job(1, whole, max_tokens=2, speculation=0))
    runner, blocks = engine.runner, list(range(1, 65))
    assert isinstance(runner, GpuRunner)
    assert isinstance(runner.draft, GpuHeads)
    states = runner.draft.hidden.states[1:]
    assert bool(states.any())
    runner.kv.write(blocks, runner.kv.read(blocks))
    assert not bool(states.any())
    later = job(2, [*whole, 9], max_tokens=TOKENS)
    answer = run(engine, later)[2]
    assert answer.ended.cost.cached_tokens == 80
    assert answer.tokens == run(open_engine(folder, **options), later)[2].tokens
    assert answer.ended.cost.accepted_tokens > 0


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> GpuRunner:
    """A runner with a draft in int4 whose attention is that of few tokens on a Hopper, too."""
    shape = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 32, "num_key_value_heads": 8}
    longer = {"num_hidden_layers": 2, "max_position_embeddings": 4096}
    folder = make_checkpoint(tmp_path_factory.mktemp("draft"), Shape("llama", {**shape, **longer}))
    options: dict[str, Any] = {"dtype": "bfloat16", "max_batch_size": 64, "max_seq_length": 2560, "step_tokens": 4096}
    options |= {"speculate": f"draft:{folder}", "draft_quantize": "int4", "kv_blocks": 320}
    runner = open_engine(folder, engine="gpu", **options).runner
    assert isinstance(runner, GpuRunner)
    return runner


@pytest.mark.parametrize("lengths", [[1], [60], [64], [1, 1, 300], [130] * 3, [7] * 40, [33] * 64, [2048]])
def test_catch_ups_in_graphs_are_those_without(lengths: list[int], drafting: GpuRunner) -> None:
    """Beside blocks of other answers, which stay as they are."""
    draft = drafting.draft
    assert draft is not None
    assert draft._catch_ups
    pending = {slot: (5 * slot % 16, [3 + (slot + at) % 250 for at in range(n)]) for slot, n in enumerate(lengths)}
    blocks = [-(-(first + len(ids)) // 16) for first, ids in pending.values()]
    for slot, count in enumerate(blocks):
        first = 1 + sum(blocks[:slot])
        drafting._tables[slot, :count] = torch.arange(first, first + count, device="cuda", dtype=torch.int32)
    begun = [torch.randn_like(layer) for layer in draft.kv.layers]

    def caught_up() -> list[Tensor]:
        for layer, numbers in zip(draft.kv.layers, begun, strict=True):
            layer.copy_(numbers)
        draft._catch_up(pending)
        torch.cuda.synchronize()
        return [layer.clone() for layer in draft.kv.layers]

    captured = caught_up()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft, "_catch_ups", {})
        eager = caught_up()
    for before, each, other in zip(begun, captured, eager, strict=True):
        changed = (before != other).flatten(1).any(1).nonzero().flatten().tolist()
        assert set(changed) - {0} == set(range(1, 1 + sum(blocks)))
        assert torch.equal(each[1 + sum(blocks) :], before[1 + sum(blocks) :])
        distance = (each - other)[1:].float().norm() / (before - other)[1:].float().norm()
        assert distance < 0.02, float(distance)


def test_a_draft_that_is_the_model_itself_is_always_right(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("llama")
    options: dict[str, Any] = {"engine": "gpu", "dtype": "float32", "kv_blocks": 256, "deterministic": True}
    jobs = [job(key, prompt_of(30, key), max_tokens=TOKENS, temperature=0.8 * (key % 2), seed=key) for key in range(9)]
    plain = run(open_engine(folder, **options), *jobs)
    engine = open_engine(folder, **options, speculate=f"draft:{folder}", speculate_depth=4)
    answers = run(engine, *jobs)
    for key, answer in answers.items():
        assert answer.tokens == plain[key].tokens
        assert answer.ended.cost.accepted_tokens == answer.ended.cost.drafted_tokens > 0


def test_forced_acceptance_keeps_the_forced_share(engine: EngineMaker) -> None:
    made = engine("llama", speculate="ngram")
    assert isinstance(made.runner, GpuRunner)
    made.runner.force_acceptance(0.7)
    jobs = [job(key, prompt_of(9, key), max_tokens=120) for key in range(16)]
    run(guessing(made, Replay(run(made, *jobs))), *jobs)
    guesses = made.stats().guesses
    assert guesses.accepted_at[0] / guesses.drafted_at[0] == pytest.approx(0.7, abs=0.08)
