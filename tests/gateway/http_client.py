"""A plain HTTP client of the gateway among fakes."""

import ssl

import httpx

from tests.gateway.fakes import FakeMesh

_TLS = ssl.create_default_context()
"""Not used, but httpx makes one for each client, which takes 30 to 60 ms."""


def client(mesh: FakeMesh, key: str = "", path: str = "") -> httpx.AsyncClient:
    """For URLs below `path`; `key` is sent as a bearer token."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    url = f"http://127.0.0.1:{mesh.http_port}{path}"
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=20, verify=_TLS)
