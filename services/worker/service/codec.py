"""Converts messages of the Run link to and from the engine's plain values. Knows no links and no engine."""

from collections.abc import Mapping
from typing import Any

from grpc import StatusCode

from protos import inference_pb2 as api
from protos import mesh_pb2 as mesh
from services import validate
from services.errors import WeftError, invalid
from services.validate_encode import check_task
from services.worker.job import Adapter, Cost, Ended, EndReason, Failure, Job, SamplingParams
from services.worker.service import encode_codec

_REASONS = {
    EndReason.STOP: api.FINISH_REASON_STOP,
    EndReason.LENGTH: api.FINISH_REASON_LENGTH,
    EndReason.CANCELLED: api.FINISH_REASON_CANCELLED,
    EndReason.ERROR: api.FINISH_REASON_ERROR,
    EndReason.DEADLINE: api.FINISH_REASON_ERROR,
}
_PLAIN = frozenset(
    ("max_tokens", "min_tokens", "top_p", "min_p", "presence_penalty", "frequency_penalty", "seed", "logprobs",
     "ignore_eos", "prompt_logprobs", "structured")
)  # fmt: skip
"""Parameters that mean the same in a message and in an engine, and have the same defaults."""
_LEAST_DIVISOR = 1e-6
"""A smaller temperature or penalty would make every logit infinite, and none the best."""
DEADLINE_EXCEEDED = WeftError(StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", "the deadline passed")


def job_of(message: mesh.Job, key: int, card: mesh.ModelCard, adapter: Adapter | None = None) -> Job:
    """The engine's job for a message, which is validated here: the worker trusts no gateway. adapter: the one that the
    message names. Raises WeftError."""
    if message.HasField("encode"):
        return encode_codec.job_of(message, key, card)
    check_task(card, "generate")
    sampling, token_ids = message.sampling, list(message.token_ids)  # Reading the repeated field itself is slow.
    given = validate.check_sampling(sampling, card)
    if not 0 < message.prompt_len <= len(token_ids):
        raise invalid("prompt_len", "must be from 1 to the number of token ids")
    if "max_tokens" not in given or "seed" not in given:
        raise invalid("sampling", "max_tokens and seed must be set in a job")
    validate.check_tokens(token_ids[: message.prompt_len], sampling, card)
    validate.check_token_ids("token_ids", token_ids[message.prompt_len :], card)
    speculation = validate.check_speculation(message)
    if len(token_ids) - message.prompt_len >= sampling.max_tokens:
        raise invalid("token_ids", "the answer already has max_tokens tokens")
    return Job(
        key=key,
        token_ids=token_ids,
        prompt_len=message.prompt_len,
        params=_params(given, card.vocab_size),
        sample_index=message.sample_index,
        salt=message.salt,
        bypass_cache=message.bypass_cache,
        deadline=encode_codec.deadline_of(message),
        priority=message.priority,
        speculation=speculation,
        adapter=adapter,
        handoff=message.handoff,
        source=message.source,
    )


def _params(given: Mapping[str, Any], vocab_size: int) -> SamplingParams:
    """The sampling parameters of the fields that are set."""
    params = {}
    for name, value in given.items():
        if name in _PLAIN:
            params[name] = value
        elif name in ("temperature", "repetition_penalty"):
            params[name] = _divisor(value)
        elif name == "top_k":
            params[name] = value if value < vocab_size else 0
        elif name == "stop_token_ids":
            params[name] = frozenset(value)
        elif name == "logit_bias":
            params[name] = dict(value)
        elif name == "bad_token_sequences":
            params["bad_sequences"] = tuple(tuple(each.ids) for each in value)
    return SamplingParams(**params)


def _divisor(value: float) -> float:
    """`value`, but not between 0 and _LEAST_DIVISOR. 0 stays 0 (greedy)."""
    return max(value, _LEAST_DIVISOR) if value else value


def end_of(ended: Ended, stream_id: int, handed_off: bool = False) -> mesh.JobEnd:
    """The message for the end of a job."""
    cost = _cost(ended.cost)
    end = mesh.JobEnd(stream_id=stream_id, reason=_REASONS[ended.reason], cost=cost, handed_off=handed_off)
    if ended.stop_token_id is not None:
        end.stop_token_id = ended.stop_token_id
    if ended.vectors is not None:
        end.vectors.width, end.vectors.data = ended.vectors.width, ended.vectors.data
    if ended.failed_text is not None:
        end.failed_text = ended.failed_text
    if ended.reason is EndReason.DEADLINE:
        end.failure.CopyFrom(DEADLINE_EXCEEDED.failure())
    elif ended.error is not None:
        end.failure.CopyFrom(_failure(ended.error))
    return end


def _failure(failure: Failure) -> mesh.Failure:
    code = StatusCode[failure.code]
    error = WeftError(code, failure.reason, failure.message, field=failure.field, retryable=failure.retryable)
    return error.failure()


def _cost(cost: Cost) -> mesh.JobCost:
    return mesh.JobCost(
        queue_s=cost.queue_s,
        prefill_s=cost.prefill_s,
        decode_s=cost.decode_s,
        prefill_tokens=cost.prefill_tokens,
        cached_tokens=cost.cached_tokens,
        preemptions=cost.preemptions,
        fetched_tokens=cost.fetched_tokens,
        drafted_tokens=cost.drafted_tokens,
        accepted_tokens=cost.accepted_tokens,
    )


def failed(stream_id: int, error: WeftError) -> mesh.JobEnd:
    """The message for a job or subscription that failed before it ran."""
    return mesh.JobEnd(stream_id=stream_id, reason=api.FINISH_REASON_ERROR, failure=error.failure())
