"""What every request of the gateway uses, made once in main. Knows no request."""

from dataclasses import dataclass, field

from services.forms.checks import FormChecks
from services.gateway.links.catalog import Catalog
from services.gateway.links.mesh_view import MeshView
from services.gateway.links.result_cache import ResultCache
from services.gateway.links.scheduler_link import SchedulerLink
from services.gateway.links.vectors.cache import VectorCache
from services.gateway.links.worker_links import WorkerLinks
from services.gateway.metrics import GatewayMetrics
from services.gateway.settings import GatewaySettings
from services.gateway.text.encoder import Encoder


@dataclass(frozen=True, slots=True)
class Backend:
    """The gateway's connections, settings and metrics."""

    settings: GatewaySettings
    catalog: Catalog
    scheduler: SchedulerLink
    workers: WorkerLinks
    results: ResultCache
    vectors: VectorCache
    metrics: GatewayMetrics
    view: MeshView
    encoder: Encoder
    forms: FormChecks = field(default_factory=FormChecks)
    """Checks the forms that answers are to have."""
