"""Requests of the Open Inference Protocol as messages of weft.v1. Pure: knows neither gRPC contexts nor HTTP nor time.

A request names its fields as tensors, as parameters, or as keys of the JSON object in the tensor `sampling_parameters`;
all are read by `apply`. Every field of weft.v1's GenerateRequest and Sampling has its own name; the names of Triton's
backends for vLLM and TensorRT-LLM are accepted beside them, and what they have and Weft has not is refused by name.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from grpc import StatusCode

from protos import inference_pb2 as api
from protos import kserve_pb2 as kserve
from services import validate
from services.errors import WeftError, invalid
from services.gateway.doors.kserve.tensors import tensors
from services.gateway.doors.kserve.values import assign, check_count, flag, integer, one
from services.validate_chat import MAX_CALLS, MAX_MESSAGES, MAX_TOOLS, calls_in

VERSION = "1"
PRIORITY_LEVELS = 2 * validate.MAX_PRIORITY + 1
DEFAULT_PRIORITY = validate.MAX_PRIORITY + 1
"""Priorities as Triton counts them: 1 is the highest, and this one belongs to requests without a priority."""


@dataclass(slots=True)
class Asked:
    """A request as it was understood."""

    id: str = ""
    """The caller's id, which the answer repeats."""
    request: api.GenerateRequest = field(default_factory=api.GenerateRequest)
    stream: bool | None = None
    """One response for each part of the answer, or one for the whole; None: the method's default."""
    outputs: list[str] = field(default_factory=list)
    """Names of the tensors of the answer."""
    extra: list[str] = field(default_factory=list)
    """Names of tensors that flags ask for: they come beside the others."""
    empty_final: bool = False
    """The final response of a stream is one of its own, without tensors."""
    timeout_s: float | None = None
    raw: bool = False
    """The answer has its tensors as raw bytes, as the request has."""
    prefix: str = ""
    """Text before that of the answer."""
    names: dict[str, str] = field(default_factory=dict)
    """The name that the caller gave to each field of weft.v1."""
    with_prompt: str = ""
    """The name of the field that asks for the prompt before the answer, if one does."""

    def param(self, name: str) -> str:
        """The caller's name for a field of weft.v1, such as "sampling.max_tokens"."""
        if name.partition(".")[0] == "prompt":
            given, chat = self.names.get("prompt", "text_input"), name.removeprefix("prompt.chat.")
            if chat == name:
                return given
            return chat if chat.startswith("messages") else f"{given}.{chat}"
        if name == "model":
            return "model_name"
        name = name.removeprefix("sampling.")
        return self.names.get(name, name)


# ---- names of fields ----

Setter: TypeAlias = Callable[[Asked, str, Any], None]


def _text(asked: Asked, name: str, value: Any) -> None:
    text = one(name, value)
    if not isinstance(text, str):
        raise invalid(name, "one string")
    asked.request.prompt.text = text


def _ids(asked: Asked, name: str, value: Any) -> None:
    assign(asked.request.prompt.token_ids, api.TokenIds.DESCRIPTOR.fields_by_name["ids"], name, value)
    asked.request.prompt.token_ids.SetInParent()


def _messages(asked: Asked, name: str, value: Any) -> None:
    """A conversation: the JSON of weft.v1's Chat, or of the list of its messages."""
    value = one(name, value) if isinstance(value, list) and value and isinstance(value[0], str) else value
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
        chat = {"messages": parsed} if isinstance(parsed, list) else parsed
        check_count(name, chat.get("messages"), MAX_MESSAGES)
        check_count(f"{name}.tool_calls", calls_in(chat.get("messages") or ()), MAX_CALLS)
        check_count(f"{name}.tools", chat.get("tools"), MAX_TOOLS)
        json_format.ParseDict(chat, asked.request.prompt.chat)
    except (ValueError, RecursionError, TypeError, AttributeError, json_format.ParseError):
        raise invalid(name, "not the JSON of weft.v1's Chat, or of a list of its messages") from None
    asked.request.prompt.chat.SetInParent()


def _stream(asked: Asked, name: str, value: Any) -> None:
    asked.stream = flag(name, one(name, value))


def _empty_final(asked: Asked, name: str, value: Any) -> None:
    asked.empty_final = flag(name, one(name, value))


def _timeout(asked: Asked, name: str, value: Any) -> None:
    """Microseconds, as in Triton; 0 for none."""
    microseconds = integer(name, one(name, value))
    if microseconds < 0:
        raise invalid(name, "microseconds, at least 0")
    asked.timeout_s = microseconds / 1e6 if microseconds else None


def _priority(asked: Asked, name: str, value: Any) -> None:
    """As Triton counts: 1 is the highest, 0 the default."""
    level = integer(name, one(name, value))
    if not 0 <= level <= PRIORITY_LEVELS:
        raise invalid(name, f"0 to {PRIORITY_LEVELS}, of which 1 is the highest and {DEFAULT_PRIORITY} the default")
    asked.request.priority = DEFAULT_PRIORITY - level if level else 0


def _end_id(asked: Asked, name: str, value: Any) -> None:
    """A token that ends the answer; -1 for none."""
    token = integer(name, one(name, value))
    if token != -1:
        assign(asked.request.sampling, api.Sampling.DESCRIPTOR.fields_by_name["stop_token_ids"], name, token)


def _pad_id(asked: Asked, name: str, value: Any) -> None:
    """Answers are not padded, so every value is as good."""
    integer(name, one(name, value))


def _without_prompt(asked: Asked, name: str, value: Any) -> None:
    asked.with_prompt = "" if flag(name, one(name, value)) else name


def _top_k(asked: Asked, name: str, value: Any) -> None:
    """-1 keeps all tokens, as 0 does: vLLM writes it so."""
    asked.request.sampling.top_k = 0
    top_k = integer(name, one(name, value))
    assign(asked.request.sampling, api.Sampling.DESCRIPTOR.fields_by_name["top_k"], name, 0 if top_k == -1 else top_k)


def _returns(*outputs: str) -> Setter:
    """A flag that asks for tensors of the answer."""

    def returns(asked: Asked, name: str, value: Any) -> None:
        if flag(name, one(name, value)):
            asked.extra.extend(outputs)

    return returns


def _sampling_parameters(asked: Asked, name: str, value: Any) -> None:
    """The JSON object of further fields, as of Triton's backend for vLLM; null is as good as absent."""
    try:
        fields = json.loads(one(name, value))
    except (ValueError, TypeError, RecursionError):
        raise invalid(name, "not JSON") from None
    if not isinstance(fields, dict):
        raise invalid(name, "not a JSON object")
    for key, each in fields.items():
        if key not in KNOWN - PROMPTS.keys() - PROTOCOL.keys():
            raise unknown(f"{name}.{key}")
        if each is not None:
            apply(asked, key, each)


PROMPTS: Mapping[str, Setter] = {"text_input": _text, "input_ids": _ids, "messages": _messages}
"""The prompt; exactly one is given."""
PROTOCOL: Mapping[str, Setter] = {
    "sampling_parameters": _sampling_parameters,
    "stream": _stream,
    "timeout": _timeout,
    "priority": _priority,
    "triton_enable_empty_final_response": _empty_final,
}
OWN: Mapping[str, Setter] = {
    "top_k": _top_k,
    "end_id": _end_id,
    "pad_id": _pad_id,
    "exclude_input_in_output": _without_prompt,
    "return_log_probs": _returns("output_log_probs", "cum_log_probs"),
    "return_logprobs": _returns("logprobs"),
    "return_cumulative_logprob": _returns("cumulative_logprob"),
    "return_finish_reason": _returns("finish_reason"),
    "return_num_input_tokens": _returns("num_input_tokens"),
    "return_num_output_tokens": _returns("num_output_tokens"),
}
"""Fields of Triton's backends that need more than another name."""
ALIASES = {
    "random_seed": "seed",
    "stop_words": "stop",
    "num_return_sequences": "n",
    "include_stop_str_in_output": "include_stop_string",
}
"""Names of Triton's backends for fields of weft.v1."""
FIELDS: Mapping[str, FieldDescriptor] = {
    each.name: each
    for descriptor in (api.GenerateRequest.DESCRIPTOR, api.Sampling.DESCRIPTOR)
    for each in descriptor.fields
    if each.name not in ("model", "prompt", "sampling", "priority", "echo", "prompt_logprobs")
}
"""The fields of weft.v1 by their own names: those of Sampling, and those of GenerateRequest that are left."""
_BEAMS = "there is no beam search"
_LOGITS = "logits are not sent: see logprobs"
REFUSED: Mapping[str, tuple[Sequence[object], str]] = {
    "beam_search_diversity_rate": ((0, 0.0), _BEAMS),
    "beam_width": ((1,), _BEAMS),
    "best_of": ((1,), "only 1 is supported: see n"),
    "echo": ((False,), "see exclude_input_in_output"),
    "early_stopping": ((0, False), _BEAMS),
    "embedding_bias_weights": ((), "not supported: see logit_bias"),
    "embedding_bias_words": ((), "not supported: see logit_bias"),
    "image": ((), "prompts are text"),
    "len_penalty": ((0, 0.0, 1, 1.0), _BEAMS),
    "length_penalty": ((0, 0.0, 1, 1.0), _BEAMS),
    "lora_name": (("",), "name the adapter in the model: MODEL:ADAPTER"),
    "lora_task_id": ((0,), "name the adapter in the model: MODEL:ADAPTER"),
    "no_repeat_ngram_size": ((0,), "not supported: see repetition_penalty"),
    "prompt_embedding_table": ((), "prompts are text"),
    "prompt_logprobs": ((), "not supported"),
    "return_context_logits": ((False,), _LOGITS),
    "return_generation_logits": ((False,), _LOGITS),
    "return_perf_metrics": ((False,), "see the receipt"),
    "sequence_end": ((False,), "requests have no state"),
    "sequence_id": ((0, ""), "requests have no state"),
    "sequence_start": ((False,), "requests have no state"),
    "skip_special_tokens": ((True,), "special tokens are never in the text"),
    "spaces_between_special_tokens": ((True,), "special tokens are never in the text"),
    "top_p_decay": ((1, 1.0), "not supported"),
    "top_p_min": ((0, 0.0), "not supported"),
    "top_p_reset_ids": ((-1,), "not supported"),
    "truncate_prompt_tokens": ((), "prompts are not truncated"),
    "use_beam_search": ((False,), _BEAMS),
}
"""Fields of Triton and its backends that are refused: values that change nothing, and the reason."""
KNOWN = PROMPTS.keys() | PROTOCOL.keys() | OWN.keys() | ALIASES.keys() | FIELDS.keys() | REFUSED.keys()
"""The names of all fields."""
OUTPUTS: Mapping[str, tuple[str, int]] = {
    "text_output": ("BYTES", -1),
    "output_ids": ("INT32", -1),
    "sequence_length": ("INT32", -1),
    "sequence_index": ("INT32", -1),
    "finish_reason": ("BYTES", -1),
    "output_log_probs": ("FP32", -1),
    "cum_log_probs": ("FP32", -1),
    "cumulative_logprob": ("FP32", -1),
    "logprobs": ("BYTES", -1),
    "num_input_tokens": ("UINT32", 1),
    "num_output_tokens": ("UINT32", -1),
}
"""The tensors of an answer: datatype and size."""
LOGPROBS = {"output_log_probs", "cum_log_probs", "cumulative_logprob", "logprobs"}
"""The tensors that need log-probabilities."""


def unknown(name: str) -> WeftError:
    """There is no field of this name."""
    return WeftError(StatusCode.INVALID_ARGUMENT, "UNKNOWN_FIELD", f"{name}: there is no such field", field=name)


def _refuse(name: str, value: object) -> None:
    neutral, reason = REFUSED[name]
    for each in value if isinstance(value, list) else [value]:
        if not any(type(each) is type(known) and each == known for known in neutral):
            raise invalid(name, reason, "UNSUPPORTED_FIELD")


def apply(asked: Asked, name: str, value: Any) -> None:
    """Takes one field; a tensor is the list of its elements. Raises WeftError."""
    if name in PROMPTS:
        _note(asked, "prompt", name)
        PROMPTS[name](asked, name, value)
        return
    target = ALIASES.get(name, name)
    if name in PROTOCOL or name in OWN or target in FIELDS:
        _note(asked, target, name)
        setter = PROTOCOL.get(name) or OWN.get(name)
        if setter is not None:
            setter(asked, name, value)
            return
        descriptor = FIELDS[target]
        owner = asked.request.sampling if descriptor.containing_type is api.Sampling.DESCRIPTOR else asked.request
        assign(owner, descriptor, name, value)
    elif name in REFUSED:
        _refuse(name, value)
    else:
        raise unknown(name)


def _note(asked: Asked, target: str, name: str) -> None:
    if target in asked.names:
        raise invalid(name, f"given twice, also as {asked.names[target]}")
    asked.names[target] = name


# ---- requests ----


def parameters_of(message: kserve.ModelInferRequest) -> dict[str, Any]:
    """The parameters of a request as plain values. Raises WeftError."""
    values = {}
    for name, parameter in message.parameters.items():
        which = parameter.WhichOneof("parameter_choice")
        if which is None:
            raise invalid(name, "has no value")
        values[name] = getattr(parameter, which)
    return values


def parse(message: kserve.ModelInferRequest, parameters: Mapping[str, Any] | None = None) -> Asked:
    """The request of a message, whose parameters may be given apart, as JSON has them. Raises WeftError."""
    validate.check_known(message, "request")
    asked = begin(message.model_name, message.model_version, message.id)
    asked.raw = bool(message.raw_input_contents)
    for output in message.outputs:
        for key in output.parameters:
            raise invalid(f"{output.name}.{key}", "no parameter of a tensor is supported", "UNSUPPORTED_FIELD")
        if output.name not in OUTPUTS:
            raise unknown(output.name)
        asked.outputs.append(output.name)
    for name, value in (parameters_of(message) if parameters is None else parameters).items():
        apply(asked, name, value)
    for tensor in tensors(message):
        name, values = tensor.name, tensor.values
        if tensor.datatype == "BYTES" and name not in PROMPTS:
            # An empty string in a list of words means that there is none, as in TensorRT-LLM's backend.
            values = [value for value in values if value]
            if not values and name in KNOWN:
                continue
        apply(asked, name, values)
    return complete(asked)


def begin(model: str, version: str, caller_id: str) -> Asked:
    """A request without fields. Raises WeftError."""
    check_version(version)
    asked = Asked(id=caller_id)
    asked.request.model = model
    return asked


def complete(asked: Asked) -> Asked:
    """Fills in what several fields decide together. Raises WeftError."""
    if "prompt" not in asked.names:
        raise invalid("text_input", "one of text_input, input_ids or messages is required", "EMPTY_PROMPT")
    if asked.with_prompt:
        if asked.names["prompt"] != "text_input":
            raise invalid(asked.with_prompt, "only with text_input", "UNSUPPORTED_FIELD")
        asked.prefix = asked.request.prompt.text
    asked.outputs = list(dict.fromkeys([*(asked.outputs or ["text_output"]), *asked.extra]))
    if LOGPROBS.intersection(asked.outputs) and not asked.request.sampling.HasField("logprobs"):
        asked.request.sampling.logprobs = 0
    return asked


def check_version(version: str) -> None:
    """Refuses other versions than the only one. Raises WeftError."""
    if version not in ("", VERSION):
        raise WeftError(
            StatusCode.NOT_FOUND,
            "VERSION_NOT_FOUND",
            f"model_version: models have the version {VERSION!r} alone",
            field="model_version",
        )


def renamed(error: WeftError, asked: Asked | None) -> WeftError:
    """The error with the caller's name of its field."""
    if asked is None or not error.field or (name := asked.param(error.field)) == error.field:
        return error
    message = name + error.message[len(error.field) :] if error.message.startswith(f"{error.field}:") else error.message
    return WeftError(
        error.code, error.reason, message, field=name, retry_after_s=error.retry_after_s, retryable=error.retryable
    )


def sooner(timeout_s: float | None, remaining_s: float | None) -> float | None:
    """The lower of two time limits, of which None is none."""
    least = min(timeout_s if timeout_s is not None else math.inf, remaining_s if remaining_s is not None else math.inf)
    return None if math.isinf(least) else least
