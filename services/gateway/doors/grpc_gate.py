"""Refuses gRPC calls before their message is read: those that the process has no time or no room for, and those without
valid credentials. Knows no requests."""

from functools import lru_cache
from typing import Any

import grpc

from services.calls.accept_probe import AcceptProbe
from services.calls.server import Metadata
from services.errors import WeftError
from services.gateway.access.authorizer import Authorizer, Credentials, Refusal, method_denied

RECEIPT_KEY = "weft-receipt-bin"
"""The trailing metadata that has the serialized receipt."""
_STATES = ("/ServerLive", "/ServerReady", "/ModelReady")
"""Methods of KServe's protocol that probes call."""
_HEALTH = "/grpc.health.v1.Health/"
_REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/"
_PUBLIC = "/weft.v1.Inference/"
_KSERVE = "/inference.GRPCInferenceService/"
_PERMITTED_BY = {
    f"{_PUBLIC}EmbedStream": "Embed",
    f"{_KSERVE}ModelInfer": "Complete",
    f"{_KSERVE}ModelStreamInfer": "Generate",
    f"{_KSERVE}ServerMetadata": "ListModels",
    f"{_KSERVE}ModelReady": "ListModels",
    f"{_KSERVE}ModelMetadata": "ListModels",
    f"{_KSERVE}ModelConfig": "ListModels",
    f"{_KSERVE}RepositoryIndex": "ListModels",
    f"{_KSERVE}RepositoryModelLoad": "ListModels",
    f"{_KSERVE}RepositoryModelUnload": "ListModels",
}
"""The method of weft.v1 that a tenant's key must permit for another method."""
_ANSWERS = (f"{_PUBLIC}Generate", f"{_PUBLIC}Complete", f"{_KSERVE}ModelInfer")
"""Methods whose calls ask for one answer of a model."""
_PROBES = (f"{_KSERVE}ServerLive", f"{_KSERVE}ServerReady")


def credentials_of(metadata: Any) -> Credentials:
    """The `authorization` values of a call's metadata: pairs of key and value, or None."""
    return [value if isinstance(value, str) else "" for key, value in metadata or () if key == "authorization"]


class AuthCheck:
    """Checks the credentials of every call of a server."""

    def __init__(self, access: Authorizer, open_reflection: bool) -> None:
        """`open_reflection`: server reflection needs no key."""
        self._access = access
        # Health is always open: it reports only whether this process serves, and probes have no keys.
        probes = (_HEALTH, *_PROBES)
        self._open = (*probes, _REFLECTION) if open_reflection or not access.requires_keys else probes

    def check(self, method: str, credentials: Credentials) -> None:
        """Whether a call to this method, "/package.Service/Method", is permitted. Raises WeftError."""
        if method.startswith(self._open):
            return
        if method in _PERMITTED_BY:
            self._access.permit(_PERMITTED_BY[method], credentials)
            return
        if method.startswith(_PUBLIC):
            self._access.permit(method.removeprefix(_PUBLIC), credentials)
            return
        tenant = self._access.tenant(credentials)
        if not (method.startswith(_REFLECTION) and tenant.methods is None):
            raise method_denied()

    def __call__(self, details: grpc.HandlerCallDetails) -> None:
        """Raises WeftError."""
        self.check(str(details.method), credentials_of(details.invocation_metadata))


class RefusalGate:
    """Refuses calls when they arrive. A `services.calls.server.Gate`."""

    def __init__(self, refusal: Refusal, answer_refusal: Refusal, probe: AcceptProbe) -> None:
        """`refusal` is for all calls but those that ask for the state of the server, `answer_refusal` instead of it for
        those that ask for an answer. `probe` measures how long calls wait."""
        self._refusal, self._answer_refusal, self._probe = refusal, answer_refusal, probe

    def __call__(self, method: str, metadata: Metadata) -> grpc.Status | None:
        """The status that refuses a call, or None."""
        credentials = credentials_of(metadata)
        if self._probe.made(credentials):
            return self._probe.answer
        if method.startswith(_HEALTH) or method.endswith(_STATES):
            return None
        self._probe.method = method
        error = (self._answer_refusal if method in _ANSWERS else self._refusal)(credentials)
        return _status(error.code, error.reason, error.message, error.retry_after_s) if error is not None else None


@lru_cache(maxsize=16)
def _status(code: grpc.StatusCode, reason: str, message: str, retry_after_s: float) -> grpc.Status:
    """The status of an error: most refusals are like the one before them."""
    return WeftError(code, reason, message, retry_after_s=retry_after_s).status()
