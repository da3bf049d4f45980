"""Answers with a form, in an engine: what they may be, how they end, and what they cost their neighbours."""

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from services.forms.form import Form
from services.forms.grammar import FormError
from services.worker.engine.generation import GenerationEngine
from services.worker.job import EndReason, Job
from services.worker.runners.cpu.runner import CpuRunner, CpuStep
from services.worker.runners.paced import PacedRunner, PacedTiming
from services.worker.runners.step import Words
from services.worker.speculative.speculation import Speculation
from services.worker.structured.compiler import CompiledForm, GuidanceForms, GuidanceMatcher
from tests.checkpoints import DEMO as LARGER
from tests.worker.drive import Answer, job, open_engine, run, solo
from tests.worker.test_speculation import STRICT, Replay

DEMO = LARGER.with_name("weft-story-2m")
TEXT = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
PROMPT = TEXT.encode("Once upon a time there was a dog. Here is its record: ").ids
EOS = 0
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bb"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMA = Form("json_schema", json.dumps(PERSON))
DATE = Form("regex", r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
WORDS = Form("choice", json.dumps(["once upon", "the little dog", 'é ünd\n"quoted"']))
SUMS = Form("grammar", 'root ::= term ("+" term){0,4}\nterm ::= [0-9] [0-9]? | "(" root ")"\n')


class Late:
    """The CPU's runner with several steps in flight: what it launches is collected after later launches."""

    def __init__(self, runner: CpuRunner, depth: int = 2) -> None:
        self._runner, self.depth = runner, depth
        self.in_flight: list[CpuStep] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, words: Words) -> CpuStep:
        assert all(step.sampled is not None for step in self.in_flight), "launched before the step in flight has drawn"
        self.in_flight.append(self._runner.launch(words))
        return self.in_flight[-1]

    def draw(self, step: CpuStep, masks: Any) -> None:
        assert self.in_flight == [step], "drawn before the earlier steps were collected"
        self._runner.draw(step, masks)

    def collect(self, step: CpuStep) -> Any:
        assert self.in_flight.pop(0) is step
        return self._runner.collect(step)


class LateStages(Late):
    """Counts how many steps were in flight."""

    most_in_flight = 0

    def launch(self, words: Words) -> CpuStep:
        step = super().launch(words)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        return step


@pytest.fixture(scope="module")
def forms() -> Iterator[GuidanceForms]:
    made = GuidanceForms((DEMO / "tokenizer.json").read_bytes(), 6144, [EOS])
    yield made
    made.close()


@pytest.fixture(params=[1, 2], ids=["depth 1", "depth 2"])
def demo(request: pytest.FixtureRequest, forms: GuidanceForms) -> Callable[..., GenerationEngine]:
    """A function that opens an engine on the demo model, with one or two steps in flight."""

    def make(**options: Any) -> GenerationEngine:
        engine = open_engine(DEMO, **{"kv_blocks": 256, "max_batch_size": 16, **options})
        engine.use_forms(forms)
        if request.param == 2:
            assert isinstance(engine.runner, CpuRunner)
            engine.runner = Late(engine.runner)
        return engine

    return make


def shaped(key: int, form: Form, *, seed: int | None = None, max_tokens: int = 300, **settings: Any) -> Job:
    """A job whose answer has this form; sampled if it has a seed."""
    sampling = {"temperature": 0.0 if seed is None else 0.9, "seed": seed or 0, "ignore_eos": False, **settings}
    return job(key, PROMPT, max_tokens=max_tokens, structured=form, **sampling)


def text_of(answer: Answer) -> str:
    return str(TEXT.decode(answer.tokens, skip_special_tokens=False))


def fits(form: Form, text: str) -> bool:
    if form.field == "json_schema":
        jsonschema.validate(json.loads(text), json.loads(form.text))
        return True
    if form.field == "choice":
        return text in json.loads(form.text)
    pattern = form.text if form.field == "regex" else r"[0-9+()]+"
    return re.fullmatch(pattern, text) is not None


@pytest.mark.parametrize("seed", [None, 7], ids=["greedy", "sampled"])
def test_every_finished_answer_has_its_form_and_free_neighbours_are_as_alone(
    demo: Callable[..., GenerationEngine], seed: int | None
) -> None:
    free = [job(key, PROMPT[:-key], max_tokens=40, temperature=key % 2, seed=key) for key in range(1, 5)]
    alone = run(demo(), *free)
    constrained = [shaped(10 + n, form, seed=seed) for n, form in enumerate([SCHEMA, DATE, WORDS, SUMS, SCHEMA])]
    engine = demo(step_tokens=24)  # Prompts come in chunks.
    answers = run(engine, *free, *constrained)
    for one in free:
        assert answers[one.key].tokens == alone[one.key].tokens
    for one in constrained:
        assert one.params.structured is not None
        if answers[one.key].ended.reason is EndReason.STOP:
            assert fits(one.params.structured, text_of(answers[one.key]))
    assert sum(answers[one.key].ended.reason is EndReason.STOP for one in constrained) >= 4
    assert engine.stats().active_blocks == 0


def test_a_step_with_forms_draws_once_all_steps_before_it_are_over(forms: GuidanceForms) -> None:
    """With as many steps in flight as stages, each of which has other jobs."""
    free = [job(key, PROMPT[:-key], max_tokens=40, temperature=key % 2, seed=key) for key in range(1, 5)]
    constrained = [shaped(10, DATE), shaped(11, WORDS, seed=7)]
    found = []
    for depth in (1, 3):
        engine = open_engine(DEMO, kv_blocks=256, max_batch_size=16)
        engine.use_forms(forms)
        assert isinstance(engine.runner, CpuRunner)
        engine.runner = late = LateStages(engine.runner, depth)
        engine.planner._stages = depth
        found.append({key: answer.tokens for key, answer in run(engine, *free, *constrained).items()})
        assert late.most_in_flight == depth
    assert found[0] == found[1]


def test_an_answer_ends_where_nothing_can_follow(demo: Callable[..., GenerationEngine]) -> None:
    answer = solo(demo(), shaped(1, DATE))
    assert re.fullmatch(DATE.text, text_of(answer))
    assert (answer.ended.reason, answer.ended.stop_token_id) == (EndReason.STOP, None)
    assert EOS not in answer.tokens


def test_end_and_stop_tokens_end_it_only_where_the_form_is_complete(demo: Callable[..., GenerationEngine]) -> None:
    engine = demo()
    letters, digit = Form("regex", "[0-9]{3}[a-z ]*"), TEXT.encode("7", add_special_tokens=False).ids[-1]
    eager = shaped(1, letters, logit_bias={EOS: 100.0})
    answer = solo(engine, eager)
    assert re.fullmatch("[0-9]{3}", text_of(answer)), "the end token was wanted from the first token on"
    assert answer.ended.stop_token_id == EOS
    stopped = solo(engine, shaped(2, letters, stop_token_ids=frozenset({digit}), logit_bias={digit: 100.0}))
    assert text_of(stopped) == "777", "within the form the stop token is an ordinary one; behind it, it ends the answer"
    assert stopped.ended.stop_token_id == digit
    held = solo(engine, shaped(3, letters, min_tokens=9, logit_bias={EOS: 100.0}))
    assert len(held.tokens) == 9
    ignoring = solo(engine, shaped(4, letters, ignore_eos=True, logit_bias={EOS: 100.0}, max_tokens=20))
    assert (len(ignoring.tokens), ignoring.ended.reason) == (20, EndReason.LENGTH)


def test_penalties_bias_and_cuts_work_behind_the_mask(demo: Callable[..., GenerationEngine]) -> None:
    settings: list[dict[str, Any]] = [
        {"repetition_penalty": 1.5}, {"presence_penalty": 2.0, "frequency_penalty": 1.0}, {"top_k": 2}, {"top_p": 0.1},
        {"min_p": 0.5}, {"logit_bias": {5: 50.0, 77: -100.0}},
    ]  # fmt: skip
    jobs = [shaped(key, SCHEMA, seed=key + 1, **each) for key, each in enumerate(settings)]
    for answer in run(demo(), *jobs).values():
        if answer.ended.reason is EndReason.STOP:
            assert fits(SCHEMA, text_of(answer))


def test_log_probabilities_are_those_behind_the_mask(demo: Callable[..., GenerationEngine]) -> None:
    free = job(2, PROMPT, max_tokens=5, logprobs=3)
    answers = run(demo(), shaped(1, Form("regex", "[ab]{5}"), logprobs=20), free)
    for logprob, top in zip(answers[1].logprobs, answers[1].tops, strict=True):
        assert logprob is not None
        assert top is not None
        assert 2 <= len(top) < 20, "tokens that the form forbids are not likely"
        assert sum(2.718281828**value for _, value in top) == pytest.approx(1, abs=1e-3)
        assert logprob == pytest.approx(top[0][1], abs=1e-5)
    assert all(top is not None and len(top) == 3 for top in answers[2].tops)


def test_an_answer_continues_from_the_tokens_of_an_earlier_attempt(demo: Callable[..., GenerationEngine]) -> None:
    whole = solo(demo(), shaped(1, SCHEMA, seed=3))
    for kept in (1, len(whole.tokens) // 2, len(whole.tokens) - 1):
        part = shaped(2, SCHEMA, seed=3)
        moved = Job(2, [*PROMPT, *whole.tokens[:kept]], len(PROMPT), part.params)
        again = solo(demo(), moved)
        assert again.tokens == whole.tokens[kept:]
        assert again.ended.reason is whole.ended.reason
    done = Job(
        3, [*PROMPT, *TEXT.encode("2020-01-31", add_special_tokens=False).ids], len(PROMPT), shaped(3, DATE).params
    )
    ended = solo(demo(), done)
    assert (ended.tokens, ended.ended.reason) == ([], EndReason.STOP), "the earlier attempt had completed it"
    other = solo(demo(), Job(4, [*PROMPT, 500], len(PROMPT), shaped(4, DATE).params))
    assert other.ended.error is not None
    assert other.ended.error.reason == "INVALID_GRAMMAR"


def test_preempted_answers_keep_their_form(demo: Callable[..., GenerationEngine]) -> None:
    jobs = [shaped(key, SCHEMA, seed=key, max_tokens=60) for key in range(1, 5)]
    calm, tight = run(demo(), *jobs), demo(kv_blocks=12)
    answers = run(tight, *jobs)
    assert tight.stats().preemptions > 0
    assert [answers[one.key].tokens for one in jobs] == [calm[one.key].tokens for one in jobs]


@pytest.mark.parametrize(
    "form",
    [Form("regex", "(a"), Form("json_schema", "{"), Form("json_schema", '{"type":"x"}'), Form("grammar", "start: b"),
     Form("json_schema", json.dumps({"type": "object", "properties": {f"p{n}": {} for n in range(2500)}}))],
    ids=lambda form: form.field,
)  # fmt: skip
def test_a_form_that_cannot_be_compiled_fails_its_job_alone(demo: Callable[..., GenerationEngine], form: Form) -> None:
    answers = run(demo(), shaped(1, form), job(2, PROMPT, max_tokens=4))
    error = answers[1].ended.error
    assert error is not None
    assert (error.code, error.reason, error.retryable) == ("INVALID_ARGUMENT", "INVALID_GRAMMAR", False)
    assert error.field == "sampling.structured"
    assert not answers[1].tokens
    assert len(answers[2].tokens) == 4


def test_a_form_that_exceeds_a_limit_within_the_answer_fails_its_job_alone(
    demo: Callable[..., GenerationEngine],
) -> None:
    many = {"type": "object", "properties": {f"p{n}": {} for n in range(2500)}}
    late = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": many}, "required": ["a", "b"]}
    answers = run(demo(), shaped(1, Form("json_schema", json.dumps(late))), job(2, PROMPT, max_tokens=30))
    error = answers[1].ended.error
    assert error is not None
    assert error.reason == "INVALID_GRAMMAR"
    assert text_of(answers[1]).startswith("{")
    assert len(answers[2].tokens) == 30


def test_a_job_that_is_cancelled_while_its_form_is_compiled_never_runs(
    demo: Callable[..., GenerationEngine], forms: GuidanceForms, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, may_go, compiled = demo(), threading.Event(), forms._compiled

    def waiting(form: Form) -> Any:
        assert may_go.wait(60)
        return compiled(form)

    monkeypatch.setattr(forms, "_compiled", waiting)
    engine.submit(shaped(1, DATE))
    engine.cancel(1)
    engine.step()
    assert engine.has_work()
    may_go.set()
    answer = run(engine)[1]
    assert (answer.tokens, answer.ended.reason) == ([], EndReason.CANCELLED)
    assert not engine.has_work()


def test_without_forms_such_a_job_is_refused() -> None:
    engine = open_engine(DEMO, kv_blocks=64)
    error = solo(engine, shaped(1, DATE)).ended.error
    assert error is not None
    assert error.reason == "STRUCTURED_UNSUPPORTED"


def test_a_tokenizer_that_cannot_be_used_serves_free_answers() -> None:
    engine, broken = open_engine(DEMO, kv_blocks=64), GuidanceForms(b"{}", 6144, [EOS])
    engine.use_forms(broken)
    answers = run(engine, shaped(1, DATE), job(2, PROMPT, max_tokens=4))
    assert answers[1].ended.error is not None
    assert len(answers[2].tokens) == 4
    broken.close()


def test_the_paced_runner_draws_what_the_masks_allow(forms: GuidanceForms) -> None:
    from tests.worker.test_runner_seam import engine_on

    engine = engine_on(PacedRunner(6144, [EOS], 4, PacedTiming(0.0)))
    engine.use_forms(forms)
    dated = shaped(1, DATE, max_tokens=60)
    answers = run(engine, dated, job(2, PROMPT, max_tokens=20))
    assert re.fullmatch(DATE.text, text_of(answers[1]))
    assert len(answers[2].tokens) == 20


class Nothing:
    """Proposes no guesses."""

    def propose(self, job: Job, token_ids: Sequence[int], most: int) -> Sequence[int]:
        return ()

    def ended(self, job: Job, token_ids: Sequence[int]) -> None:
        pass


class Continues(Nothing):
    """Proposes what comes in a text behind the answer's last token."""

    def __init__(self, written: list[int]) -> None:
        self.written = written

    def propose(self, job: Job, token_ids: Sequence[int], most: int) -> Sequence[int]:
        ends = [place for place, token in enumerate(self.written, 1) if token == token_ids[-1]]
        return self.written[ends[-1] :][:most] if ends else ()


NO_SPACES = {"whitespace_flexible": False}


def varied_forms() -> list[Job]:
    """Answers with a form and free ones: with penalties, stop tokens, least lengths and log-probabilities."""
    letters, penal = Form("regex", "[0-9]{3}[a-z ]*"), {"repetition_penalty": 1.3, "frequency_penalty": 0.4}
    digit = TEXT.encode("7", add_special_tokens=False).ids[-1]
    return [
        shaped(1, SCHEMA, max_tokens=80),
        shaped(2, SCHEMA, seed=3, logprobs=3, max_tokens=80),
        shaped(3, SCHEMA, seed=4, max_tokens=80, **penal),
        shaped(4, DATE, logprobs=0),
        shaped(5, WORDS, seed=5),
        shaped(6, SUMS, seed=6, max_tokens=20),
        shaped(7, letters, stop_token_ids=frozenset({digit}), logit_bias={digit: 100.0}),
        shaped(8, letters, min_tokens=9, logit_bias={EOS: 100.0}),
        shaped(9, letters, ignore_eos=True, max_tokens=20),
        job(10, PROMPT[:-1], max_tokens=30, logprobs=2, temperature=0.7, seed=9),
        job(11, PROMPT[:-2], max_tokens=30),
    ]


@pytest.mark.parametrize("wrong", [10_000, 5, 1], ids=["all right", "some wrong", "all wrong"])
def test_guesses_change_no_answer_with_a_form(demo: Callable[..., GenerationEngine], wrong: int) -> None:
    jobs = varied_forms()
    plain = run(demo(**STRICT), *jobs)
    for depth in (1, 4, None):
        engine = demo(**STRICT)
        engine.speculation = Speculation(Replay(plain, wrong), depth)
        answers = run(engine, *jobs)
        for one in jobs:
            guessed, expected = answers[one.key], plain[one.key]
            assert guessed.tokens == expected.tokens, one.key
            assert (guessed.logprobs, guessed.tops) == (expected.logprobs, expected.tops), one.key
            ends = [(each.ended.reason, each.ended.stop_token_id, each.ended.position) for each in (guessed, expected)]
            assert ends[0] == ends[1], one.key
        formed = [answers[one.key].ended.cost for one in jobs if one.params.structured]
        if wrong > 1 and depth:
            assert all(cost.accepted_tokens for cost in formed[:3])
        assert engine.stats().active_blocks == 0


def test_a_guess_that_the_form_forbids_ends_there(demo: Callable[..., GenerationEngine]) -> None:
    digits = Form("regex", "[0-9]{8}")
    plain, engine = solo(demo(), shaped(1, digits)), demo()
    engine.speculation = Speculation(Replay({1: Answer([*plain.tokens[:3], *[500] * 8])}, 10_000), 4)
    answer = solo(engine, shaped(1, digits))
    assert answer.tokens == plain.tokens
    assert (answer.ended.cost.drafted_tokens, answer.ended.cost.accepted_tokens) == (2, 2)


@pytest.mark.parametrize("required", [["a", "b"], ["a"]], ids=["met", "only guessed"])
def test_a_limit_of_a_form_is_met_where_plain_decoding_meets_it(
    demo: Callable[..., GenerationEngine], required: list[str]
) -> None:
    """Also if guesses lead to it earlier, or if they alone lead to it."""
    many = {"type": "object", "properties": {f"p{n}": {} for n in range(2500)}}
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": many}, "required": required}
    form = Form("json_schema", json.dumps({**schema, "additionalProperties": False, "x-guidance": NO_SPACES}))
    close, limit = (TEXT.encode(text, add_special_tokens=False).ids[-1] for text in ('"a":true}', '"b":{'))
    bias = {} if "b" in required else {close: 50.0}
    plain = solo(demo(**STRICT), shaped(1, form, logit_bias=bias))
    written = TEXT.encode('{"a":true,"b":{"p', add_special_tokens=False).ids
    assert limit in written
    for depth in (3, 8):
        engine = demo(**STRICT)
        engine.speculation = Speculation(Continues(written), depth)
        answer = solo(engine, shaped(1, form, logit_bias=bias))
        assert answer.tokens == plain.tokens
        assert answer.ended.error == plain.ended.error
        assert (answer.ended.error is not None) == ("b" in required)
        assert answer.ended.cost.drafted_tokens


def test_what_a_form_prescribes_is_guessed(demo: Callable[..., GenerationEngine]) -> None:
    """Also without a proposer's guess."""
    named = {name: {"enum": ["a", "b"]} for name in ("a long name of a field", "another long name of another field")}
    schema = {"type": "object", "properties": named, "required": [*named], "additionalProperties": False}
    form = Form("json_schema", json.dumps(schema))
    plain, engine = solo(demo(), shaped(1, form)), demo()
    engine.speculation = Speculation(Nothing(), 8)
    answer = solo(engine, shaped(1, form))
    assert answer.tokens == plain.tokens
    assert fits(form, text_of(answer))
    cost = answer.ended.cost
    assert cost.accepted_tokens == cost.drafted_tokens >= 9
    assert cost.steps <= len(answer.tokens) - cost.accepted_tokens + 1  # One may draw the end token.


def test_a_draft_model_guesses_free_answers_beside_those_with_a_form(forms: GuidanceForms) -> None:
    jobs = varied_forms()
    plain, engine = (
        open_engine(DEMO, **{"kv_blocks": 512, "max_batch_size": 16, **STRICT, **options})
        for options in ({}, {"speculate": f"draft:{DEMO}", "speculate_depth": 3})
    )
    found = []
    for made in (plain, engine):
        made.use_forms(forms)
        found.append(run(made, *jobs))
    assert [found[1][one.key].tokens for one in jobs] == [found[0][one.key].tokens for one in jobs]
    for one in jobs:
        assert (found[1][one.key].ended.cost.drafted_tokens > 0) == (one.params.structured is None)


def test_the_paced_runner_draws_along_guesses_what_the_masks_allow(forms: GuidanceForms) -> None:
    from tests.worker.test_runner_seam import engine_on

    found: list[dict[int, Answer]] = []
    for guesses in (False, True):
        engine = engine_on(PacedRunner(6144, [EOS], 4, PacedTiming(0.0)))
        engine.use_forms(forms)
        if guesses:
            engine.speculation = Speculation(Replay(found[0], 3), 4)
        found.append(run(engine, shaped(1, DATE, max_tokens=60), job(2, PROMPT, max_tokens=20)))
    assert [answer.tokens for answer in found[1].values()] == [answer.tokens for answer in found[0].values()]
    assert all(answer.ended.cost.accepted_tokens for answer in found[1].values())


def test_answers_of_a_form_share_the_work_of_threads_and_have_the_same_masks(forms: GuidanceForms) -> None:
    form, opened = Form("regex", "[a-c]{2,9}x"), list[GuidanceMatcher]()
    arrived = threading.Semaphore(0)

    def then(found: Any) -> None:
        opened.append(found)
        arrived.release()

    for _ in range(12):
        forms.open(form, TEXT.encode("ab", add_special_tokens=False).ids, then)
    assert all(arrived.acquire(timeout=60) for _ in range(12))
    assert len({matcher.lexer for matcher in opened}) > 1, "one lexer is used by one thread at a time"
    masks = np.zeros((14, forms.words), np.int32)
    forms.fill([(matcher, line) for line, matcher in enumerate(opened, 1)], masks)
    alone = np.zeros((1, forms.words), np.int32)
    forms.fill([(opened[0], 0)], alone)
    assert alone.any()
    assert (masks[1:13] == alone).all()
    assert not masks[[0, 13]].any(), "lines of other rows are left alone"


@pytest.mark.parametrize(
    ("seconds", "lexers"), [([0.1, 0.001], 9), ([0.1, 0.02], 3), ([0.1, 0.1], 2), ([0.3, 0.001], 1)]
)
def test_the_fastest_compilation_sets_the_number_of_lexers(
    monkeypatch: pytest.MonkeyPatch, seconds: list[float], lexers: int
) -> None:
    clock, taken = [0.0], iter(seconds)

    def compile_one() -> Any:
        clock[0] += next(taken, seconds[-1])
        return object()

    monkeypatch.setattr("services.worker.structured.compiler.time.perf_counter", lambda: clock[0])
    form = CompiledForm(compile_one, 9)
    assert max(form.next()[1] for _ in range(40)) == lexers - 1


def test_a_form_that_cannot_be_compiled_is_refused_again(forms: GuidanceForms) -> None:
    compiled = forms._compiled(Form("regex", "(b"))
    for _ in range(2):
        with pytest.raises(FormError):
            compiled.next()
