"""Parallel draft models: one pass makes all guesses, they are those of transformers, and they change no token."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.speculation import equality
from services.worker.errors import CheckpointError
from services.worker.runners.cpu.drafts.parallel_draft import CpuParallelDraft
from services.worker.runners.cpu.runner import CpuRunner
from tests.checkpoints import VOCAB
from tests.parallel_drafts import MASK, with_mask
from tests.worker.drive import job, open_engine, prompt_of, run
from tests.worker.test_speculation import STRICT, varied_jobs

Checkpoints = Callable[[str], Path]


@pytest.fixture(scope="module")
def parallel(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that the tests serve, with a mask token: its first guess is always right."""
    return with_mask(checkpoint("llama"), tmp_path_factory.mktemp("parallel") / "draft", MASK)


def test_guesses_are_those_of_transformers(checkpoint: Checkpoints, parallel: Path) -> None:
    """Behind the last known token come masks, whose keys are gone when the next ones are guessed: also in a prompt that
    is caught up in parts, at several depths, and after right and wrong guesses."""
    model = AutoModelForCausalLM.from_pretrained(parallel, dtype=torch.float32)
    engine = open_engine(
        checkpoint("llama"), kv_blocks=256, block_size=4, **STRICT, speculate=f"draft:{parallel}", speculate_depth=4
    )
    assert isinstance(engine.runner, CpuRunner)
    draft = engine.runner.draft
    assert isinstance(draft, CpuParallelDraft)
    original, proposed = draft.guess, list[tuple[int, list[int]]]()

    def record(pending: Mapping[int, tuple[int, Sequence[int]]], wanted: Mapping[int, int], *rest: Any) -> Any:
        found = original(pending, wanted, *rest)
        proposed.extend((first + len(pending[slot][1]), found[slot]) for slot, (first, _) in pending.items())
        return found

    draft.guess = record  # type: ignore[method-assign,assignment]
    one = job(1, prompt_of(40), max_tokens=40)
    tokens = [*prompt_of(40), *run(engine, one)[1].tokens]
    assert sum(len(guesses) for _, guesses in proposed) > 60
    for end, guesses in proposed:
        ids = torch.tensor([[*tokens[:end], *[MASK] * (len(guesses) - 1)]])
        with torch.inference_mode():
            logits = model(ids).logits[0, end - 1 :]
        assert guesses == logits.argmax(-1).tolist(), end
    counts = engine.stats().guesses
    assert counts.accepted_at[0] == counts.drafted_at[0] > 10, "the model itself is right behind a known token"
    assert sum(counts.accepted_at[1:]) < sum(counts.drafted_at[1:]), "and is not behind a mask"


def test_answers_are_those_of_plain_decoding(checkpoint: Checkpoints, parallel: Path) -> None:
    folder, jobs = checkpoint("llama"), varied_jobs()
    plain = run(open_engine(folder, kv_blocks=256, **STRICT), *jobs)
    options: dict[str, Any] = {"kv_blocks": 256, "step_tokens": 64, "speculate_depth": 4, **STRICT}
    answers = run(open_engine(folder, **options, speculate=f"draft:{parallel}"), *jobs)
    for key, answer in answers.items():
        assert answer.tokens == plain[key].tokens, key
        assert (answer.logprobs, answer.tops) == (plain[key].logprobs, plain[key].tops)
        assert answer.ended.cost.accepted_tokens > 0


@pytest.mark.parametrize("depth", [3, None])
def test_random_requests_are_equal(depth: int | None, checkpoint: Checkpoints, parallel: Path) -> None:
    options: dict[str, Any] = {} if depth is None else {"speculate_depth": depth}
    wrong, line = equality.compare(checkpoint("llama"), 24, speculate=f"draft:{parallel}", **options)
    assert wrong == 0, line


@pytest.mark.parametrize("token", [VOCAB, -1, True, "[MASK]", 1.5])
def test_a_mask_token_outside_the_vocabulary_is_refused(token: Any, checkpoint: Checkpoints, tmp_path: Path) -> None:
    folder = checkpoint("llama")
    wrong = with_mask(folder, tmp_path / "wrong", token)
    with pytest.raises(CheckpointError, match=f"pard_token must be a token of the vocabulary, below {VOCAB}"):
        open_engine(folder, speculate=f"draft:{wrong}")
