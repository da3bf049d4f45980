"""Translates vllm.grpc.engine.VllmEngine to jobs and back. Pure: knows neither calls nor links.

Every field of a request is honoured, or refused by name.
"""

import io
import json
import os
import zipfile
from collections.abc import Iterator, Sequence
from typing import Protocol

from protos import inference_pb2 as api
from protos import mesh_pb2 as mesh
from protos import vllm_engine_pb2 as vllm
from services import validate
from services.errors import WeftError, invalid

_REFUSED = ("kv_transfer_params", "kv_transfer_params_json", "mm_inputs", "media_refs", "extra_mm_inputs")
_REFUSED_SAMPLING = ("prompt_logprobs", "truncate_prompt_tokens", "structural_tag")
_SAME = ("temperature", "top_k", "min_p", "frequency_penalty", "presence_penalty", "max_tokens", "min_tokens")
_FINISH = {
    api.FINISH_REASON_STOP: "stop",
    api.FINISH_REASON_LENGTH: "length",
    api.FINISH_REASON_CANCELLED: "abort",
}
_EPOCH = (1980, 1, 1, 0, 0, 0)


class StopWatch(Protocol):
    """Finds stop strings in an answer."""

    def feed(self, token_id: int) -> str | None:
        """Adds a token. -> the stop string that it completes, if any."""


def check(request: vllm.GenerateRequest) -> None:
    """Refuses what this worker does not have. Raises WeftError."""
    validate.check_known(request, "request")
    for name in _REFUSED:
        if getattr(request, name):
            raise invalid(name, "not supported", "UNSUPPORTED_FIELD")
    if request.data_parallel_rank:
        raise invalid("data_parallel_rank", "there is one rank", "UNSUPPORTED_FIELD")
    which = request.WhichOneof("input")
    if which == "text":
        raise invalid("text", "send token ids: a worker does not tokenize", "UNSUPPORTED_FIELD")
    if which is None or not request.tokenized.input_ids:
        raise invalid("tokenized.input_ids", "empty", "EMPTY_PROMPT")
    params = request.sampling_params
    given = {each.name for each, _ in params.ListFields()}
    for name in _REFUSED_SAMPLING:
        if name in given:
            raise invalid(f"sampling_params.{name}", "not supported", "UNSUPPORTED_FIELD")
    if params.n > validate.MAX_N:
        raise invalid("sampling_params.n", f"must be at most {validate.MAX_N}")


def check_stops(stops: Sequence[str]) -> None:
    """Checks the stop strings. Raises WeftError."""
    validate.check_stops(api.Sampling(stop=stops))


def sampling_of(params: vllm.SamplingParams) -> api.Sampling:
    """The same sampling in the terms of weft.v1, without stop strings; a seed is drawn if there is none."""
    given = {each.name for each, _ in params.ListFields()}
    sampling = api.Sampling(
        top_p=params.top_p or 1.0,
        repetition_penalty=params.repetition_penalty or 1.0,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        seed=params.seed % (1 << 64) if "seed" in given else int.from_bytes(os.urandom(8), "little"),
        **{name: getattr(params, name) for name in _SAME if name in given},
    )
    for token, bias in params.logit_bias.items():
        if token < 0:
            raise invalid("sampling_params.logit_bias", "its keys are token ids")
        sampling.logit_bias[token] = bias
    if "logprobs" in given:
        if params.logprobs < 0:
            raise invalid("sampling_params.logprobs", f"0 to {validate.MAX_LOGPROBS}")
        sampling.logprobs = params.logprobs
    _constrain(sampling, params)
    return sampling


def _constrain(sampling: api.Sampling, params: vllm.SamplingParams) -> None:
    which = params.WhichOneof("constraint")
    if which == "choice":
        sampling.structured.choice.texts.extend(params.choice.choices)
    elif which == "json_object":
        sampling.structured.json_object = params.json_object
    elif which is not None:
        setattr(sampling.structured, which, getattr(params, which))


def jobs_of(request: vllm.GenerateRequest, card: mesh.ModelCard, deadline_s: float, traceparent: str) -> list[mesh.Job]:
    """A job for each continuation; its stream id is its index. `deadline_s` is 0 for no deadline. Raises WeftError.

    The jobs are tentative: they are not the scheduler's, so none joins or replaces them.
    """
    check(request)
    token_ids, params = request.tokenized.input_ids, request.sampling_params
    sampling = sampling_of(params)
    if not sampling.HasField("max_tokens"):
        sampling.max_tokens = max(1, validate.default_max_tokens(len(token_ids), sampling, card))
    return [
        mesh.Job(
            stream_id=index,
            job_id=f"vllm/{request.request_id}/{index}",
            attempt=1,
            token_ids=token_ids,
            prompt_len=len(token_ids),
            sampling=sampling,
            sample_index=index,
            deadline_s=deadline_s,
            traceparent=traceparent,
            tentative=True,
        )
        for index in range(max(1, params.n))
    ]


def renamed(error: WeftError) -> WeftError:
    """The error with the name that the field has in this protocol."""
    if not error.field.startswith(("sampling.", "prompt")):
        return error
    name = error.field.replace("sampling.", "sampling_params.", 1)
    name = "tokenized.input_ids" if error.field.startswith("prompt") else name
    message = name + error.message[len(error.field) :] if error.message.startswith(f"{error.field}:") else error.message
    return WeftError(
        error.code, error.reason, message, field=name, retry_after_s=error.retry_after_s, retryable=error.retryable
    )


class Continuation:
    """The messages of one continuation."""

    def __init__(self, request: vllm.GenerateRequest, index: int, watch: StopWatch | None) -> None:
        self._index = index
        self._watch = watch
        self._streams = request.stream
        self._prompt_tokens = len(request.tokenized.input_ids)
        self._stop_token_ids = frozenset(request.sampling_params.stop_token_ids)
        self._top = request.sampling_params.logprobs
        self._token_ids: list[int] = []
        self._logprobs: vllm.OutputLogProbs | None = None
        self.count = 0
        """Tokens so far, up to the one that completes a stop string."""
        self.stopped: str | None = None
        """The stop string that was found. Further tokens do not count."""

    def add(self, token_id: int, logprob: float | None, top: mesh.TopTokens | None) -> None:
        """Adds a token; after a stop string nothing."""
        if self.stopped is not None:
            return
        self.count += 1
        self._token_ids.append(token_id)
        if logprob is not None:
            if self._logprobs is None:
                self._logprobs = vllm.OutputLogProbs()
            self._logprobs.token_ids.append(token_id)
            self._logprobs.token_logprobs.append(logprob)
            if self._top and top is not None:
                self._logprobs.top_logprobs.add(values=top.logprobs, token_ids=top.token_ids)
        if self._watch is not None:
            self.stopped = self._watch.feed(token_id)

    def chunk(self) -> vllm.GenerateResponse | None:
        """The tokens since the last message, if they are streamed."""
        if not self._streams or not self._token_ids:
            return None
        response = vllm.GenerateResponse()
        chunk = response.chunk
        chunk.token_ids.extend(self._token_ids)
        chunk.prompt_tokens, chunk.completion_tokens, chunk.index = (
            self._prompt_tokens,
            len(self._token_ids),
            self._index,
        )
        self._move_logprobs(chunk.output_logprobs)
        self._token_ids.clear()
        return response

    def complete(self, end: mesh.JobEnd) -> vllm.GenerateResponse:
        """The end of the continuation, with all tokens unless they were streamed."""
        response = vllm.GenerateResponse()
        complete = response.complete
        complete.output_ids.extend(self._token_ids)
        complete.finish_reason = "stop" if self.stopped is not None else _FINISH.get(end.reason, "error")
        complete.prompt_tokens, complete.completion_tokens = self._prompt_tokens, len(self._token_ids)
        complete.cached_tokens = min(self._prompt_tokens, end.cost.cached_tokens + end.cost.fetched_tokens)
        complete.index = self._index
        self._move_logprobs(complete.output_logprobs)
        if self.stopped is not None:
            complete.matched_stop_str = self.stopped
        elif end.HasField("stop_token_id") and end.stop_token_id in self._stop_token_ids:
            complete.matched_token_id = end.stop_token_id
        return response

    def _move_logprobs(self, target: vllm.OutputLogProbs) -> None:
        if self._logprobs is not None:
            target.CopyFrom(self._logprobs)
            self._logprobs = None


def tokens_of(message: mesh.RunResponse) -> Iterator[tuple[int, int, float | None, mesh.TopTokens | None]]:
    """Stream id, token, log-probability and most likely tokens of each entry of a message."""
    tops = {top.entry: top for top in message.tops}
    logprobs: Sequence[float] = message.logprobs
    for entry, (stream_id, token_id) in enumerate(zip(message.stream_ids, message.token_ids, strict=True)):
        logprob = logprobs[entry] if entry < len(logprobs) else None
        yield stream_id, token_id, None if logprob is None or logprob != logprob else logprob, tops.get(entry)


def model_info(card: mesh.ModelCard) -> vllm.GetModelInfoResponse:
    """The model. Its path is its name: callers get the tokenizer from GetTokenizer."""
    return vllm.GetModelInfoResponse(
        model_path=card.name,
        served_model_name=card.name,
        is_generation=not card.HasField("encoder"),
        max_context_length=card.context_length,
        max_req_input_len=card.context_length - 1,
        vocab_size=card.vocab_size,
        architectures=[card.architecture],
    )


def load_of(report: mesh.WorkerReport, block_size: int, credits: int) -> vllm.SchedulerLoad:
    """The worker's load."""
    used, size = report.active_blocks, report.active_blocks + report.cached_blocks + report.free_blocks
    return vllm.SchedulerLoad(
        num_running_reqs=report.running,
        num_waiting_reqs=report.waiting,
        num_total_reqs=report.running + report.waiting,
        num_used_tokens=used * block_size,
        max_total_num_tokens=size * block_size,
        token_usage=used / size if size else 0.0,
        max_running_requests=credits,
        num_waiting_uncached_tokens=report.prefill_backlog,
    )


def tokenizer_archive(bundle: mesh.Bundle) -> bytes:
    """A zip archive of the tokenizer's files, equal for equal bundles."""
    config = {**bundle.special_tokens, "tokenizer_class": "PreTrainedTokenizerFast"}
    files = {"tokenizer.json": bundle.tokenizer_json}
    if bundle.chat_template:
        config["chat_template"] = bundle.chat_template
        files["chat_template.jinja"] = bundle.chat_template.encode()
    files["tokenizer_config.json"] = json.dumps(config, sort_keys=True).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(files.items()):
            info = zipfile.ZipInfo(name, _EPOCH)
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, data)
    return buffer.getvalue()
