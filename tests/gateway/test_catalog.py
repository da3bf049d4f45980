"""The models that a gateway knows: names after a restart of the scheduler, and after one of a model."""

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import pytest_asyncio

from protos import mesh_pb2 as mesh
from services.errors import WeftError
from services.gateway.access.tenants import Tenant
from services.gateway.links.catalog import Catalog

OPERATOR = Tenant.named("operator")
CARD = mesh.ModelCard(name="llama", aliases=["gpt"], fingerprint=b"old", bundle_digest=b"old")


@pytest_asyncio.fixture
async def catalog() -> AsyncIterator[Catalog]:
    """A catalog without models."""
    with ThreadPoolExecutor(1) as threads:
        made = Catalog(threads)
        yield made
        await made.close()


def served(card: mesh.ModelCard, *adapters: str) -> mesh.ModelList:
    """One model at one worker that has these adapters. Nothing listens at its address."""
    states = [mesh.AdapterState(name=name, fingerprint=name.encode()) for name in adapters]
    worker = mesh.ServedWorker(worker_id="w", address="127.0.0.1:1", credits=4, adapters=states)
    return mesh.ModelList(models=[mesh.ServedModel(card=card, addresses=[worker.address], workers=[worker])])


async def test_adapters_stay_known_to_a_new_scheduler_that_knows_no_worker_yet(catalog: Catalog) -> None:
    catalog.update(served(CARD, "poems"))
    catalog.update(mesh.ModelList())
    assert catalog.find("llama", OPERATOR).model == "llama"
    for name in ("llama:poems", "gpt:poems"):
        found = catalog.find(name, OPERATOR)
        assert (found.card.name, found.model, found.adapter) == ("llama:poems", "llama", b"poems")
    assert await catalog.listing(OPERATOR) == [], "a model that the scheduler does not list"
    catalog.update(served(CARD))
    with pytest.raises(WeftError, match="no model 'llama:poems': there are llama"):
        catalog.find("llama:poems", OPERATOR)


async def test_a_model_loses_the_aliases_that_its_next_card_lacks(catalog: Catalog) -> None:
    catalog.update(served(CARD))
    assert catalog.find("gpt", OPERATOR).card.fingerprint == b"old"
    catalog.update(mesh.ModelList())
    assert catalog.find("gpt", OPERATOR).card.fingerprint == b"old", "it is unavailable, not unknown"
    catalog.update(served(mesh.ModelCard(name="llama", fingerprint=b"new", bundle_digest=b"new")))
    assert catalog.find("llama", OPERATOR).card.fingerprint == b"new"
    with pytest.raises(WeftError, match="no model 'gpt': there are llama"):
        catalog.find("gpt", OPERATOR)
