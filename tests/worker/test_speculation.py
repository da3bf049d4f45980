"""Guessed tokens change no answer: each is checked by drawing what plain decoding would draw at its position."""

import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.speculation import equality
from kernels.quantized_cpu import Int8Product
from services.worker.build.drafting.draft import draft_head
from services.worker.build.weights import open_source
from services.worker.engine.generation import GenerationEngine
from services.worker.errors import CheckpointError
from services.worker.job import EndReason, Job
from services.worker.loader import quantized
from services.worker.options import EngineOptions, MemoryPlan
from services.worker.planner.block_pool import BlockPool
from services.worker.planner.planner import Planner
from services.worker.planner.sequence import Sequence as Planned
from services.worker.runners.cpu.runner import CpuRunner, CpuStep
from services.worker.runners.paced import PacedRunner, PacedTiming, tokens_of
from services.worker.runners.step import Words, unpack
from services.worker.speculative import draft_model, suffix
from services.worker.speculative.ngram import NgramProposer
from services.worker.speculative.speculation import Speculation
from services.worker.speculative.suffix import SuffixProposer
from tests.checkpoints import VOCAB
from tests.draft_heads import make_heads
from tests.worker.conftest import EngineMaker
from tests.worker.drive import Answer, decoder_of, job, open_engine, prompt_of, run, solo
from tests.worker.test_overlap import LateRunner

STRICT = {"deterministic": True}
TOKENS = 24


class Replay:
    """A proposer that has seen the answers: every `wrong`-th of its guesses is another token."""

    def __init__(self, answers: dict[int, Answer], wrong: int = 7) -> None:
        self.answers, self.wrong = answers, wrong
        self.open: set[int] = set()

    def propose(self, job: Job, token_ids: Sequence[int], most: int) -> Sequence[int]:
        self.open.add(job.key)
        position = len(token_ids) - job.prompt_len
        tokens = [*self.answers[job.key].tokens, *[7] * most]
        return [
            token ^ 1 if (position + place) % self.wrong == self.wrong - 1 else token
            for place, token in enumerate(tokens[position : position + most])
        ]

    def ended(self, job: Job, token_ids: Sequence[int]) -> None:
        self.open.discard(job.key)


class LateReplay(Replay):
    """It guesses nothing before a position of the answer."""

    def __init__(self, answers: dict[int, Answer], begin: int) -> None:
        super().__init__(answers)
        self.begin = begin

    def propose(self, job: Job, token_ids: Sequence[int], most: int) -> Sequence[int]:
        return super().propose(job, token_ids, most) if len(token_ids) - job.prompt_len >= self.begin else ()


def guessing(engine: GenerationEngine, proposer: Any, depth: int | None = 4) -> GenerationEngine:
    engine.speculation = Speculation(proposer, depth, overlaps=engine.runner.depth > 1)
    return engine


@dataclass(frozen=True)
class Guesser:
    """Who guesses in a test: a replay of the plain answers, or draft heads of another tiny model."""

    engine: EngineMaker
    heads: Path | None = None

    @property
    def shape(self) -> str:
        """The model that is served."""
        return "llama" if self.heads is None else "llama-damped"

    def plain(self, **options: Any) -> GenerationEngine:
        """An engine that guesses nothing."""
        return self.engine(self.shape, **STRICT, **options)

    def guessing(
        self, plain: dict[int, Answer], wrong: int = 7, depth: int | None = 4, **options: Any
    ) -> GenerationEngine:
        """An engine that guesses these answers; a replay's every `wrong`-th guess is another token."""
        if self.heads is None:
            return guessing(self.plain(**options), Replay(plain, wrong), depth)
        return self.plain(**options, speculate=f"heads:{self.heads}", speculate_depth=depth)


@pytest.fixture(scope="module")
def heads(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_heads(tmp_path_factory.mktemp("heads") / "heads", checkpoint("llama-damped"))


@pytest.fixture(params=["replay", "heads"])
def guesser(request: pytest.FixtureRequest, engine: EngineMaker, heads: Path) -> Guesser:
    return Guesser(engine, heads if request.param == "heads" else None)


PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 5},
    "cut": {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 6},
    "penalties": {
        "temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.9, "seed": 7,
    },
    "greedy penalties": {"repetition_penalty": 1.5, "frequency_penalty": 1.1},
    "bias": {"logit_bias": {9: 4.0, 30: -60.0}, "temperature": 0.9, "seed": 8},
    "logprobs": {"logprobs": 3, "temperature": 0.6, "seed": 9},
}  # fmt: skip


def varied_jobs() -> list[Job]:
    return [
        job(key, prompt_of(5 + 13 * (key % 4), key), max_tokens=TOKENS, sample_index=key % 3, **params)
        for key, params in enumerate([*PARAMS.values()] * 2)
    ]


@pytest.mark.parametrize("shape", ["llama", "mistral-window", "gpt2"])
def test_answers_are_those_of_plain_decoding(shape: str, engine: EngineMaker) -> None:
    jobs = varied_jobs()
    plain = run(engine(shape, **STRICT), *jobs)
    replay = Replay(plain)
    made = guessing(engine(shape, **STRICT, step_tokens=64), replay)
    answers = run(made, *jobs)
    for key, answer in answers.items():
        assert answer.tokens == plain[key].tokens, key
        assert (answer.logprobs, answer.tops) == (plain[key].logprobs, plain[key].tops)
        cost = answer.ended.cost
        assert 0 < cost.accepted_tokens < cost.drafted_tokens
        assert cost.steps < plain[key].ended.cost.steps
    counts = made.stats().guesses
    assert counts.accepted == sum(answer.ended.cost.accepted_tokens for answer in answers.values())
    assert counts.drafted == sum(counts.drafted_at)
    assert counts.accepted == sum(counts.accepted_at)
    assert not replay.open, "a proposer keeps jobs that have ended"
    assert made.stats().active_blocks == 0


def test_an_end_within_a_guess_ends_the_answer(guesser: Guesser) -> None:
    settings: dict[str, Any] = {"temperature": 1.0, "seed": 3}
    plain = solo(guesser.plain(), job(1, prompt_of(9), max_tokens=TOKENS, **settings))
    made = guesser.guessing({1: plain}, wrong=100)
    for position in range(8):
        stop = plain.tokens[position]
        first = plain.tokens.index(stop)
        ended = solo(made, job(1, prompt_of(9), max_tokens=TOKENS, stop_token_ids=frozenset({stop}), **settings))
        assert ended.tokens == plain.tokens[:first]
        assert (ended.ended.reason, ended.ended.stop_token_id) == (EndReason.STOP, stop)
        short = solo(made, job(1, prompt_of(9), max_tokens=position + 1, **settings))
        assert short.tokens == plain.tokens[: position + 1]
        assert short.ended.reason is EndReason.LENGTH


def test_guesses_do_not_cross_the_end_of_min_tokens(guesser: Guesser) -> None:
    settings: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": False, "temperature": 1.4, "seed": 2}
    free = solo(guesser.plain(), job(1, prompt_of(9), **settings))
    stops = frozenset(free.tokens[2:9])
    held = {**settings, "min_tokens": 11, "stop_token_ids": stops}
    plain = solo(guesser.plain(), job(1, prompt_of(9), **held))
    assert len(plain.tokens) >= 11
    answer = solo(guesser.guessing({1: plain}), job(1, prompt_of(9), **held))
    assert answer.tokens == plain.tokens
    assert answer.ended.stop_token_id == plain.ended.stop_token_id


def test_preempted_and_chunked_answers_are_equal(guesser: Guesser) -> None:
    jobs = [job(key, prompt_of(40 + 7 * key), max_tokens=30, temperature=key % 2, seed=key) for key in range(6)]
    plain = run(guesser.plain(), *jobs)
    tight = guesser.guessing(plain, kv_blocks=16, max_batch_size=4, step_tokens=24)
    answers = run(tight, *jobs)
    assert tight.stats().preemptions > 0
    assert [answers[key].tokens for key in range(6)] == [plain[key].tokens for key in range(6)]
    assert tight.stats().guesses.accepted > 0


def test_guesses_neither_pause_others_nor_starve_prompts(guesser: Guesser) -> None:
    jobs = [job(key, prompt_of(30, key), max_tokens=33) for key in range(4)]
    plain = run(guesser.plain(), *jobs)
    exact = guesser.guessing(plain, depth=8, kv_blocks=16, max_batch_size=4, step_tokens=8)
    answers = run(exact, *jobs)
    assert exact.stats().preemptions == 0, "16 blocks are what the answers need at their end"
    assert all(answers[key].tokens == plain[key].tokens for key in range(4))


def test_only_kept_tokens_are_found_in_the_prefix_cache(guesser: Guesser) -> None:
    first = job(1, prompt_of(10), max_tokens=40, temperature=0.9, seed=4)
    plain = solo(guesser.plain(), first)
    made = guesser.guessing({1: plain}, wrong=3, depth=8, block_size=4)
    assert solo(made, first).tokens == plain.tokens
    again = job(2, [*prompt_of(10), *plain.tokens, 9], max_tokens=12, temperature=0.9, seed=5)
    expected = solo(guesser.plain(), again)
    made.speculation = None
    answer = solo(made, again)
    assert answer.tokens == expected.tokens
    assert answer.ended.cost.cached_tokens == 48, "all whole blocks of 50 tokens whose last one was never computed"


def test_a_cancelled_answer_leaves_only_its_counted_tokens(guesser: Guesser) -> None:
    first = job(1, prompt_of(12), max_tokens=60)
    plain = solo(guesser.plain(), first)
    for position in (0, 3, 5, 17):
        made = guesser.guessing({1: plain}, block_size=4)
        partial = run(made, first, steps=9)[1]
        made.cancel(1, position)
        run(made)
        assert partial.tokens == plain.tokens[: len(partial.tokens)]
        assert len(partial.tokens) > 9, "a guess was right"
        made.speculation = None
        again = solo(made, job(2, [*prompt_of(12), *plain.tokens], max_tokens=2))
        assert again.ended.cost.cached_tokens == (12 + position) // 4 * 4


def test_a_moved_answer_continues_with_guesses(guesser: Guesser) -> None:
    settings: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0.9, "seed": 4, "frequency_penalty": 0.8}
    plain = solo(guesser.plain(), job(1, prompt_of(20), **settings))
    for kept in (1, 7, 20):
        made = guesser.guessing({1: plain})
        rest = solo(made, job(1, prompt_of(20), emitted=plain.tokens[:kept], **settings))
        assert rest.tokens == plain.tokens[kept:]
        assert rest.positions[0] == kept


def test_a_request_chooses_its_depth(engine: EngineMaker) -> None:
    plain = solo(engine(**STRICT), job(1, prompt_of(20), max_tokens=TOKENS))
    for most, drafted_at in ((0, 0), (2, 2), (8, 4), (None, 4)):
        made = guessing(engine(**STRICT), Replay({1: plain}, wrong=100))
        answer = solo(made, job(1, prompt_of(20), max_tokens=TOKENS, speculation=most))
        assert answer.tokens == plain.tokens
        assert len(made.stats().guesses.drafted_at) == drafted_at
        assert (answer.ended.cost.drafted_tokens > 0) == (drafted_at > 0)


def test_a_guess_that_is_not_finite_is_not_guessed_again(engine: EngineMaker) -> None:
    poison = 8
    good = engine(**STRICT)
    plain = solo(good, job(1, prompt_of(20), max_tokens=TOKENS))
    assert poison not in [*prompt_of(20), *plain.tokens]
    made = engine("llama", **STRICT, block_size=8, kv_blocks=8)
    decoder_of(made).model.embedding[poison] = torch.inf
    spoiled = Answer(tokens=[*plain.tokens[:3], poison, poison])
    answer = solo(guessing(made, Replay({1: spoiled}, wrong=100)), job(1, prompt_of(20), max_tokens=TOKENS))
    assert answer.ended.reason is EndReason.LENGTH
    assert answer.tokens == plain.tokens
    assert all(bool(torch.isfinite(layer).all()) for layer in decoder_of(made).kv.layers)


def test_the_paced_runner_keeps_right_guesses() -> None:
    vocabulary = list(range(2, 200))
    truth = Answer(tokens=[token for at in range(6) for token in tokens_of(11, 0, at, vocabulary)])
    memory = MemoryPlan(0, 0, 0, 0, kv_blocks=64, kv_tokens=256, max_seq_length=128)
    options = EngineOptions(max_batch_size=4, step_tokens=32, block_size=4)
    engine = GenerationEngine(options, memory, PacedRunner(200, [0, 1], 4, PacedTiming(0.0)), [0, 1])
    answer = solo(guessing(engine, Replay({1: truth})), job(1, prompt_of(9), max_tokens=40, seed=11, logprobs=2))
    assert answer.tokens == truth.tokens[:40]
    assert len(answer.tops) == 40
    assert 0 < answer.ended.cost.accepted_tokens < answer.ended.cost.drafted_tokens


def test_random_requests_are_equal_with_ngrams(checkpoint: Callable[[str], Path]) -> None:
    wrong, line = equality.compare(checkpoint("llama"), 36, speculate="ngram", speculate_depth=5)
    assert wrong == 0, line
    assert " 0 of " not in line.partition(";")[2], "no guess was right: the test shows nothing"


def test_the_comparison_finds_a_difference() -> None:
    ones = {1: equality.Answer([5, 6], [-1.0, -2.0], [None, None], EndReason.STOP)}
    late = {1: equality.Answer([5, 6], [-2.0], [None], EndReason.STOP)}
    assert equality.differing(ones, late, exact=True) == []
    for other in ([5, 7], [5]):
        wrong = {1: equality.Answer(other, [-1.0, -2.0], [None, None], EndReason.STOP)}
        assert equality.differing(ones, wrong, exact=True) == [1]
    off = {1: equality.Answer([5, 6], [-1.5, -2.0], [None, None], EndReason.STOP)}
    assert equality.differing(ones, off, exact=True) == [1]
    assert equality.differing(ones, off, exact=False) == []


class AloneRunner(LateRunner):
    """It asserts that a step with guesses is the only one in flight."""

    alone = False

    def launch(self, words: Words) -> CpuStep:
        before, self.alone = self.alone, max(unpack(words)[1].samples) > 1
        assert not self.in_flight or not (before or self.alone)
        return super().launch(words)


@pytest.mark.parametrize("depth", [4, None])
def test_guesses_wait_for_the_step_in_flight(depth: int | None, engine: EngineMaker) -> None:
    jobs = [job(key, prompt_of(9 + 5 * key), max_tokens=40, temperature=key % 2, seed=key) for key in range(4)]
    plain = run(engine(**STRICT), *jobs)
    made = engine(**STRICT, max_batch_size=3, step_tokens=24)
    assert isinstance(made.runner, CpuRunner)
    late = AloneRunner(made.runner)
    made = GenerationEngine(made.options, made.memory, late, ())
    answers = run(guessing(made, Replay(plain), depth), *jobs)
    assert [answer.tokens for answer in answers.values()] == [plain[key].tokens for key in answers]
    assert made.stats().guesses.accepted > 0
    assert late.most_in_flight == 2, "steps without guesses overlap"
    assert late.in_flight == 0


class LonelyRunner(LateRunner):
    """It counts the steps that are launched while none is in flight."""

    lonely = 0

    def launch(self, words: Words) -> CpuStep:
        self.lonely += not self.in_flight
        return super().launch(words)


@pytest.mark.parametrize(
    ("why", "depth"),
    [
        ("too slow", None),
        ("too many answers", 4),
        ("too many answers", None),
        ("nothing found", 4),
        ("nothing found", None),
    ],
)
def test_steps_overlap_where_nothing_is_guessed(why: str, depth: int | None, engine: EngineMaker) -> None:
    made = engine(**STRICT)
    assert isinstance(made.runner, CpuRunner)
    jobs = [job(key, prompt_of(9 + key), max_tokens=60) for key in range(3)]
    if why == "too slow":
        speculation = Speculation(draft_model.DraftProgress(made.options.block_size, 512), overlaps=True)
        speculation._budget.spend(25_000, 250.0, 3)  # No slow machine earns this within the test.
    elif why == "nothing found":
        speculation = Speculation(LateReplay({}, 1000), depth, overlaps=True)
    else:
        speculation = Speculation(Replay(run(engine(**STRICT), *jobs)), depth, overlaps=True, limit=lambda _: 0)
    late = LonelyRunner(made.runner)
    run(GenerationEngine(made.options, made.memory, late, (), speculation=speculation), *jobs)
    assert speculation.counts.drafted == 0
    assert late.lonely <= 2


# ---- proposers ----


def naive_ngram(tokens: Sequence[int], most: int) -> list[int]:
    for length in range(min(4, len(tokens) - 1), 1, -1):
        for begin in range(len(tokens) - length - 1, -1, -1):
            if list(tokens[begin : begin + length]) == list(tokens[-length:]):
                rest = list(tokens)
                for place in range(most):
                    rest.append(rest[begin + length + place])
                return rest[len(tokens) :]
    return []


def test_ngrams_are_those_of_a_plain_search() -> None:
    source = random.Random(3)
    for round_ in range(60):
        one, proposer = job(round_, [1]), NgramProposer()
        tokens = [source.choice((3, 256, 65536, 771)) for _ in range(source.randrange(1, 9))]
        for _ in range(12):
            assert list(proposer.propose(one, tokens, 5)) == naive_ngram(tokens, 5), tokens
            tokens = tokens + [source.choice((3, 256, 65536, 771)) for _ in range(source.randrange(1, 4))]
        proposer.ended(one, tokens)
        assert proposer._joined == {}


# ---- planner ----


def test_a_plan_gives_guesses_only_free_blocks_and_the_rest_of_the_budget() -> None:
    planner = Planner(BlockPool(8), 4, slots=2, step_tokens=6, prefix_cache=True)
    for key in (1, 2):
        planner.add(Planned(job(key, prompt_of(3, key), max_tokens=20), key, 4, 64, b""))
    plan = planner.plan()
    for row in plan.rows:
        planner.commit(row, [50])
    asked: list[int] = []

    def guess(answers: list[tuple[Planned, int]], rows: int) -> list[Sequence[int]]:
        asked.extend(room for _, room in answers)
        return [[9] * 8 for _ in answers]

    plan = planner.plan(guess)
    assert asked == [18, 18], "the token of this row, guesses, and one drawn after them"
    assert [row.tokens for row in plan.rows] == [5, 1], "the budget of six tokens"
    assert plan.rows[0].samples == 5
    planner.commit(plan.rows[0], [9, 9, 60])
    planner.commit(plan.rows[1], [61])
    first = plan.rows[0].sequence
    assert (first.computed, first.total, len(first.tokens)) == (6, 7, 7)
    planner.check()


@pytest.mark.parametrize(("pool", "guesses", "blocks"), [(8, 4, 4), (3, 4, 2), (1, 0, 1), (8, 1, 4), (8, 7, 5)])
def test_blocks_of_the_next_guesses_are_taken_while_some_are_free(pool: int, guesses: int, blocks: int) -> None:
    """Where guesses are made behind a step, before its results are known, as many as there may be. The answer ends at
    token 18."""
    planner = Planner(BlockPool(pool), 4, slots=1, step_tokens=9, prefix_cache=True, guesses_behind=8)
    planner.add(Planned(job(1, prompt_of(3), max_tokens=15), 1, 4, 64, b""))
    planner.commit(planner.plan().rows[0], [50])
    (row,) = planner.plan(lambda answers, rows: [[9] * guesses]).rows
    assert len(row.guesses) == guesses
    assert len(row.sequence.blocks) == blocks
    planner.check()


# ---- suffixes ----


def test_suffixes_continue_as_most_of_the_longest_matches_do() -> None:
    proposer, one = SuffixProposer(), job(1, [1, 2, 3, 9])
    tokens = [1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 6, 0, 1, 2, 3, 4, 5, 8, 0, 1, 2, 3]
    assert list(proposer.propose(one, tokens, 8)) == [4, 5, 8, 0], "at most the four tokens of the match"
    assert list(proposer.propose(one, tokens, 2)) == [4, 5]
    assert list(proposer.propose(one, [*tokens, 9], 8)) == []


def test_suffixes_find_the_tenants_own_earlier_answers_alone() -> None:
    proposer = SuffixProposer()
    answer = list(range(50, 90))
    mine = job(1, [1, 2, 3, 4], salt=b"mine")
    proposer.propose(mine, [1, 2, 3, 4], 4)
    proposer.ended(mine, [1, 2, 3, 4, *answer])
    asked = [7, 7, 50, 51, 52, 53]
    assert list(proposer.propose(job(2, asked, salt=b"mine"), asked, 8)) == [54, 55, 56, 57]
    assert list(proposer.propose(job(3, asked, salt=b"other"), asked, 8)) == []
    assert list(proposer.propose(job(4, asked, salt=b"mine", bypass_cache=True), asked, 8)) == []
    silent = job(5, [1, 2, 3, 4], salt=b"silent", bypass_cache=True)
    proposer.ended(silent, [1, 2, 3, 4, *answer])
    assert list(proposer.propose(job(6, asked, salt=b"silent"), asked, 8)) == []


def test_suffixes_stay_within_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "TENANT_TOKENS", 100)
    monkeypatch.setattr(suffix, "ALL_TOKENS", 500)
    proposer = SuffixProposer()
    for key in range(60):
        one = job(key, [1, 2, 3], salt=bytes([key % 7]))
        proposer.propose(one, [1, 2, 3], 4)
        proposer.ended(one, [1, 2, 3, *[1000 * key + at for at in range(40)]])
    kept = proposer._earlier
    assert proposer._own == {}
    assert sum(each.tokens for each in kept.values()) <= 500
    assert all(each.tokens <= 300 for each in kept.values())
    assert bytes([59 % 7]) in kept
    long = job(99, prompt_of(9000))
    for _ in range(4):
        proposer.propose(long, [*prompt_of(9000), *prompt_of(9000)[8000:8040]], 4)
    expected = prompt_of(9000)[8040:8044]
    assert list(proposer.propose(long, [*prompt_of(9000), *prompt_of(9000)[8000:8040]], 4)) == expected


def test_random_requests_are_equal_with_suffixes(checkpoint: Callable[[str], Path]) -> None:
    wrong, line = equality.compare(checkpoint("llama"), 36, speculate="suffix", speculate_depth=8)
    assert wrong == 0, line
    assert " 0 of " not in line.partition(";")[2], "no guess was right: the test shows nothing"


def test_an_unmeasured_engine_measures_before_it_guesses(checkpoint: Callable[[str], Path]) -> None:
    """Without a set depth the answers are the same too, and a loop is soon guessed."""
    wrong, line = equality.compare(checkpoint("llama"), 24, speculate="ngram")
    assert wrong == 0, line


# ---- draft models ----


def test_a_draft_that_is_the_model_itself_is_always_right(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("llama")
    jobs = [job(key, prompt_of(30, key), max_tokens=TOKENS, temperature=0.8 * (key % 2), seed=key) for key in range(4)]
    plain = run(open_engine(folder, kv_blocks=256, **STRICT), *jobs)
    engine = open_engine(folder, kv_blocks=256, **STRICT, speculate=f"draft:{folder}", speculate_depth=4)
    answers = run(engine, *jobs)
    for key, answer in answers.items():
        assert answer.tokens == plain[key].tokens
        cost = answer.ended.cost
        assert cost.accepted_tokens == cost.drafted_tokens > 0
        assert cost.steps == 1 + -(-(TOKENS - 1) // 5)


@pytest.mark.parametrize("shape", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_the_head_of_a_rounded_draft_is_rounded(
    kind: str, shape: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is the embedding, which stays as it is. Its rows are rounded by themselves; answers are equal."""
    folder, x, logits = checkpoint(shape), torch.randn(5, 64), []
    plain = decoder_of(open_engine(folder, kv_blocks=256))
    jobs = [job(key, prompt_of(30, key), max_tokens=TOKENS) for key in range(4)]
    wanted = {key: answer.tokens for key, answer in run(open_engine(folder, kv_blocks=256, **STRICT), *jobs).items()}
    for rows in (quantized._HEAD_ROWS, 37):
        monkeypatch.setattr(quantized, "_HEAD_ROWS", rows)
        settings = {"speculate": f"draft:{folder}", "speculate_depth": 4, "draft_quantize": kind}
        engine = open_engine(folder, kv_blocks=256, **STRICT, **settings)
        assert isinstance(engine.runner, CpuRunner)
        assert engine.runner.draft is not None
        draft = engine.runner.draft.model
        assert isinstance(draft.head.weight, Int8Product)
        assert torch.equal(draft.embedding, plain.model.embedding)
        logits.append(draft.logits(x))
        assert {key: answer.tokens for key, answer in run(engine, *jobs).items()} == wanted
        assert engine.stats().guesses.accepted > 0
    assert torch.equal(*logits)
    error = (logits[0] - plain.model.logits(x)).abs().mean() / logits[0].abs().mean()
    assert 1e-4 < float(error) < 0.02


@pytest.mark.parametrize(
    ("settings", "width", "head"),
    [
        ({"engine": "gpu"}, 2048, None),
        ({"engine": "gpu", "draft_quantize": "int4"}, 2048, "int4"),
        ({"engine": "gpu", "draft_quantize": "int4"}, 2880, "int8"),
        ({"engine": "gpu", "draft_quantize": "fp8"}, 2880, "fp8"),
        ({"engine": "gpu", "draft_quantize": "nf4"}, 2048, "int8"),
        ({"engine": "gpu", "draft_quantize": "int4", "dtype": "float32"}, 2048, None),
        ({"engine": "gpu", "draft_quantize": "int4", "deterministic": True}, 2048, None),
        ({"engine": "torch", "draft_quantize": "int4", "deterministic": True}, 2048, "int8"),
        ({"engine": "torch"}, 2048, None),
    ],
)
def test_the_format_of_a_drafts_head(settings: dict[str, Any], width: int, head: str | None) -> None:
    assert draft_head(EngineOptions(**settings), width) == head


def test_the_memory_of_a_rounded_copy_of_the_embedding_is_planned(checkpoint: Callable[[str], Path]) -> None:
    for shape, nbytes in (("qwen2", VOCAB * 64), ("llama", 0)):
        source = open_source(checkpoint(shape), EngineOptions())
        plain, int8, int4 = (
            replace(source, head=head).expected_bytes(torch.float32, "cpu") for head in (None, "int8", "int4")
        )
        assert int8 - plain == nbytes
        assert nbytes // 2 <= int4 - plain <= 0.54 * nbytes


def test_a_draft_that_catches_up_guesses_with_two_steps_in_flight(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it computes a long prompt piece by piece nothing is guessed; afterwards every answer is."""
    monkeypatch.setattr(draft_model, "CATCH_UP_TOKENS", 32)
    folder = checkpoint("llama")
    made = open_engine(folder, kv_blocks=256, **STRICT, speculate=f"draft:{folder}", speculate_depth=4)
    assert isinstance(made.runner, CpuRunner)
    speculation = Speculation(draft_model.DraftProgress(made.options.block_size, 512), 4, overlaps=True)
    engine = GenerationEngine(made.options, made.memory, AloneRunner(made.runner), (), speculation=speculation)
    run(engine, *(job(key, prompt_of(100, key), max_tokens=60, bypass_cache=True) for key in range(2)))
    guesses = engine.stats().guesses
    assert guesses.accepted == guesses.drafted >= 80


@pytest.mark.parametrize(
    ("right", "recomputed"),
    [((0,), [1]), ((2, 1), [1, 1]), ((3,), [2]), ((0, 3, 1), [2, 2, 2]), ((1, None), [1, 9]), ((3, None), [2, 9])],
)
def test_a_draft_computes_what_the_longest_steady_row_lacks(
    right: tuple[int | None, ...], recomputed: list[int]
) -> None:
    """right: how many of three guesses were right, for each row; None: the row was not guessed before."""
    progress, sequences = draft_model.DraftProgress(4, 512), []
    for key, count in enumerate(right):
        planned = Planned(job(key, prompt_of(9, key), max_tokens=20), key, 4, 64, b"")
        if count is not None:
            progress.drawn(planned, 3, count)
            planned.tokens += [7] * (count + 1)
        sequences.append(planned)
    found = progress.before_guesses(sequences)
    assert [(each.sequence, each.end) for each in found] == [(each, len(each.tokens)) for each in sequences]
    assert [each.end - each.first for each in found] == recomputed


@pytest.mark.parametrize("depth", [4, None])
def test_an_answer_is_guessed_again_after_searches_in_vain(depth: int | None, engine: EngineMaker) -> None:
    """With two steps in flight, too, the pause after a search without a result ends."""
    plain = run(engine(**STRICT), job(1, prompt_of(20), max_tokens=60))
    made = engine(**STRICT)
    assert isinstance(made.runner, CpuRunner)
    made = GenerationEngine(made.options, made.memory, AloneRunner(made.runner), ())
    found = run(guessing(made, LateReplay(plain, 24), depth), job(1, prompt_of(20), max_tokens=60))
    assert found[1].tokens == plain[1].tokens
    assert made.stats().guesses.accepted > 0


def test_a_draft_catches_up_with_cached_prefixes_and_pauses(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_model, "CATCH_UP_TOKENS", 24)
    folder = checkpoint("llama")
    options: dict[str, Any] = {"speculate": f"draft:{folder}", "speculate_depth": 3, "block_size": 4, **STRICT}
    engine = open_engine(folder, kv_blocks=44, max_batch_size=4, step_tokens=32, **options)
    whole = prompt_of(70)
    silent = job(1, whole, max_tokens=3, speculation=0)
    solo(engine, silent)  # Its blocks hold nothing of the draft model.
    jobs = [job(key, [*whole, key], max_tokens=40) for key in range(2, 6)]
    answers = run(engine, *jobs)
    plain = run(open_engine(folder, kv_blocks=256, **STRICT), *jobs)
    assert engine.stats().preemptions > 0
    for key, answer in answers.items():
        assert answer.tokens == plain[key].tokens
        assert answer.ended.cost.accepted_tokens == answer.ended.cost.drafted_tokens > 0


def test_random_requests_are_equal_with_another_model_as_draft(checkpoint: Callable[[str], Path]) -> None:
    draft = f"draft:{checkpoint('qwen3')}"
    wrong, line = equality.compare(checkpoint("llama"), 36, speculate=draft, speculate_depth=3)
    assert wrong == 0, line


def test_a_draft_of_another_vocabulary_is_refused(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = checkpoint("llama")
    other = shutil.copytree(folder, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": VOCAB + 1}))
    with pytest.raises(CheckpointError, match=f"a vocabulary of {VOCAB + 1} tokens, the served model one of {VOCAB}"):
        open_engine(folder, speculate=f"draft:{other}")
    (other / "config.json").write_text(json.dumps(config))
    tokens = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokens["model"]["vocab"]
    first, second = list(vocabulary)[10:12]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokens))
    with pytest.raises(CheckpointError, match="tokenizer is not that of the served model"):
        open_engine(folder, speculate=f"draft:{other}")
    with pytest.raises(CheckpointError, match="the draft model: no checkpoint folder"):
        open_engine(folder, speculate="draft:/nowhere")


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
def test_the_paced_engine_pretends_a_draft(acceptance: float, checkpoint: Callable[[str], Path]) -> None:
    options: dict[str, Any] = {"engine": "paced", "paced_step_ms": 0, "kv_blocks": 256}
    jobs = [job(key, prompt_of(9, key), max_tokens=60, seed=key) for key in range(20)]
    plain = run(open_engine(checkpoint("llama"), **options), *jobs)
    guesses = {"speculate": "draft:any", "speculate_depth": 4, "paced_acceptance": acceptance}
    engine = open_engine(checkpoint("llama"), **options, **guesses)
    answers = run(engine, *jobs)
    assert [answer.tokens for answer in answers.values()] == [answer.tokens for answer in plain.values()]
    counts = engine.stats().guesses
    assert counts.accepted_at[0] / counts.drafted_at[0] == pytest.approx(acceptance, abs=0.1)
