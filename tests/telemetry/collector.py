"""A real OTLP collector for tests: stores the spans that it receives, or never answers."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from grpc import aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

WAIT_S = 60.0


@dataclass(frozen=True)
class ReceivedSpan:
    """A span, and the service that sent it."""

    service: str
    span: Span

    @property
    def id(self) -> str:
        """16 hexadecimal digits."""
        return self.span.span_id.hex()

    @property
    def parent(self) -> str:
        """16 hexadecimal digits, or "" for none."""
        return self.span.parent_span_id.hex()

    @property
    def name(self) -> str:
        """The span's name."""
        return self.span.name

    @property
    def attributes(self) -> dict[str, Any]:
        """Name to value."""
        found = {}
        for pair in self.span.attributes:
            kind = pair.value.WhichOneof("value")
            found[pair.key] = getattr(pair.value, kind) if kind else None
        return found

    @property
    def failed(self) -> str:
        """The message of the error status; "" without an error."""
        return self.span.status.message if self.span.status.code == Status.STATUS_CODE_ERROR else ""

    def __repr__(self) -> str:
        return f"{self.service}/{self.name}({self.failed})"


class Collector(otlp_grpc.TraceServiceServicer):
    """Use it with `async with`; a `silent` collector accepts calls and never answers."""

    def __init__(self, silent: bool = False) -> None:
        self.spans: list[ReceivedSpan] = []
        self.calls = 0
        self._silent = silent
        self._server = aio.server()
        otlp_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    async def __aenter__(self) -> Self:
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.stop(0)

    async def Export(self, request: otlp.ExportTraceServiceRequest, context: Any) -> otlp.ExportTraceServiceResponse:
        """Stores the spans of a request."""
        self.calls += 1
        if self._silent:
            await asyncio.sleep(3600)
        for resource in request.resource_spans:
            names = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [ReceivedSpan(names["service.name"], span) for span in scope.spans]
        return otlp.ExportTraceServiceResponse()

    def trace(self, trace_id: str) -> list[ReceivedSpan]:
        """The spans of a trace, by start time."""
        spans = [seen for seen in self.spans if seen.span.trace_id.hex() == trace_id]
        return sorted(spans, key=lambda seen: seen.span.start_time_unix_nano)

    async def until(self, trace_id: str, complete: Callable[[list[ReceivedSpan]], bool]) -> list[ReceivedSpan]:
        """The spans of a trace once `complete` returns True for them."""
        deadline = time.monotonic() + WAIT_S
        while not complete(self.trace(trace_id)):
            assert time.monotonic() < deadline, f"incomplete: {self.trace(trace_id)}"
            await asyncio.sleep(0.05)
        return self.trace(trace_id)


def tree(spans: list[ReceivedSpan], root: str) -> dict[str, list[ReceivedSpan]]:
    """Children by the id of their parent. Every parent is `root` or a span of the trace, and there are no loops."""
    assert len({seen.id for seen in spans}) == len(spans), "an id is used twice"
    parents = {seen.id: seen.parent for seen in spans}
    children = defaultdict(list)
    for seen in spans:
        ancestor, steps = seen.id, 0
        while ancestor != root:
            assert ancestor in parents, f"{seen} has the unknown ancestor {ancestor}"
            ancestor, steps = parents[ancestor], steps + 1
            assert steps <= len(spans), f"{seen} is its own ancestor"
        children[seen.parent].append(seen)
    return children
