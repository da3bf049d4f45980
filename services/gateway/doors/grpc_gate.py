"""Refuses gRPC calls before their message is read: those that the process has no time or no room for, and those without
valid credentials. Knows no requests."""

from functools import lru_cache
from typing import Any

import grpc
from grpc import aio

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
"""The method of weft.v1 that a tenant's key must permit for a method of another protocol."""
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
        if method.startswith(_PUBLIC):
            self._access.permit(method.removeprefix(_PUBLIC), credentials)
            return
        if method in _PERMITTED_BY:
            self._access.permit(_PERMITTED_BY[method], credentials)
            return
        tenant = self._access.tenant(credentials)
        if not (method.startswith(_REFLECTION) and tenant.methods is None):
            raise method_denied()

    def __call__(self, details: grpc.HandlerCallDetails) -> None:
        """Raises WeftError."""
        self.check(str(details.method), credentials_of(details.invocation_metadata))


class RefusalInterceptor(aio.ServerInterceptor):
    """Refuses calls before they are read, as cheaply as it can: the first interceptor of its server."""

    def __init__(self, refusal: Refusal, answer_refusal: Refusal) -> None:
        """`refusal` is for all calls but those of probes, `answer_refusal` instead of it for those that ask for an
        answer."""
        self._refusals = refusal, answer_refusal
        self._known: dict[str, Refusal] = {}
        """What refuses the calls of a method that exists, by its name."""

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        method, handler = handler_call_details.method, None
        refusal = self._known.get(method)
        if refusal is None:
            handler = await continuation(handler_call_details)
            if handler is None or method.startswith(_HEALTH) or method.endswith(_STATES):
                return handler
            refusal = self._known[method] = self._refusals[method in _ANSWERS]
        error = refusal(credentials_of(handler_call_details.invocation_metadata))
        if error is not None:
            return _refusing(error.code, error.reason, error.message, error.retry_after_s)
        return handler or await continuation(handler_call_details)


@lru_cache(maxsize=16)
def _refusing(code: grpc.StatusCode, reason: str, message: str, retry_after_s: float) -> Any:
    """A handler of calls that end with this error and without a message: most refusals are like the one before them.

    It takes a stream of requests, whatever the method takes: gRPC reads none of them before it calls the handler. It
    sets the status. The exception of `context.abort` and the call would hold each other until the garbage collector
    finds them, which takes 20 ms for the refusals of a second.
    """
    status: Any = WeftError(code, reason, message, retry_after_s=retry_after_s).status()

    async def refuse(requests: object, context: Any) -> None:
        context.set_code(status.code)
        context.set_details(status.details)
        context.set_trailing_metadata(status.trailing_metadata)

    return grpc.stream_stream_rpc_method_handler(refuse)
