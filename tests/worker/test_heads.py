"""Draft heads: their guesses change no token, follow from hidden states, and heads of another model are refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.speculation import equality
from services.worker.errors import CheckpointError
from services.worker.runners.cpu.drafts.heads import CpuHeads
from services.worker.runners.cpu.hidden import HiddenPool
from services.worker.runners.cpu.runner import CpuRunner
from services.worker.speculative import draft_model
from tests.checkpoints import VOCAB, make_checkpoint
from tests.draft_heads import make_heads
from tests.worker.drive import decoder_of, job, open_engine, prompt_of, run, solo
from tests.worker.test_speculation import STRICT, TOKENS, varied_jobs

Checkpoints = Callable[[str], Path]


@pytest.fixture(scope="module")
def heads(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_heads(tmp_path_factory.mktemp("heads") / "heads", checkpoint("llama-damped"))


def changed(heads: Path, to: Path, **entries: Any) -> Path:
    """A copy of the heads with other entries of config.json."""
    shutil.copytree(heads, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, **entries}))
    return to


def hidden_of(engine: Any) -> HiddenPool:
    runner = engine.runner
    assert isinstance(runner, CpuRunner)
    assert isinstance(runner.draft, CpuHeads)
    return runner.draft.hidden


def test_answers_with_heads_are_those_of_plain_decoding(checkpoint: Checkpoints, heads: Path) -> None:
    folder, jobs = checkpoint("llama-damped"), varied_jobs()
    plain = run(open_engine(folder, kv_blocks=256, **STRICT), *jobs)
    options: dict[str, Any] = {"kv_blocks": 256, "step_tokens": 64, "speculate_depth": 4, **STRICT}
    engine = open_engine(folder, **options, speculate=f"heads:{heads}")
    answers = run(engine, *jobs)
    for key, answer in answers.items():
        assert answer.tokens == plain[key].tokens, key
        assert (answer.logprobs, answer.tops) == (plain[key].logprobs, plain[key].tops)
        assert answer.ended.cost.drafted_tokens > 0
    counts = engine.stats().guesses
    assert counts.drafted / 8 < counts.accepted < counts.drafted


@pytest.mark.parametrize("depth", [4, None])
def test_random_requests_are_equal_with_heads(depth: int | None, checkpoint: Checkpoints, heads: Path) -> None:
    options: dict[str, Any] = {} if depth is None else {"speculate_depth": depth}
    wrong, line = equality.compare(checkpoint("llama-damped"), 30, speculate=f"heads:{heads}", **options)
    assert wrong == 0, line


def test_an_own_head_guesses_its_tokens_alone(checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder, tokens = checkpoint("llama-damped"), list(range(7, VOCAB, 2))
    few = make_heads(tmp_path / "few", folder, vocab_size=len(tokens), draft_tokens=tokens, tie_word_embeddings=False)
    tensors, base = load_file(few / "model.safetensors"), load_file(folder / "model.safetensors")
    save_file({**tensors, "lm_head.weight": base["lm_head.weight"][tokens].clone()}, few / "model.safetensors")
    one = job(1, prompt_of(20), max_tokens=60)
    plain = solo(open_engine(folder, kv_blocks=64, **STRICT), one)
    engine = open_engine(folder, kv_blocks=64, speculate=f"heads:{few}", speculate_depth=2, **STRICT)
    assert solo(engine, one).tokens == plain.tokens
    odd = sum(token in tokens for token in plain.tokens)
    assert 0 < engine.stats().guesses.accepted <= odd


def test_guesses_follow_from_hidden_states(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Heads that read the stream before the last layer alone, and not the token, guess what followed the token before:
    wrong guesses, unless that state is of the right place."""
    folder = checkpoint("llama-damped")
    blind = make_heads(tmp_path / "blind", folder, noise=0.0, hidden_layers=[2])
    tensors, width = load_file(blind / "model.safetensors"), 64
    fuse = {"fuse.weight": torch.eye(width), "fuse_norm.weight": torch.ones(width)}
    state_alone = torch.cat((torch.zeros(width, width), torch.eye(width)), 1)
    save_file({**tensors, **fuse, "combine.weight": state_alone}, blind / "model.safetensors")
    engine = open_engine(folder, kv_blocks=64, speculate=f"heads:{blind}", speculate_depth=1, **STRICT)
    runner = engine.runner
    assert isinstance(runner, CpuRunner)
    proposed: list[int] = []
    draft = runner.draft
    assert draft is not None
    original = draft.guess

    def record(*arguments: Any) -> dict[int, list[int]]:
        found = original(*arguments)
        proposed.extend(guess for guesses in found.values() for guess in guesses)
        return found

    draft.guess = record  # type: ignore[method-assign,assignment]
    one = job(1, prompt_of(20), max_tokens=30)
    answer = solo(engine, one)
    # The state of the token before the last one leads to the last one.
    assert sum(a == b for a, b in zip(proposed, answer.tokens, strict=False)) >= len(proposed) * 0.7


def test_blocks_from_elsewhere_have_no_hidden_states(checkpoint: Checkpoints, heads: Path) -> None:
    """As a prefix that host memory or another worker brings: answers are equal, and the states are zeros, not old."""
    folder = checkpoint("llama-damped")
    options: dict[str, Any] = {"kv_blocks": 64, "block_size": 4, "speculate_depth": 4, **STRICT}
    engine = open_engine(folder, speculate=f"heads:{heads}", **options)
    whole = prompt_of(40)
    solo(engine, job(1, whole, max_tokens=2, speculation=0))
    kv, pool = decoder_of(engine).kv, hidden_of(engine)
    blocks = list(range(1, 65))
    assert bool(pool.read(torch.arange(4, 65 * 4)).any())
    kv.write(blocks, kv.read(blocks))
    assert not bool(pool.read(torch.arange(4, 65 * 4)).any())
    later = job(2, [*whole, 9], max_tokens=TOKENS)
    plain = solo(open_engine(folder, kv_blocks=64, **STRICT), later)
    answer = solo(engine, later)
    assert answer.ended.cost.cached_tokens == 40
    assert answer.tokens == plain.tokens
    assert answer.ended.cost.accepted_tokens > 0


def test_heads_catch_up_with_prefixes_and_pauses(
    checkpoint: Checkpoints, heads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_model, "CATCH_UP_TOKENS", 24)
    folder = checkpoint("llama-damped")
    options: dict[str, Any] = {"speculate": f"heads:{heads}", "speculate_depth": 3, "block_size": 4, **STRICT}
    engine = open_engine(folder, kv_blocks=44, max_batch_size=4, step_tokens=32, **options)
    whole = prompt_of(70)
    solo(engine, job(1, whole, max_tokens=3, speculation=0))
    jobs = [job(key, [*whole, key], max_tokens=40, temperature=key % 2, seed=key) for key in range(2, 6)]
    answers = run(engine, *jobs)
    plain = run(open_engine(folder, kv_blocks=256, **STRICT), *jobs)
    assert engine.stats().preemptions > 0
    for key, answer in answers.items():
        assert answer.tokens == plain[key].tokens
        assert answer.ended.cost.drafted_tokens > 0


def test_hidden_states_that_are_not_finite_are_not_kept(checkpoint: Checkpoints, heads: Path) -> None:
    engine = open_engine(checkpoint("llama-damped"), kv_blocks=8, speculate=f"heads:{heads}", **STRICT)
    pool = hidden_of(engine)
    pool.take(1, torch.full((2, 64), torch.inf), torch.tensor([20, 21]))
    assert bool(torch.isfinite(pool.read(torch.tensor([20, 21]))).all())


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "width": ({"hidden_size": 128}, "for a width of 128, the served model has one of 64"),
    "vocabulary": (
        {"vocab_size": 99, "base": {"vocab_size": 99, "num_hidden_layers": 3}},
        f"for a vocabulary of 99, the served model has one of {VOCAB}",
    ),
    "layers": (
        {"base": {"vocab_size": VOCAB, "num_hidden_layers": 4}},
        "for a depth of 4, the served model has one of 3",
    ),
    "base": (
        {"base": {"vocab_size": VOCAB, "num_hidden_layers": 3, "digest": "0123"}},
        "trained for another model: its embedding is not the served one's",
    ),
    "depth": ({"depth": 9}, "config.json: depth must be a positive whole number of at most 8"),
    "hidden layers": ({"hidden_layers": [1, 3]}, "hidden_layers must be ascending whole numbers below 3"),
    "no hidden layers": ({"hidden_layers": []}, "hidden_layers must be ascending whole numbers below 3"),
    "draft tokens": (
        {"draft_tokens": [3, 3], "vocab_size": 2, "tie_word_embeddings": False},
        f"draft_tokens must be ascending whole numbers below {VOCAB}",
    ),
    "two heads": ({"draft_tokens": [3, 5]}, "contradict each other"),
    "more layers": ({"num_hidden_layers": 2}, "draft heads have one layer, not 2"),
    "a model": ({"architectures": ["LlamaForCausalLM"]}, "holds no draft heads: its architecture is LlamaForCausalLM"),
    "fused": ({"hidden_layers": [1]}, "tensor fuse.weight has shape"),
}


@pytest.mark.parametrize("bad", BAD)
def test_heads_of_another_model_are_refused(bad: str, checkpoint: Checkpoints, heads: Path, tmp_path: Path) -> None:
    entries, message = BAD[bad]
    with pytest.raises(CheckpointError, match=message.replace("[", r"\[")) as refused:
        open_engine(checkpoint("llama-damped"), speculate=f"heads:{changed(heads, tmp_path / 'bad', **entries)}")
    assert "\n" not in str(refused.value)


def test_missing_files_of_heads_are_named(checkpoint: Checkpoints, heads: Path, tmp_path: Path) -> None:
    folder = checkpoint("llama-damped")
    with pytest.raises(CheckpointError, match="no folder of draft heads at /nowhere"):
        open_engine(folder, speculate="heads:/nowhere")
    for name, message in (("config.json", "config.json is missing"), ("model.safetensors", "found no weights")):
        broken = shutil.copytree(heads, tmp_path / name)
        (broken / name).unlink()
        with pytest.raises(CheckpointError, match=message):
            open_engine(folder, speculate=f"heads:{broken}")
    other = make_checkpoint(tmp_path / "other", seed=1)
    with pytest.raises(CheckpointError, match="another model"):
        open_engine(other, speculate=f"heads:{heads}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "paced"}, "the paced engine pretends a draft model, no heads"),
        ({"engine": "compile"}, "checks no guesses"),
        ({"tensor_parallel": 2}, "do not support WEFT_SPECULATE"),
    ],
)
def test_engines_that_keep_no_hidden_states_refuse_heads(
    options: dict[str, Any], message: str, checkpoint: Checkpoints, heads: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_engine(checkpoint("llama-damped"), speculate=f"heads:{heads}", **options)
