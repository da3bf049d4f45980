"""What the mesh on one machine is made of."""

import asyncio
import socket
from pathlib import Path

import pytest

from weft.launch import plan
from weft.launch.plan import MeshPlan, MeshSpec, PortTaken


def wanted(tmp_path: Path, **changes: object) -> MeshSpec:
    values = {"models": ["/models/fox"], "home": tmp_path, "free_ports": True, **changes}
    return MeshSpec(**values)  # type: ignore[arg-type]


def environments(mesh: MeshPlan) -> dict[str, dict[str, str]]:
    return {spec.name: dict(spec.environment) for spec in mesh.specs}


async def test_the_parts_know_where_to_find_each_other(tmp_path: Path) -> None:
    mesh = await plan.plan(wanted(tmp_path, workers=2, settings={"MAX_BATCH_SIZE": "8"}))
    parts = environments(mesh)
    assert list(parts) == ["redis", "cache", "scheduler", "worker-1", "worker-2", "gateway"]
    listening = [parts[name]["WEFT_LISTEN"] for name in list(parts)[1:]]
    assert len(set(listening)) == 5
    assert parts["gateway"]["WEFT_LISTEN"] == mesh.address
    for name in ("gateway", "worker-1", "worker-2"):
        assert parts[name]["WEFT_SCHEDULER_ADDRESS"] == parts["scheduler"]["WEFT_LISTEN"]
        assert parts[name]["WEFT_CACHE_ADDRESS"] == parts["cache"]["WEFT_LISTEN"]
    assert parts["worker-2"]["MODEL_NAME"] == "/models/fox"
    assert parts["worker-1"]["MAX_BATCH_SIZE"] == "8"
    assert str(tmp_path) in parts["cache"]["WEFT_REDIS_URL"]
    assert mesh.redis == f"embedded Valkey, data in {tmp_path}/redis/bundled"


@pytest.mark.parametrize(
    ("said", "first", "last"), [("9000", "9000", "9003"), ("0", "0", "0"), ("many", "many", "many")]
)
async def test_each_part_has_a_port_for_prometheus(tmp_path: Path, said: str, first: str, last: str) -> None:
    parts = environments(await plan.plan(wanted(tmp_path, settings={"WEFT_METRICS_PORT": said})))
    assert [parts[name]["WEFT_METRICS_PORT"] for name in ("gateway", "worker-1")] == [first, last]


async def test_several_models_have_workers_each_and_names_of_their_own(tmp_path: Path) -> None:
    models = ["/models/fox", "someone/owl"]
    aliases = {"reynard": "fox", "default": "fox", "hoot": "owl"}
    parts = environments(await plan.plan(wanted(tmp_path, models=models, workers=2, aliases=aliases)))
    workers = [parts[f"worker-{number}"] for number in range(1, 5)]
    assert [worker["MODEL_NAME"] for worker in workers] == ["/models/fox"] * 2 + ["someone/owl"] * 2
    assert [worker["WEFT_ALIASES"] for worker in workers] == ['["reynard", "default"]'] * 2 + ['["hoot"]'] * 2
    assert len({worker["WEFT_LISTEN"] for worker in workers}) == 4


async def test_ones_own_redis_is_used_and_its_password_kept(tmp_path: Path) -> None:
    mesh = await plan.plan(wanted(tmp_path, redis_url="rediss://me:secret@cache.example:6380/2?x=secret"))
    assert "redis" not in environments(mesh)
    assert environments(mesh)["cache"]["WEFT_REDIS_URL"] == "rediss://me:secret@cache.example:6380/2?x=secret"
    assert mesh.redis == "rediss://cache.example:6380/2"


async def test_two_meshes_of_one_home_share_its_redis(tmp_path: Path) -> None:
    spec = (await plan.plan(wanted(tmp_path))).specs[0]
    server = await asyncio.create_subprocess_exec(*spec.command)
    try:
        async with asyncio.timeout(10):
            while not await spec.ready():  # noqa: ASYNC110 (the event is in another process)
                await asyncio.sleep(0.02)
        second = await plan.plan(wanted(tmp_path))
        assert "redis" not in environments(second)
        assert second.redis.endswith("(running already)")
    finally:
        server.terminate()
        await server.wait()


async def test_unreadable_data_is_set_aside(tmp_path: Path) -> None:
    spec = (await plan.plan(wanted(tmp_path))).specs[0]
    (tmp_path / "redis/bundled/precious").touch()
    assert spec.mend() == f"its data could not be read and is now in {tmp_path}/redis/bundled.unreadable"
    assert (tmp_path / "redis/bundled.unreadable/precious").exists()
    assert spec.mend() is None


async def test_taken_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mine, socket.create_server(("127.0.0.1", 0)) as scheduler:
        port = mine.getsockname()[1]
        with pytest.raises(PortTaken, match=f"port {port} is taken: .* --port"):
            await plan.plan(wanted(tmp_path, port=port))
        taken = f"127.0.0.1:{scheduler.getsockname()[1]}"
        monkeypatch.setattr(plan, "SCHEDULER_ADDRESS", taken)
        mine.close()
        mesh = await plan.plan(wanted(tmp_path, free_ports=False, port=port))
        assert mesh.address == f"127.0.0.1:{port}"
        assert environments(mesh)["scheduler"]["WEFT_LISTEN"] != taken
