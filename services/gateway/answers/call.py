"""One call at the public door, from arrival to receipt: its clock, its span, what it counts. Knows no tokens.

The span has the names of OpenTelemetry's conventions for generative AI, and nothing that a client wrote but its
request id and the numbers of its sampling.
"""

import math
import os
import time
from typing import Any

from grpc import StatusCode, aio

from protos import inference_pb2 as api
from services import telemetry
from services.errors import WeftError
from services.gateway.access.authorizer import Metadata
from services.gateway.answers.generation import Generation
from services.gateway.answers.receipt import Phase, Timeline, fill_costs, timings
from services.gateway.links.catalog import Served
from services.gateway.metrics import GatewayMetrics, reason_name

RECEIPT_KEY = "weft-receipt-bin"
_MOST_SAID = 128
"""Characters of a wrong name or id that a receipt repeats: in metadata there is little room."""
Context = aio.ServicerContext[Any, Any]

_NUMBERS = ("max_tokens", "temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "seed")


class Call:
    """One call: what its receipt, its span and its counts are made of."""

    def __init__(
        self, request: api.GenerateRequest, context: Context, metadata: Metadata, metrics: GatewayMetrics
    ) -> None:
        self.timeline = Timeline(time.monotonic)
        self.request = request
        self.request_id = request.request_id[:_MOST_SAID] or os.urandom(16).hex()
        self.remaining_s = context.time_remaining()
        self.deadline = math.inf if self.remaining_s is None else self.timeline.began + self.remaining_s
        self.generation: Generation | None = None
        self.joined = False
        self._context = context
        self._metrics = metrics
        self._model = ""
        self._error: WeftError | None = None
        self._receipt = api.Receipt()
        self._operation = "chat" if request.prompt.WhichOneof("form") == "chat" else "text_completion"
        self._span = telemetry.start(self._operation, str(dict(metadata).get("traceparent", "")), kind="server")
        self.traceparent = self._span.traceparent
        metrics.in_flight += 1

    def found(self, served: Served) -> None:
        """The model it asks for is one of ours."""
        self._model = served.card.name
        if not self._span.recorded:
            return
        sampling = self.request.sampling
        self._span.rename(f"{self._operation} {self._model}")
        given = ((field.name, value) for field, value in sampling.ListFields() if field.name in _NUMBERS)
        # Attributes are signed.
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

    def conclude(self, error: WeftError | None = None) -> api.Receipt:
        """Makes the receipt and puts it into the trailing metadata."""
        self._error = error
        receipt = self._receipt = self._make_receipt()
        self._context.set_trailing_metadata(((RECEIPT_KEY, receipt.SerializeToString()),))
        return receipt

    def end(self) -> None:
        """The call is over, however it ended: counts it and ends its span."""
        self._metrics.in_flight -= 1
        generation, receipt, error = self.generation, self._receipt, self._error
        last = generation.last if generation is not None else None
        tokens = len(last.journal.tokens) - 1 if last is not None else 0
        per_token_s = last.ledger.decode_s / tokens if last is not None and tokens > 0 and not last.ledger.hit else None
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
                "rpc.system.name": "grpc",
                "rpc.response.status_code": error.code.name if error is not None else "OK",
                "weft.attempts": receipt.attempts,
                "weft.result_hit": receipt.result_hit,
                "weft.joined": receipt.joined,
            }
        )
        if error is not None:
            self._span.fail(error.reason)

    def _make_receipt(self) -> api.Receipt:
        error = self._error
        self.timeline.enter(Phase.OWN)
        receipt = api.Receipt(
            request_id=self.request_id,
            model=self._model or self.request.model[:_MOST_SAID],
            joined=self.joined,
            trace_id=self._span.trace_id,
            finish_reason=api.FINISH_REASON_UNSPECIFIED if error is None else _reason(error),
        )
        generation = self.generation
        if generation is None:
            receipt.timings.CopyFrom(timings(self.timeline, None, None))
            return receipt
        continuations = generation.continuations
        receipt.seed = generation.seed
        receipt.prompt_tokens = generation.prompt_tokens
        receipt.completion_tokens = sum(len(each.journal.tokens) for each in continuations)
        fill_costs(receipt, [each.ledger for each in continuations])
        last = generation.last
        if error is None and last is not None and last.journal.ending is not None:
            receipt.finish_reason = last.journal.ending.reason
        firsts = [each.first_token_at for each in continuations if each.first_token_at is not None]
        receipt.timings.CopyFrom(timings(self.timeline, last.ledger if last else None, min(firsts, default=None)))
        return receipt


def cancelled() -> WeftError:
    """The client left or took its request back."""
    return WeftError(StatusCode.CANCELLED, "CANCELLED", "the client cancelled")


def _reason(error: WeftError) -> "api.FinishReason.ValueType":
    gone = error.code in (StatusCode.CANCELLED, StatusCode.DEADLINE_EXCEEDED)
    return api.FINISH_REASON_CANCELLED if gone else api.FINISH_REASON_ERROR
