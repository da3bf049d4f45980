"""The record of one call, from arrival to receipt: its timeline, span and metrics. Knows no tokens and no protocol.

The span follows OpenTelemetry's conventions for generative AI. It contains nothing that a client wrote except its
request id and the numbers of its sampling.
"""

import math
import os
import time

from grpc import StatusCode

from protos import inference_pb2 as api
from services import telemetry
from services.errors import WeftError
from services.gateway.answers.call import Call
from services.gateway.answers.generation import Generation
from services.gateway.answers.receipt import Phase, Timeline, fill_costs, timings
from services.gateway.links.adapters import Served
from services.gateway.metrics import GatewayMetrics, reason_name

MOST_ECHOED = 128
"""Characters of an unknown model name or invalid request id that a receipt repeats: metadata is limited in size."""
_NUMBERS = ("max_tokens", "temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "seed")


class CallRecord:
    """What the receipt, span and metrics of one call are made of."""

    def __init__(self, call: Call, metrics: GatewayMetrics) -> None:
        self.timeline = Timeline(time.monotonic)
        self.request = call.request
        self.request_id = call.request.request_id[:MOST_ECHOED] or os.urandom(16).hex()
        self.deadline = math.inf if call.remaining_s is None else self.timeline.began + call.remaining_s
        self.generation: Generation | None = None
        self.joined = False
        """The request joined a generation of the same id that was already running at this gateway."""
        self._metrics = metrics
        self._protocol = call.protocol
        self._model = ""
        self._operation = "chat" if call.request.prompt.WhichOneof("form") == "chat" else "text_completion"
        self._span = telemetry.start(self._operation, call.traceparent, kind="server")
        self.traceparent = self._span.traceparent
        metrics.in_flight += 1

    @property
    def tokens(self) -> int:
        """Tokens of prompt and answers, as charged to the tenant; cached ones included."""
        generation = self.generation
        if generation is None:
            return 0
        return generation.prompt_tokens + sum(len(each.journal.tokens) for each in generation.continuations)

    def resolved(self, served: Served) -> None:
        """Notes the model that the request names."""
        self._model = served.card.name
        if not self._span.recorded:
            return
        sampling = self.request.sampling
        self._span.rename(f"{self._operation} {self._model}")
        given = ((field.name, value) for field, value in sampling.ListFields() if field.name in _NUMBERS)
        # Integer attributes are signed 64-bit numbers.
        self._span.set({f"gen_ai.request.{name}": min(value, (1 << 63) - 1) for name, value in given})
        self._span.set(
            {
                "gen_ai.operation.name": self._operation,
                "gen_ai.provider.name": "weft",
                "gen_ai.request.model": self._model,
                "gen_ai.request.choice.count": max(1, self.request.n),
                "weft.request_id": self.request_id,
            }
        )

    def receipt(self, error: WeftError | None = None) -> api.Receipt:
        """Ends the timeline. -> the receipt of the call, which ended with `error` or well."""
        self.timeline.enter(Phase.OWN)
        receipt = api.Receipt(
            request_id=self.request_id,
            model=self._model or self.request.model[:MOST_ECHOED],
            joined=self.joined,
            trace_id=self._span.trace_id,
            finish_reason=api.FINISH_REASON_UNSPECIFIED if error is None else reason_of(error),
        )
        generation = self.generation
        if generation is None:
            receipt.timings.CopyFrom(timings(self.timeline, None, None))
            return receipt
        continuations = generation.continuations
        receipt.seed = generation.seed
        receipt.prompt_tokens = generation.prompt_tokens
        receipt.completion_tokens = sum(len(each.journal.tokens) for each in continuations)
        fill_costs(receipt, [each.costs for each in continuations])
        last = generation.last
        if error is None and last is not None and last.journal.ending is not None:
            receipt.finish_reason = last.journal.ending.reason
        firsts = [each.first_token_at for each in continuations if each.first_token_at is not None]
        receipt.timings.CopyFrom(timings(self.timeline, last.costs if last else None, min(firsts, default=None)))
        return receipt

    def close(self, receipt: api.Receipt, error: WeftError | None) -> None:
        """Counts the call in the metrics, and ends its span."""
        self._metrics.in_flight -= 1
        generation = self.generation
        last = generation.last if generation is not None else None
        tokens = len(last.journal.tokens) - 1 if last is not None else 0
        per_token_s = last.costs.decode_s / tokens if last is not None and tokens > 0 and not last.costs.hit else None
        self._metrics.request(self._operation, self._model, receipt, error, per_token_s)
        if self._span.recorded:
            self._finish_span(receipt, error)
        self._span.end()

    def _finish_span(self, receipt: api.Receipt, error: WeftError | None) -> None:
        if receipt.timings.first_token_s:
            self._span.event("first token", self.timeline.began + receipt.timings.first_token_s)
        self._span.set(
            {
                "gen_ai.usage.input_tokens": receipt.prompt_tokens,
                "gen_ai.usage.output_tokens": receipt.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": receipt.cached_tokens,
                "gen_ai.response.finish_reasons": [reason_name(receipt.finish_reason)],
                "rpc.system.name": self._protocol,
                "rpc.response.status_code": error.code.name if error is not None else "OK",
                "weft.attempts": receipt.attempts,
                "weft.result_hit": receipt.result_hit,
                "weft.joined": receipt.joined,
            }
        )
        if error is not None:
            self._span.fail(error.reason)


def reason_of(error: WeftError) -> "api.FinishReason.ValueType":
    """The finish reason of a request that failed."""
    gone = error.code in (StatusCode.CANCELLED, StatusCode.DEADLINE_EXCEEDED)
    return api.FINISH_REASON_CANCELLED if gone else api.FINISH_REASON_ERROR
