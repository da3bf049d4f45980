"""Errors of authentication and authorisation."""

from grpc import StatusCode

from services.errors import WeftError


def unauthenticated(message: str, reason: str) -> WeftError:
    """UNAUTHENTICATED: the call has no valid credentials."""
    return WeftError(StatusCode.UNAUTHENTICATED, reason, message)


def denied(message: str, reason: str, field: str = "") -> WeftError:
    """PERMISSION_DENIED: the tenant is not permitted to do this."""
    return WeftError(StatusCode.PERMISSION_DENIED, reason, message, field=field)
