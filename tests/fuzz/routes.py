"""The HTTP routes that a gateway adds, as its own main adds them."""

from typing import Any
from unittest import mock

from services.gateway.doors.http_routes import HttpRoutes
from tests.gateway.fakes import FakeMesh
from tests.ports import free_port


async def routes_of_a_gateway() -> list[tuple[str, str]]:
    """Every method and path."""
    added: list[tuple[str, str]] = []
    add = HttpRoutes.add

    def recorded(self: HttpRoutes, method: str, path: str, *rest: Any, **named: Any) -> None:
        added.append((method, path))
        add(self, method, path, *rest, **named)

    with mock.patch.object(HttpRoutes, "add", recorded):
        async with FakeMesh(http_port=free_port()):
            pass
    return added
