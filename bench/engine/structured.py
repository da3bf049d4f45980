"""Structured answers: random schemas are obeyed, and what compiling, masking and drawing cost.

    python -m bench.engine.structured [--schemas 1000] [--model models/weft-story-2m] [--out FILE]
    python -m bench.engine.structured --gpu [--model llama-3.1-8b] [--batch 32]

Without --gpu: the demo model answers random schemas with sampling, beside unconstrained requests. Each finished
answer must be valid by `jsonschema`, and each unconstrained one must equal the answer that it has alone; otherwise the
exit code is 1. With --gpu: the time of a step of an 8B shape with random weights and a synthetic tokenizer,
whose rows are unconstrained, constrained or both. Unconstrained rows must have the same tokens; the goal for a step of
constrained rows is 105% of an unconstrained one.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from bench.engine.schemas import random_schema
from bench.table import Figure
from services.forms.form import Form
from services.worker.build.choose import build_engine
from services.worker.engine.generation import GenerationEngine
from services.worker.job import EndReason, Job, SamplingParams
from services.worker.loader import presets
from services.worker.options import EngineOptions
from services.worker.structured.base import Masks, Matcher
from services.worker.structured.compiler import GuidanceForms

ROOT = Path(__file__).parents[2]
BATCH, TOKENS = 32, 320
STEPS, SETTLED = 200, 24
PROMPT = "Here is a record of what was found in the old house by the sea: "
_ENDLESS = json.dumps(
    {
        "type": "array",
        "minItems": 2000,
        "items": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 120}},
            "required": ["name", "age"],
            "additionalProperties": False,
        },
    }
)
"""A schema whose answers do not end during the measurement."""


class TimedForms(GuidanceForms):
    """Records what masks take."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.steps: list[tuple[int, float]] = []
        """Rows and seconds of each call."""

    def fill(self, matchers: Collection[tuple[Matcher, int]], masks: Masks) -> None:
        """Write the masks, and record the time."""
        began = time.perf_counter()
        super().fill(matchers, masks)
        self.steps.append((len(matchers), time.perf_counter() - began))


def percentile(values: list[float], share: float) -> float:
    """The value below which this share lies."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def compile_times(forms: GuidanceForms, schemas: list[Form]) -> list[float]:
    """Seconds to compile each schema, without the cache of forms."""
    times = []
    for schema in schemas:
        began = time.perf_counter()
        compiled = forms._compiled(schema)
        times.append(time.perf_counter() - began)
        assert not compiled.is_error()
    return times


def run(engine: GenerationEngine, jobs: list[Job]) -> dict[int, tuple[list[int], EndReason]]:
    """The tokens and the end of each job. Asserts that none fails."""
    for job in jobs:
        engine.submit(job)
    tokens: dict[int, list[int]] = {job.key: [] for job in jobs}
    ends: dict[int, EndReason] = {}
    while engine.has_work():
        output = engine.step()
        for token in output.tokens:
            tokens[token.key].append(token.token_id)
        for end in output.ended:
            assert end.error is None, (end.key, end.error)
            ends[end.key] = end.reason
    return {key: (tokens[key], ends[key]) for key in tokens}


def obeyed(folder: Path, count: int) -> tuple[list[Figure], list[int]]:
    """Answers to random schemas beside free ones -> figures, and the numbers of schemas whose answer is not valid."""
    import jsonschema
    from tokenizers import Tokenizer

    text = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = text.encode(PROMPT).ids
    options = EngineOptions(engine="torch", max_batch_size=BATCH + 2, kv_blocks=(BATCH + 2) * 24, step_tokens=256)
    built = build_engine(folder, options, lambda *_: None)
    tokenizer = (folder / "tokenizer.json").read_bytes()
    forms = TimedForms(tokenizer, built.config.vocab_size, built.config.eos_token_ids)
    schemas = [Form("json_schema", random_schema(number)) for number in range(count)]
    compiled = compile_times(forms, schemas)
    built.engine.use_forms(forms)
    free = [Job(-2 - seed, prompt, len(prompt), SamplingParams(64, seed=seed, temperature=0.9)) for seed in range(2)]
    alone = run(built.engine, free)
    finished, wrong = 0, []
    for first in range(0, count, BATCH):
        numbers = range(first, min(first + BATCH, count))
        jobs = [_constrained(number, prompt, schemas[number]) for number in numbers]
        answers = run(built.engine, [*jobs, *free])
        if any(answers[job.key] != alone[job.key] for job in free):
            wrong.append(-1)
        for number in numbers:
            tokens, reason = answers[number]
            if reason is EndReason.STOP:
                finished += 1
                try:
                    written = json.loads(text.decode(tokens, skip_special_tokens=True))
                    jsonschema.validate(written, json.loads(schemas[number].text))
                except (ValueError, jsonschema.ValidationError):
                    wrong.append(number)
    forms.close()
    rows, seconds = [each[0] for each in forms.steps], [each[1] for each in forms.steps]
    return [
        Figure("schemas", count),
        Figure("answers that finished", finished),
        Figure("of these not valid, and changed free answers", len(wrong), goal="<= 0"),
        Figure("compile p50", percentile(compiled, 0.5) * 1e3, "ms"),
        Figure("compile p99", percentile(compiled, 0.99) * 1e3, "ms"),
        Figure("mask p50 of a step", percentile(seconds, 0.5) * 1e3, "ms", note=f"{statistics.mean(rows):.0f} rows"),
        Figure("mask p99 of a step", percentile(seconds, 0.99) * 1e3, "ms"),
        Figure("mask of a row", sum(seconds) / max(sum(rows), 1) * 1e6, "us"),
    ], wrong


def _constrained(key: int, prompt: list[int], form: Form, tokens: int = TOKENS) -> Job:
    params = SamplingParams(tokens, temperature=0.9, seed=key, structured=form)
    return Job(key, prompt, len(prompt), params)


# ---- on a GPU ----


_END_TOKEN = 0
"""The demo tokenizer's: the synthetic one has no tokens with the ids of the shape's."""


def synthetic_tokenizer(folder: Path, vocab_size: int) -> bytes:
    """A tokenizer.json of about `vocab_size` tokens: the demo's, words of two of its tokens, and random ones."""
    content = json.loads((folder / "tokenizer.json").read_text())
    vocab: dict[str, int] = content["model"]["vocab"]
    source, words = random.Random(0), list(vocab)
    while len(vocab) < vocab_size - 300:
        letters = "".join(source.choices("etaoinshrdlucmfwypvbgk", k=source.randint(3, 9)))
        word = source.choice(words) + source.choice(words) if source.random() < 0.5 else f"\u0120{letters}"
        if len(word) < 20:
            vocab.setdefault(word, len(vocab))
    return json.dumps(content).encode()


def _jobs(batch: int, constrained: int, vocab_size: int, first_key: int) -> list[Job]:
    form, made = Form("json_schema", _ENDLESS), []
    for place in range(batch):
        source = random.Random(place)
        prompt = [source.randrange(100, vocab_size - 300) for _ in range(1000)]
        shaped = form if place >= batch - constrained else None
        params = SamplingParams(STEPS + 2 * SETTLED + 64, temperature=0.9, seed=place, structured=shaped)
        made.append(Job(first_key + place, prompt, len(prompt), params))
    return made


def step_times(engine: GenerationEngine, jobs: list[Job]) -> tuple[list[float], dict[int, list[int]]]:
    """Seconds of each decode step while all jobs run -> and the tokens so far of each place."""
    for job in jobs:
        engine.submit(job)
    tokens: dict[int, list[int]] = {job.key: [] for job in jobs}
    seconds: list[float] = []
    while len(seconds) < STEPS + SETTLED:
        began = time.perf_counter()
        output = engine.step()
        took = time.perf_counter() - began
        assert not output.ended, output.ended
        for token in output.tokens:
            tokens[token.key].append(token.token_id)
        if all(len(each) >= SETTLED for each in tokens.values()):
            seconds.append(took)
    for job in jobs:
        engine.cancel(job.key)
    while engine.has_work():
        engine.step()
    return seconds[SETTLED:], {job.key - jobs[0].key: tokens[job.key] for job in jobs}


def on_gpu(model: str, batch: int) -> Iterator[Figure]:
    """The time of steps with no, one and only constrained rows."""
    folder = presets.folder_of(f"random:{model}")
    options = EngineOptions(
        engine="gpu", dtype="bfloat16", max_batch_size=batch, step_tokens=2048, max_seq_length=2048,
        kv_blocks=batch * 100,
    )  # fmt: skip
    built = build_engine(folder, options, lambda *_: None)
    vocab = built.config.vocab_size
    forms = TimedForms(synthetic_tokenizer(folder, vocab), vocab, [_END_TOKEN])
    built.engine.use_forms(forms)
    times, tokens = {}, {}
    for number, constrained in enumerate((0, 1, batch, 0, 1, batch)):  # twice: the first round warms up
        forms.steps.clear()
        jobs = _jobs(batch, constrained, vocab, 1 + number * batch)
        seconds, tokens[constrained] = step_times(built.engine, jobs)
        times[constrained] = statistics.median(seconds) * 1e3
        if constrained:
            masks = [each[1] * 1e6 for each in forms.steps]
            yield Figure(
                f"masks of {constrained} rows, p50", percentile(masks, 0.5), "us", note=f"round {number // 3 + 1}"
            )
            yield Figure(f"masks of {constrained} rows, p99", percentile(masks, 0.99), "us")
    same = sum(tokens[0][place][: STEPS // 2] == tokens[1][place][: STEPS // 2] for place in range(batch - 1))
    yield Figure("free rows unchanged beside one constrained", same, goal=f">= {batch - 1}")
    yield Figure(f"step of {batch} free rows", times[0], "ms")
    yield Figure("the same, one constrained", times[1], "ms", goal=f"<= {times[0] * 1.05:.4f}")
    yield Figure("the same, all constrained", times[batch], "ms", goal=f"<= {times[0] * 1.05:.4f}")
    forms.close()


def main(arguments: list[str] | None = None) -> int:
    """Measure and print -> 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--model", default="")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--out", type=Path, help="a file for the figures, as JSON")
    given = parser.parse_args(arguments)
    if given.gpu:
        figures = list(on_gpu(given.model or "llama-3.1-8b", given.batch))
    else:
        figures, wrong = obeyed(Path(given.model or ROOT / "models" / "weft-story-2m"), given.schemas)
        for number in wrong:
            print(f"schema {number}: not valid" if number >= 0 else "a free answer changed")
    for each in figures:
        met = {None: "", True: "  met", False: "  MISSED"}[each.met]
        print(f"{each.name:48} {each.value:12.3f} {each.unit:3} {each.goal}{met} {each.note}")
    if given.out:
        given.out.write_text(
            json.dumps([{"name": f.name, "value": f.value, "unit": f.unit} for f in figures], indent=1)
        )
    return int(any(each.met is False for each in figures))


if __name__ == "__main__":
    sys.exit(main())
