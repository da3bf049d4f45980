"""A model that is served, and the same with each of its adapters. Knows names and fingerprints, no tokenizer.

Requests name an adapter as MODEL:ADAPTER, and it is a model of its own to them: with a fingerprint of its own, so that
nothing in a cache is shared with the model or with another adapter.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from protos import mesh_pb2 as mesh
from services import hashing


@dataclass(frozen=True, slots=True)
class Served:
    """A model and the addresses of its workers."""

    card: mesh.ModelCard
    """With an adapter: the model's, under the name MODEL:ADAPTER and with the fingerprint of both."""
    addresses: tuple[str, ...]
    adapter: bytes = b""
    """The fingerprint of the adapter on top of the model; empty: there is none."""
    base: str = ""
    """The name of the model that the adapter is of."""

    @property
    def model(self) -> str:
        """The model's name at the scheduler."""
        return self.base or self.card.name

    @property
    def only_address(self) -> str:
        """The address of its only worker; empty if there are none or several."""
        return self.addresses[0] if len(self.addresses) == 1 else ""


def served_with_adapters(models: mesh.ModelList, before: Mapping[str, Served]) -> dict[str, Served]:
    """Each adapter of each model, by all of its names. An adapter of a model that has no workers now, or is not listed,
    is known from `before`: it is unavailable, not unknown."""
    at_work = {model.card.name for model in models.models if model.workers}
    found = {name: replace(served, addresses=()) for name, served in before.items() if served.base not in at_work}
    for model in models.models:
        for served in _adapters_of(model):
            found.update(dict.fromkeys([served.card.name, *served.card.aliases], served))
    return found


def _adapters_of(model: mesh.ServedModel) -> Iterator[Served]:
    for name in sorted({each.name for worker in model.workers for each in worker.adapters}):
        counts = Counter(each.fingerprint for worker in model.workers for each in worker.adapters if each.name == name)
        # Where workers have different adapters of one name, that of most workers is served.
        fingerprint = max(sorted(counts), key=lambda each: counts[each])
        addresses = tuple(
            worker.address
            for worker in model.workers
            if any((each.name, each.fingerprint) == (name, fingerprint) for each in worker.adapters)
        )
        yield Served(_card_of(model.card, name, fingerprint), addresses, fingerprint, model.card.name)


def _card_of(base: mesh.ModelCard, name: str, fingerprint: bytes) -> mesh.ModelCard:
    card = mesh.ModelCard()
    card.CopyFrom(base)
    card.name = f"{base.name}:{name}"
    card.aliases[:] = [f"{alias}:{name}" for alias in base.aliases]
    card.fingerprint = hashing.adapted(base.fingerprint, fingerprint)
    return card
