"""Every field of a request of the Open Inference Protocol is honoured by name, or refused by name.

The fields are those of weft.v1, read from its descriptors, and those of Triton's backends for vLLM and TensorRT-LLM.
"""

import json
import struct
from collections.abc import Sequence
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from protos import inference_pb2 as api
from protos import kserve_pb2 as kserve
from services.errors import WeftError, invalid
from services.gateway.doors.kserve import answers
from services.gateway.doors.kserve import requests as messages
from services.gateway.doors.kserve import tensors as kserve_tensors
from services.gateway.doors.kserve.requests import ALIASES, FIELDS, OUTPUTS, OWN, PROMPTS, PROTOCOL, REFUSED, parse
from tests.gateway.test_weft_fields import HONOURED as HONOURED_BY_WEFT

# Inputs of the models that Triton's two backends for language models configure.
VLLM_BACKEND = {
    "text_input", "image", "stream", "sampling_parameters", "exclude_input_in_output", "return_finish_reason",
    "return_cumulative_logprob", "return_logprobs", "return_num_input_tokens", "return_num_output_tokens",
}  # fmt: skip
TENSORRT_LLM_ENSEMBLE = {
    "text_input", "max_tokens", "bad_words", "stop_words", "end_id", "pad_id", "top_k", "top_p", "temperature",
    "length_penalty", "repetition_penalty", "min_tokens", "presence_penalty", "frequency_penalty", "random_seed",
    "return_log_probs", "return_context_logits", "return_generation_logits", "beam_width", "stream",
    "prompt_embedding_table", "embedding_bias_words", "embedding_bias_weights", "num_return_sequences",
    "exclude_input_in_output", "return_perf_metrics",
}  # fmt: skip
VLLM_SAMPLING = {
    "n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k",
    "min_p", "seed", "stop", "stop_token_ids", "bad_words", "ignore_eos", "max_tokens", "min_tokens", "logprobs",
    "prompt_logprobs", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output",
    "truncate_prompt_tokens", "logit_bias",
}  # fmt: skip
TRITON_PARAMETERS = {
    "sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "triton_enable_empty_final_response",
}  # fmt: skip


def message(**parameters: Any) -> kserve.ModelInferRequest:
    """A request for the prompt "hi" with these parameters."""
    request = kserve.ModelInferRequest(model_name="fox")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"hi")
    kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
    for name, value in parameters.items():
        setattr(request.parameters[name], kinds[type(value)], value)
    return request


def tensor(request: kserve.ModelInferRequest, name: str, datatype: str, values: Sequence[Any]) -> None:
    """Adds an input with typed contents."""
    entry = request.inputs.add(name=name, datatype=datatype, shape=[len(values)])
    elements = [value.encode() for value in values] if datatype == "BYTES" else values
    getattr(entry.contents, kserve_tensors.FORMATS[datatype][1]).extend(elements)


def refusal(request: kserve.ModelInferRequest) -> WeftError:
    """The error of a request."""
    with pytest.raises(WeftError) as caught:
        parse(request)
    return caught.value


def example(field: FieldDescriptor) -> tuple[Any, str]:
    """A value of a field that is not its default, as a parameter; and its datatype as a tensor."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return '{"5": 1.5}', "BYTES"
    if field.message_type is not None:
        return "[{}]" if field.is_repeated else "{}", "BYTES"
    if field.enum_type is not None:
        return field.enum_type.values[1].name.removeprefix(
            field.enum_type.values[0].name.removesuffix("UNSPECIFIED")
        ).lower(), "BYTES"
    return {
        FieldDescriptor.CPPTYPE_FLOAT: (0.5, "FP32"),
        FieldDescriptor.CPPTYPE_BOOL: (True, "BOOL"),
        FieldDescriptor.CPPTYPE_STRING: ("some", "BYTES"),
    }.get(int(field.cpp_type), (3, "INT32"))


def owner(request: api.GenerateRequest, field: FieldDescriptor) -> Any:
    """The message of a request that has the field."""
    return request.sampling if field.containing_type is api.Sampling.DESCRIPTOR else request


def is_set(request: api.GenerateRequest, field: FieldDescriptor) -> bool:
    """The request has the field."""
    return field.name in [each.name for each, _ in owner(request, field).ListFields()]


def test_every_field_of_weft_v1_has_its_own_name() -> None:
    requests = {field.name for field in api.GenerateRequest.DESCRIPTOR.fields}
    sampling = {field.name for field in api.Sampling.DESCRIPTOR.fields}
    assert FIELDS.keys() == (requests | sampling) - {"model", "prompt", "sampling", "priority"} - REFUSED.keys()
    assert "priority" in PROTOCOL
    assert {"text", "chat", "token_ids"} == {each.name for each in api.Prompt.DESCRIPTOR.fields}
    assert PROMPTS.keys() == {"text_input", "messages", "input_ids"}
    effects = {path.removeprefix("sampling.").partition(".")[0] for path in HONOURED_BY_WEFT}
    assert FIELDS.keys() <= effects, "what becomes of each is the table of `test_weft_fields`"


@pytest.mark.parametrize(
    "names", [VLLM_BACKEND, TENSORRT_LLM_ENSEMBLE, VLLM_SAMPLING, TRITON_PARAMETERS], ids=["vllm", "trt", "v1", "own"]
)
def test_every_field_of_tritons_backends_is_in_one_of_the_lists(names: set[str]) -> None:
    assert names <= messages.KNOWN
    assert not FIELDS.keys() & ALIASES.keys()
    assert set(ALIASES.values()) <= FIELDS.keys()


@pytest.mark.parametrize("name", sorted(FIELDS.keys() - OWN.keys()))
def test_a_field_arrives_as_parameter_tensor_and_json(name: str) -> None:
    field = FIELDS[name]
    value, datatype = example(field)
    by_parameter = parse(message(**{name: value})).request
    request = message()
    tensor(request, name, datatype, [value])
    by_tensor = parse(request).request
    by_json = parse(message(sampling_parameters=json.dumps({name: value}))).request
    assert is_set(by_parameter, field)
    assert by_parameter == by_tensor == by_json
    assert not is_set(parse(message()).request, field)


@pytest.mark.parametrize("name", sorted(FIELDS.keys() | ALIASES.keys()))
def test_a_field_of_a_wrong_type_is_refused_by_name(name: str) -> None:
    field = FIELDS[ALIASES.get(name, name)]
    wrong: dict[int, Any] = {FieldDescriptor.CPPTYPE_BOOL: 1, FieldDescriptor.CPPTYPE_STRING: True}
    bad = message(**{name: wrong.get(int(field.cpp_type), "wrong")})
    error = refusal(bad)
    assert (error.field, error.code.name) == (name, "INVALID_ARGUMENT")
    if not field.is_repeated:
        several = message()
        value, datatype = example(field)
        tensor(several, name, datatype, [value, value])
        assert refusal(several).field == name


@pytest.mark.parametrize("name", sorted(REFUSED.keys() - FIELDS.keys()))
def test_a_refused_field_is_refused_by_name_and_its_neutral_values_are_not(name: str) -> None:
    for value in ("something", 5, 0.25):
        error = refusal(message(**{name: value}))
        assert (error.field, error.reason, error.code.name) == (name, "UNSUPPORTED_FIELD", "INVALID_ARGUMENT")
    for neutral in REFUSED[name][0]:
        parse(message(**{name: neutral}))


@pytest.mark.parametrize("name", sorted(messages.KNOWN - REFUSED.keys()))
def test_a_field_that_is_given_twice_is_refused_by_name(name: str) -> None:
    value: Any = "hi"
    datatype = "BYTES"
    if name in FIELDS or name in ALIASES:
        value, datatype = example(FIELDS[ALIASES.get(name, name)])
    elif name in PROTOCOL or name in OWN:
        value, datatype = {
            "sampling_parameters": ("{}", "BYTES"),
            "timeout": (1, "INT64"),
            "priority": (1, "INT64"),
            "end_id": (1, "INT32"),
            "pad_id": (1, "INT32"),
        }.get(name, (True, "BOOL"))
    elif name == "input_ids":
        value, datatype = 1, "INT32"
    elif name == "messages":
        value = "[]"
    request = message(**{name: value})
    tensor(request, name, datatype, [value]) if name not in PROMPTS else None
    assert refusal(request).field in (name, "text_input")


def test_what_nobody_has_is_refused_by_name() -> None:
    assert refusal(message(guided_json="{}")).field == "guided_json"
    assert refusal(message(sampling_parameters='{"tempreature": 1}')).field == "sampling_parameters.tempreature"
    assert refusal(message(sampling_parameters='{"stream": true}')).field == "sampling_parameters.stream"
    request = message()
    tensor(request, "logits", "FP32", [1.0])
    assert refusal(request).field == "logits"
    request = message()
    request.outputs.add(name="embedding")
    assert refusal(request).field == "embedding"
    request = message()
    request.outputs.add(name="text_output").parameters["classification"].int64_param = 3
    assert refusal(request).field == "text_output.classification"
    request = message()
    request.inputs[0].parameters["shared_memory_region"].string_param = "x"
    assert refusal(request).field == "text_input.shared_memory_region"
    request = message()
    request.model_version = "2"
    assert (refusal(request).field, refusal(request).code.name) == ("model_version", "NOT_FOUND")
    unknown = kserve.ModelInferRequest.FromString(message().SerializeToString() + b"\xa2\x06\x01x")
    assert refusal(unknown).reason == "UNKNOWN_FIELD"


@pytest.mark.parametrize(
    ("datatype", "shape", "raw", "field"),
    [
        ("BYTES", [1], b"\x05\x00\x00\x00hi", "text_input"),
        ("BYTES", [1], b"\x02\x00", "text_input"),
        ("BYTES", [1], b"\x02\x00\x00\x00\xff\xfe", "text_input"),
        ("BYTES", [2], b"\x02\x00\x00\x00hi", "text_input"),
        ("BYTES", [-1, -1], b"\x02\x00\x00\x00hi", "text_input"),
        ("BYTES", [2], b"\x01\x00\x00\x00h\x01\x00\x00\x00i", "text_input"),
        ("INT32", [1], b"\x02\x00\x00\x00", "text_input"),
        ("INT32", [1], b"\x02\x00\x00", "text_input"),
        ("BF16", [1], b"\x02\x00", "text_input"),
    ],
)
def test_raw_bytes_that_are_no_tensor_are_refused_by_name(
    datatype: str, shape: list[int], raw: bytes, field: str
) -> None:
    request = kserve.ModelInferRequest()
    request.inputs.add(name="text_input", datatype=datatype, shape=shape)
    request.raw_input_contents.append(raw)
    assert refusal(request).field == field


@pytest.mark.parametrize("datatype", sorted(kserve_tensors.FORMATS.keys() - {"BYTES", "BOOL"}))
def test_a_tensor_of_every_datatype_is_read(datatype: str) -> None:
    is_float = datatype.startswith("FP")
    name, value = ("temperature", 0.5) if is_float else ("max_tokens", 7)
    request = message()
    request.inputs.add(name=name, datatype=datatype, shape=[1, 1])
    request.inputs[0].ClearField("contents")
    packed = struct.pack(f"<{kserve_tensors.FORMATS[datatype][0]}", value)
    request.raw_input_contents.extend([b"\x02\x00\x00\x00hi", packed])
    sampling = parse(request).request.sampling
    assert (sampling.temperature if is_float else sampling.max_tokens) == value


def test_raw_and_typed_contents_exclude_each_other() -> None:
    request = message()
    request.raw_input_contents.append(b"\x02\x00\x00\x00hi")
    assert refusal(request).field == "text_input"
    request.raw_input_contents.append(b"")
    assert refusal(request).field == "raw_input_contents"


def test_the_words_of_tensorrt_llms_ensemble() -> None:
    request = message()
    tensor(request, "stop_words", "BYTES", ["end", "fin"])
    tensor(request, "bad_words", "BYTES", [""])
    tensor(request, "random_seed", "UINT64", [(1 << 64) - 1])
    tensor(request, "end_id", "INT32", [2])
    tensor(request, "pad_id", "INT32", [2])
    tensor(request, "beam_width", "INT32", [1])
    asked = parse(request)
    sampling = asked.request.sampling
    assert (list(sampling.stop), sampling.seed, list(sampling.stop_token_ids)) == (["end", "fin"], (1 << 64) - 1, [2])
    assert asked.param("sampling.seed") == "random_seed"
    assert messages.renamed(invalid("sampling.stop", "at most 16"), asked).message == "stop_words: at most 16"


def test_priorities_count_as_tritons() -> None:
    priorities = [parse(message(priority=level)).request.priority for level in (0, 1, 2, 101, 201)]
    assert priorities == [0, 100, 99, 0, -100]
    assert refusal(message(priority=202)).field == "priority"


def test_numbers_may_be_text_and_top_k_may_be_minus_one() -> None:
    sampling = parse(message(temperature="0.25", max_tokens="7", top_k=-1)).request.sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.top_k) == (0.25, 7, 0)
    assert refusal(message(top_k=-2)).field == "top_k"
    assert refusal(message(max_tokens=1 << 32)).field == "max_tokens"


def test_a_timeout_is_in_microseconds() -> None:
    assert parse(message(timeout=2_500_000)).timeout_s == 2.5
    assert parse(message(timeout=0)).timeout_s is None
    assert messages.sooner(2.5, None) == 2.5
    assert messages.sooner(None, None) is None
    assert messages.sooner(2.5, 1.0) == 1.0


def test_the_prompt_has_one_form() -> None:
    request = kserve.ModelInferRequest()
    assert refusal(request).reason == "EMPTY_PROMPT"
    tensor(request, "input_ids", "INT32", [3, 4])
    assert list(parse(request).request.prompt.token_ids.ids) == [3, 4]
    both = message()
    tensor(both, "input_ids", "INT32", [3, 4])
    assert refusal(both).field == "input_ids"
    negative = kserve.ModelInferRequest()
    tensor(negative, "input_ids", "INT32", [-3])
    assert refusal(negative).field == "input_ids"


@pytest.mark.parametrize(
    "text", ['[{"role": "user", "content": "x"}]', '{"messages": [{"role": "user", "content": "x"}]}']
)
def test_a_conversation_is_the_json_of_weft_v1(text: str) -> None:
    request = kserve.ModelInferRequest()
    tensor(request, "messages", "BYTES", [text])
    [turn] = parse(request).request.prompt.chat.messages
    assert (turn.role, turn.content) == ("user", "x")
    for wrong in ("{", "5", '[{"rôle": "user"}]', '"x"', "[5]", "[" * 5000):
        request = kserve.ModelInferRequest()
        tensor(request, "messages", "BYTES", [wrong])
        assert refusal(request).field == "messages"


def test_json_with_too_many_entries_is_refused_before_it_is_read() -> None:
    def rule(name: str, value: object) -> str:
        request = kserve.ModelInferRequest()
        tensor(request, name, "BYTES", [json.dumps(value)])
        return refusal(request).message

    many = [*[{}] * 1024, 5]
    assert rule("messages", many) == rule("messages", {"messages": many}) == "messages: at most 1024"
    assert rule("messages", {"tools": many}) == "messages.tools: at most 128"
    for calls in ({"tool_calls": many}, {"tool_calls": None, "toolCalls": many}, {"tool_calls": {}, "toolCalls": many}):
        assert rule("messages", [5, calls]) == "messages.tool_calls: at most 1024"
    assert rule("bad_token_sequences", many) == "bad_token_sequences: at most 1024"
    assert rule("logit_bias", dict.fromkeys(range(1025), "x")) == "logit_bias: at most 1024"


def test_flags_ask_for_tensors_beside_the_text() -> None:
    flags = {name: True for name in OWN if name.startswith("return_")}
    asked = parse(message(**flags))
    assert asked.outputs[0] == "text_output"
    assert set(asked.outputs) == set(OUTPUTS) - {"output_ids", "sequence_length", "sequence_index"}
    assert asked.request.sampling.HasField("logprobs")
    only = message(return_finish_reason=True)
    only.outputs.add(name="output_ids")
    assert parse(only).outputs == ["output_ids", "finish_reason"]


def test_metadata_and_config_list_the_same_tensors() -> None:
    model = api.Model(name="fox", architecture="Fox", context_length=512)
    described, configured = answers.metadata(model), answers.config(model).config
    assert {each.name for each in described.inputs} == {each.name for each in configured.input}
    assert {each.name for each in described.outputs} == {each.name for each in configured.output} == OUTPUTS.keys()
    named = {each.name for each in described.inputs}
    assert named <= messages.KNOWN
    assert FIELDS.keys() | PROMPTS.keys() <= named
    assert configured.model_transaction_policy.decoupled
