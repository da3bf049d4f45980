"""Structured answers over gRPC and a whole mesh: each form, streamed and whole, beside free ones, a worker lost."""

import asyncio
import json
import re
import signal
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from grpc import aio

from protos import inference_pb2 as api
from tests.mesh.harness import Answer, Mesh, Stub, ask, cached, generate

STORY = "Once upon a time there was a little girl. Here is what we know of her: "
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "age": {"type": "integer", "minimum": 1, "maximum": 120},
        "friends": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2},
    },
    "required": ["name", "age", "friends"],
    "additionalProperties": False,
}
SCHEMA = api.Structured(json_schema=json.dumps(PERSON))
FORMS = {
    "json_schema": SCHEMA,
    "json_object": api.Structured(json_object=True),
    "regex": api.Structured(regex=r"(red|blue) [0-9]{3}!"),
    "choice": api.Structured(choice=api.Choices(texts=["yes", "no", "perhaps"])),
    "grammar": api.Structured(grammar='root ::= item ("-" item){0,3}\nitem ::= "<" [a-z]{1,9} ">"'),
}
STOP, LENGTH = api.FINISH_REASON_STOP, api.FINISH_REASON_LENGTH


def shaped(form: api.Structured, *, text: str = STORY, max_tokens: int = 200, **sampling: Any) -> api.GenerateRequest:
    return ask(text, max_tokens=max_tokens, structured=form, **sampling)


def check(form: api.Structured, text: str) -> None:
    """Asserts that a finished answer has its form."""
    which = form.WhichOneof("form")
    if which == "json_schema":
        jsonschema.validate(json.loads(text), json.loads(form.json_schema))
    elif which == "json_object":
        assert isinstance(json.loads(text), dict)
    elif which == "choice":
        assert text in form.choice.texts
    else:
        assert re.fullmatch(form.regex or r"(<[a-z]{1,9}>)(-<[a-z]{1,9}>)*", text)


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("name", FORMS)
async def test_each_form_is_kept_streamed_and_whole(stub: Stub, name: str) -> None:
    for temperature in (0.0, 0.8):
        request = shaped(FORMS[name], temperature=temperature, seed=5)
        answer = await generate(stub, request)
        whole = await stub.Complete(request)
        assert (whole.choices[0].text, list(whole.choices[0].token_ids)) == (answer.text, answer.ids)
        if answer.finish == {0: STOP}:
            check(FORMS[name], answer.text)
        else:
            assert (name, answer.finish) == ("json_object", {0: LENGTH})


@pytest.mark.asyncio(loop_scope="session")
async def test_forms_are_part_of_what_makes_requests_equal(stub: Stub) -> None:
    free, first, second = [
        await generate(stub, request)
        for request in (ask(STORY, max_tokens=200), shaped(FORMS["choice"]), shaped(FORMS["regex"]))
    ]
    assert len({free.text, first.text, second.text}) == 3
    assert (await cached(stub, shaped(FORMS["regex"]))).text == second.text, "the result cache serves this form alone"
    check(FORMS["choice"], first.text)
    check(FORMS["regex"], second.text)


@pytest.mark.asyncio(loop_scope="session")
async def test_several_samples_have_the_form_beside_free_answers(stub: Stub) -> None:
    free = [ask(STORY[:-count], max_tokens=48, temperature=0.9, seed=count) for count in range(1, 4)]
    for each in free:
        each.cache = api.CACHE_POLICY_BYPASS
    alone = [(await generate(stub, each)).ids for each in free]
    several = shaped(SCHEMA, temperature=0.9, seed=4)
    several.n = 4
    answer, *others = await asyncio.gather(generate(stub, several), *(generate(stub, each) for each in free))
    assert [other.ids for other in others] == alone
    texts = {index: "".join(parts) for index, parts in answer.texts.items()}
    assert len(set(texts.values())) == 4
    for index, finish in answer.finish.items():
        if finish == STOP:
            check(SCHEMA, texts[index])


@pytest.mark.asyncio(loop_scope="session")
async def test_stop_strings_and_log_probabilities(stub: Stub) -> None:
    stopped = await generate(stub, shaped(FORMS["regex"], stop=["!"]))
    assert re.fullmatch(r"(red|blue) [0-9]{3}", stopped.text)
    assert stopped.stop == {0: "!"}
    call = stub.Generate(shaped(FORMS["choice"], logprobs=20))
    places = [place async for response in call for place in response.delta.logprobs]
    assert places[0].top[0].logprob <= 0
    assert {top.text.strip()[:1] for top in places[0].top} <= {"y", "n", "p"}, "what the form forbids is not likely"


@pytest.mark.asyncio(loop_scope="session")
async def test_a_form_that_cannot_be_compiled_is_refused_with_its_reason(stub: Stub) -> None:
    with pytest.raises(aio.AioRpcError, match="unclosed group") as caught:
        await generate(stub, shaped(api.Structured(regex="(a")))
    assert caught.value.code().name == "INVALID_ARGUMENT"


@pytest.mark.asyncio(loop_scope="function")
async def test_a_killed_worker_changes_no_byte_of_a_structured_answer(tmp_path: Path, model: Path) -> None:
    async with Mesh(tmp_path, model, workers=2, worker_env={"WEFT_DETERMINISTIC": "true"}) as mesh:
        requests = []
        for number in range(16):
            form = SCHEMA if number % 2 else api.Structured(regex="([a-z]{3,8} ){24}end")
            text, temperature = f"{STORY}{number} ", 0.9 if number % 3 else 0.0
            one = shaped(form, text=text, max_tokens=120, logprobs=0, temperature=temperature, seed=number)
            requests.append(one)
            requests[-1].cache = api.CACHE_POLICY_BYPASS
        calm = await asyncio.gather(*(generate(mesh.stub(), each, deadline_s=100) for each in requests))
        seen = [0] * len(requests)

        def begin(number: int) -> "asyncio.Task[Answer]":
            def on_delta(delta: api.Delta) -> None:
                seen[number] += len(delta.token_ids)

            return asyncio.create_task(generate(mesh.stub(), requests[number], deadline_s=100, on_delta=on_delta))

        long, short = range(1, len(requests), 2), range(0, len(requests), 2)
        tasks = {number: begin(number) for number in long}
        while not all(seen[number] for number in long):  # noqa: ASYNC110 (deltas arrive meanwhile)
            await asyncio.sleep(0.005)
        tasks |= {number: begin(number) for number in short}
        while sum(count >= 8 for count in seen) < 12:
            assert not any(task.done() for task in tasks.values()), "a stream ended before enough were in flight"
            await asyncio.sleep(0.005)
        mesh.workers[0].kill(signal.SIGKILL)
        answers = await asyncio.gather(*(tasks[number] for number in range(len(requests))))
        assert sum(answer.attempts == {1, 2} for answer in answers) >= 4
        for request, answer, before in zip(requests, answers, calm, strict=True):
            assert (answer.ids, answer.text, answer.logprobs) == (before.ids, before.text, before.logprobs)
            assert answer.finish == before.finish
            if answer.finish == {0: STOP} and request.sampling.structured.json_schema:
                check(request.sampling.structured, answer.text)
