"""The metrics of the whole gateway over HTTP, for operators. Knows no metric."""

from collections.abc import Awaitable, Callable

from services import metrics
from services.errors import unavailable
from services.gateway.access.authorizer import Authorizer
from services.gateway.doors.http import Exchange
from services.gateway.doors.http_routes import HttpRoutes


class MetricsDoor:
    """Serves /metrics to clients that may watch the mesh."""

    def __init__(self, access: Authorizer, scrape: Callable[[], Awaitable[bytes]]) -> None:
        """`scrape` returns the metrics of all processes of the gateway; empty if they cannot be had."""
        self._access = access
        self._scrape = scrape

    def add_to(self, routes: HttpRoutes) -> None:
        """Adds the route."""
        routes.add("GET", "/metrics", self.metrics, always=True)

    async def metrics(self, exchange: Exchange) -> None:
        """All metrics in Prometheus's text format."""
        self._access.count(self._access.permit("WatchMesh", exchange.credentials))
        text = await self._scrape()
        if not text:
            raise unavailable("METRICS", "the processes of this gateway did not answer in time")
        await exchange.send(text, 200, [(b"content-type", metrics.CONTENT_TYPE.encode())])
