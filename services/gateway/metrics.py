"""The metrics of the gateway, taken from each request's receipt. Knows no requests under way."""

import functools
from collections.abc import Callable

from protos import inference_pb2 as api
from services import metrics
from services.errors import WeftError
from services.gateway.traffic import Traffic

_PROVIDER = "weft"
_PHASES = ("tokenize", "cache", "queue", "prefill", "decode", "detokenize", "network", "unaccounted")
_SECONDS = [(phase, f"{phase}_s") for phase in _PHASES]


@functools.cache
def reason_name(reason: "api.FinishReason.ValueType") -> str:
    """The label for a finish reason: stop, length, cancelled, error or unspecified."""
    return api.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()


class GatewayMetrics:
    """The metrics of one gateway."""

    def __init__(self) -> None:
        self.all = metrics.Metrics()
        self.traffic = Traffic()
        self.in_flight = 0
        """Calls that are running: Generate, Complete, Embed, Rank and Classify."""
        add = self.all
        add.gauge("weft_gateway_requests_in_flight", "Requests that are running.", lambda: self.in_flight)
        self._requests = add.counter("weft_gateway_requests", "Requests by outcome.", "model", "code", "finish_reason")
        self._results = add.counter("weft_gateway_results", "Result cache look-ups by outcome.", "model", "outcome")
        self._vectors = add.counter("weft_gateway_vectors", "Vectors looked up, by outcome.", "model", "outcome")
        self._joined = add.counter("weft_gateway_joined", "Requests that joined another one's generation.", "model")
        self._lost = add.counter("weft_gateway_attempts_lost", "Attempts that a worker did not complete.", "reason")
        self._prompt = add.counter("weft_gateway_prompt_tokens", "Prompt tokens.", "model")
        self._cached = add.counter("weft_gateway_cached_tokens", "Prompt tokens found in prefix caches.", "model")
        self._output = add.counter("weft_gateway_completion_tokens", "Tokens produced.", "model")
        self._phases = add.counter("weft_gateway_phase_seconds", "Time of requests by phase.", "model", "phase")
        self._tokenize = add.histogram(
            "weft_gateway_tokenize_seconds", "Waiting for the tokenizer, and tokenizing.", metrics.SHORT_S, "model"
        )
        named = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
        self._duration = add.histogram(
            "gen_ai_server_request_duration_seconds", "Whole requests.", metrics.DURATION_S, *named, "error_type"
        )
        self._first = add.histogram(
            "gen_ai_server_time_to_first_token_seconds", "From request to first token.", metrics.FIRST_TOKEN_S, *named
        )
        self._per_token = add.histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean time between the tokens of an answer.",
            metrics.PER_TOKEN_S,
            *named,
        )
        self._usage = add.histogram(
            "gen_ai_client_token_usage", "Tokens of a request.", metrics.TOKENS, *named, "gen_ai_token_type"
        )

    def request(
        self, operation: str, model: str, receipt: api.Receipt, error: WeftError | None, per_token_s: float | None
    ) -> None:
        """Counts a request that ended. `model` is a served model, or "" if the request named none."""
        times = receipt.timings
        if model:
            self.traffic.model(model).ended(receipt, error is not None)
        code = error.code.name if error is not None else "OK"
        self._requests.add(1, model, code, reason_name(receipt.finish_reason))
        named = (operation, _PROVIDER, model)
        self._duration.observe(times.wall_s, *named, code if error is not None else "")
        for phase, field in _SECONDS:
            self._phases.add(getattr(times, field), model, phase)
        if receipt.joined:
            self._joined.add(1, model)
        if receipt.prompt_tokens:
            self._tokenize.observe(times.tokenize_s, model)
            self._prompt.add(receipt.prompt_tokens, model)
            self._cached.add(receipt.cached_tokens, model)
            self._output.add(receipt.completion_tokens, model)
            self._usage.observe(receipt.prompt_tokens, *named, "input")
            self._usage.observe(receipt.completion_tokens, *named, "output")
        if times.first_token_s:
            self._first.observe(times.first_token_s, *named)
        if per_token_s is not None:
            self._per_token.observe(per_token_s, *named)

    def load(self, admitted: Callable[[], float], refused: Callable[[], int]) -> None:
        """Adds the gate's share of admitted calls and its count of refused ones, which are no requests."""
        self.all.gauge("weft_gateway_admitted_share", "Share of calls that the process has time for.", admitted)
        self.all.total("weft_gateway_refused", "Calls that were refused before they were read.", refused)

    def looked_up(self, model: str, hit: bool) -> None:
        """Counts a look-up in the result cache."""
        self._results.add(1, model, "hit" if hit else "miss")

    def looked_up_vectors(self, model: str, hits: int, keys: int) -> None:
        """Counts a look-up of vectors of texts."""
        self._vectors.add(hits, model, "hit")
        self._vectors.add(keys - hits, model, "miss")

    def attempt_lost(self, error: WeftError) -> None:
        """Counts an attempt that a worker did not complete."""
        self._lost.add(1, error.reason)
