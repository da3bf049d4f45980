"""A small mesh with every service, started once for all tests that break nothing."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.mesh.harness import ROOT, Mesh, Stub
from tests.redis_server import RedisServer


def demo_model() -> Path:
    """The smaller of the two models that ship: a token takes a quarter of the processor time of the larger one."""
    return ROOT / "models" / "weft-story-2m"


@pytest.fixture(scope="session")
def model() -> Path:
    """The demo model."""
    return demo_model()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def mesh(tmp_path_factory: pytest.TempPathFactory, model: Path) -> AsyncIterator[Mesh]:
    """One worker, one gateway, scheduler, cache and a real Redis, shared by the tests that break nothing."""
    folder = tmp_path_factory.mktemp("mesh")
    with RedisServer(folder / "redis") as redis:
        async with Mesh(folder, model, redis_url=redis.url) as running:
            yield running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stub(mesh: Mesh) -> Stub:
    """A client of the shared mesh."""
    return mesh.stub()
