"""A mesh of real processes with a mesh secret, TLS and tenants at its public ports."""

import hashlib
import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.security.certificates import Authority
from services.security.identity import of_secret
from tests.mesh.conftest import demo_model
from tests.mesh.harness import Mesh
from tests.ports import free_port
from tests.redis_server import RedisServer
from weft.launch.reach import Reach

KEY = "weft-key-of-the-tenant"
SECRET = secrets.token_hex(32)
PACED = {"ENGINE": "paced", "WEFT_PACED_STEP_MS": "5", "MAX_BATCH_SIZE": "4", "WEFT_PACED_PREFILL_RATE": "4000"}
PATIENT = {
    "WEFT_GATEWAY_CACHE_BUDGET_S": "10",
    "WEFT_CACHE_BUDGET_MS": "10000",
    "WEFT_CACHE_STORE_BUDGET_MS": "10000",
    "WEFT_CACHE_CONNECT_MS": "10000",
}
"""Look-ups in the cache take part however busy the machine is."""
TENANTS = f'[[tenant]]\nname = "acme"\nkeys = ["sha256:{hashlib.sha256(KEY.encode()).hexdigest()}"]\n'


class Files:
    """Files of the public door: a certificate for localhost, and a file of tenants."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.authority = Authority.random()
        pair = self.authority.issue(["localhost", "127.0.0.1"])
        self.certificate = pair.certificate
        self.env = {
            "WEFT_GATEWAY_TLS_CERT": str(folder / "door.crt"),
            "WEFT_GATEWAY_TLS_KEY": str(folder / "door.key"),
            "WEFT_TENANTS_FILE": str(folder / "tenants.toml"),
        }
        self.ca = folder / "ca.crt"
        self.ca.write_bytes(self.authority.certificate)
        (folder / "door.crt").write_bytes(pair.certificate)
        (folder / "door.key").write_bytes(pair.key)
        (folder / "tenants.toml").write_text(TENANTS)


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Files of the public door."""
    return Files(tmp_path_factory.mktemp("door"))


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """The Redis of the mesh."""
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def mesh(tmp_path_factory: pytest.TempPathFactory, files: Files, redis: RedisServer) -> AsyncIterator[Mesh]:
    """One worker (paced), one gateway, scheduler and cache, with a secret, TLS, tenants and ports for metrics."""
    made = Mesh(
        tmp_path_factory.mktemp("mesh"),
        demo_model(),
        redis_url=redis.url,
        worker_env=PACED,
        gateway_env=files.env,
        env={"WEFT_MESH_SECRET": SECRET, "WEFT_LOG_LEVEL": "debug", **PATIENT},
        reach=Reach(of_secret("admin", SECRET.encode()), files.certificate),
    )
    for process in made.processes:
        process.env["WEFT_METRICS_PORT"] = str(free_port())
    async with made as running:
        yield running
