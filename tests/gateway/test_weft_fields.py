"""Every field of weft.v1's request, read from its descriptor, has its effect, and a wrong value is refused by name."""

import hashlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest
import pytest_asyncio
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.json_format import ParseDict
from grpc import aio

from protos import inference_pb2 as api
from protos import mesh_pb2
from tests.gateway.fakes import FakeMesh
from tests.gateway.model import BUNDLE, TOKENIZER, ids_of, make_card

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEMPLATE = (
    "{{ messages | tojson }} {{ tools | tojson }} begins: {{ add_generation_prompt }} thinks: {{ enable_thinking }}"
    "{# calls are <tool_call> with arguments #}"
)
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
SCRIPT = f"The quick fox. {CALL}{CALL}"


@dataclass
class Seen:
    """What became of a request."""

    job: mesh_pb2.Job
    submit: mesh_pb2.Submit
    reply: api.CompleteResponse

    @property
    def text(self) -> str:
        """The prompt that the model reads."""
        return str(TOKENIZER.decode(list(self.job.token_ids), skip_special_tokens=False))

    @property
    def grammar(self) -> str:
        """The grammar of the answer."""
        return self.job.sampling.structured.grammar

    @property
    def choice(self) -> api.Choice:
        """The first answer."""
        return self.reply.choices[0]


Row: TypeAlias = tuple[Any, Callable[[Seen], Any], Any]
"""A value of the field, what to look at, and what is found there; without the field something else is found."""


def rendered(value: Any, text: str) -> Row:
    """The prompt contains this text."""
    return value, lambda seen: text in seen.text, True


def arrives(name: str, value: Any) -> Row:
    """The worker's job has this value."""

    def found(seen: Seen) -> Any:
        at: Any = seen.job.sampling
        for part in name.split("."):
            at = getattr(at, part)
        return dict(at) if isinstance(value, dict) else list(at) if isinstance(value, list) else at

    return value, found, {int(key): each for key, each in value.items()} if isinstance(value, dict) else value


IN_A_JOB: dict[str, Any] = {
    "max_tokens": 7, "min_tokens": 3, "temperature": 0.5, "top_k": 5, "top_p": 0.25, "min_p": 0.5,
    "repetition_penalty": 1.5, "presence_penalty": -1.5, "frequency_penalty": 0.5, "seed": 9, "stop_token_ids": [3],
    "logit_bias": {"5": -1.5}, "logprobs": 2, "ignore_eos": True, "prompt_logprobs": 2,
    "structured.json_schema": '{"type": "integer"}', "structured.json_object": True, "structured.regex": "a+",
    "structured.choice.texts": ["a", "b"], "structured.grammar": 'start: "a"',
}  # fmt: skip
HONOURED: dict[str, Row] = {
    "model": ("alias", lambda seen: seen.submit.model, "fake"),
    "prompt.text": ("a fox", lambda seen: seen.text, "<s>a fox"),
    "prompt.token_ids.ids": ([5, 7], lambda seen: list(seen.job.token_ids), [5, 7]),
    "prompt.chat.messages.role": rendered("narrator", '"role": "narrator"'),
    "prompt.chat.messages.content": rendered("a fox", '"content": "a fox"'),
    "prompt.chat.messages.name": rendered("Ada", '"name": "Ada"'),
    "prompt.chat.messages.tool_calls.id": rendered("call-9", '"id": "call-9"'),
    "prompt.chat.messages.tool_calls.name": rendered("other", '"name": "other"'),
    "prompt.chat.messages.tool_calls.arguments": rendered('{"a": 1}', '"arguments": {"a": 1}'),
    "prompt.chat.messages.tool_call_id": rendered("call-9", '"tool_call_id": "call-9"'),
    "prompt.chat.tools.name": rendered("other", '"name": "other"'),
    "prompt.chat.tools.description": rendered("It counts.", '"description": "It counts."'),
    "prompt.chat.tools.parameters": rendered('{"title": "x"}', '"parameters": {"title": "x"}'),
    "prompt.chat.template_variables": rendered('{"enable_thinking": false}', "thinks: False"),
    "prompt.chat.add_generation_prompt": rendered(False, "begins: False"),
    "prompt.chat.continue_final_message": (True, lambda seen: seen.text.endswith('"content": "hi'), True),
    "prompt.chat.tool_mode": ("TOOL_MODE_REQUIRED", lambda seen: "call_0" in seen.grammar, True),
    "prompt.chat.tool_function": ("f", lambda seen: "call_0" in seen.grammar, True),
    "prompt.chat.parallel_tool_calls": (False, lambda seen: len(seen.choice.tool_calls), 1),
    "sampling.stop": (["quick"], lambda seen: seen.choice.text, "The "),
    "sampling.include_stop_string": (True, lambda seen: seen.choice.text, "The quick"),
    "sampling.bad_words": (["fox"], lambda seen: len(seen.job.sampling.bad_token_sequences), 2),
    "sampling.bad_token_sequences.ids": (
        [4, 6],
        lambda seen: [list(each.ids) for each in seen.job.sampling.bad_token_sequences],
        [[4, 6]],
    ),
    **{f"sampling.{name}": arrives(name, value) for name, value in IN_A_JOB.items()},
    "n": (2, lambda seen: len(seen.reply.choices), 2),
    "priority": (5, lambda seen: (seen.submit.priority, seen.job.priority), (5, 5)),
    "cache": ("CACHE_POLICY_BYPASS", lambda seen: seen.job.bypass_cache, True),
    "request_id": ("mine", lambda seen: seen.reply.receipt.request_id, "mine"),
    "speculation": (3, lambda seen: seen.job.speculation, 3),
    "criticality": ("CRITICALITY_SHEDDABLE", lambda seen: seen.submit.sheddable, True),
    "echo": (True, lambda seen: seen.reply.prompt.text, "hello world"),
}
ALONG: dict[str, dict[str, Any]] = {
    "sampling.include_stop_string": {"sampling.stop": ["quick"]},
    "prompt.chat.messages.tool_calls.id": {"prompt.chat.messages.tool_calls.name": "f"},
    "prompt.chat.messages.tool_calls.arguments": {"prompt.chat.messages.tool_calls.name": "f"},
    **{
        f"prompt.chat.{name}": {"prompt.chat.tools.name": "f"}
        for name in ("tools.description", "tools.parameters", "tool_mode", "tool_function", "parallel_tool_calls")
    },
}
"""Fields without which a field has no meaning."""
WRONG: dict[str, Any] = {
    "model": "unknown",
    "prompt.text": "",
    "prompt.token_ids.ids": [10**6],
    "prompt.chat.messages.role": "",
    "prompt.chat.messages.tool_calls.name": "two words",
    "prompt.chat.messages.tool_calls.arguments": "[]",
    "prompt.chat.tools.name": "two words",
    "prompt.chat.tools.parameters": "5",
    "prompt.chat.template_variables": '{"unread": 1}',
    "prompt.chat.tool_mode": 9,
    "prompt.chat.tool_function": "g",
    "sampling.max_tokens": 0,
    "sampling.min_tokens": 401,
    "sampling.temperature": 101.0,
    "sampling.top_p": 1.5,
    "sampling.min_p": -0.5,
    "sampling.repetition_penalty": 0.0,
    "sampling.presence_penalty": 2.5,
    "sampling.frequency_penalty": -2.5,
    "sampling.stop": [""],
    "sampling.stop_token_ids": [10**6],
    "sampling.logit_bias": {"5": 101.0},
    "sampling.logprobs": 21,
    "sampling.prompt_logprobs": 21,
    "sampling.bad_words": [""],
    "sampling.bad_token_sequences.ids": [10**6],
    "sampling.structured.json_schema": "{",
    "sampling.structured.json_object": False,
    "sampling.structured.regex": "(",
    "sampling.structured.choice.texts": ["a", "a"],
    "sampling.structured.grammar": "start: (",
    "n": 17,
    "priority": 101,
    "cache": 9,
    "request_id": "not good",
    "speculation": 9,
    "criticality": 9,
}
ANYTHING = {
    # Any text, or any number of 32 or 64 bits.
    "prompt.chat.messages.content", "prompt.chat.messages.name", "prompt.chat.messages.tool_calls.id",
    "prompt.chat.messages.tool_call_id", "prompt.chat.tools.description", "sampling.top_k", "sampling.seed",
}  # fmt: skip
NAMED_BY = {
    "model": "no model 'unknown'",
    "prompt.token_ids.ids": "prompt.token_ids",
    "sampling.bad_token_sequences.ids": "sampling.bad_token_sequences",
    "sampling.structured.choice.texts": "sampling.structured.choice",
}
"""How the error begins, where it does not begin with the field."""


def leaves(descriptor: Descriptor, at: str = "") -> Iterator[tuple[str, FieldDescriptor]]:
    """The fields of a message that are no messages, each with its path."""
    for field in descriptor.fields:
        inner = field.message_type
        if inner is None or inner.GetOptions().map_entry:
            yield f"{at}{field.name}", field
        else:
            yield from leaves(inner, f"{at}{field.name}.")


LEAVES = dict(leaves(api.GenerateRequest.DESCRIPTOR))


def request_of(given: dict[str, Any]) -> api.GenerateRequest:
    """A request with these values at their paths; repeated messages have one element."""
    form = next((path.split(".")[1] for path in given if path.startswith("prompt.")), "text")
    values: dict[str, Any] = {"sampling.max_tokens": 400, "sampling.temperature": 0.0}
    if form == "text":
        values |= {"prompt.text": "hello world"}
    elif form == "chat":
        values |= {"prompt.chat.messages.role": "user", "prompt.chat.messages.content": "hi"}
    body: dict[str, Any] = {}
    for path, value in (values | given).items():
        *parents, last = path.split(".")
        descriptor, place = api.GenerateRequest.DESCRIPTOR, body
        for name in parents:
            field = descriptor.fields_by_name[name]
            assert field.message_type is not None
            descriptor = field.message_type
            inner = place.setdefault(name, [{}] if field.is_repeated else {})
            place = inner[0] if field.is_repeated else inner
        place[last] = value
    return ParseDict(body, api.GenerateRequest())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[FakeMesh]:
    """A gateway and a worker that always writes the same."""
    bundle = mesh_pb2.Bundle.FromString(BUNDLE)
    bundle.chat_template = TEMPLATE
    data = bundle.SerializeToString()
    card = make_card(context_length=2048, bundle_digest=hashlib.sha256(data).digest())
    async with FakeMesh(bundle=data, card=card, script=lambda job: ids_of(SCRIPT)) as running:
        yield running


async def seen(mesh: FakeMesh, given: dict[str, Any]) -> Seen:
    """What becomes of a request."""
    reply = await mesh.stub.Complete(request_of(given))
    return Seen(mesh.workers[0].jobs[-1], mesh.scheduler.submits[-1], reply)


async def test_the_tables_have_every_field() -> None:
    assert HONOURED.keys() == LEAVES.keys()
    flags = {path for path, field in LEAVES.items() if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL}
    assert WRONG.keys() | ANYTHING | flags == LEAVES.keys()
    assert not WRONG.keys() & ANYTHING


@pytest.mark.parametrize("path", LEAVES)
async def test_a_field_has_its_effect(mesh: FakeMesh, path: str) -> None:
    value, look, expected = HONOURED[path]
    along = ALONG.get(path, {})
    assert look(await seen(mesh, along | {path: value})) == expected
    if path != "model":  # It names the same model, by another name.
        form = {"prompt.chat.messages.role": "user"} if path.startswith("prompt.chat") else {}
        assert look(await seen(mesh, form | along)) != expected


@pytest.mark.parametrize("path", WRONG)
async def test_a_wrong_value_is_refused_by_name(mesh: FakeMesh, path: str) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await seen(mesh, ALONG.get(path, {}) | {path: WRONG[path]})
    assert caught.value.code().name == ("NOT_FOUND" if path == "model" else "INVALID_ARGUMENT")
    assert (caught.value.details() or "").startswith(NAMED_BY.get(path, path))
