"""What every request of the gateway uses, made once in main. Knows no request."""

from concurrent.futures import Executor
from dataclasses import dataclass

from services.gateway.links.catalog import Catalog
from services.gateway.links.result_cache import ResultCache
from services.gateway.links.scheduler_link import SchedulerLink
from services.gateway.links.worker_link import WorkerLinks
from services.gateway.metrics import GatewayMetrics
from services.gateway.settings import GatewaySettings


@dataclass(frozen=True, slots=True)
class Backend:
    """The gateway's connections, settings and metrics."""

    settings: GatewaySettings
    catalog: Catalog
    scheduler: SchedulerLink
    workers: WorkerLinks
    results: ResultCache
    metrics: GatewayMetrics
    threads: Executor
    """Tokenizes prompts and renders chat templates."""
