"""Ends each request exactly once: its door gets the receipt, its record is closed. Knows no protocol and no tokens."""

import asyncio
from types import TracebackType
from typing import Protocol, Self

from grpc import StatusCode

from protos import inference_pb2 as api
from services.errors import WeftError, internal
from services.gateway.answers.call import Finish


class Record(Protocol):
    """What is recorded of one request."""

    def receipt(self, error: WeftError | None = None) -> api.Receipt:
        """The receipt of the request, which ended with `error` or well."""

    def close(self, receipt: api.Receipt, error: WeftError | None) -> None:
        """Counts the request in the metrics, and ends its span."""


class FinishOnce:
    """A `with` block that serves one request. However it ends, `finish` is called with the receipt, then the record is
    closed. Errors pass through."""

    def __init__(self, record: Record, finish: Finish) -> None:
        self._record, self._finish = record, finish
        self.receipt: api.Receipt | None = None
        """Set by the block: the receipt that the client has. None: one is made at the end of the block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        error = _error_of(raised)
        receipt = self._record.receipt(error) if self.receipt is None else self.receipt
        self._finish(receipt)
        self._record.close(receipt, error)


def _error_of(raised: BaseException | None) -> WeftError | None:
    if raised is None or isinstance(raised, WeftError):
        return raised
    if isinstance(raised, asyncio.CancelledError):
        return WeftError(StatusCode.CANCELLED, "CANCELLED", "the client cancelled")
    return internal()
