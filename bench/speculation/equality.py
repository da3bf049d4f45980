"""Whether speculation changes a token: random requests with it and without it, on the CPU or the GPU.

    python -m bench.speculation.equality [--model FOLDER] [--requests 1000] [--speculate ngram] [--depth 4]
    python -m bench.speculation.equality --engine gpu --model random:llama-3.1-8b --draft random:llama-3.2-1b
        --requests 200 --speculate ngram suffix draft

The requests are greedy and sampled, with penalties, stop tokens, biases, minimal lengths, log-probabilities, several
samples and long prompts that are computed in chunks. The engine that guesses has few blocks, so that answers are
paused, and every fifth answer is moved as after the loss of its worker: its first tokens come with a new job. In
deterministic mode tokens, ends and log-probabilities must be equal; otherwise the exit code is 1.

A model with random weights is opened once, with few blocks, for all proposers and the answers without guesses; it and
its draft follow cycles of 16 tokens (`bench.engine.copying`), so that some guesses are right and some are not.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.engine.copying import make_copying, walk
from services.worker.build.choose import build_engine
from services.worker.engine.generation import GenerationEngine
from services.worker.job import EndReason, Job, SamplingParams
from services.worker.loader import presets
from services.worker.options import EngineOptions
from services.worker.speculative.ngram import NgramProposer
from services.worker.speculative.proposer import Proposer
from services.worker.speculative.suffix import SuffixProposer

MOST_TOKENS = 48
SLOTS, TIGHT_BLOCKS = 16, 40
"""Rows of a step, and blocks of the engine that guesses."""
CYCLE, DRAFT_TOP_LOGIT = 16, 9.0
"""Of random weights. A draft that is less sure of the next token than the model draws another one now and then."""


@dataclass
class Answer:
    """What a job produced."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    tops: list[list[tuple[int, float]] | None] = field(default_factory=list)
    end: EndReason | None = None
    stop_token_id: int | None = None


def requests(count: int, vocab: int, eos: Iterable[int], longest: int, cycle: int = 0) -> list[Job]:
    """Random jobs, a function of their number; every sixth one is another sample of the one before. cycle: most prompts
    walk through one of this many tokens; 0: most repeat random tokens."""
    source, made = random.Random(count), list[Job]()
    plain = [token for token in range(vocab) if token not in set(eos)]
    for key in range(count):
        if key % 6 == 5:
            made.append(replace(made[-1], key=key, sample_index=made[-1].sample_index + 1))
            continue
        motif = source.choices(plain, k=source.randrange(3, 12))
        motif = walk(motif[0], cycle, cycle, vocab) if cycle else motif
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
    jobs = requests(count, built.config.vocab_size, built.config.eos_token_ids, _longest(built.engine))
    plain = answers(built.engine, jobs)
    tight = {**settings, "kv_blocks": TIGHT_BLOCKS, **options}
    guessing = build_engine(model, EngineOptions(**tight), lambda *_: None).engine
    return _judge(plain, guessing, jobs, exact=deterministic)


def compare_in_one(
    model: str, draft: str, count: int, speculate: Iterable[str], *, deterministic: bool = True, **options: Any
) -> Iterator[tuple[str, int, str]]:
    """Presets of random weights that follow cycles, in one engine. -> as `compare`, with the name of each proposer."""
    tight: dict[str, Any] = {"max_batch_size": SLOTS, "step_tokens": 96, "kv_blocks": TIGHT_BLOCKS}
    settings = EngineOptions(
        **{**tight, "max_seq_length": 1024, "speculate": f"draft:{_with_a_head(draft)}", **options},
        deterministic=deterministic,
    )
    built = build_engine(presets.folder_of(model), settings, lambda *_: None)
    engine, speculation = built.engine, built.engine.speculation
    runner: Any = engine.runner
    make_copying(runner.model, CYCLE)
    make_copying(runner.draft.model, CYCLE, DRAFT_TOP_LOGIT)
    jobs = requests(count, built.config.vocab_size, built.config.eos_token_ids, _longest(engine), CYCLE)
    engine.speculation = None
    plain = answers(engine, jobs)
    assert speculation is not None
    proposers: dict[str, Proposer | None] = {"ngram": NgramProposer(), "suffix": SuffixProposer(), "draft": None}
    for name in speculate:
        engine.speculation = speculation.fresh(settings.speculate_depth, proposers[name])
        fresh = [replace(job, salt=job.salt + name.encode()) for job in jobs]  # Nothing of earlier runs is cached.
        yield name, *_judge(plain, engine, fresh, exact=deterministic)


def _with_a_head(preset: str) -> Path:
    """The folder of a preset whose head is not its embedding."""
    folder = presets.folder_of(preset)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tie_word_embeddings": False}))
    return folder


def _longest(engine: GenerationEngine) -> int:
    """Tokens of the longest prompt."""
    return min(engine.memory.max_seq_length, TIGHT_BLOCKS * engine.options.block_size) - MOST_TOKENS


def _judge(
    plain: dict[int, Answer], guessing: GenerationEngine, jobs: Sequence[Job], *, exact: bool
) -> tuple[int, str]:
    """Answer the jobs once more, with guesses. -> the number of answers that differ, and a line about the run."""
    before, began = guessing.stats(), time.perf_counter()
    wrong = differing(plain, answers(guessing, moved(jobs, plain)), exact=exact)
    stats, seconds = guessing.stats(), time.perf_counter() - began
    tokens = sum(len(answer.tokens) for answer in plain.values())
    counts = stats.guesses
    shares = [f"{a / max(d, 1):.2f}" for a, d in zip(counts.accepted_at, counts.drafted_at, strict=True)]
    line = (
        f"{len(jobs) - len(wrong)} of {len(jobs)} equal ({tokens} tokens, {seconds:.0f} s); "
        f"{counts.accepted} of {counts.drafted} guesses right, by place {' '.join(shares)}; "
        f"{stats.preemptions - before.preemptions} pauses"
    )
    return len(wrong), line


def _compared(asked: argparse.Namespace) -> Iterator[tuple[str, int, str]]:
    """Each proposer, the number of answers that differ, and a line about the run."""
    deterministic, options = not asked.fast, {"engine": asked.engine, "speculate_depth": asked.depth}
    if asked.model.startswith(presets.PREFIX):
        draft = asked.draft.removeprefix(presets.PREFIX)
        yield from compare_in_one(
            asked.model, draft, asked.requests, asked.speculate, deterministic=deterministic, **options
        )
        return
    for speculate in asked.speculate:
        model, count = Path(asked.model), asked.requests
        yield speculate, *compare(model, count, deterministic=deterministic, speculate=speculate, **options)


def main() -> int:
    """The program. -> its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("torch", "gpu"), default="torch")
    parser.add_argument("--model", default="models/weft-story-2m", help="a folder, or random:NAME")
    parser.add_argument("--draft", default="random:llama-3.2-1b", help="beside random:NAME")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--speculate", nargs="+", default=["ngram"])
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--fast", action="store_true", help="deterministic mode off: at least 99%% must be equal")
    asked = parser.parse_args()
    failed = 0
    for speculate, wrong, line in _compared(asked):
        failed += wrong > (asked.requests // 100 if asked.fast else 0)
        print(f"{speculate}: {line}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
