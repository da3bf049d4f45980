"""The seam between doors and encoders: one request in the terms of no protocol. Knows neither gRPC nor HTTP."""

from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from protos import inference_pb2 as api
from services.gateway.access.authorizer import Credentials
from services.gateway.answers.call import Finish
from services.validate_encode import EncodeRequest

Request = TypeVar("Request", bound=EncodeRequest)
AnyEncodeCall: TypeAlias = (
    "EncodeCall[api.EmbedRequest] | EncodeCall[api.RankRequest] | EncodeCall[api.ClassifyRequest]"
)


@dataclass(frozen=True, slots=True)
class EncodeCall(Generic[Request]):
    """A request as a door received it. To cancel the call, a door cancels the task that serves it."""

    method: str
    """Method of the public API: "Embed", "Rank" or "Classify"."""
    protocol: str
    """Name of the door's protocol in traces, such as "grpc"."""
    request: Request
    credentials: Credentials
    finish: Finish
    """Takes the receipt, exactly once, however the call ends."""
    remaining_s: float | None = None
    """Seconds until the client's deadline; None for no deadline."""
    traceparent: str = ""
    """W3C trace context of the client."""
