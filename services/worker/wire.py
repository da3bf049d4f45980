"""Between the messages of the Run link and the engine's plain values. Knows both shapes, no links and no engine."""

import time

from grpc import StatusCode

from protos import inference_pb2 as api
from protos import mesh_pb2 as mesh
from services import validate
from services.errors import WeftError, invalid
from services.worker.job import Cost, Ended, EndReason, Failure, Job, SamplingParams

_REASONS = {
    EndReason.STOP: api.FINISH_REASON_STOP,
    EndReason.LENGTH: api.FINISH_REASON_LENGTH,
    EndReason.CANCELLED: api.FINISH_REASON_CANCELLED,
    EndReason.ERROR: api.FINISH_REASON_ERROR,
    EndReason.DEADLINE: api.FINISH_REASON_ERROR,
}
_LEAST_DIVISOR = 1e-6
DEADLINE_EXCEEDED = WeftError(StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", "the deadline passed")


def job_of(message: mesh.Job, key: int, card: mesh.ModelCard) -> Job:
    """The engine's job for a validated message. Raises WeftError: nothing that a gateway sends is trusted."""
    sampling, token_ids = message.sampling, list(message.token_ids)  # reading the message's own is slow
    validate.check_sampling(sampling, card)
    if not 0 < message.boundary <= len(token_ids):
        raise invalid("boundary", "not within the tokens")
    if not sampling.HasField("max_tokens") or not sampling.HasField("seed"):
        raise invalid("sampling", "a job's max_tokens and seed are set by its gateway")
    validate.check_tokens(token_ids[: message.boundary], sampling, card)
    validate.check_token_ids("token_ids", token_ids[message.boundary :], card)
    if len(token_ids) - message.boundary >= sampling.max_tokens:
        raise invalid("token_ids", "the answer is complete already")
    return Job(
        key=key,
        token_ids=token_ids,
        boundary=message.boundary,
        params=_params(sampling, card.vocab_size),
        sample_index=message.sample_index,
        salt=message.salt,
        bypass_cache=message.bypass_cache,
        deadline=time.monotonic() + message.deadline_s if message.deadline_s > 0 else None,
        priority=message.priority,
    )


def _params(sampling: api.Sampling, vocab_size: int) -> SamplingParams:
    def given(field: str, default: float) -> float:
        return float(getattr(sampling, field)) if sampling.HasField(field) else default  # type: ignore[arg-type]

    return SamplingParams(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=_divisor(given("temperature", 1.0)),
        top_k=sampling.top_k if sampling.top_k < vocab_size else 0,
        top_p=given("top_p", 1.0),
        min_p=sampling.min_p,
        repetition_penalty=_divisor(given("repetition_penalty", 1.0)),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed,
        stop_token_ids=frozenset(sampling.stop_token_ids),
        logit_bias=dict(sampling.logit_bias),
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        ignore_eos=sampling.ignore_eos,
    )


def _divisor(value: float) -> float:
    """What logits are divided by, 0 as it is: by less than the least they would all be infinite, and none the best."""
    return max(value, _LEAST_DIVISOR) if value else value


def end_of(ended: Ended, row: int) -> mesh.JobEnd:
    """The end of a job as a link's message tells it."""
    end = mesh.JobEnd(row=row, reason=_REASONS[ended.reason], cost=_cost(ended.cost))
    if ended.stop_token_id is not None:
        end.stop_token_id = ended.stop_token_id
    if ended.reason is EndReason.DEADLINE:
        end.failure.CopyFrom(DEADLINE_EXCEEDED.failure())
    elif ended.error is not None:
        end.failure.CopyFrom(_failure(ended.error))
    return end


def _failure(failure: Failure) -> mesh.Failure:
    code = StatusCode[failure.code]
    return WeftError(code, failure.reason, failure.message, retryable=failure.retryable).failure()


def _cost(cost: Cost) -> mesh.JobCost:
    return mesh.JobCost(
        queue_s=cost.queue_s,
        prefill_s=cost.prefill_s,
        decode_s=cost.decode_s,
        prefill_tokens=cost.prefill_tokens,
        cached_tokens=cost.cached_tokens,
        preemptions=cost.preemptions,
        steps=cost.steps,
        prefill_steps=cost.prefill_steps,
        fetched_tokens=cost.fetched_tokens,
    )


def failed(row: int, error: WeftError) -> mesh.JobEnd:
    """The end of a job which never ran."""
    return mesh.JobEnd(row=row, reason=api.FINISH_REASON_ERROR, failure=error.failure())
