"""Required tool calls over a whole mesh: every answer is valid calls, in the syntax of the model's chat template."""

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import pytest_asyncio
from grpc import aio

from protos import inference_pb2 as api
from tests.gateway.tool_templates import HERMES
from tests.mesh.harness import ROOT, Mesh
from weft.client.api import Client

pytestmark = pytest.mark.asyncio(loop_scope="session")

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
        "$defs": {"city": {"enum": ["Oslo", 'Rome "::=" \n}', "Żary"]}},
    },
    "clock.now": {},
    "add-friends": {
        "properties": {"names": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2}},
        "required": ["names"],
        "additionalProperties": False,
    },
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, **({"parameters": schema} if schema else {}), "strict": True}}
    for name, schema in SCHEMAS.items()
]
PROMPT: list[Any] = [{"role": "user", "content": "Once upon a time there was a little girl named Lily."}]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def teach(source: Path, folder: Path, template: str, special: tuple[str, ...]) -> Path:
    """A copy of the checkpoint with this chat template. `special` tokens replace the last ones of its vocabulary."""
    shutil.copytree(source, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab, flags = tokenizer["model"]["vocab"], dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for text, last in zip(special, sorted(vocab, key=vocab.__getitem__, reverse=True), strict=False):
        vocab[text] = vocab.pop(last)
        tokenizer["model"]["merges"] = [each for each in tokenizer["model"]["merges"] if "".join(each) != last]
        tokenizer["added_tokens"].append({"id": vocab[text], "content": text, "special": True, **flags})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    """A model of Hermes's syntax, whose tags are special tokens: no text matches them."""
    folder, source = tmp_path_factory.mktemp("calls"), ROOT / "models" / "weft-story-2m"
    model = teach(source, folder / "hermes", HERMES, ("<tool_call>", "</tool_call>"))
    async with Mesh(folder / "mesh", model) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def ai(mesh: Mesh) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client of the mesh."""
    async with openai.AsyncOpenAI(base_url=f"{mesh.url()}/v1", api_key="x") as client:
        yield client


def fields(temperature: float, **more: Any) -> dict[str, Any]:
    sampling = {"temperature": temperature, "seed": 11, "max_tokens": 400}
    return {"model": "hermes", "messages": PROMPT, "tools": TOOLS, **sampling, **more}


def check(calls: Any) -> list[tuple[str, str]]:
    """Asserts that all calls are valid. -> their names and arguments."""
    for call in calls:
        arguments = json.loads(call.function.arguments)
        assert isinstance(arguments, dict)
        jsonschema.validate(arguments, SCHEMAS[call.function.name])
        assert call.function.name != "clock.now" or arguments == {}
    return [(call.function.name, call.function.arguments) for call in calls]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_required_answers_are_valid_calls_streamed_and_whole(ai: openai.AsyncOpenAI, temperature: float) -> None:
    for choice in ("required", NAMED):
        asked = fields(temperature, tool_choice=choice, parallel_tool_calls=False)
        [whole] = (await ai.chat.completions.create(**asked)).choices
        assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
        [call] = check(whole.message.tool_calls)
        assert choice == "required" or call[0] == "get_weather"
        async with ai.chat.completions.stream(**asked) as stream:
            deltas = [event async for event in stream if event.type == "tool_calls.function.arguments.delta"]
            [streamed] = (await stream.get_final_completion()).choices
        assert check(streamed.message.tool_calls) == [call]
        assert len(deltas) > 1 or call[1] == "{}"
        assert streamed.finish_reason == "tool_calls"


async def test_calls_follow_one_another_until_the_answer_is_cut_off(ai: openai.AsyncOpenAI) -> None:
    never_ends = {"logit_bias": {"0": -100}}
    answer = await ai.chat.completions.create(**fields(0.9, tool_choice="required", n=3, **never_ends))
    for each in answer.choices:
        assert (each.finish_reason, each.message.content or "") == ("length", "")
        check(each.message.tool_calls[:-1])
    assert max(len(each.message.tool_calls) for each in answer.choices) > 1


async def test_weft_v1_has_the_same_calls(mesh: Mesh, ai: openai.AsyncOpenAI) -> None:
    asked = fields(0.0, tool_choice=NAMED)
    [expected] = check((await ai.chat.completions.create(**asked)).choices[0].message.tool_calls)
    options = {name: asked[name] for name in ("model", "temperature", "seed", "max_tokens", "tool_choice")}
    tools = [{"name": name, "parameters": schema or ""} for name, schema in SCHEMAS.items()]
    async with Client(mesh.gateways[0].address) as client:
        answer = await client.complete(PROMPT, tools=tools, **options)
    [call] = answer.choices[0].tool_calls
    assert (call.name, call.arguments) == expected


def chat(**more: Any) -> api.Prompt:
    tools = [api.Tool(name="f", parameters=more.pop("parameters", ""))]
    return api.Prompt(chat=api.Chat(messages=[api.ChatMessage(role="user", content="x")], tools=tools, **more))


@pytest.mark.parametrize(
    ("prompt", "sampling", "field"),
    [
        (chat(tool_function="g"), {}, "prompt.chat.tool_function"),
        (chat(tool_function="f", parameters='{"type": "array"}'), {}, "prompt.chat.tools.parameters"),
        (chat(tool_function="f", parameters='{"x-guidance": 1}'), {}, "prompt.chat.tools.parameters"),
        (chat(tool_function="f", parameters='{"properties": {"a": {"not": {}}}}'), {}, "prompt.chat.tools"),
        (
            chat(tool_mode=api.TOOL_MODE_REQUIRED),
            {"structured": api.Structured(json_object=True)},
            "sampling.structured",
        ),
        (
            api.Prompt(chat=api.Chat(messages=PROMPT, tool_mode=api.TOOL_MODE_REQUIRED)),
            {},
            "prompt.chat.tool_mode",
        ),
    ],
)
async def test_what_cannot_be_required_is_refused_by_name(
    mesh: Mesh, prompt: api.Prompt, sampling: dict[str, Any], field: str
) -> None:
    request = api.GenerateRequest(model="hermes", prompt=prompt, sampling=api.Sampling(**sampling))
    with pytest.raises(aio.AioRpcError) as caught:
        await mesh.stub().Complete(request)
    assert caught.value.code().name == "INVALID_ARGUMENT"
    assert field in (caught.value.details() or "")
