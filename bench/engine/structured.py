"""Structured answers: random schemas are obeyed, and what compiling, masking and drawing cost.

    python -m bench.engine.structured [--schemas 1000] [--model models/weft-story-2m] [--out FILE]
    python -m bench.engine.structured --gpu [--model llama-3.1-8b] [--batch 32] [--schemas 200]
    python -m bench.engine.structured --guesses [--model llama-3.1-8b]

Without --gpu: the demo model answers random schemas with sampling, beside unconstrained requests. Each finished
answer must be valid by `jsonschema`, and each unconstrained one must equal the answer that it has alone; otherwise the
exit code is 1. With --gpu: the mean and the median time of a step of an 8B shape with random weights and a synthetic
tokenizer, whose rows are unconstrained, constrained or both, and what of it the host spends on what; the goal for both
with constrained rows is 105% of a step without any. All steps have the same rows in the same order, whether constrained
or not, so that the free rows have the same logits and must have the same tokens. With --guesses: tokens/s of such a
model's answers to a schema of records, without guesses and with those of `ngram` and of the schema.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator
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
_FIELDS = {
    "first_name": {"type": "string", "maxLength": 12},
    "date_of_birth": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"},
    "number_of_children": {"type": "integer", "maximum": 12},
    "preferred_language": {"enum": ["english", "spanish", "chinese"]},
    "is_active_member": {"type": "boolean"},
}
_RECORDS = json.dumps(
    {
        "type": "array",
        "minItems": 2000,
        "items": {
            "type": "object", "properties": _FIELDS, "required": [*_FIELDS], "additionalProperties": False,
        },
    }
)  # fmt: skip
"""A schema of endless records."""


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
        matcher, _ = forms._compiled(schema).next()
        times.append(time.perf_counter() - began)
        assert not matcher.is_error()
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


def _jobs(batch: int, constrained: int, vocab_size: int, first_key: int, schema: str = _ENDLESS) -> list[Job]:
    form, made = Form("json_schema", schema), []
    for place in range(batch):
        source = random.Random(place)
        prompt = [source.randrange(100, vocab_size - 300) for _ in range(1000)]
        shaped = form if place >= batch - constrained else None
        most = STEPS + 2 * SETTLED + 64
        params = SamplingParams(most, temperature=0.9, seed=place, structured=shaped, ignore_eos=True)
        made.append(Job(first_key + place, prompt, len(prompt), params, bypass_cache=True))
    return made


class HostTimes:
    """Seconds that the host spends in some methods of the runner, of each call."""

    def __init__(self, runner: Any) -> None:
        self.seconds: dict[str, list[float]] = {"launch": [], "draw": [], "collect": []}
        for name, taken in self.seconds.items():
            setattr(runner, name, self._timed(getattr(runner, name), taken))

    @staticmethod
    def _timed(call: Callable[..., Any], taken: list[float]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                taken.append(time.perf_counter() - began)

        return timed

    def clear(self) -> None:
        """Forget all calls so far."""
        for taken in self.seconds.values():
            taken.clear()

    def medians(self) -> str:
        """The median of each method's calls in milliseconds."""
        return ", ".join(f"{name} {percentile(taken, 0.5) * 1e3:.2f}" for name, taken in self.seconds.items() if taken)


def submit_together(engine: GenerationEngine, jobs: list[Job]) -> None:
    """Submit jobs to an idle engine, and wait until those with a form have been compiled: all begin with one step."""
    for job in jobs:
        engine.submit(job)
    until = time.monotonic() + 60
    while len(engine.inbox.messages) < len(jobs):
        assert time.monotonic() < until, "the forms are not compiled"
        time.sleep(0.001)


def step_times(
    engine: GenerationEngine, jobs: list[Job], settled: Callable[[], None]
) -> tuple[list[float], dict[int, list[int]]]:
    """Seconds of each decode step while all jobs run -> and the tokens so far of each place. settled: called when the
    first of these steps begins."""
    submit_together(engine, jobs)
    tokens: dict[int, list[int]] = {job.key: [] for job in jobs}
    seconds: list[float] = []
    warm = False
    while len(seconds) < STEPS:
        began = time.perf_counter()
        output = engine.step()
        took = time.perf_counter() - began
        assert not output.ended, output.ended
        for token in output.tokens:
            tokens[token.key].append(token.token_id)
        if warm:
            seconds.append(took)
        elif all(len(each) >= SETTLED for each in tokens.values()):
            warm = True
            settled()
    for job in jobs:
        engine.cancel(job.key)
    while engine.has_work():
        engine.step()
    return seconds, {job.key - jobs[0].key: tokens[job.key] for job in jobs}


def tokens_per_s(engine: GenerationEngine, jobs: list[Job]) -> float:
    """Of all jobs together, from their 24th token until the first one has 250."""
    submit_together(engine, jobs)
    tokens, began, before = {job.key: 0 for job in jobs}, 0.0, 0
    while max(tokens.values()) < STEPS + 50:
        for token in engine.step().tokens:
            tokens[token.key] += 1
        if not began and min(tokens.values()) >= SETTLED:
            began, before = time.perf_counter(), sum(tokens.values())
    rate = (sum(tokens.values()) - before) / (time.perf_counter() - began)
    for job in jobs:
        engine.cancel(job.key)
    while engine.has_work():
        engine.step()
    return rate


def _same(one: dict[int, list[int]], other: dict[int, list[int]], free: int) -> int:
    """How many of the first `free` places have the same tokens in both runs, as far as both have any."""
    return sum(all(a == b for a, b in zip(one[place], other[place], strict=False)) for place in range(free))


def on_gpu(model: str, batch: int, schemas: int) -> Iterator[Figure]:
    """The time of steps with no, one and only constrained rows."""
    folder = presets.folder_of(f"random:{model}")
    options = EngineOptions(
        engine="gpu", dtype="bfloat16", max_batch_size=batch, step_tokens=2048, max_seq_length=2048,
        kv_blocks=batch * 100,
    )  # fmt: skip
    built = build_engine(folder, options, lambda *_: None)
    vocab = built.config.vocab_size
    forms = TimedForms(synthetic_tokenizer(folder, vocab), vocab, [_END_TOKEN])
    forms.wait()
    compiled = compile_times(forms, [Form("json_schema", random_schema(number)) for number in range(schemas)])
    yield Figure("compile p50", percentile(compiled, 0.5) * 1e3, "ms", note=f"{schemas} schemas")
    yield Figure("compile p99", percentile(compiled, 0.99) * 1e3, "ms")
    built.engine.use_forms(forms)
    host = HostTimes(built.engine.runner)

    def settled() -> None:
        forms.steps.clear()
        host.clear()

    times: dict[int, float] = {}
    medians: dict[int, float] = {}
    runs: list[dict[int, list[int]]] = []
    for number, constrained in enumerate((0, 1, batch, 0, 1, batch)):  # twice: the first round warms up
        jobs = _jobs(batch, constrained, vocab, 1 + number * batch)
        seconds, tokens = step_times(built.engine, jobs, settled)
        runs.append(tokens)
        times[constrained] = statistics.fmean(seconds) * 1e3
        medians[constrained] = statistics.median(seconds) * 1e3
        if number < 3:
            continue
        yield Figure(
            f"step, {constrained} of {batch} rows constrained", times[constrained], "ms",
            goal=f"<= {times[0] * 1.05:.4f}" if constrained else "", note=f"host: {host.medians()} ms",
        )  # fmt: skip
        goal = f"<= {medians[0] * 1.05:.4f}" if constrained else ""
        yield Figure("  its median", medians[constrained], "ms", goal=goal)
        yield Figure("  its p99", percentile(seconds, 0.99) * 1e3, "ms")
        if constrained:
            masks = [each[1] * 1e6 for each in forms.steps]
            yield Figure("  its masks, p50", percentile(masks, 0.5), "us")
            yield Figure("  its masks, p99", percentile(masks, 0.99), "us")
    again = _same(runs[0], runs[3], batch)
    yield Figure("rows equal when run again, none constrained", again, goal=f">= {batch}")
    for other, name in ((1, "first"), (4, "second")):
        same = _same(runs[3], runs[other], batch - 1)
        yield Figure(f"free rows equal beside one constrained, {name} run", same, goal=f">= {batch - 1}")
    assert runs[3][batch - 1] != runs[4][batch - 1], "the mask changed nothing"
    forms.close()


def guessed(model: str) -> Iterator[Figure]:
    """Tokens/s of 1 and 8 answers to a schema, without guesses and with them."""
    folder = presets.folder_of(f"random:{model}")
    options = EngineOptions(
        engine="gpu", dtype="bfloat16", max_batch_size=8, step_tokens=2048, max_seq_length=2048, kv_blocks=1000,
        speculate="ngram",
    )  # fmt: skip
    built = build_engine(folder, options, lambda *_: None)
    vocab, engine, key = built.config.vocab_size, built.engine, 1
    forms = GuidanceForms(synthetic_tokenizer(folder, vocab), vocab, [_END_TOKEN])
    forms.wait()
    engine.use_forms(forms)
    speculation = engine.speculation
    assert speculation is not None
    for count in (1, 8):
        rates: dict[bool, float] = {}
        for on in (False, True, False, True):  # twice: the first round warms up
            engine.speculation = speculation.fresh(None) if on else None
            rates[on] = tokens_per_s(engine, _jobs(count, count, vocab, key, _RECORDS))
            key += count
        yield Figure(f"{count} answers without guesses", rates[False], "tokens/s")
        yield Figure(f"{count} answers with guesses", rates[True], "tokens/s")
        yield Figure("  ratio", rates[True] / rates[False], "x", ">= 0.97")
    assert engine.speculation is not None
    counts = engine.speculation.counts
    yield Figure("right guesses of the last answers", counts.accepted / max(counts.drafted, 1))
    forms.close()


def main(arguments: list[str] | None = None) -> int:
    """Measure and print -> 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--guesses", action="store_true")
    parser.add_argument("--schemas", type=int, help="default: 1000, with --gpu 200")
    parser.add_argument("--model", default="")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--out", type=Path, help="a file for the figures, as JSON")
    given = parser.parse_args(arguments)
    if given.guesses:
        figures = list(guessed(given.model or "llama-3.1-8b"))
    elif given.gpu:
        figures = list(on_gpu(given.model or "llama-3.1-8b", given.batch, given.schemas or 200))
    else:
        figures, wrong = obeyed(Path(given.model or ROOT / "models" / "weft-story-2m"), given.schemas or 1000)
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
