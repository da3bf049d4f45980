"""Errors of authentication and authorisation."""

from grpc import StatusCode

from services.errors import WeftError


def unauthenticated(message: str, reason: str) -> WeftError:
    """UNAUTHENTICATED: nobody knows who calls."""
    return WeftError(StatusCode.UNAUTHENTICATED, reason, message)


def denied(message: str, reason: str, field: str = "") -> WeftError:
    """PERMISSION_DENIED: it is known who calls, and this is not for them."""
    return WeftError(StatusCode.PERMISSION_DENIED, reason, message, field=field)
