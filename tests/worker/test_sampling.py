"""Each sampling field has its documented effect, beside rows with other settings."""

import math
from collections import Counter
from typing import Any

import pytest
import torch

from services.worker.engine.generation import GenerationEngine
from tests.checkpoints import VOCAB
from tests.worker.conftest import EngineMaker
from tests.worker.drive import job, prompt_of, run, solo

PROMPT = prompt_of(24)


@pytest.fixture(scope="module")
def shared(engine: EngineMaker) -> GenerationEngine:
    return engine()


def distribution(engine: GenerationEngine) -> torch.Tensor:
    """The model's probabilities for the first token after PROMPT."""
    top = solo(engine, job(1, PROMPT, max_tokens=1, logprobs=VOCAB)).tops[0]
    assert top is not None
    chances = torch.zeros(VOCAB)
    chances[[token for token, _ in top]] = torch.tensor([value for _, value in top]).exp()
    return chances


def first_tokens(engine: GenerationEngine, draws: int, **settings: Any) -> Counter[int]:
    """Counts of first tokens for many seeds, 60 at a time, beside rows with other settings."""
    others = [
        job(5000, prompt_of(9), max_tokens=99, temperature=0.0),
        job(5001, prompt_of(9), max_tokens=99, temperature=2.0, top_k=7),
        job(5002, prompt_of(9), max_tokens=99, presence_penalty=1.0, logprobs=2),
    ]
    jobs = [job(seed, PROMPT, max_tokens=1, seed=seed, **settings) for seed in range(draws)]
    answers = run(engine, *others, *jobs)
    return Counter(answers[seed].tokens[0] for seed in range(draws))


def assert_drawn_from(counts: Counter[int], chances: torch.Tensor) -> None:
    """Asserts that no count differs from its expected value by more than five standard deviations."""
    total = sum(counts.values())
    for token, chance in enumerate(chances.tolist()):
        deviation = math.sqrt(total * chance * (1 - chance)) + 1
        assert abs(counts[token] - total * chance) < 5 * deviation, f"token {token} of probability {chance}"


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_temperature_draws_from_the_tempered_softmax(shared: GenerationEngine, temperature: float) -> None:
    chances = torch.softmax(distribution(shared).log() / temperature, 0)
    assert_drawn_from(first_tokens(shared, 1500, temperature=temperature), chances)


def renormalized(chances: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return chances * kept / (chances * kept).sum()


def test_top_k_draws_from_the_k_best(shared: GenerationEngine) -> None:
    chances = distribution(shared)
    kept = chances >= chances.topk(3).values[-1]
    counts = first_tokens(shared, 800, temperature=1.0, top_k=3)
    assert set(counts) == set(kept.nonzero()[:, 0].tolist())
    assert_drawn_from(counts, renormalized(chances, kept))


def test_top_p_draws_from_the_smallest_set_that_reaches_p(shared: GenerationEngine) -> None:
    chances = distribution(shared)
    ordered = chances.sort(descending=True).values
    last = int((ordered.cumsum(0) < 0.6).sum())  # the token that crosses p is kept
    kept = chances >= ordered[last]
    counts = first_tokens(shared, 800, temperature=1.0, top_p=0.6)
    assert set(counts) <= set(kept.nonzero()[:, 0].tolist())
    assert_drawn_from(counts, renormalized(chances, kept))


def test_min_p_draws_from_tokens_above_its_share_of_the_best(shared: GenerationEngine) -> None:
    chances = distribution(shared)
    kept = chances >= 0.3 * chances.max()
    counts = first_tokens(shared, 800, temperature=1.0, min_p=0.3)
    assert set(counts) == set(kept.nonzero()[:, 0].tolist())
    assert_drawn_from(counts, renormalized(chances, kept))


def test_seed_sample_index_and_position_each_change_the_draw(shared: GenerationEngine) -> None:
    def tokens(**settings: Any) -> list[int]:
        return solo(shared, job(1, PROMPT, temperature=1.5, max_tokens=12, **settings)).tokens

    same = tokens(seed=5)
    assert tokens(seed=5) == same
    assert tokens(seed=6) != same
    assert tokens(seed=5 + (1 << 40)) != same, "all 64 bits of the seed are used"
    assert tokens(seed=(1 << 64) - 1) != same
    assert tokens(seed=5, sample_index=1) != same
    late = solo(shared, job(1, PROMPT, emitted=[same[0]], temperature=1.5, max_tokens=12, seed=5)).tokens
    assert late == same[1:]


def test_logit_bias_is_added(shared: GenerationEngine) -> None:
    assert solo(shared, job(1, PROMPT, max_tokens=4, logit_bias={17: 100.0})).tokens == [17] * 4
    best = solo(shared, job(1, PROMPT, max_tokens=1)).tokens[0]
    assert solo(shared, job(1, PROMPT, max_tokens=1, logit_bias={best: -100.0})).tokens != [best]


def test_repetition_penalty_counts_prompt_and_answer(shared: GenerationEngine) -> None:
    """A large penalty lowers each seen token so far that no token of prompt or answer is repeated."""
    answer = solo(shared, job(1, PROMPT, max_tokens=40, repetition_penalty=10.0))
    assert len(set(answer.tokens)) == len(answer.tokens)
    assert not set(answer.tokens) & set(PROMPT)


@pytest.mark.parametrize("field", ["presence_penalty", "frequency_penalty"])
def test_penalties_count_the_answer_only(shared: GenerationEngine, field: str) -> None:
    """Each token has the best of the model's log-probabilities less the penalties of the tokens in the answer."""
    settings: dict[str, Any] = {field: 2.0, "max_tokens": 40, "logprobs": VOCAB}
    answer = solo(shared, job(1, prompt_of(300, seed=2), **settings))
    counts: Counter[int] = Counter()
    for token, top in zip(answer.tokens, answer.tops, strict=True):
        assert top is not None

        def penalized(entry: tuple[int, float]) -> float:
            count = counts[entry[0]]
            return entry[1] - 2.0 * (min(count, 1) if field == "presence_penalty" else count)

        assert token == max(top, key=penalized)[0]
        counts[token] += 1
    assert answer.tokens != solo(shared, job(2, prompt_of(300, seed=2), max_tokens=40)).tokens


def test_logprobs_are_those_of_the_unmodified_model(shared: GenerationEngine) -> None:
    plain = solo(shared, job(1, PROMPT, max_tokens=1, logprobs=5))
    top = plain.tops[0]
    assert top is not None
    assert len(top) == 5
    assert top[0] == (plain.tokens[0], plain.logprobs[0])
    assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)
    bent = solo(
        shared, job(2, PROMPT, max_tokens=1, logprobs=5, temperature=3.0, logit_bias={top[3][0]: 100.0}, seed=1)
    )
    assert bent.tokens == [top[3][0]]
    assert bent.logprobs[0] == pytest.approx(top[3][1], abs=1e-5)
    assert dict(bent.tops[0] or ()) == pytest.approx(dict(top), abs=1e-5)


def test_each_job_gets_the_number_of_logprobs_that_it_asked_for(shared: GenerationEngine) -> None:
    asked = (None, 0, 2, 20)
    answers = run(shared, *(job(i, PROMPT, max_tokens=3, logprobs=n) for i, n in enumerate(asked)))
    assert answers[0].logprobs == [None] * 3
    assert answers[0].tops == answers[1].tops == [None] * 3
    assert None not in answers[1].logprobs
    assert [len(top or []) for top in answers[2].tops] == [2] * 3
    assert [len(top or []) for top in answers[3].tops] == [20] * 3


def test_a_reused_slot_keeps_no_state_of_the_previous_job(engine: EngineMaker) -> None:
    single = engine(max_batch_size=1)
    expected = solo(single, job(1, PROMPT, max_tokens=10)).tokens
    nasty: dict[str, Any] = {
        "temperature": 5.0,
        "top_k": 3,
        "repetition_penalty": 9.0,
        "logit_bias": {9: 50.0},
        "min_tokens": 9,
    }
    solo(single, job(2, PROMPT, max_tokens=10, logprobs=20, stop_token_ids=frozenset({4}), **nasty))
    assert solo(single, job(3, PROMPT, max_tokens=10)).tokens == expected
