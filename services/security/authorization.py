"""Which role may call which method of the inner ports: the table, and the interceptor that applies it.

Everything that the table does not permit is denied. SECURITY.md repeats the table, and a test compares both.
"""

from collections.abc import Mapping
from typing import Any

import structlog
from grpc import StatusCode, aio

from services.errors import WeftError
from services.security.roles import ROLES, role_name

log = structlog.get_logger("authorization")

ANY: frozenset[str] = frozenset(ROLES)
MATRIX: Mapping[str, frozenset[str]] = {
    "/weft.v1.Scheduler/Dispatch": frozenset({"gateway"}),
    "/weft.v1.Scheduler/Attach": frozenset({"worker"}),
    "/weft.v1.Scheduler/Overview": frozenset({"gateway", "admin"}),
    "/weft.v1.Worker/Run": frozenset({"gateway"}),
    "/weft.v1.Worker/FetchBundle": frozenset({"gateway"}),
    "/weft.v1.Worker/ReadBlocks": frozenset({"worker"}),
    "/weft.v1.Worker/ShareMemory": frozenset({"worker"}),
    "/weft.v1.Worker/LendBlocks": frozenset({"worker"}),
    "/weft.v1.Worker/Profile": frozenset({"admin"}),
    "/weft.v1.Worker/Status": frozenset({"admin"}),
    "/weft.v1.Worker/ListAdapters": frozenset({"admin"}),
    "/weft.v1.Worker/LoadAdapter": frozenset({"admin"}),
    "/weft.v1.Worker/DropAdapter": frozenset({"admin"}),
    "/vllm.grpc.engine.VllmEngine/Generate": frozenset({"gateway"}),
    "/vllm.grpc.engine.VllmEngine/Abort": frozenset({"gateway"}),
    "/vllm.grpc.engine.VllmEngine/Embed": frozenset({"gateway"}),
    "/vllm.grpc.engine.VllmEngine/HealthCheck": frozenset({"gateway"}),
    "/vllm.grpc.engine.VllmEngine/FlushCache": frozenset({"admin"}),
    "/vllm.grpc.engine.VllmEngine/StartProfile": frozenset({"admin"}),
    "/vllm.grpc.engine.VllmEngine/StopProfile": frozenset({"admin"}),
    "/vllm.grpc.engine.VllmEngine/GetModelInfo": frozenset({"gateway"}),
    "/vllm.grpc.engine.VllmEngine/GetServerInfo": frozenset({"gateway"}),
    "/vllm.grpc.engine.VllmEngine/GetLoads": frozenset({"gateway"}),
    "/vllm.grpc.engine.VllmEngine/GetTokenizer": frozenset({"gateway"}),
    "/vllm.grpc.engine.VllmEngine/SubscribeKvEvents": frozenset({"gateway"}),
    "/weft.v1.Cache/GetResult": frozenset({"gateway"}),
    "/weft.v1.Cache/PutResult": frozenset({"gateway"}),
    "/weft.v1.Cache/LookUpVectors": frozenset({"gateway"}),
    "/weft.v1.Cache/PutVectors": frozenset({"gateway"}),
    "/weft.v1.Cache/HasBlocks": frozenset({"worker"}),
    "/weft.v1.Cache/GetBlocks": frozenset({"worker"}),
    "/weft.v1.Cache/PutBlocks": frozenset({"worker"}),
    "/grpc.health.v1.Health/Check": ANY,
    "/grpc.health.v1.Health/Watch": ANY,
    "/grpc.health.v1.Health/List": ANY,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": frozenset({"admin"}),
}
"""The roles that may call each method. All methods of all inner ports are here."""
_NAMES = {role_name(role).encode(): role for role in ROLES}
_SAN = "x509_subject_alternative_name"


def roles_of(context: Any) -> frozenset[str]:
    """The roles in the certificate of a call's peer, which TLS has verified."""
    names = (context.auth_context() or {}).get(_SAN, ())
    return frozenset(_NAMES[name] for name in names if name in _NAMES)


def require(method: str, roles: frozenset[str]) -> None:
    """Raises WeftError unless one of these roles may call the method."""
    if roles.isdisjoint(MATRIX.get(method, frozenset())):
        log.warning("refused: the caller's role does not permit this method", method=method, roles=sorted(roles))
        raise WeftError(StatusCode.PERMISSION_DENIED, "ROLE_DENIED", "the caller's role does not permit this method")


class RoleInterceptor(aio.ServerInterceptor):
    """Checks the role of every caller of a server whose callers present certificates."""

    def __init__(self) -> None:
        self._checked: dict[str, tuple[Any, Any]] = {}

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """The handler of the call, which checks the caller before it reads a message."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = str(handler_call_details.method)
        known, checked = self._checked.get(method, (None, None))
        if known is not handler:
            checked = _checking(handler, method)
            self._checked[method] = handler, checked
        return checked


def _checking(handler: Any, method: str) -> Any:
    """A handler of the same kind that first checks the role of its caller."""
    kind = f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
    behavior = getattr(handler, kind)

    def checked(request: Any, context: Any) -> Any:
        require(method, roles_of(context))
        return behavior(request, context)

    return handler._replace(**{kind: checked})
