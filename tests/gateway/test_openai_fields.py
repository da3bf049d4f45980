"""Every field of the requests of OpenAI's Python client is honoured by name, or refused by name."""

import math
import typing
from typing import Any

import pytest
from openai.types import completion_create_params as completions
from openai.types.chat import ChatCompletionMessageParam
from openai.types.chat import completion_create_params as chat
from openai.types.chat.chat_completion_stream_options_param import ChatCompletionStreamOptionsParam

from protos import inference_pb2 as api
from services.errors import WeftError
from services.gateway.doors.openai import answers
from services.gateway.doors.openai.requests import EXTENSIONS, HONOURED, REFUSED, parse
from services.gateway.doors.openai.values import Asked
from services.validate import check_request_id
from tests.gateway.test_weft_fields import HONOURED as HONOURED_BY_WEFT

TYPES: dict[str, Any] = {
    "chat": chat.CompletionCreateParamsStreaming,
    "completions": completions.CompletionCreateParamsStreaming,
}
REQUIRED: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hi"}]},
    "completions": {"prompt": "hi"},
}
BOTH: dict[str, tuple[Any, str, Any]] = {
    # field: a value, where it arrives, what arrives
    "model": ("fox", "request.model", "fox"),
    "max_tokens": (7, "request.sampling.max_tokens", 7),
    "temperature": (0.5, "request.sampling.temperature", 0.5),
    "top_p": (0.25, "request.sampling.top_p", 0.25),
    "presence_penalty": (-1.5, "request.sampling.presence_penalty", -1.5),
    "frequency_penalty": (1, "request.sampling.frequency_penalty", 1.0),
    "seed": ((1 << 64) - 1, "request.sampling.seed", (1 << 64) - 1),
    "n": (3, "request.n", 3),
    "stop": ("end", "request.sampling.stop", ["end"]),
    "logit_bias": ({"5": -100, "17": 1.5}, "request.sampling.logit_bias", {5: -100.0, 17: 1.5}),
    "stream": (True, "stream", True),
    "stream_options": ({"include_usage": True}, "usage", True),
    "min_tokens": (4, "request.sampling.min_tokens", 4),
    "top_k": (-1, "request.sampling.top_k", 0),
    "min_p": (0.5, "request.sampling.min_p", 0.5),
    "repetition_penalty": (1.5, "request.sampling.repetition_penalty", 1.5),
    "stop_token_ids": ([1, 2], "request.sampling.stop_token_ids", [1, 2]),
    "ignore_eos": (True, "request.sampling.ignore_eos", True),
    "include_stop_str_in_output": (True, "request.sampling.include_stop_string", True),
    "bad_words": (["fox"], "request.sampling.bad_words", ["fox"]),
    "bad_token_sequences": ([[1, 2]], "request.sampling.bad_token_sequences", [api.TokenIds(ids=[1, 2])]),
    "priority": (-5, "request.priority", -5),
    "speculation": (3, "request.speculation", 3),
    "cache": ("bypass", "request.cache", api.CACHE_POLICY_BYPASS),
    "criticality": ("sheddable", "request.criticality", api.CRITICALITY_SHEDDABLE),
    "request_id": ("mine", "request.request_id", "mine"),
    "return_token_ids": (True, "token_ids", True),
    "structured_outputs": ({"grammar": "start: A", "regex": None}, "request.sampling.structured.grammar", "start: A"),
    "guided_json": ({"type": "object"}, "request.sampling.structured.json_schema", '{"type":"object"}'),
    "guided_regex": ("a+", "request.sampling.structured.regex", "a+"),
    "guided_choice": (["a", "b"], "request.sampling.structured.choice.texts", ["a", "b"]),
    "guided_grammar": ("start: A", "request.sampling.structured.grammar", "start: A"),
}
EXAMPLES: dict[str, dict[str, tuple[Any, str, Any]]] = {
    "chat": {
        **BOTH,
        "messages": ([{"role": "system", "content": "x"}], "request.prompt.chat.messages[0].role", "system"),
        "max_completion_tokens": (9, "request.sampling.max_tokens", 9),
        "logprobs": (True, "request.sampling.logprobs", 0),
        "top_logprobs": (5, "request.sampling.logprobs", 5),
        "response_format": (
            {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": {"type": "integer"}}},
            "request.sampling.structured.json_schema",
            '{"type":"integer"}',
        ),
        "tools": (
            [{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": 2.0}}}],
            "request.prompt.chat.tools[0].parameters",
            '{"b":1,"a":2.0}',
        ),
        "tool_choice": ("none", "request.prompt.chat.tool_mode", api.TOOL_MODE_NONE),
        "parallel_tool_calls": (True, "request.prompt.chat.parallel_tool_calls", True),
        "chat_template_kwargs": ({"x": [1]}, "request.prompt.chat.template_variables", '{"x":[1]}'),
        "enable_thinking": (False, "request.prompt.chat.template_variables", '{"enable_thinking":false}'),
        "add_generation_prompt": (True, "request.prompt.chat.add_generation_prompt", True),
        "continue_final_message": (True, "request.prompt.chat.continue_final_message", True),
    },
    "completions": {
        **BOTH,
        "prompt": ([3, 4], "request.prompt.token_ids.ids", [3, 4]),
        "logprobs": (3, "request.sampling.logprobs", 3),
        "echo": (True, "request.echo", True),
    },
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}
ALONG: dict[str, dict[str, Any]] = {"stream_options": {"stream": True}, "top_logprobs": {"logprobs": True}}


def refusal(kind: str, **fields: Any) -> WeftError:
    """The error of a body with these fields."""
    with pytest.raises(WeftError) as caught:
        parse(kind, REQUIRED[kind] | fields)
    return caught.value


def reached(asked: Asked, path: str) -> Any:
    """The value at a path such as "request.prompt.chat.messages[0].role"."""
    value: Any = asked
    for part in path.split("."):
        name, _, index = part.partition("[")
        value = getattr(value, name)
        value = value[int(index[:-1])] if index else value
    return value


@pytest.mark.parametrize("kind", TYPES)
def test_every_field_of_openais_request_is_in_one_of_the_lists(kind: str) -> None:
    fields = set(TYPES[kind].__annotations__)
    assert not HONOURED[kind].keys() & REFUSED[kind].keys()
    assert HONOURED[kind].keys() | REFUSED[kind].keys() == fields | EXTENSIONS[kind].keys()
    assert EXAMPLES[kind].keys() == HONOURED[kind].keys()


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in HONOURED for name in HONOURED[kind]])
def test_an_honoured_field_arrives(kind: str, name: str) -> None:
    value, path, expected = EXAMPLES[kind][name]
    asked = parse(kind, REQUIRED[kind] | ALONG.get(name, {}) | {name: value})
    found = reached(asked, path)
    assert (
        dict(found) if isinstance(expected, dict) else list(found) if isinstance(expected, list) else found
    ) == expected
    if expected not in (0, True) and path != "request.model":
        assert reached(parse(kind, REQUIRED[kind]), path.partition("[")[0]) != expected


def test_what_arrives_is_a_field_whose_effect_is_known() -> None:
    """What becomes of weft.v1's fields is the table of `test_weft_fields`."""
    arrived = {path.replace("[0]", "") for kind in EXAMPLES for _, path, _ in EXAMPLES[kind].values()}
    of_weft = {path.removeprefix("request.") for path in arrived if path.startswith("request.")}
    effects = HONOURED_BY_WEFT.keys() | {path.rpartition(".")[0] for path in HONOURED_BY_WEFT}
    assert of_weft <= effects
    assert arrived - {f"request.{path}" for path in of_weft} == {"stream", "usage", "token_ids"}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in HONOURED for name in HONOURED[kind]])
def test_an_honoured_field_of_a_wrong_type_is_refused_by_name(kind: str, name: str) -> None:
    anything = {} if name in ("chat_template_kwargs", "guided_json") else {"x": "y"}
    texts = ("model", "prompt", "stop", "request_id", "guided_json", "guided_regex", "guided_grammar")
    for wrong in (object(), [[[]]], anything or 5, "" if name not in texts else 7):
        error = refusal(kind, **(ALONG.get(name, {}) | {name: wrong}))
        assert error.field.partition("[")[0].partition(".")[0] == name


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in REFUSED for name in REFUSED[kind]])
def test_a_refused_field_is_refused_by_name(kind: str, name: str) -> None:
    for value in ("something", {"type": "x"}, [1], 5):
        error = refusal(kind, **{name: value})
        assert (error.field, error.reason, error.code.name) == (name, "UNSUPPORTED_FIELD", "INVALID_ARGUMENT")
    for neutral in (*REFUSED[kind][name][0], None):
        parse(kind, REQUIRED[kind] | {name: neutral})


@pytest.mark.parametrize("kind", TYPES)
def test_an_unknown_field_is_refused_by_name(kind: str) -> None:
    error = refusal(kind, guided_yaml={})
    assert (error.field, error.reason) == ("guided_yaml", "UNKNOWN_FIELD")


def test_true_is_no_number() -> None:
    assert refusal("completions", best_of=True).field == "best_of"
    for name in ("max_tokens", "temperature", "n", "seed", "logprobs"):
        assert refusal("completions", **{name: True}).field == name


MESSAGE: dict[str, tuple[Any, dict[str, Any]]] = {
    # field: a value, how it arrives
    "name": ("ann", {"name": "ann"}),
    "tool_call_id": ("c1", {"tool_call_id": "c1"}),
    "tool_calls": (
        [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        {"tool_calls": [api.ToolCall(id="c1", name="f", arguments='{"a": 1}')]},
    ),
}


@pytest.mark.parametrize("message", typing.get_args(ChatCompletionMessageParam))
def test_every_field_of_a_message_is_honoured_or_refused_by_name(message: Any) -> None:
    for name in set(message.__annotations__) - {"role", "content"}:
        given: dict[str, Any] = {
            "role": "user",
            "content": "x",
            name: MESSAGE[name][0] if name in MESSAGE else {"id": "y"},
        }
        if name in MESSAGE:
            [arrived] = parse("chat", {"messages": [given]}).request.prompt.chat.messages
            assert arrived == api.ChatMessage(role="user", content="x", **MESSAGE[name][1])
            given[name] = 5
        assert refusal("chat", messages=[given]).field == f"messages[0].{name}"
        parse("chat", {"messages": [given | {name: None}]})


@pytest.mark.parametrize("name", ChatCompletionStreamOptionsParam.__annotations__)
def test_every_stream_option_is_honoured_or_refused_by_name(name: str) -> None:
    if name == "include_usage":
        assert parse("chat", REQUIRED["chat"] | {"stream": True, "stream_options": {name: True}}).usage
    else:
        assert refusal("chat", stream=True, stream_options={name: True}).field == f"stream_options.{name}"


STRICT = {"type": "function", "function": {"name": "f", "strict": True}}


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        ("chat", {"messages": {}}, "messages"),
        ("chat", {"messages": ["hi"]}, "messages[0]"),
        ("chat", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("chat", {"messages": [{"content": "x"}]}, "messages[0].role"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ("chat", {"messages": [{"role": "assistant", "tool_calls": ["f"]}]}, "messages[0].tool_calls[0]"),
        (
            "chat",
            {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]},
            "messages[0].tool_calls[0].type",
        ),
        ("chat", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
        ("chat", {"tools": [{"type": "custom"}]}, "tools[0].type"),
        ("chat", {"tools": [{"type": "function"}]}, "tools[0].function"),
        ("chat", {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ("chat", {"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, "tools[0].function.x"),
        (
            "chat",
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
            "tools[0].function.strict",
        ),
        (
            "chat",
            {"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}], "tool_choice": "required"},
            "tools[0].function.strict",
        ),
        ("chat", {"tool_choice": "sometimes"}, "tool_choice"),
        ("chat", {"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ("chat", {"tool_choice": {"type": "function", "function": {"name": "f"}, "x": 1}}, "tool_choice.x"),
        ("chat", {"tool_choice": {"type": "function", "function": {"name": "f", "x": 1}}}, "tool_choice.function.x"),
        (
            "chat",
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "id": "c"}}]}]},
            "messages[0].tool_calls[0].function.id",
        ),
        ("chat", {"messages": None}, "messages"),
        ("completions", {"prompt": None}, "prompt"),
        ("chat", {"enable_thinking": "no"}, "enable_thinking"),
        ("chat", {"response_format": "json"}, "response_format"),
        ("chat", {"response_format": {"type": "xml"}}, "response_format.type"),
        ("chat", {"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
        ("chat", {"response_format": {"type": "text", "json_schema": {}}}, "response_format.json_schema"),
        ("chat", {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ("chat", {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
        ("chat", {"response_format": SCHEMA | {"x": 1}}, "response_format.x"),
        (
            "chat",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
            "response_format.json_schema.name",
        ),
        (
            "chat",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
        ),
        (
            "chat",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": 1}}},
            "response_format.json_schema.strict",
        ),
        ("chat", {"response_format": SCHEMA, "guided_regex": "a"}, "guided_regex"),
        ("completions", {"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ("completions", {"structured_outputs": {}}, "structured_outputs"),
        ("completions", {"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ("completions", {"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ("completions", {"guided_choice": ["a", 1]}, "guided_choice"),
        ("completions", {"guided_json": 3}, "guided_json"),
        ("chat", {"top_logprobs": 2}, "top_logprobs"),
        ("chat", {"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ("chat", {"stream_options": {"include_usage": True}}, "stream_options"),
        ("chat", {"n": 0}, "n"),
        ("chat", {"seed": -1}, "seed"),
        ("chat", {"logit_bias": {"x": 1}}, "logit_bias"),
        ("chat", {"logit_bias": {"4294967296": 1}}, "logit_bias"),
        ("completions", {"prompt": ["a"] * 65}, "prompt"),
        ("completions", {"prompt": [[1, "a"]]}, "prompt"),
        ("completions", {"prompt": [-1]}, "prompt"),
        ("completions", {"cache": "never"}, "cache"),
    ],
)
def test_a_wrong_value_is_refused_by_name(kind: str, fields: dict[str, Any], param: str) -> None:
    assert refusal(kind, **fields).field == param


def test_null_is_as_good_as_absent_in_a_call() -> None:
    function = {"name": "f", "arguments": "{}"}
    call = {"id": None, "type": None, "function": function | {"strict": None}, "custom": None}
    asked = parse("chat", {"messages": [{"role": "assistant", "tool_calls": [call]}]})
    assert asked.request.prompt.chat.messages[0].tool_calls[0] == api.ToolCall(**function)


def test_parts_of_text_are_joined_by_line_breaks() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    asked = parse("chat", {"messages": [{"role": "user", "content": parts}]})
    assert asked.request.prompt.chat.messages[0].content == "one\ntwo"


def test_the_lower_of_two_limits_holds() -> None:
    for limits in ({"max_tokens": 5, "max_completion_tokens": 9}, {"max_completion_tokens": 5, "max_tokens": 9}):
        assert parse("chat", REQUIRED["chat"] | limits).request.sampling.max_tokens == 5


def test_a_list_of_one_prompt_is_that_prompt() -> None:
    assert parse("completions", {"prompt": ["hi"]}).request.prompt.text == "hi"
    assert list(parse("completions", {"prompt": [[1, 2]]}).request.prompt.token_ids.ids) == [1, 2]


@pytest.mark.parametrize(("prompts", "most", "last"), [(2, 126, "-1"), (10, 126, "-9"), (11, 125, "-10")])
def test_the_id_of_several_prompts_has_room_for_their_suffixes(prompts: int, most: int, last: str) -> None:
    body = {"prompt": ["a"] * prompts}
    for request in parse("completions", body | {"request_id": "r" * most}).requests:
        check_request_id("request_id", request.request_id)
    for length in (most + 1, 128, 129):
        with pytest.raises(WeftError) as refused:
            parse("completions", body | {"request_id": "r" * length})
        message = f"request_id: at most {most} characters with {prompts} prompts: {last} is added to it"
        assert (refused.value.message, refused.value.field) == (message, "request_id")
    assert parse("completions", {"prompt": ["a"], "request_id": "r" * 128}).requests[0].request_id == "r" * 128


def test_several_prompts_are_several_requests() -> None:
    asked = parse("completions", {"prompt": ["a", "b"], "max_tokens": 3, "request_id": "r"})
    assert [(each.prompt.text, each.sampling.max_tokens) for each in asked.requests] == [("a", 3), ("b", 3)]
    assert [each.request_id for each in asked.requests] == ["r-0", "r-1"]
    asked = parse("completions", {"prompt": [[1], [2, 3]]})
    assert [list(each.prompt.token_ids.ids) for each in asked.requests] == [[1], [2, 3]]


def test_an_echo_has_the_log_probabilities_of_the_prompt() -> None:
    asked = parse("completions", {"prompt": "a", "echo": True, "logprobs": 2, "max_tokens": 0})
    assert (asked.request.sampling.prompt_logprobs, asked.request.sampling.max_tokens) == (2, 1)
    assert asked.prompt_alone
    assert not parse("completions", {"prompt": "a", "echo": True}).request.sampling.HasField("prompt_logprobs")


def test_errors_name_the_field_of_openais_api() -> None:
    of_chat, of_text = Asked(True), Asked(False)
    names = ("prompt.chat.messages", "prompt", "sampling.stop", "sampling.logprobs")
    assert [of_chat.param(name) for name in names] == [
        "messages", "messages", "stop", "top_logprobs",
    ]  # fmt: skip
    fields = ("prompt.chat.template_variables.x", "prompt.chat.continue_final_message", "prompt.chat.tools.name")
    assert [of_chat.param(name) for name in fields] == [
        "chat_template_kwargs.x", "continue_final_message", "tools.name",
    ]  # fmt: skip
    assert of_chat.param("prompt.chat.messages.tool_calls.arguments") == "messages.tool_calls.arguments"
    for other in (9, 0):
        limits = {"max_completion_tokens": 3, "max_tokens": other}
        lower = parse("chat", REQUIRED["chat"] | limits).param("sampling.max_tokens")
        assert lower == min(limits, key=lambda name: limits[name])
    assert [of_text.param(name) for name in ("prompt.text", "sampling.logprobs", "n")] == ["prompt", "logprobs", "n"]


@pytest.mark.parametrize(
    ("kind", "name", "entry", "most"),
    [
        ("completions", "prompt", "a", 64),
        ("completions", "bad_token_sequences", [1], 128),
        ("chat", "messages", {"role": "user", "content": "x"}, 1024),
        ("chat", "tools", {"type": "function", "function": {"name": "f"}}, 128),
    ],
)
def test_a_list_that_is_too_long_is_refused_before_it_is_read(kind: str, name: str, entry: Any, most: int) -> None:
    parse(kind, REQUIRED[kind] | {name: [entry] * most})
    with pytest.raises(WeftError, match=f"^{name}: at most {most}$"):
        parse(kind, REQUIRED[kind] | {name: [*[entry] * most, 5]})


def test_too_many_tool_calls_are_refused_before_they_are_read() -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    half: dict[str, Any] = {"role": "assistant", "tool_calls": [call] * 512}
    parse("chat", {"messages": [half, half]})
    with pytest.raises(WeftError, match=r"^messages\.tool_calls: at most 1024$"):
        parse("chat", {"messages": [half, half, {"role": "assistant", "tool_calls": [5]}]})


def test_too_many_biases_are_refused_before_they_are_read() -> None:
    with pytest.raises(WeftError, match=r"^logit_bias: at most 1024$"):
        parse("chat", REQUIRED["chat"] | {"logit_bias": dict.fromkeys(map(str, range(1024)), 1) | {"x": 1}})


def test_cached_tokens_are_those_that_were_not_computed() -> None:
    def cached(**fields: Any) -> int:
        usage = answers.usage_of(api.Receipt(prompt_tokens=10, completion_tokens=2, **fields))
        assert (usage["prompt_tokens"], usage["total_tokens"]) == (10, 12)
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached(prefill_tokens=10) == 0
    assert cached(cached_tokens=4, fetched_tokens=3) == 7
    assert cached(cached_tokens=8, fetched_tokens=0, attempts=2) == 8
    assert cached(cached_tokens=18) == 10  # Two continuations of one prompt.
    assert cached(result_hit=True) == 10


def test_the_log_probabilities_of_the_completions_api() -> None:
    def place(text: str, *top: tuple[str, float]) -> api.PositionLogprobs:
        chosen = api.TokenLogprob(text=text, logprob=-0.5)
        return api.PositionLogprobs(chosen=chosen, top=[api.TokenLogprob(text=t, logprob=p) for t, p in top])

    lists, offset = answers.completion_logprobs([place("ab", ("x", -0.25)), place("c")], 4)
    assert lists == {
        "tokens": ["ab", "c"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"x": -0.25, "ab": -0.5}, {"c": -0.5}],
        "text_offset": [4, 6],
    }
    assert offset == 7
    first = place("<s>")
    first.chosen.logprob = math.nan
    for text, second in (("Once", 0), ("<s>Once", 3)):
        lists, _ = answers.completion_logprobs([first, place("Once")], 0, text)
        assert lists["text_offset"] == [0, second], "a token that the tokenizer has added is not in the text"


def test_the_receipt_is_one_line_of_ascii() -> None:
    receipt = api.Receipt(model="日本\n語", finish_reason=api.FINISH_REASON_STOP, timings=api.Timings(wall_s=0.5))
    line = answers.receipt_json(receipt)
    assert line.isascii()
    assert b"\n" not in line
    assert b'"finish_reason":"stop"' in line.replace(b" ", b"")


def test_response_formats_become_forms() -> None:
    plain = parse("chat", REQUIRED["chat"] | {"response_format": {"type": "text"}})
    assert not plain.request.sampling.HasField("structured")
    whole = parse("chat", REQUIRED["chat"] | {"response_format": {"type": "json_object"}})
    assert whole.request.sampling.structured.json_object
    named = parse("chat", REQUIRED["chat"] | {"response_format": SCHEMA})
    assert named.request.sampling.structured.json_schema == "{}"
    assert named.param("sampling.structured.json_schema") == "response_format.json_schema.schema"
    text = parse("completions", {"prompt": "a", "guided_json": '{"type": "null"}'})
    assert text.request.sampling.structured.json_schema == '{"type": "null"}'
    assert text.param("sampling.structured.json_schema") == "guided_json"
