"""What all rooms of the gateway share, made once in main. Knows no request."""

from dataclasses import dataclass

from services.gateway.links.catalog import Catalog
from services.gateway.links.result_cache import ResultCache
from services.gateway.links.scheduler_link import SchedulerLink
from services.gateway.links.worker_link import WorkerLinks
from services.gateway.metrics import GatewayMetrics
from services.gateway.settings import GatewaySettings


@dataclass(frozen=True, slots=True)
class Backend:
    """What the gateway's rooms share: made once, in main."""

    settings: GatewaySettings
    catalog: Catalog
    dispatch: SchedulerLink
    links: WorkerLinks
    results: ResultCache
    metrics: GatewayMetrics
