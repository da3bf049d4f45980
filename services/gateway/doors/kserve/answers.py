"""Answers of the Open Inference Protocol: deltas and whole answers of weft.v1 as tensors, models as metadata. Pure."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from protos import inference_pb2 as api
from protos import kserve_pb2 as kserve
from services.errors import WeftError
from services.gateway.answers.call import Delta, Part
from services.gateway.doors.kserve import tensors as kserve_tensors
from services.gateway.doors.kserve.requests import (
    DEFAULT_PRIORITY,
    FIELDS,
    OUTPUTS,
    OWN,
    PRIORITY_LEVELS,
    PROMPTS,
    VERSION,
    Asked,
)

Continued: TypeAlias = "Delta | api.Choice"
FINAL = "triton_final_response"
_FINISH = {
    api.FINISH_REASON_UNSPECIFIED: "",
    api.FINISH_REASON_STOP: "stop",
    api.FINISH_REASON_LENGTH: "length",
    api.FINISH_REASON_CANCELLED: "cancelled",
}
_OF_TOKENS = {
    "output_log_probs", "cum_log_probs", "cumulative_logprob", "logprobs", "output_ids", "sequence_length",
    "num_output_tokens",
}  # fmt: skip
"""The tensors of tokens, which may have no text yet."""


class Replies:
    """Writes the answer to one request."""

    def __init__(self, asked: Asked, only_model: Callable[[], str]) -> None:
        """`only_model`: the model of a request without a name, once it is accepted."""
        self._asked = asked
        self._only_model = only_model
        self._model = asked.request.model
        self._running = max(1, asked.request.n)
        self._sums: dict[int, float] = {}
        self._closes = asked.empty_final or "num_input_tokens" in asked.outputs
        self._quiet = _OF_TOKENS.isdisjoint(asked.outputs)
        self._prefixed: set[int] = set()

    def reply(self, part: Part) -> kserve.ModelStreamInferResponse | None:
        """The response for a part of the answer; None if it has nothing that the caller asked for."""
        if isinstance(part, Delta):
            return self._delta(part)
        return self._closing(part) if isinstance(part, api.Receipt) else None

    def _delta(self, delta: Delta) -> kserve.ModelStreamInferResponse | None:
        if not (delta.text or delta.finish_reason) and self._quiet:
            return None
        self._running -= delta.finish_reason != api.FINISH_REASON_UNSPECIFIED
        streamed = kserve.ModelStreamInferResponse()
        self._fill(streamed.infer_response, [delta], None)
        streamed.infer_response.parameters[FINAL].bool_param = not self._running and not self._closes
        return streamed

    def _closing(self, receipt: api.Receipt) -> kserve.ModelStreamInferResponse | None:
        """The final response of a stream of parts, if it is one of its own."""
        if not self._closes:
            return None
        streamed = kserve.ModelStreamInferResponse()
        response = streamed.infer_response
        self._head(response)
        if "num_input_tokens" in self._asked.outputs:
            kserve_tensors.add(response, "num_input_tokens", "UINT32", [receipt.prompt_tokens], self._asked.raw)
        response.parameters[FINAL].bool_param = True
        return streamed

    def whole(self, answer: api.CompleteResponse) -> kserve.ModelInferResponse:
        """The whole answer."""
        response = kserve.ModelInferResponse()
        self._fill(response, answer.choices, answer.receipt)
        return response

    def _head(self, response: kserve.ModelInferResponse) -> None:
        if not self._model:
            self._model = self._only_model()
        response.model_name, response.model_version, response.id = self._model, VERSION, self._asked.id

    def _fill(
        self, response: kserve.ModelInferResponse, parts: Sequence[Continued], receipt: api.Receipt | None
    ) -> None:
        self._head(response)
        for name in self._asked.outputs:
            if name == "num_input_tokens":
                if receipt is None:
                    continue
                values: list[Any] = [receipt.prompt_tokens]
            elif name == "text_output":
                values = [self._prefix(part.index) + part.text for part in parts]
            elif name in ("cum_log_probs", "cumulative_logprob"):
                values = [self._sum(part, name) for part in parts]
            else:
                values = _VALUES[name](parts)
            kserve_tensors.add(response, name, OUTPUTS[name][0], values, self._asked.raw)

    def _prefix(self, index: int) -> str:
        """The prompt before the first text of a continuation, if the caller asked for it."""
        if not self._asked.prefix or index in self._prefixed:
            return ""
        self._prefixed.add(index)
        return self._asked.prefix

    def _sum(self, part: Continued, name: str) -> float:
        """The sum of the log-probabilities of a continuation so far; both names may be asked for at once."""
        before = self._sums.get(part.index, 0.0)
        total = before + sum(place.chosen.logprob for place in part.logprobs)
        if name == self._last_sum:
            self._sums[part.index] = total
        return total

    @property
    def _last_sum(self) -> str:
        return [name for name in self._asked.outputs if name in ("cum_log_probs", "cumulative_logprob")][-1]


def _places(part: Continued) -> str:
    """The log-probabilities of a part as a JSON list with an object for each token."""
    return json.dumps(
        [
            {
                "token_id": place.chosen.token_id,
                "text": place.chosen.text,
                "logprob": place.chosen.logprob,
                "top": [{"token_id": each.token_id, "text": each.text, "logprob": each.logprob} for each in place.top],
            }
            for place in part.logprobs
        ]
    )


_VALUES: Mapping[str, Callable[[Sequence[Continued]], list[Any]]] = {
    "output_ids": lambda parts: [token for part in parts for token in part.token_ids],
    "sequence_length": lambda parts: [len(part.token_ids) for part in parts],
    "num_output_tokens": lambda parts: [len(part.token_ids) for part in parts],
    "sequence_index": lambda parts: [part.index for part in parts],
    "finish_reason": lambda parts: [_FINISH.get(part.finish_reason, "error") for part in parts],
    "output_log_probs": lambda parts: [place.chosen.logprob for part in parts for place in part.logprobs],
    "logprobs": lambda parts: [_places(part) for part in parts],
}
"""The tensors that a part of the answer has: one element for each continuation, or for each token of each."""


def failed(asked: Asked | None, caller_id: str, error: WeftError) -> kserve.ModelStreamInferResponse:
    """The response of a stream for a request that failed: its id, and the error in the terms of gRPC."""
    streamed = kserve.ModelStreamInferResponse(error_message=error.message)
    response = streamed.infer_response
    response.id = caller_id
    response.model_name = asked.request.model if asked is not None else ""
    response.parameters[FINAL].bool_param = True
    response.parameters["error_code"].string_param = error.code.name
    response.parameters["error_reason"].string_param = error.reason
    if error.field:
        response.parameters["error_field"].string_param = error.field
    if error.retry_after_s:
        response.parameters["retry_after_s"].double_param = error.retry_after_s
    return streamed


# ---- models ----

_FLAGS = {name for name in OWN if name.startswith(("return_", "exclude_"))}
_DATATYPES = {1: "INT32", 2: "INT64", 3: "UINT32", 4: "UINT64", 5: "FP64", 6: "FP32", 7: "BOOL"}
"""By the C++ type of a field; the others are BYTES."""


def inputs() -> dict[str, tuple[str, int]]:
    """The tensors of a request: datatype and size. Only the prompt is required."""
    found = {"text_input": ("BYTES", 1), "input_ids": ("INT32", -1), "messages": ("BYTES", 1)}
    assert found.keys() == PROMPTS.keys()
    found |= {"stream": ("BOOL", 1), "sampling_parameters": ("BYTES", 1), "end_id": ("INT32", 1)}
    found |= dict.fromkeys(sorted(_FLAGS), ("BOOL", 1))
    for name, field in FIELDS.items():
        is_list = field.is_repeated and field.message_type is None
        found[name] = (_DATATYPES.get(int(field.cpp_type), "BYTES"), -1 if is_list else 1)
    return found


_TYPES = {"BYTES": kserve.TYPE_STRING} | {
    name: kserve.DataType.Value(f"TYPE_{name}") for name in ("BOOL", "UINT32", "UINT64", "INT32", "INT64", "FP32")
}


def metadata(model: api.Model) -> kserve.ModelMetadataResponse:
    """The tensors of a model."""
    response = kserve.ModelMetadataResponse(name=model.name, versions=[VERSION], platform=model.architecture)
    for name, (datatype, size) in inputs().items():
        response.inputs.add(name=name, datatype=datatype, shape=[size])
    for name, (datatype, size) in OUTPUTS.items():
        response.outputs.add(name=name, datatype=datatype, shape=[size])
    return response


def config(model: api.Model) -> kserve.ModelConfigResponse:
    """The configuration of a model."""
    response = kserve.ModelConfigResponse()
    described = response.config
    described.name, described.platform, described.backend = model.name, model.architecture, "weft"
    described.model_transaction_policy.decoupled = True
    described.dynamic_batching.priority_levels = PRIORITY_LEVELS
    described.dynamic_batching.default_priority_level = DEFAULT_PRIORITY
    for name, (datatype, size) in inputs().items():
        described.input.add(name=name, data_type=_TYPES[datatype], dims=[size], optional=True)
    for name, (datatype, size) in OUTPUTS.items():
        described.output.add(name=name, data_type=_TYPES[datatype], dims=[size])
    for name in ("context_length", "vocab_size", "parameters"):
        described.parameters[name].string_value = str(getattr(model, name))
    return response


def index(models: Sequence[api.Model], ready: bool) -> kserve.RepositoryIndexResponse:
    """The models that are served and, unless `ready`, those that are not (yet)."""
    response = kserve.RepositoryIndexResponse()
    for model in models:
        if model.workers:
            response.models.add(name=model.name, version=VERSION, state="READY")
        elif not ready:
            reason = ", ".join(f"{each.phase} {each.percent}%" for each in model.loading)
            state = "LOADING" if model.loading else "UNAVAILABLE"
            response.models.add(name=model.name, version=VERSION, state=state, reason=reason)
    return response
