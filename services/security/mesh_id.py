"""The id of the mesh that a process belongs to: how links and calls carry it, and how another mesh's are refused.

Keeps two meshes on one machine apart that were given the same address by mistake. It is no secret and authenticates
nobody. An empty id is not checked.
"""

import grpc
import structlog
from grpc import StatusCode, aio

from services.errors import WeftError

log = structlog.get_logger("mesh")

METADATA_KEY = "weft-mesh-id"
"""Carries the id in the metadata of unary calls, and in the initial metadata of health answers."""
REASON = "OTHER_MESH"
RETRY_S = 1.0
"""Seconds after which a refused hello is sent again: the address may be given back to this mesh."""


def check(own: str, other: str, peer: str) -> None:
    """Raises WeftError (FAILED_PRECONDITION) if `peer` ("gateway", "worker", ...) belongs to another mesh."""
    if own and other and own != other:
        message = f"the {peer} belongs to mesh {other[:64]!r}, this process to mesh {own!r}"
        raise WeftError(StatusCode.FAILED_PRECONDITION, REASON, message)


def metadata(mesh_id: str) -> tuple[tuple[str, str], ...]:
    """What a call sends so that a process of another mesh refuses it."""
    return ((METADATA_KEY, mesh_id),) if mesh_id else ()


class RefusalLog:
    """Logs once that a peer refuses this process as one of another mesh or role, and again after a link that held."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._logged = ""

    def accepted(self) -> None:
        """The peer has accepted this process."""
        self._logged = ""

    def refused(self, error: aio.AioRpcError | WeftError, address: str) -> bool:
        """Whether the error is a refusal, which is logged if it is a new one."""
        if isinstance(error, WeftError):
            code, reason = error.code, error.message
        else:
            code, reason = error.code(), error.details() or ""
        if code not in (StatusCode.FAILED_PRECONDITION, StatusCode.PERMISSION_DENIED):
            return False
        if reason != self._logged:
            log.warning(f"the {self._peer} refuses this process", at=address, reason=reason)
            self._logged = reason
        return True


class MeshCheck:
    """Refuses calls whose metadata names another mesh. Calls that name none, such as a tool's, pass."""

    def __init__(self, mesh_id: str) -> None:
        self._mesh_id = mesh_id

    def __call__(self, details: grpc.HandlerCallDetails) -> None:
        """Raises WeftError."""
        for key, named in details.invocation_metadata or ():
            if key == METADATA_KEY:
                check(self._mesh_id, str(named), "caller")
