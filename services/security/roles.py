"""The roles that processes of a mesh may have, and the names that certificates grant them by."""

from typing import Literal, get_args

Role = Literal["gateway", "scheduler", "worker", "cache", "admin"]
"""What a process of a mesh is. `admin` is a person's tool, such as `weft bench --profile`."""
ROLES: tuple[Role, ...] = get_args(Role)
DOMAIN = "weft.internal"


def role_name(role: str) -> str:
    """The DNS name in a certificate that grants a role."""
    return f"{role}.{DOMAIN}"
