"""The models of the mesh by name and alias, who serves them and who will. Pure; rejects nothing and sends nothing."""

from services.scheduler.messages import Card, Loading, Models
from services.scheduler.models import Model


class Catalog:
    """What can be asked for. `by_name` also has names that nobody serves yet, for jobs that wait for them."""

    def __init__(self, now: float) -> None:
        self.by_name: dict[str, Model] = {}
        self.told = Models(())
        """What gateways know."""
        self._started_at = now
        self._aliases: dict[str, Model] = {}
        self._loading: dict[str, Loading] = {}

    @property
    def loading(self) -> tuple[Loading, ...]:
        """Workers whose start is not over, by id."""
        return tuple(loading for _, loading in sorted(self._loading.items()))

    def load(self, loading: Loading) -> None:
        """A worker is on its way."""
        self._loading[loading.worker_id] = loading

    def loaded(self, worker_id: str) -> bool:
        """Its start is over, one way or the other. Whether it was known to be under way."""
        return self._loading.pop(worker_id, None) is not None

    def resolve(self, name: str, now: float, patience_s: float) -> Model | None:
        """The model of a name or alias. Right after our start a name that nobody serves yet is waited for."""
        model = self.by_name.get(name) or self._aliases.get(name)
        if model is None and now - self._started_at < patience_s:
            model = self.by_name[name] = Model(name, self._started_at)
        return model

    def of_card(self, card: Card, now: float) -> Model:
        """The model that a worker with this card joins, with the jobs that already wait under any of its names."""
        model = self.by_name.setdefault(card.name, Model(card.name, now))
        model.card = card
        for alias in card.aliases:
            early = self.by_name.get(alias)
            if early is not None and early.card is None:
                del self.by_name[alias]
                model.take_line(early)
        return model

    def drop(self, model: Model) -> None:
        """Nobody serves it or waits for it any more."""
        del self.by_name[model.name]

    def news(self) -> Models | None:
        """What gateways are to be told now; None if they know it."""
        served = [model for _, model in sorted(self.by_name.items()) if model.card is not None]
        self._aliases = {}
        for model in served:
            for alias in model.card.aliases if model.card else ():
                self._aliases.setdefault(alias, model)
        models = Models(tuple(model.served() for model in served), self.loading)
        if models == self.told:
            return None
        self.told = models
        return models
