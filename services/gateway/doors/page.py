"""Serves the page: static files, read once at the start. Knows no requests to models.

The page runs no inline script and loads nothing from elsewhere; browsers enforce both by the headers sent here.
"""

import hashlib
from pathlib import Path

from services.gateway.doors.http import Exchange, Header
from services.gateway.doors.http_routes import HttpRoutes

FOLDER = Path(__file__).parents[1] / "page"
_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    b"form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_PROTECTION: list[Header] = [
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    # The files belong together: a browser revalidates them each time, in case a newer gateway serves others.
    (b"cache-control", b"no-cache"),
]


class PageDoor:
    """Serves the page at / and its files below /page/."""

    def add_to(self, routes: HttpRoutes) -> None:
        """Adds a route for every file."""
        for path in sorted(FOLDER.iterdir()):
            if path.suffix in _TYPES:
                at = "/" if path.name == "index.html" else f"/page/{path.name}"
                routes.add("GET", at, _File(path.read_bytes(), _TYPES[path.suffix]).send)


class _File:
    """A file in memory."""

    def __init__(self, body: bytes, content_type: bytes) -> None:
        self._body = body
        self._tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        self._headers = [*_PROTECTION, (b"content-type", content_type), (b"etag", self._tag.encode())]

    async def send(self, exchange: Exchange) -> None:
        """Sends the file, or status 304 to a client that has it."""
        if self._tag in exchange.headers.get("if-none-match", ""):
            await exchange.send(b"", 304, self._headers)
        else:
            await exchange.send(self._body, 200, self._headers)
