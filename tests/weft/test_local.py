"""The plan of a mesh on one machine: processes, addresses, ports, folders, Redis."""

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from grpc import aio

from protos import inference_pb2 as api
from services import rpc
from services.cache.embedded import EmbeddedRedis
from tests.ports import free_port
from tests.weft.test_supervisor import alive
from weft.launch import plan
from weft.launch.home import locked_home
from weft.launch.mesh import first_command
from weft.launch.plan import CannotServe, MeshPlan, MeshSpec, OpenToOthers, PortTaken, planned
from weft.launch.ports import HeldPorts
from weft.launch.supervisor import Supervisor

HOST = "127.0.0.1"


def spec_of(tmp_path: Path, **changes: object) -> MeshSpec:
    values = {"models": ["/models/fox"], "home": tmp_path, "free_ports": True, **changes}
    return MeshSpec(**values)  # type: ignore[arg-type]


def environments(mesh: MeshPlan) -> dict[str, dict[str, str]]:
    return {spec.name: dict(spec.environment) for spec in mesh.specs}


async def planned_environments(spec: MeshSpec) -> dict[str, dict[str, str]]:
    async with planned(spec) as mesh:
        return environments(mesh)


async def test_each_process_gets_the_addresses_of_its_peers(tmp_path: Path) -> None:
    async with planned(spec_of(tmp_path, workers=2, settings={"MAX_BATCH_SIZE": "8"})) as mesh:
        parts = environments(mesh)
        assert list(parts) == ["redis", "cache", "scheduler", "worker-1", "worker-2", "gateway"]
        listening = [parts[name]["WEFT_LISTEN"] for name in list(parts)[1:]]
        assert len(set(listening)) == 5
        assert parts["gateway"]["WEFT_LISTEN"] == mesh.address == mesh.listen
        for name in ("gateway", "worker-1", "worker-2"):
            assert parts[name]["WEFT_SCHEDULER_ADDRESS"] == parts["scheduler"]["WEFT_LISTEN"]
            assert parts[name]["WEFT_CACHE_ADDRESS"] == parts["cache"]["WEFT_LISTEN"]
        assert parts["worker-2"]["MODEL_NAME"] == "/models/fox"
        assert parts["worker-1"]["MAX_BATCH_SIZE"] == "8"
        assert str(tmp_path) in parts["cache"]["WEFT_REDIS_URL"]
        assert mesh.redis == f"embedded Valkey, data in {tmp_path}/redis/bundled"


async def test_workers_of_each_model_take_roles_in_turn(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, models=["/models/fox", "/models/owl"], workers=3, roles=["prefill", "decode"])
    parts = await planned_environments(spec)
    roles = [parts[f"worker-{number}"]["WEFT_ROLE"] for number in range(1, 7)]
    assert roles == 2 * ["prefill", "decode", "prefill"]


@pytest.mark.parametrize(
    ("setting", "first", "last"), [("9000", "9000", "9003"), ("0", "0", "0"), ("many", "many", "many")]
)
async def test_each_process_has_a_port_for_prometheus(tmp_path: Path, setting: str, first: str, last: str) -> None:
    parts = await planned_environments(spec_of(tmp_path, settings={"WEFT_METRICS_PORT": setting}))
    assert [parts[name]["WEFT_METRICS_PORT"] for name in ("gateway", "worker-1")] == [first, last]


async def test_http_has_a_port_that_is_held(tmp_path: Path) -> None:
    async with planned(spec_of(tmp_path)) as mesh:
        port = environments(mesh)["gateway"]["WEFT_GATEWAY_HTTP_PORT"]
        assert mesh.http_address == f"{HOST}:{port}" != mesh.address
        with HeldPorts() as others:
            assert others.take(HOST, int(port)) is None
            assert others.take(HOST, 0) not in (int(port), None)


async def test_the_port_for_http_is_chosen_by_flag_or_setting(tmp_path: Path) -> None:
    with HeldPorts() as others:
        free, taken = others.free(HOST), others.free(HOST)
        others.release()
        others.take(HOST, taken)
        for chosen in ({"http_port": free}, {"settings": {"WEFT_GATEWAY_HTTP_PORT": str(free)}}):
            async with planned(spec_of(tmp_path, **chosen)) as mesh:
                assert mesh.http_address == f"{HOST}:{free}"
        with pytest.raises(PortTaken, match=f"port {taken} is taken: .* --http-port"):
            await planned_environments(spec_of(tmp_path, http_port=taken))
    async with planned(spec_of(tmp_path, http_port=0)) as mesh:
        assert (mesh.http_address, environments(mesh)["gateway"]["WEFT_GATEWAY_HTTP_PORT"]) == ("", "0")
    parts = await planned_environments(spec_of(tmp_path, settings={"WEFT_GATEWAY_HTTP_PORT": "many"}))
    assert parts["gateway"]["WEFT_GATEWAY_HTTP_PORT"] == "many"


async def test_a_free_port_replaces_the_default_one_for_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HeldPorts() as others:
        taken = others.free(HOST)
        monkeypatch.setattr(plan, "HTTP_PORT", taken)
        async with planned(spec_of(tmp_path, free_ports=False, port=free_port())) as mesh:
            assert mesh.http_address.startswith(f"{HOST}:")
            assert mesh.http_address != f"{HOST}:{taken}"


async def test_each_of_several_models_has_its_workers_and_aliases(tmp_path: Path) -> None:
    models = ["/models/fox", "someone/owl"]
    aliases = {"reynard": "fox", "default": "fox", "hoot": "owl"}
    adapters = {"owl": ["poems=/adapters/poems"]}
    spec = spec_of(tmp_path, models=models, workers=2, aliases=aliases, adapters=adapters)
    parts = await planned_environments(spec)
    workers = [parts[f"worker-{number}"] for number in range(1, 5)]
    assert [worker["MODEL_NAME"] for worker in workers] == ["/models/fox"] * 2 + ["someone/owl"] * 2
    assert [worker["WEFT_ALIASES"] for worker in workers] == ['["reynard", "default"]'] * 2 + ['["hoot"]'] * 2
    assert [worker.get("WEFT_ADAPTERS") for worker in workers] == [None] * 2 + ['["poems=/adapters/poems"]'] * 2
    assert len({worker["WEFT_LISTEN"] for worker in workers}) == 4
    assert {worker["WEFT_SETTINGS_SHARED"] for worker in workers} == {"true"}
    alone = await planned_environments(spec_of(tmp_path))
    assert "WEFT_SETTINGS_SHARED" not in alone["worker-1"], "what its model cannot honour is refused"


async def test_an_external_redis_is_used_and_its_password_not_printed(tmp_path: Path) -> None:
    async with planned(spec_of(tmp_path, redis_url="rediss://me:secret@cache.example:6380/2?x=secret")) as mesh:
        assert "redis" not in environments(mesh)
        url = "rediss://me:secret@cache.example:6380/2?x=secret"
        assert environments(mesh)["cache"]["WEFT_REDIS_URL"] == url
        assert mesh.redis == "rediss://cache.example:6380/2"


async def test_unreadable_data_is_set_aside(tmp_path: Path) -> None:
    async with planned(spec_of(tmp_path)) as mesh:
        spec = mesh.specs[0]
        (tmp_path / "redis/bundled/precious").touch()
        assert spec.repair() == f"its data could not be read and is now in {tmp_path}/redis/bundled.unreadable"
        assert (tmp_path / "redis/bundled.unreadable/precious").exists()
        assert spec.repair() is None


# ---- ports ----


async def test_a_taken_port_of_the_gateway_is_refused_and_inner_ones_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server((HOST, 0)) as mine, socket.create_server((HOST, 0)) as scheduler:
        port = mine.getsockname()[1]
        with pytest.raises(PortTaken, match=f"port {port} is taken: .* --port"):
            await planned_environments(spec_of(tmp_path, port=port))
        taken = f"{HOST}:{scheduler.getsockname()[1]}"
        monkeypatch.setattr(plan, "SCHEDULER_ADDRESS", taken)
        mine.close()
        async with planned(spec_of(tmp_path, free_ports=False, port=port)) as mesh:
            assert mesh.address == f"{HOST}:{port}"
            assert environments(mesh)["scheduler"]["WEFT_LISTEN"] != taken


@pytest.mark.parametrize("free_ports", [True, False])
async def test_two_meshes_planned_at_one_time_share_neither_ports_nor_ids(tmp_path: Path, free_ports: bool) -> None:
    """Ports are held when they are planned, before any process listens."""
    async with contextlib.AsyncExitStack() as meshes:
        specs = (spec_of(tmp_path / name, free_ports=free_ports, port=0) for name in "abc")
        plans = [await meshes.enter_async_context(planned(spec)) for spec in specs]
        addresses = [each["WEFT_LISTEN"] for p in plans for name, each in environments(p).items() if name != "redis"]
        assert len(set(addresses)) == len(addresses) == 12
        ids = [{each["WEFT_MESH_ID"] for name, each in environments(p).items() if name != "redis"} for p in plans]
        assert [len(each) for each in ids] == [1, 1, 1]
        assert len(set.union(*ids)) == 3


async def test_a_deployment_may_set_its_mesh_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_MESH_ID", "ours")
    parts = await planned_environments(spec_of(tmp_path))
    assert {name: each["WEFT_MESH_ID"] for name, each in parts.items() if name != "redis"} == dict.fromkeys(
        ["cache", "scheduler", "worker-1", "gateway"], "ours"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a held port cannot be listened at")
async def test_a_held_port_is_not_given_to_others_before_and_after_its_process_listens() -> None:
    with HeldPorts() as ours, HeldPorts() as theirs:
        port = ours.free(HOST)
        assert theirs.take(HOST, port) is None
        with socket.socket() as client, pytest.raises(ConnectionRefusedError):
            client.connect((HOST, port))
        for _ in range(2):  # A restarted process listens at the same port again.
            server = aio.server(options=[("grpc.so_reuseport", 0)])
            assert server.add_insecure_port(f"{HOST}:{port}") == port
            await server.start()
            with socket.socket() as client:
                client.connect((HOST, port))
            assert theirs.take(HOST, port) is None
            await server.stop(0)
        ours.release()
        assert theirs.take(HOST, port) == port


async def test_a_service_of_another_mesh_is_never_ready() -> None:
    server = await rpc.serve(f"{HOST}:0", [rpc.Service("weft.v1.Cache", lambda s, server: None, None)], mesh_id="a")
    await server.ready()
    address = f"{HOST}:{server.port}"
    answers = [await plan.serving(address, "weft.v1.Cache", mesh)() for mesh in ("a", "b", "")]
    await server.stop(0)
    assert answers == [True, False, True]


@pytest.mark.parametrize(
    ("models", "command"),
    [
        ([], "generate 'Once upon a time'"),
        ([api.Model(name="fox", tasks=["generate"])], "generate 'Once upon a time'"),
        ([api.Model(name="fox", tasks=["generate"]), api.Model(name="fox:poems", base="fox", tasks=["generate"])],
         "generate 'Once upon a time'"),
        ([api.Model(name="vixen", tasks=["embed"]), api.Model(name="fox", tasks=["generate"])],
         "generate 'Once upon a time' --model fox"),
        ([api.Model(name="vixen", tasks=["embed"])], "embed 'Once upon a time'"),
        ([api.Model(name="vixen", tasks=["rank"])], "models"),
    ],
)  # fmt: skip
def test_the_command_to_try_is_one_that_the_models_answer(models: list[api.Model], command: str) -> None:
    assert first_command(models) == command


# ---- hosts ----


@pytest.mark.parametrize(
    ("host", "reached"), [("0.0.0.0", HOST), ("127.0.0.2", "127.0.0.2"), ("localhost", "localhost")]
)
async def test_the_gateway_listens_at_the_given_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, reached: str
) -> None:
    monkeypatch.setenv("WEFT_ALLOW_UNPROTECTED", "true" if host == "0.0.0.0" else "false")
    async with planned(spec_of(tmp_path, host=host)) as mesh:
        parts = environments(mesh)
        port = mesh.address.rpartition(":")[2]
        assert (mesh.listen, mesh.address) == (f"{host}:{port}", f"{reached}:{port}")
        assert parts["gateway"]["WEFT_LISTEN"] == mesh.listen
        assert all(parts[name]["WEFT_LISTEN"].startswith(f"{HOST}:") for name in ("cache", "scheduler", "worker-1"))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "weft.example"])
@pytest.mark.parametrize("allow", ["", "many"])
async def test_a_host_open_to_others_needs_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, allow: str
) -> None:
    if allow:
        monkeypatch.setenv("WEFT_ALLOW_UNPROTECTED", allow)
    with pytest.raises(OpenToOthers, match=r"set WEFT_TENANTS_FILE .* WEFT_ALLOW_UNPROTECTED=true"):
        await planned_environments(spec_of(tmp_path, host=host))


async def test_a_host_that_is_not_this_machines_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_ALLOW_UNPROTECTED", "true")
    with pytest.raises(CannotServe, match=r"192\.0\.2\.1:0 cannot be listened at: Cannot assign"):
        await planned_environments(spec_of(tmp_path, host="192.0.2.1"))


# ---- folders ----


async def test_a_second_mesh_in_one_folder_has_separate_data_and_logs(tmp_path: Path) -> None:
    async with planned(spec_of(tmp_path)) as first, planned(spec_of(tmp_path)) as second:
        assert (first.home, second.home) == (tmp_path, tmp_path / "mesh-2")
        assert (
            second.redis == f"embedded Valkey, data in {tmp_path}/mesh-2/redis/bundled (another mesh uses {tmp_path})"
        )
        urls = [environments(mesh)["cache"]["WEFT_REDIS_URL"] for mesh in (first, second)]
        assert urls[0] != urls[1]
    async with planned(spec_of(tmp_path)) as again:
        assert again.home == tmp_path


async def test_the_plan_names_how_tools_reach_another_scheduler_and_folder(tmp_path: Path) -> None:
    async with planned(spec_of(tmp_path)) as first, planned(spec_of(tmp_path)) as second:
        schedulers = [environments(mesh)["scheduler"]["WEFT_LISTEN"] for mesh in (first, second)]
        assert first.tools == f"weft adapters list --scheduler {schedulers[0]}"
        assert second.tools == f"WEFT_HOME={tmp_path}/mesh-2 weft adapters list --scheduler {schedulers[1]}"


async def test_a_redis_ends_with_its_mesh_and_not_with_another(tmp_path: Path) -> None:
    async with redis_of(tmp_path) as first:
        async with redis_of(tmp_path) as second:
            assert first.url != second.url
        assert await first.answers()
        assert not await second.answers()
        async with redis_of(tmp_path) as third:
            assert third.url == second.url


@contextlib.asynccontextmanager
async def redis_of(home: Path) -> AsyncIterator[EmbeddedRedis]:
    """The Redis of a planned mesh of which no other process runs."""
    async with planned(spec_of(home)) as mesh, Supervisor([mesh.specs[0]], mesh.home / "logs").running():
        yield EmbeddedRedis(mesh.home / "redis")


async def test_the_next_mesh_waits_for_the_folder_of_a_killed_one(tmp_path: Path) -> None:
    """The Redis of the killed mesh may still write: it has inherited the lock."""
    script = f"""
import asyncio, subprocess
from pathlib import Path
from weft.launch.home import locked_home

async def main():
    async with locked_home(Path({str(tmp_path)!r})) as home:
        child = subprocess.Popen(["sleep", "1"], pass_fds=[home.lock])
        print(child.pid, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""
    launcher = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    assert launcher.stdout is not None
    child = int(await launcher.stdout.readline())
    async with locked_home(tmp_path) as beside:
        assert beside.folder == tmp_path / "mesh-2"
    launcher.kill()
    await launcher.wait()
    async with locked_home(tmp_path) as after:
        assert after.folder == tmp_path
        assert not alive(child)
