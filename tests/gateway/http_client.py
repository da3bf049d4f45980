"""A plain HTTP client of the gateway among fakes."""

import httpx

from tests.gateway.fakes import FakeMesh


def client(mesh: FakeMesh, key: str = "", path: str = "") -> httpx.AsyncClient:
    """For URLs below `path`; `key` is sent as a bearer token."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{mesh.http_port}{path}", headers=headers, timeout=20)
