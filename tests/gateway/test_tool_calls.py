"""Tool calls in answers: found in each model's format, streamed as they are written, never lost as text."""

# ruff: noqa: E501

import hashlib
import itertools
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from protos import inference_pb2 as api
from protos import mesh_pb2
from services.errors import invalid
from services.forms.form import Form
from services.forms.grammar import compile_form
from services.gateway.links.worker_link import worker_lost
from services.gateway.text.tool_calls.formats import FORMATS, format_of
from services.gateway.text.tool_calls.grammar import grammar_of
from services.gateway.text.tool_calls.parser import CallPiece, ToolCallParser
from tests.gateway.fakes import FakeMesh, ask, generate
from tests.gateway.model import BUNDLE, TEMPLATE, TOKENIZER, ids_of, make_card
from tests.gateway.test_conversations import WEATHER, message, tool
from tests.gateway.test_text import CHATML
from tests.gateway.tool_templates import HERMES, TEMPLATES
from tests.ports import free_port

KNOWN = ("get_weather", "clock.now")
OSLO = '{"city": "Oslo }]\\" <tool_call>", "days": [1, {"a": 2}]}'
Found = tuple[str, list[tuple[str, str]]]

CALLS: dict[str, list[tuple[str, Found]]] = {
    # format: texts of answers; their content and calls
    "hermes": [
        (f'<tool_call>\n{{"name": "get_weather", "arguments": {OSLO}}}\n</tool_call>', ("", [("get_weather", OSLO)])),
        ('I look. \n<tool_call>{"arguments": {}, "name": "clock.now"}</tool_call>', ("I look.", [("clock.now", "{}")])),
        (
            '<tool_call>\n{"name": "clock.now", "arguments": {"zone": 1}}\n</tool_call>\n'
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>\n',
            ("", [("clock.now", '{"zone": 1}'), ("get_weather", '{"city": "Rome"}')]),
        ),
        ('<tool_call>{"name": "clock.now"}</tool_call> and then', (" and then", [("clock.now", "{}")])),
        ('<tool_call>{"name": "clock.now", "arguments": "{\\"a\\": 1}"}', ("", [("clock.now", '{"a": 1}')])),
        ('<tool_call>{"name": "clock.now"', ("", [("clock.now", "")])),
        ('<tool_call>{"name": "clock.now", "arguments": 5}', ("", [("clock.now", "5")])),
        ('<tool_call>{"name": "clock.now", "arguments": "a\\ud83d\\ude00\\ud83d"}', ("", [("clock.now", "a😀\ufffd")])),
        ('<tool_call>{"name": "clock.now", "id": null, "arguments": {"a"', ("", [("clock.now", '{"a"')])),
    ],
    "llama3": [
        (f'{{"name": "get_weather", "parameters": {OSLO}}}', ("", [("get_weather", OSLO)])),
        (' <|python_tag|>{"name": "clock.now", "parameters": {}}', ("", [("clock.now", "{}")])),
        (
            '{"name": "clock.now", "parameters": {}}; {"name": "get_weather", "parameters": {"city": "x"}}',
            ("", [("clock.now", "{}"), ("get_weather", '{"city": "x"}')]),
        ),
        ('{"type": "function", "name": "clock.now", "parameters": {"a": "b"}}', ("", [("clock.now", '{"a": "b"}')])),
    ],
    "mistral": [
        (f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {OSLO}}}]', ("", [("get_weather", OSLO)])),
        (
            'Well.[TOOL_CALLS] [{"name": "clock.now", "arguments": {}, "id": "abcdefghi"}, '
            '{"name": "get_weather", "arguments": {"city": "x"}}]',
            ("Well.", [("clock.now", "{}"), ("get_weather", '{"city": "x"}')]),
        ),
        ('[TOOL_CALLS]clock.now[ARGS]{"zone": "x"}', ("", [("clock.now", '{"zone": "x"}')])),
        (
            '[TOOL_CALLS]clock.now[CALL_ID]abcdefghi[ARGS]{}[TOOL_CALLS]get_weather{"city": "x"}',
            ("", [("clock.now", "{}"), ("get_weather", '{"city": "x"}')]),
        ),
    ],
}
NO_CALLS: dict[str, list[str]] = {
    "hermes": [
        "no call at all", "a < b and <tool", "<tool_call>", '<tool_call>\n{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>["get_weather"]</tool_call>', '<tool_call>{"name": 5}',
        '{"name": "get_weather", "arguments": {}}', '<tool_call>{"a":', "  spaced  \n", "",
        '<tool_call>{"arguments": {"city": "x"}}</tool_call>',
    ],
    "llama3": ['{"name": "Bob", "age": 3}', "{", '{"a": 1}', 'x {"name": "clock.now", "parameters": {}}', "<|python_tag|>print(1)"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS][]", "[TOOL_CALLS]unknown{}", '[{"name": "clock.now"}]', "[TOOL", "[TOOL_CALLS]" + "x" * 300],
}  # fmt: skip


def parsed(form: str, pieces: list[str], most: int | None = None) -> tuple[Found, list[str]]:
    """Content and calls of an answer that arrives in these pieces, and the ids of its calls."""
    parser = ToolCallParser(FORMATS[form], KNOWN, b"seed", most)
    content, parts = "", list[CallPiece]()
    for piece in pieces:
        text, calls = parser.feed(piece)
        content, parts = content + text, parts + calls
    text, calls = parser.flush()
    names: list[tuple[str, str]] = []
    for part in parts + calls:
        if part.name:
            assert part.index == len(names)
            names.append((part.name, ""))
        name, arguments = names[part.index]
        names[part.index] = (name, arguments + part.arguments)
    return (content + text, names), [part.id for part in parts + calls if part.id]


def cut(text: str, places: list[int]) -> list[str]:
    """The text, cut at these places."""
    ends = sorted({min(place, len(text)) for place in places} | {0, len(text)})
    return [text[start:end] for start, end in itertools.pairwise(ends)]


@pytest.mark.parametrize(("form", "text", "expected"), [(form, *case) for form in CALLS for case in CALLS[form]])
def test_calls_are_found(form: str, text: str, expected: Found) -> None:
    found, ids = parsed(form, [text])
    assert found == expected
    assert len(set(ids)) == len(expected[1])
    assert parsed(form, list(text)) == (found, ids)


@pytest.mark.parametrize(("form", "text"), [(form, text) for form in NO_CALLS for text in NO_CALLS[form]])
def test_what_is_no_call_is_text(form: str, text: str) -> None:
    assert parsed(form, [text])[0] == (text, [])
    assert parsed(form, list(text))[0] == (text, [])


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_pieces_do_not_matter(data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(sorted(CALLS)))
    texts = [text for text, _ in CALLS[form]] + NO_CALLS[form]
    text = "".join(data.draw(st.lists(st.sampled_from([*texts, "x", "\n", "{", "]"]), max_size=3)))
    whole = parsed(form, [text])
    assert parsed(form, cut(text, data.draw(st.lists(st.integers(0, 200), max_size=20)))) == whole


@pytest.mark.parametrize("form", sorted(CALLS))
def test_an_answer_that_runs_away_into_space_takes_no_longer_for_each_character(form: str) -> None:
    text, (content, calls) = CALLS[form][0]
    pieces = [text, *[" " * 64] * (1 << 12)]  # Minutes if each character read all space before it.
    assert parsed(form, pieces)[0] == (content, calls)
    assert parsed(form, ["x", *pieces[1:], "y"])[0] == ("x" + " " * (1 << 18) + "y", [])


def test_arguments_arrive_while_they_are_written() -> None:
    parser = ToolCallParser(FORMATS["hermes"], KNOWN, b"")
    assert parser.feed('<tool_call>{"name": "get_weather", "arguments"') == (
        "",
        [CallPiece(0, f"call_{hashlib.sha256(bytes(4)).hexdigest()[:24]}", "get_weather")],
    )
    assert parser.feed(': {"city": "Os') == ("", [CallPiece(0, arguments='{"city": "Os')])
    assert parser.feed('lo"}}') == ("", [CallPiece(0, arguments='lo"}')])


def test_ids_have_the_length_that_the_template_accepts() -> None:
    for form, length in (("hermes", 29), ("llama3", 29), ("mistral", 9)):
        text = CALLS[form][0][0]
        [identity] = parsed(form, [text])[1]
        assert len(identity) == length
        assert identity.replace("_", "").isalnum()


def test_one_call_may_be_the_last() -> None:
    for form, index in (("hermes", 2), ("llama3", 2), ("mistral", 1)):
        text, (content, calls) = CALLS[form][index]
        assert parsed(form, [text], most=1)[0] == (content, calls[:1])


def test_the_template_shows_the_format() -> None:
    assert {name: format_of(template) for name, template in TEMPLATES.items()} == FORMATS
    for template in (TEMPLATE, CHATML, HERMES.replace("<tool_call>", "<tool_call><function=")):
        assert format_of(template) is None


REQUIRED = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "x"}}\n</tool_call>',
    "llama3": '{"name": "get_weather", "parameters": {"city": "x"}}',
    "mistral": '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "x"}}]',
    "mistral-args": '[TOOL_CALLS]get_weather[ARGS]{"city": "x"}',
}
SEVERAL = {
    "hermes": f'{REQUIRED["hermes"]}\n<tool_call>\n{{"name": "clock.now", "arguments": {{}}}}\n</tool_call>',
    "llama3": f'{REQUIRED["llama3"]}; {{"name": "clock.now", "parameters": {{}}}}',
    "mistral": f'{REQUIRED["mistral"][:-1]}, {{"name": "clock.now", "arguments": {{}}}}]',
    "mistral-args": f"{REQUIRED['mistral-args']}[TOOL_CALLS]clock.now[CALL_ID]abcdefghi[ARGS]{{}}",
}


def matches(form: str, text: str, *, once: bool = False, tools: int = 2) -> bool:
    """Whether an answer with required calls may have this text."""
    grammar = grammar_of(FORMATS[form], conversation().chat.tools[:tools], once=once, special={})
    matcher = compile_form(Form("grammar", grammar), LLTokenizer("byte"))
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


@pytest.mark.parametrize("form", FORMATS)
def test_required_calls_have_the_syntax_that_is_read(form: str) -> None:
    one, several = REQUIRED[form], SEVERAL[form]
    assert parsed(form, [one])[0] == ("", [("get_weather", '{"city": "x"}')])
    assert parsed(form, [several])[0] == ("", [("get_weather", '{"city": "x"}'), ("clock.now", "{}")])
    assert matches(form, one)
    assert matches(form, one, once=True)
    assert matches(form, several)
    assert not matches(form, several, once=True)
    assert not matches(form, several, tools=1)
    for wrong in ("", f"x{one}", one.replace('"x"', "1"), one.replace("weather", "w")):
        assert not matches(form, wrong)


async def test_tools_that_are_too_large_to_be_required_are_refused() -> None:
    silent = "{% if tools %}<tool_call> arguments{% endif %}"
    large = api.Tool(name="f", parameters=json.dumps({"title": "x" * (128 << 10)}))
    async with mesh_with(bundle(silent), lambda job: ids_of(SCRIPT), context=1 << 20) as mesh:
        asked = request(tool_function="f")
        asked.prompt.chat.tools.append(large)
        answer = await generate(mesh.stub, asked)
        assert answer.error is not None
        assert answer.error.details() == "prompt.chat.tools: at most 128 KiB"


MOST = 150
SCRIPT = 'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n<tool_call>\n{"name": "clock.now", "arguments": {}}\n</tool_call>'
EXPECTED = [("get_weather", '{"city": "Oslo"}'), ("clock.now", "{}")]


def bundle(template: str = HERMES) -> bytes:
    made = mesh_pb2.Bundle.FromString(BUNDLE)
    made.chat_template = template
    return made.SerializeToString()


def mesh_of(script: str = SCRIPT, **options: Any) -> FakeMesh:
    """A gateway among workers that answer with this text."""
    return mesh_with(bundle(), lambda job: ids_of(script), **options)


def mesh_with(
    data: bytes, script: Callable[[mesh_pb2.Job], list[int]], context: int = 2048, **options: Any
) -> FakeMesh:
    """A gateway among workers of a model with this bundle and room for conversations with tools."""
    vocab = Tokenizer.from_buffer(mesh_pb2.Bundle.FromString(data).tokenizer_json).get_vocab_size()
    card = make_card(context_length=context, bundle_digest=hashlib.sha256(data).digest(), vocab_size=vocab)
    return FakeMesh(bundle=data, card=card, script=script, **options)


def conversation(**fields: Any) -> api.Prompt:
    tools = [tool(WEATHER), api.Tool(name="clock.now")]
    return api.Prompt(chat=api.Chat(messages=[message("user", "hi")], tools=tools, **fields))


def request(**fields: Any) -> api.GenerateRequest:
    return ask(prompt=conversation(**fields), max_tokens=MOST)


async def test_calls_over_grpc_stream_and_collect() -> None:
    async with mesh_of() as mesh:
        answer = await generate(mesh.stub, request())
        assert answer.error is None
        assert answer.text() == "I look."
        calls: dict[int, list[str]] = {}
        for part in (part for delta in answer.deltas for part in delta.tool_calls):
            calls.setdefault(part.index, ["", "", ""])
            for place, text in enumerate((part.id, part.name, part.arguments)):
                calls[part.index][place] += text
        assert [(name, arguments) for _, name, arguments in calls.values()] == EXPECTED
        assert len([delta for delta in answer.deltas if delta.tool_calls]) > 4
        assert answer.last().finish_reason == api.FINISH_REASON_STOP
        [choice] = (await mesh.stub.Complete(request())).choices
        assert choice.text == "I look."
        assert [[each.id, each.name, each.arguments] for each in choice.tool_calls] == list(calls.values())
        assert list(choice.token_ids) == ids_of(SCRIPT)


async def test_without_tools_the_text_is_text() -> None:
    async with mesh_of() as mesh:
        for asked in (request(tool_mode=api.TOOL_MODE_NONE), ask(max_tokens=MOST)):
            [choice] = (await mesh.stub.Complete(asked)).choices
            assert choice.text == SCRIPT
            assert not choice.tool_calls
        hidden, seen = mesh.workers[0].jobs[0], (await mesh.stub.Complete(request())) and mesh.workers[0].jobs[-1]
        assert len(hidden.token_ids) < len(seen.token_ids)


async def test_an_answer_without_parallel_calls_ends_after_the_first_one() -> None:
    async with mesh_of(cache=True) as mesh:
        [one] = (await mesh.stub.Complete(request(parallel_tool_calls=False))).choices
        assert [call.name for call in one.tool_calls] == ["get_weather"]
        assert one.finish_reason == api.FINISH_REASON_STOP
        assert list(one.token_ids) == ids_of(SCRIPT)[: len(one.token_ids)]
        [both] = (await mesh.stub.Complete(request(parallel_tool_calls=True))).choices
        assert len(both.tool_calls) == 2, "the shorter answer is not in the cache of the longer one"


async def test_a_lost_worker_costs_no_part_of_a_call() -> None:
    async with mesh_of(workers=2) as mesh:
        mesh.workers[0].fail_at = (20, worker_lost())
        [choice] = (await mesh.stub.Complete(request())).choices
        assert [(call.name, call.arguments) for call in choice.tool_calls] == EXPECTED
        assert len(mesh.workers[1].jobs) == 1


async def test_special_tokens_of_a_format_are_part_of_the_text() -> None:
    """A tokenizer may have the tag as a special token, whose text is otherwise dropped."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
    tokenizer.add_special_tokens(["<tool_call>", "</tool_call>"])
    made = mesh_pb2.Bundle.FromString(bundle())
    made.tokenizer_json = tokenizer.to_str().encode()
    ids = tokenizer.encode(SCRIPT, add_special_tokens=False).ids
    assert len(ids) < len(ids_of(SCRIPT))
    async with mesh_with(made.SerializeToString(), lambda job: ids) as mesh:
        [choice] = (await mesh.stub.Complete(request())).choices
        assert [(call.name, call.arguments) for call in choice.tool_calls] == EXPECTED
        assert choice.text == "I look."


async def test_the_format_can_be_set() -> None:
    unknown = TEMPLATE + "{{ tools }}"
    script = CALLS["llama3"][0][0]
    for setting, names in (("llama3", ["get_weather"]), ("mistral", [])):
        async with mesh_with(bundle(unknown), lambda job: ids_of(script), gateway_tool_format=setting) as mesh:
            [choice] = (await mesh.stub.Complete(request())).choices
            assert [call.name for call in choice.tool_calls] == names
    async with FakeMesh(bundle=bundle(unknown)) as mesh:
        answer = await generate(mesh.stub, request())
        assert answer.error is not None
        assert "WEFT_GATEWAY_TOOL_FORMAT" in (answer.error.details() or "")


TOOLS: Any = [
    {"type": "function", "function": WEATHER | {"strict": False}},
    {"type": "function", "function": {"name": "clock.now"}},
]


async def test_openais_client_streams_calls() -> None:
    port = free_port()
    fields: Any = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": MOST, "tools": TOOLS}
    async with (
        mesh_of(http_port=port) as mesh,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x") as ai,
    ):
        whole = await ai.chat.completions.create(**fields)
        [choice] = whole.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look."
        calls: Any = choice.message.tool_calls
        assert [(call.function.name, call.function.arguments) for call in calls] == EXPECTED
        async with ai.chat.completions.stream(**fields) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_completion()
        assert len([event for event in events if event.type == "tool_calls.function.arguments.delta"]) > 3
        streamed: Any = final.choices[0].message.tool_calls
        assert [(call.function.name, call.function.arguments) for call in streamed] == EXPECTED
        assert final.choices[0].finish_reason == "tool_calls"
        assert final.choices[0].message.content == "I look."
        one = await ai.chat.completions.create(**fields, parallel_tool_calls=False, tool_choice="auto")
        assert len(one.choices[0].message.tool_calls or []) == 1
        none = await ai.chat.completions.create(**fields, tool_choice="none")
        assert none.choices[0].message.tool_calls is None
        assert none.choices[0].message.content == SCRIPT
        # The calls and their results go back in the history.
        history = [*fields["messages"], final.choices[0].message.model_dump(exclude_none=True)]
        history += [{"role": "tool", "tool_call_id": call.id, "content": json.dumps({"ok": 1})} for call in streamed]
        for each in history[1].get("tool_calls", []):
            each["function"].pop("parsed_arguments", None)
        history[1].pop("parsed", None)
        await ai.chat.completions.create(**{**fields, "messages": history})
        assert len(mesh.workers[0].jobs[-1].token_ids) > len(mesh.workers[0].jobs[0].token_ids)
        mesh.workers[0].fail_at = 0, invalid("sampling.structured", "too large", "INVALID_GRAMMAR")
        with pytest.raises(openai.BadRequestError) as caught:
            await ai.chat.completions.create(**fields, tool_choice="required")
        assert (caught.value.param, caught.value.code) == ("tools", "invalid_grammar")
