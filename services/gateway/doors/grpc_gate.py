"""gRPC's part of access control: refuses calls without credentials before their bytes are read."""

from typing import Any

from grpc import aio

from services.errors import WeftError
from services.gateway.access.authorizer import Authorizer, Metadata
from services.interceptor import rebuilt


def metadata_of(context: aio.ServicerContext[Any, Any]) -> Metadata:
    """What a call brings beside its message."""
    return tuple(context.invocation_metadata() or ())


class AuthInterceptor(aio.ServerInterceptor):
    """Before every call of a server: what may not pass is refused unread."""

    def __init__(self, access: Authorizer) -> None:
        self._access = access

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        try:
            self._access.check(handler_call_details.method, handler_call_details.invocation_metadata or ())
        except WeftError as error:
            return _refusal(handler, error)
        return handler


def _refusal(handler: Any, error: WeftError) -> Any:
    """A handler of the same kind that reads nothing and fails."""

    async def refuse(request: object, context: object) -> None:
        raise error

    return rebuilt(handler, refuse)
