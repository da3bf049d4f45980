"""An engine on the paced runner: consistent counts, tokens that depend on the job alone, and steps of a fixed time."""

import random
import subprocess
import sys
import time
from typing import Any

import pytest

from services.worker.build.choose import build_engine
from services.worker.engine.generation import GenerationEngine
from services.worker.errors import CheckpointError
from services.worker.job import Ended, EndReason, Job, SamplingParams
from services.worker.options import EngineOptions
from services.worker.runners.paced import PacedTiming
from weft.launch.demo_model import model_folder


def engine(step_ms: float = 0.0, **options: int) -> GenerationEngine:
    values: dict[str, Any] = {"max_batch_size": 4, "kv_blocks": 64, "step_tokens": 64, **options}
    made = EngineOptions(engine="paced", paced_step_ms=step_ms, **values)
    return build_engine(model_folder(), made, lambda *_: None).engine


def job(key: int, tokens: list[int], most: int = 12, prompt_len: int | None = None, **params: object) -> Job:
    sampling = SamplingParams(max_tokens=most, **{"seed": 7, **params})  # type: ignore[arg-type]
    return Job(key, tokens, len(tokens) if prompt_len is None else prompt_len, sampling)


def finish(subject: GenerationEngine, *jobs: Job) -> tuple[dict[int, list[int]], dict[int, Ended]]:
    for each in jobs:
        subject.submit(each)
    tokens: dict[int, list[int]] = {each.key: [] for each in jobs}
    ended: dict[int, Ended] = {}
    while subject.has_work():
        output = subject.step()
        for token in output.tokens:
            assert token.position == len(tokens[token.key]) + _start(jobs, token.key)
            tokens[token.key].append(token.token_id)
        ended.update({end.key: end for end in output.ended})
        subject.check_integrity()
    return tokens, ended


def _start(jobs: tuple[Job, ...], key: int) -> int:
    return next(len(each.token_ids) - each.prompt_len for each in jobs if each.key == key)


def test_tokens_depend_on_seed_and_position_alone() -> None:
    alone, _ = finish(engine(), job(1, [5] * 40, most=30))
    crowd = [job(1, [5] * 40, most=30), *(job(key, [key] * 20, seed=key) for key in range(2, 7))]
    beside, ended = finish(engine(), *crowd)
    assert beside[1] == alone[1]
    assert len(alone[1]) == 30
    assert beside[2] != beside[3]
    assert {end.reason for end in ended.values()} == {EndReason.LENGTH}


def test_recovery_by_prefill_continues_the_answer() -> None:
    prompt = [3] * 20
    whole, _ = finish(engine(), job(1, prompt, most=25))
    moved, ended = finish(engine(), job(1, prompt + whole[1][:10], most=25, prompt_len=20))
    assert whole[1][:10] + moved[1] == whole[1]
    assert ended[1].position == 25
    assert ended[1].cost.prefill_tokens == 30


def test_random_loads_lose_no_block_and_no_token() -> None:
    chance = random.Random(3)
    for round_ in range(8):
        jobs = [
            job(key, chance.choices(range(3), k=chance.randint(1, 120)), most=chance.randint(1, 150), seed=key)
            for key in range(12)
        ]
        subject = engine(kv_blocks=chance.randint(18, 40))
        tokens, ended = finish(subject, *jobs)
        for each in jobs:
            assert len(tokens[each.key]) == each.params.max_tokens, (round_, each)
        assert len(ended) == len(jobs)
        assert subject.stats().active_blocks == 0


def test_preempted_jobs_get_the_same_tokens() -> None:
    jobs = [job(key, [key] * 100, most=100, seed=key) for key in range(4)]
    roomy, _ = finish(engine(kv_blocks=64), *jobs)
    tight = engine(kv_blocks=30)
    crowded, _ = finish(tight, *jobs)
    assert tight.stats().preemptions > 0
    assert crowded == roomy


def test_a_known_prefix_is_found() -> None:
    subject = engine()
    _, first = finish(subject, job(1, list(range(100))))
    _, second = finish(subject, job(2, list(range(100))))
    assert (first[1].cost.cached_tokens, second[2].cost.cached_tokens) == (0, 96)
    stored, evicted = subject.take_block_events()
    assert len(stored) >= 6
    assert not evicted


def test_stop_tokens_cancellations_and_too_long_jobs_end_with_their_reason() -> None:
    tokens, _ = finish(engine(), job(1, [1] * 5))
    stopping = job(1, [1] * 5, stop_token_ids=frozenset({tokens[1][4]}))
    short, ended = finish(engine(), stopping)
    assert short[1] == tokens[1][:4]
    assert (ended[1].reason, ended[1].stop_token_id) == (EndReason.STOP, tokens[1][4])
    subject = engine()
    subject.submit(job(2, [1] * 5))
    subject.step()
    subject.cancel(2, 1)
    assert subject.step().ended[0].reason is EndReason.CANCELLED
    _, ended = finish(subject, job(3, [1] * 1000, most=500))
    assert ended[3].error is not None
    assert ended[3].error.reason == "KV_EXHAUSTED"


def test_log_probabilities_are_nearly_uniform() -> None:
    subject = engine()
    subject.submit(job(1, [1], logprobs=3))
    token = subject.step().tokens[0]
    assert token.logprob == pytest.approx(-8.7, abs=0.1)
    assert token.top is not None
    assert len(token.top) == 3


def test_steps_take_the_configured_time() -> None:
    subject = engine(10.0)
    began = time.monotonic()
    finish(subject, job(1, [1] * 10, most=21))
    elapsed = time.monotonic() - began
    assert elapsed >= 0.2, "the job takes at least twenty steps"
    assert PacedTiming(0.01, prefill_rate=1000).end(1.001, 100) == pytest.approx(1.11)
    assert PacedTiming(0.0).end(1.5, 100) == 1.5


def test_the_context_may_exceed_the_checkpoints_up_to_a_limit() -> None:
    assert engine(max_seq_length=128 * 1024).memory.max_seq_length == 128 * 1024
    with pytest.raises(CheckpointError):
        engine(max_seq_length=128 * 1024 + 1)


def test_the_paced_runner_does_not_import_torch() -> None:
    code = "import sys, services.worker.main, services.worker.runners.paced; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
