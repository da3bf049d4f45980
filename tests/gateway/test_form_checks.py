"""Forms of answers at the gateway: compiled in a process of its own, refused by name, within limits."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from grpc import StatusCode

from protos import inference_pb2 as api
from services.errors import WeftError
from services.forms.checks import FormChecks
from services.forms.form import Form
from services.forms.request import MOST_BYTES, form_of
from tests.gateway.fakes import FakeMesh, ask, generate, until
from tests.gateway.model import ANSWER
from tests.gateway.test_refusals import reason_of


@pytest_asyncio.fixture
async def checks() -> AsyncIterator[FormChecks]:
    made = FormChecks()
    yield made
    await made.close()


async def refusal(checks: FormChecks, form: Form) -> WeftError:
    with pytest.raises(WeftError) as caught:
        await checks.check(form)
    return caught.value


async def test_forms_that_can_be_compiled_pass(checks: FormChecks) -> None:
    await checks.check(Form("json_schema", '{"type":"object","properties":{"a":{"type":"integer"}}}'))
    await checks.check(Form("json_object", '{"type":"object"}'))
    await checks.check(Form("regex", "[a-z]+"))
    await checks.check(Form("choice", json.dumps(["a", 'b "quoted"\n', "é 😀"])))
    await checks.check(Form("grammar", 'root ::= "a" | "b" root'))
    await checks.check(Form("grammar", 'start: "a" | "b" start'))


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (Form("json_schema", "{"), "EOF"),
        (Form("json_schema", '{"type":"thing"}'), "thing"),
        (Form("json_schema", '{"type":"array","uniqueItems":true}'), "uniqueItems"),
        (Form("json_schema", '{"type":"array","uniqueItems":true,"x-guidance":{"lenient":true}}'), "uniqueItems"),
        (Form("json_schema", '{"$ref":"https://example.com/schema.json"}'), "example.com"),
        (Form("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000), "recursion"),
        (Form("regex", "(a"), "unclosed"),
        (Form("regex", "(?=a)b"), "look-around"),
        (Form("regex", "(" * 50_000), "regex"),
        (Form("grammar", "start: missing"), "missing"),
        (Form("grammar", "root ::= " + "(" * 9000 + '"a"' + ")" * 9000), "recursion"),
    ],
    ids=lambda value: value.field if isinstance(value, Form) else value,
)
async def test_others_are_refused_with_their_reason(checks: FormChecks, form: Form, words: str) -> None:
    error = await refusal(checks, form)
    assert (error.code, error.reason) == (StatusCode.INVALID_ARGUMENT, "INVALID_GRAMMAR")
    assert error.field == f"sampling.structured.{form.field}"
    assert words in error.message
    assert len(error.message) < 400
    assert "\n" not in error.message


async def test_a_form_that_takes_too_long_is_refused_and_the_next_one_is_served(checks: FormChecks) -> None:
    await checks.check(Form("regex", "a"))
    endless = Form("json_schema", '{"type":"integer","multipleOf":9999991}')
    assert "2 s of computation or 1 GiB" in (await refusal(checks, endless)).message
    await checks.check(Form("regex", "b"))


async def test_a_form_is_compiled_once(checks: FormChecks) -> None:
    good, bad = Form("regex", "a+"), Form("regex", "(a")
    await checks.check(good)
    await refusal(checks, bad)
    await checks.close()
    checks._command = ("/nonexistent",)
    await checks.check(good)
    await refusal(checks, bad)
    other = await refusal(checks, Form("regex", "c"))
    assert (other.code, other.retryable) == (StatusCode.UNAVAILABLE, True), "no process could be started"


async def test_a_cancelled_check_leaves_no_process_behind(tmp_path: Path) -> None:
    started = tmp_path / "pid"
    stuck = f"import os, pathlib, time; pathlib.Path({str(started)!r}).write_text(str(os.getpid())); time.sleep(600)"
    checks = FormChecks((sys.executable, "-c", stuck))
    waiting = asyncio.create_task(checks.check(Form("regex", "a")))
    await until(lambda: started.exists() and bool(started.read_text()))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


async def test_the_bounds_of_a_form() -> None:
    for wrong, field in [
        (api.Structured(), "structured"),
        (api.Structured(json_object=False), "structured.json_object"),
        (api.Structured(regex=""), "structured.regex"),
        (api.Structured(regex="a" * MOST_BYTES), "structured.regex"),
        (api.Structured(choice=api.Choices()), "structured.choice"),
        (api.Structured(choice=api.Choices(texts=["a", "a"])), "structured.choice"),
        (api.Structured(choice=api.Choices(texts=["a", ""])), "structured.choice"),
        (api.Structured(choice=api.Choices(texts=map(str, range(1025)))), "structured.choice"),
    ]:
        with pytest.raises(WeftError) as caught:
            form_of(wrong)
        assert caught.value.field == f"sampling.{field}"


async def test_a_request_with_a_bad_form_reaches_no_worker() -> None:
    async with FakeMesh() as mesh:
        bad = await generate(mesh.stub, ask(structured=api.Structured(json_schema='{"type":"thing"}')))
        assert bad.error is not None
        assert (bad.error.code(), reason_of(bad.error)) == (StatusCode.INVALID_ARGUMENT, "INVALID_GRAMMAR")
        assert not mesh.scheduler.submits
        good = await generate(mesh.stub, ask(structured=api.Structured(regex="a+")))
        assert good.ids() == ANSWER  # The fake worker knows no forms.
        assert mesh.workers[0].jobs[-1].sampling.structured.regex == "a+"
