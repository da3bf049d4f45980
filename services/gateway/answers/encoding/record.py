"""The record of one request to an encoder, from arrival to receipt: timeline, span, metrics. Knows no protocol."""

import math
import os
import time

from protos import inference_pb2 as api
from services import telemetry
from services.errors import WeftError
from services.gateway.answers.call_record import MOST_ECHOED, reason_of
from services.gateway.answers.encoding.call import AnyEncodeCall
from services.gateway.answers.receipt import AttemptCosts, Phase, Timeline, fill_costs, timings
from services.gateway.links.adapters import Served
from services.gateway.metrics import GatewayMetrics

_OPERATIONS = {"Embed": "embeddings", "Rank": "rank", "Classify": "classify"}


class EncodeRecord:
    """What the receipt, span and metrics of one request are made of."""

    def __init__(self, call: AnyEncodeCall, metrics: GatewayMetrics) -> None:
        self.timeline = Timeline(time.monotonic)
        self.deadline = math.inf if call.remaining_s is None else self.timeline.began + call.remaining_s
        options = call.request.options
        self.request_id = options.request_id[:MOST_ECHOED] or os.urandom(16).hex()
        self.costs: list[AttemptCosts] = []
        """The costs of its jobs, in the order of their ends."""
        self.tokens = 0
        """Tokens of its inputs, as charged to the tenant; cached ones included."""
        self.found_tokens = 0
        """Those of inputs whose vectors were in the cache, or were computed for another request."""
        self.joined = False
        """Some vectors were computed for another request."""
        self._model, self._named = "", options.model
        self._metrics, self._protocol = metrics, call.protocol
        self._operation = _OPERATIONS[call.method]
        self._span = telemetry.start(self._operation, call.traceparent, kind="server")
        self.traceparent = self._span.traceparent
        metrics.in_flight += 1

    def resolved(self, served: Served) -> None:
        """Notes the model that the request names."""
        self._model = served.card.name
        if self._span.recorded:
            self._span.rename(f"{self._operation} {self._model}")
            self._span.set(
                {
                    "gen_ai.operation.name": self._operation,
                    "gen_ai.provider.name": "weft",
                    "gen_ai.request.model": self._model,
                    "weft.request_id": self.request_id,
                }
            )

    def receipt(self, error: WeftError | None = None) -> api.Receipt:
        """Ends the timeline. -> the receipt of the request, which ended with `error` or well."""
        self.timeline.enter(Phase.OWN)
        hit = error is None and not self.costs and not self.joined
        last = self.costs[-1] if self.costs else AttemptCosts(hit=hit)
        receipt = api.Receipt(
            request_id=self.request_id,
            model=self._model or self._named[:MOST_ECHOED],
            trace_id=self._span.trace_id,
            prompt_tokens=self.tokens,
            cached_tokens=self.found_tokens,
            finish_reason=api.FINISH_REASON_STOP if error is None else reason_of(error),
            result_hit=hit,
            joined=self.joined,
            timings=timings(self.timeline, last, None),
        )
        fill_costs(receipt, self.costs)
        return receipt

    def close(self, receipt: api.Receipt, error: WeftError | None) -> None:
        """Counts the request in the metrics, and ends its span."""
        self._metrics.in_flight -= 1
        self._metrics.request(self._operation, self._model, receipt, error, None)
        if self._span.recorded:
            self._span.set(
                {
                    "gen_ai.usage.input_tokens": receipt.prompt_tokens,
                    "gen_ai.usage.cache_read.input_tokens": receipt.cached_tokens,
                    "rpc.system.name": self._protocol,
                    "rpc.response.status_code": error.code.name if error is not None else "OK",
                    "weft.attempts": receipt.attempts,
                    "weft.result_hit": receipt.result_hit,
                }
            )
            if error is not None:
                self._span.fail(error.reason)
        self._span.end()
