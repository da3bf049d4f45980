"""Authenticates gRPC calls: refuses a call without valid credentials before its message is read. Knows no requests."""

from typing import Any

from grpc import aio

from services.errors import WeftError
from services.gateway.access.authorizer import Authorizer, Credentials, method_denied
from services.interceptor import refusing

_HEALTH = "/grpc.health.v1.Health/"
_REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/"
_PUBLIC = "/weft.v1.Inference/"


def credentials_of(metadata: Any) -> Credentials:
    """The `authorization` values of a call's metadata: pairs of key and value, or None."""
    return [value if isinstance(value, str) else "" for key, value in metadata or () if key == "authorization"]


class AuthInterceptor(aio.ServerInterceptor):
    """Checks the credentials of every call of a server."""

    def __init__(self, access: Authorizer, open_reflection: bool) -> None:
        """`open_reflection`: server reflection needs no key."""
        self._access = access
        # Health is always open: it reports only whether this process serves, and probes have no keys.
        self._open = (_HEALTH, _REFLECTION) if open_reflection or not access.requires_keys else (_HEALTH,)

    def check(self, method: str, credentials: Credentials) -> None:
        """Whether a call to this method, "/package.Service/Method", is permitted. Raises WeftError."""
        if method.startswith(self._open):
            return
        if method.startswith(_PUBLIC):
            self._access.permit(method.removeprefix(_PUBLIC), credentials)
            return
        tenant = self._access.tenant(credentials)
        if not (method.startswith(_REFLECTION) and tenant.methods is None):
            raise method_denied()

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        try:
            self.check(handler_call_details.method, credentials_of(handler_call_details.invocation_metadata))
        except WeftError as error:
            return refusing(handler, error)
        return handler
