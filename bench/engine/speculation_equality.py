"""Whether speculation changes a token: random requests with it and without it, one engine each, on the CPU.

    python -m bench.engine.speculation_equality [--model FOLDER] [--requests 1000] [--speculate ngram] [--depth 4]

The requests are greedy and sampled, with penalties, stop tokens, biases, minimal lengths, log-probabilities, several
samples and long prompts that are computed in chunks. The engine that guesses has few blocks, so that answers are
paused, and every fifth answer is moved as after the loss of its worker: its first tokens come with a new job. In
deterministic mode tokens, ends and log-probabilities must be equal; otherwise the exit code is 1.
"""

import argparse
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from services.worker.build.choose import build_engine
from services.worker.engine.generation import GenerationEngine
from services.worker.job import EndReason, Job, SamplingParams
from services.worker.options import EngineOptions

MOST_TOKENS = 48
SLOTS, TIGHT_TOKENS = 16, 1024
"""Rows of a step, and tokens of the pool of the engine that guesses."""


@dataclass
class Answer:
    """What a job produced."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    tops: list[list[tuple[int, float]] | None] = field(default_factory=list)
    end: EndReason | None = None
    stop_token_id: int | None = None


def requests(count: int, vocab: int, eos: Iterable[int], longest: int) -> list[Job]:
    """Random jobs, a function of their number; every sixth one is another sample of the one before."""
    source, made = random.Random(count), list[Job]()
    plain = [token for token in range(vocab) if token not in set(eos)]
    for key in range(count):
        if key % 6 == 5:
            made.append(replace(made[-1], key=key, sample_index=made[-1].sample_index + 1))
            continue
        motif = source.choices(plain, k=source.randrange(3, 12))
        length = source.choice((1, 7, 20, 40, longest // 3))
        prompt = (motif * length)[:length] if source.random() < 0.7 else source.choices(plain, k=length)
        made.append(Job(key, prompt, len(prompt), _params(source, plain), salt=source.choice((b"a", b"b"))))
    return made


def _params(source: random.Random, plain: Sequence[int]) -> SamplingParams:
    def sometimes(chance: float, value: Any, otherwise: Any) -> Any:
        return value if source.random() < chance else otherwise

    return SamplingParams(
        max_tokens=source.randrange(1, MOST_TOKENS),
        min_tokens=sometimes(0.2, source.randrange(1, 12), 0),
        temperature=sometimes(0.5, source.choice((0.2, 0.7, 1.0)), 0.0),
        top_k=sometimes(0.3, source.randrange(2, 20), 0),
        top_p=sometimes(0.3, 0.8, 1.0),
        min_p=sometimes(0.2, 0.05, 0.0),
        repetition_penalty=sometimes(0.2, 1.2, 1.0),
        presence_penalty=sometimes(0.2, 0.5, 0.0),
        frequency_penalty=sometimes(0.2, 0.3, 0.0),
        seed=source.randrange(1 << 63),
        stop_token_ids=frozenset(sometimes(0.3, source.choices(plain, k=8), ())),
        logit_bias=sometimes(0.2, {source.choice(plain): 3.0, source.choice(plain): -50.0}, {}),
        logprobs=sometimes(0.4, source.randrange(4), None),
        ignore_eos=source.random() < 0.5,
    )


def answers(engine: GenerationEngine, jobs: Sequence[Job], together: int = 2 * SLOTS) -> dict[int, Answer]:
    """Run the jobs, at most `together` at a time. -> the answer of each job by its key."""
    found = {job.key: Answer(list(job.token_ids[job.prompt_len :])) for job in jobs}
    waiting, running = list(reversed(jobs)), 0
    while waiting or running:
        while waiting and running < together:
            engine.submit(waiting.pop())
            running += 1
        output = engine.step()
        for token in output.tokens:
            answer = found[token.key]
            assert token.position == len(answer.tokens), "a gap in the positions"
            answer.tokens.append(token.token_id)
            answer.logprobs.append(token.logprob)
            answer.tops.append(token.top)
        for end in output.ended:
            found[end.key].end, found[end.key].stop_token_id = end.reason, end.stop_token_id
            running -= 1
    engine.check_integrity()
    return found


def moved(jobs: Sequence[Job], plain: dict[int, Answer]) -> list[Job]:
    """The jobs; every fifth begins with a part of its answer, as after the loss of a worker."""
    source, result = random.Random(len(jobs)), list[Job]()
    for job in jobs:
        tokens = plain[job.key].tokens
        kept = tokens[: source.randrange(len(tokens))] if job.key % 5 == 0 and tokens else []
        result.append(replace(job, token_ids=[*job.token_ids, *kept]))
    return result


def differing(plain: dict[int, Answer], guessed: dict[int, Answer], *, exact: bool) -> list[int]:
    """Keys of the answers that differ: in tokens and end, and if `exact` in any bit of a log-probability."""
    wrong = []
    for key, answer in plain.items():
        other = guessed[key]
        same = (answer.tokens, answer.end, answer.stop_token_id) == (other.tokens, other.end, other.stop_token_id)
        late = len(answer.logprobs) - len(other.logprobs)  # A moved answer reports those of its later tokens.
        if same and exact:
            same = (answer.logprobs[late:], answer.tops[late:]) == (other.logprobs, other.tops)
        wrong += [] if same else [key]
    return wrong


def compare(model: Path, count: int, *, deterministic: bool = True, **options: Any) -> tuple[int, str]:
    """-> the number of answers that differ, and a line about the run."""
    settings: dict[str, Any] = {
        **{name: options[name] for name in ("engine", "dtype") if name in options},
        "deterministic": deterministic,
        "max_batch_size": SLOTS,
        "step_tokens": 96,
        "threads": 1,
    }
    built = build_engine(model, EngineOptions(**settings, kv_blocks=2048), lambda *_: None)
    longest = min(built.engine.memory.max_seq_length, TIGHT_TOKENS) - MOST_TOKENS
    jobs = requests(count, built.config.vocab_size, built.config.eos_token_ids, longest)
    plain = answers(built.engine, jobs)
    tight = TIGHT_TOKENS // EngineOptions().block_size
    guessing = build_engine(model, EngineOptions(**{**settings, "kv_blocks": tight, **options}), lambda *_: None).engine
    guessed = answers(guessing, moved(jobs, plain))
    wrong = differing(plain, guessed, exact=deterministic)
    stats = guessing.stats()
    tokens = sum(len(answer.tokens) for answer in plain.values())
    counts = stats.guesses
    shares = [f"{a / max(d, 1):.2f}" for a, d in zip(counts.accepted_at, counts.drafted_at, strict=True)]
    line = (
        f"{count - len(wrong)} of {count} equal ({tokens} tokens); "
        f"{counts.accepted} of {counts.drafted} guesses right, by place {' '.join(shares)}; {stats.preemptions} pauses"
    )
    return len(wrong), line


def main() -> int:
    """The program. -> its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/weft-story-2m"))
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--speculate", nargs="+", default=["ngram"])
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--fast", action="store_true", help="deterministic mode off: at least 99%% must be equal")
    asked = parser.parse_args()
    failed = 0
    for speculate in asked.speculate:
        wrong, line = compare(
            asked.model, asked.requests, deterministic=not asked.fast, speculate=speculate, speculate_depth=asked.depth
        )
        failed += wrong > (asked.requests // 100 if asked.fast else 0)
        print(f"{speculate}: {line}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
