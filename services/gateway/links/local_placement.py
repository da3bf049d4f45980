"""Places jobs without the scheduler: on the workers that it listed last, while it does not answer.

The worker reports these jobs when it registers at the next scheduler, which then counts them. Fairness, queue and
prefix index are not available meanwhile: the worker with the most free places takes the job. Knows no tokens.
"""

import math
import time
from dataclasses import dataclass

from protos import inference_pb2 as api
from protos import mesh_pb2 as mesh
from services.gateway.links.worker_links import WorkerLinks

REMEMBER_S = 30.0
"""How long a worker is remembered after the scheduler's last list with it: it may have lost the scheduler alone."""


@dataclass(slots=True)
class _Known:
    """A worker as the scheduler listed it last."""

    worker: mesh.ServedWorker
    names: frozenset[str]
    unlisted_at: float = math.inf
    """When the first list without it arrived."""

    def serves(self, submit: mesh.Submit) -> bool:
        """Whether the worker has the job's model and adapter."""
        adapters = [b"", *(each.fingerprint for each in self.worker.adapters)]
        return submit.model in self.names and submit.adapter in adapters


class LocalPlacement:
    """The workers that the scheduler listed, and the choice among them."""

    def __init__(self, workers: WorkerLinks) -> None:
        self._workers = workers
        self._known: dict[str, _Known] = {}

    def update(self, models: mesh.ModelList) -> None:
        """Takes the scheduler's list."""
        now = time.monotonic()
        for known in self._known.values():
            known.unlisted_at = min(known.unlisted_at, now)
        for model in models.models:
            names = frozenset((model.card.name, *model.card.aliases))
            for worker in model.workers:
                self._known[worker.address] = _Known(worker, names)

    @property
    def addresses(self) -> set[str]:
        """The workers to whom links are kept."""
        return set(self._remembered())

    def place(self, submit: mesh.Submit, connected: bool = False) -> mesh.Assigned | None:
        """A worker for a whole job, rather not one for prompts; None if there is none with a free place.

        Workers with a working link precede those whose link would have to be opened first. `connected`: only the
        former, for jobs whose model no worker serves according to the scheduler.
        """
        candidates = []
        for address, known in self._remembered().items():
            link = self._workers.find(address)
            working = link is not None and link.connected and link.usable
            unknown = link is None and not connected and self._workers.reaches(address)
            jobs = link.jobs if link is not None else 0
            if known.serves(submit) and (working or unknown) and jobs < known.worker.credits:
                failed = known.worker.worker_id in submit.avoid
                prompts = known.worker.role == api.WORKER_ROLE_PREFILL
                candidates.append((failed, unknown, prompts, jobs / known.worker.credits, address))
        if not candidates:
            return None
        worker = self._known[min(candidates)[-1]].worker
        return mesh.Assigned(
            job_id=submit.job_id, attempt=submit.attempt, worker_id=worker.worker_id, address=worker.address
        )

    def _remembered(self) -> dict[str, _Known]:
        """The known workers by address; forgets those that have been off the list for too long."""
        now = time.monotonic()
        self._known = {at: known for at, known in self._known.items() if now - known.unlisted_at <= REMEMBER_S}
        return self._known
