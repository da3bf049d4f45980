"""Models of the mesh by name and alias, and workers that are still starting. Pure; rejects and sends nothing."""

from services.scheduler.core.messages import Card, ModelList, WorkerLoading
from services.scheduler.core.models import ModelRecord


class Catalog:
    """Models by name. `by_name` also holds names that no worker serves yet, for jobs that wait for them."""

    def __init__(self, now: float) -> None:
        self.by_name: dict[str, ModelRecord] = {}
        self.published = ModelList(())
        """The list that gateways received last."""
        self._started_at = now
        self._aliases: dict[str, ModelRecord] = {}
        self._loading: dict[str, WorkerLoading] = {}

    @property
    def loading(self) -> tuple[WorkerLoading, ...]:
        """Workers that are still starting, by id."""
        return tuple(loading for _, loading in sorted(self._loading.items()))

    def note_loading(self, loading: WorkerLoading) -> None:
        """Stores the progress of a starting worker."""
        self._loading[loading.worker_id] = loading

    def end_loading(self, worker_id: str) -> bool:
        """Forgets the start of a worker, whether it succeeded or failed. Returns whether it was known."""
        return self._loading.pop(worker_id, None) is not None

    def resolve(self, name: str, now: float, wait_s: float) -> ModelRecord | None:
        """The model of a name or alias.

        For `wait_s` seconds after the scheduler's start an unknown name gets a record without a card: its workers may
        not have registered again yet.
        """
        model = self.by_name.get(name) or self._aliases.get(name)
        if model is None and now - self._started_at < wait_s:
            model = self.by_name[name] = ModelRecord(name, self._started_at)
        return model

    def model_for(self, card: Card, now: float) -> ModelRecord:
        """The model that a worker with this card joins, with the jobs that already wait under any of its names."""
        model = self.by_name.setdefault(card.name, ModelRecord(card.name, now))
        model.card = card
        for alias in card.aliases:
            unserved = self.by_name.get(alias)
            if unserved is not None and unserved.card is None:
                del self.by_name[alias]
                model.take_queue(unserved)
        return model

    def forget(self, model: ModelRecord) -> None:
        """Removes a model that no worker serves and no job waits for."""
        del self.by_name[model.name]

    def next_list(self) -> ModelList | None:
        """The list to send to gateways now; None if it equals the last one."""
        served = [model for _, model in sorted(self.by_name.items()) if model.card is not None]
        self._aliases = {}
        for model in served:
            for alias in model.card.aliases if model.card else ():
                self._aliases.setdefault(alias, model)
        models = ModelList(tuple(model.served() for model in served), self.loading)
        if models == self.published:
            return None
        self.published = models
        return models
