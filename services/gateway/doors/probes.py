"""The health checks over HTTP: whether a model is served, and the progress of workers that are loading. Need no key.

Knows phases and percentages, never the names of models: only tenants that may use a model see its name.
"""

from services.gateway.doors.http import Exchange
from services.gateway.doors.http_routes import HttpRoutes
from services.gateway.links.catalog import Catalog


class Probes:
    """Serves /health and /startupz."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def add_to(self, routes: HttpRoutes) -> None:
        """Adds the two routes."""
        routes.add("GET", "/health", self.health, always=True)
        routes.add("GET", "/startupz", self.startup, always=True)

    async def health(self, exchange: Exchange) -> None:
        """Status 200 if a model is served, else 503."""
        serves = self._catalog.available
        await exchange.reply({"status": "serving" if serves else "not_serving"}, 200 if serves else 503)

    async def startup(self, exchange: Exchange) -> None:
        """As `health`, with the phase and percent of every worker that is loading."""
        serves = self._catalog.available
        loading = [{"phase": each.phase, "percent": each.percent} for each in self._catalog.loading]
        await exchange.reply({"started": serves, "loading": loading}, 200 if serves else 503)
