"""An answer has no bad words: not as tokens, not after a pause, not after a lost worker, and nothing else changes."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from services.worker.engine.generation import GenerationEngine
from services.worker.runners.cuda.bad_words import BadWords
from services.worker.runners.forbidden import Forbidden
from tests.checkpoints import VOCAB, make_checkpoint
from tests.worker.conftest import EngineMaker
from tests.worker.drive import job, prompt_of, run, solo

PROMPT = prompt_of(24)
Sequences = tuple[tuple[int, ...], ...]


@pytest.fixture(scope="module")
def shared(engine: EngineMaker) -> GenerationEngine:
    return engine()


def contains(tokens: list[int], sequence: tuple[int, ...]) -> bool:
    return any(tuple(tokens[at : at + len(sequence)]) == sequence for at in range(len(tokens)))


def taken_from(answer: list[int]) -> Sequences:
    """Sequences of one to four tokens of an answer."""
    return tuple(tuple(answer[at : at + length]) for at, length in ((3, 1), (6, 2), (9, 3), (12, 4)))


def test_the_answer_is_that_of_transformers(shared: GenerationEngine, tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(make_checkpoint(tmp_path / "llama"), dtype=torch.float32)
    bad = taken_from(solo(shared, job(1, PROMPT, max_tokens=24)).tokens)
    answer = solo(shared, job(2, PROMPT, max_tokens=24, bad_sequences=bad))
    ids = torch.tensor([PROMPT])
    expected = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=24,
        min_new_tokens=24,
        pad_token_id=0,
        eos_token_id=VOCAB + 1,
        bad_words_ids=[list(each) for each in bad],
    )
    assert answer.tokens == expected[0, len(PROMPT) :].tolist()
    assert not any(contains(answer.tokens, each) for each in bad)


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 4, "frequency_penalty": 0.5, "logprobs": 2}])
def test_every_bad_word_stays_out_beside_other_rows(shared: GenerationEngine, settings: dict[str, Any]) -> None:
    free = solo(shared, job(1, PROMPT, max_tokens=32, **settings))
    bad = taken_from(free.tokens)
    answers = run(
        shared,
        job(2, PROMPT, max_tokens=32, **settings),
        *(job(3 + at, PROMPT, max_tokens=32, bad_sequences=(each,), **settings) for at, each in enumerate(bad)),
    )
    assert answers[2].tokens == free.tokens, "the row beside them has no bad words"
    for at, each in enumerate(bad):
        tokens = answers[3 + at].tokens
        assert not contains(tokens, each)
        first = next(place for place in range(32) if tuple(free.tokens[place : place + len(each)]) == each)
        assert tokens[: first + len(each) - 1] == free.tokens[: first + len(each) - 1]


def test_a_sequence_counts_in_the_answer_alone(shared: GenerationEngine) -> None:
    free = solo(shared, job(1, PROMPT, max_tokens=4))
    across = (PROMPT[-1], free.tokens[0])
    assert solo(shared, job(2, PROMPT, max_tokens=4, bad_sequences=(across,))).tokens == free.tokens


def test_a_pause_and_a_lost_worker_change_nothing(engine: EngineMaker) -> None:
    roomy, tight = engine(), engine(kv_blocks=9, block_size=16, max_batch_size=4)
    bad = taken_from(solo(roomy, job(1, PROMPT, max_tokens=60)).tokens)
    whole = solo(roomy, job(2, PROMPT, max_tokens=60, bad_sequences=bad))
    paused = run(tight, *(job(key, PROMPT, max_tokens=60, bad_sequences=bad, bypass_cache=True) for key in range(3)))
    assert sum(answer.ended.cost.preemptions for answer in paused.values()) > 0
    assert all(answer.tokens == whole.tokens for answer in paused.values())
    for emitted in (1, 2, 7, 30):  # Each worker that takes over has the tokens so far.
        rest = solo(roomy, job(3, PROMPT, emitted=whole.tokens[:emitted], max_tokens=60, bad_sequences=bad))
        assert rest.tokens == whole.tokens[emitted:]


def test_a_reused_slot_has_no_bad_words_of_the_job_before(engine: EngineMaker) -> None:
    single = engine(max_batch_size=1)
    free = solo(single, job(1, PROMPT, max_tokens=8)).tokens
    assert solo(single, job(2, PROMPT, max_tokens=8, bad_sequences=((free[2],),))).tokens != free
    assert solo(single, job(3, PROMPT, max_tokens=8)).tokens == free


@pytest.mark.parametrize("seed", range(8))
def test_the_devices_bans_are_those_of_the_host(seed: int) -> None:
    draw, vocab = random.Random(seed), 6
    bad = [[draw.randrange(vocab) for _ in range(draw.randint(1, 1 + seed % 4))] for _ in range(12)]
    answer = [draw.randrange(vocab) for _ in range(draw.randint(0, 7))]
    before = max(map(len, bad)) - 1
    last = answer[-before:] if before else []
    words = np.array([len(answer), len(last), *last, *(word for each in bad for word in (len(each), *each))], np.int32)
    host, device = Forbidden(words), BadWords(words, torch.device("cpu"))
    line = torch.randn(vocab)
    line[draw.randrange(vocab)] = -torch.inf
    bias = line.clone()
    device.rewritten(line)
    position, token = len(answer), None
    for _ in range(20):
        for _ in range(2):  # A step that failed is launched again.
            device.mark(line, position, token)
        expected = bias.clone()
        expected[host.banned(position)] = -torch.inf
        assert torch.equal(line, expected)
        drawn = draw.randrange(vocab)
        host.add(position, drawn)
        position, token = position + 1, torch.tensor([drawn])
