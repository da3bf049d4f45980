"""Several processes of one gateway at one port: they share calls and limits, and their ends are not noticed."""

import asyncio
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from grpc import StatusCode, aio
from prometheus_client.parser import text_string_to_metric_families

from protos import inference_pb2 as api
from protos.inference_pb2_grpc import InferenceStub
from tests.gateway.tenant_files import tenant
from tests.mesh.harness import ROOT, Mesh
from tests.ports import free_port
from weft import Client
from weft.launch import plan
from weft.launch.supervisor import Supervisor

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROCESSES = 3
PACED = {"ENGINE": "paced", "WEFT_PACED_STEP_MS": "60", "MAX_BATCH_SIZE": "64"}
KEY = "weft-key-of-a-tenant"
OPERATORS_KEY = "weft-key-of-an-operator"
WAIT_S = 60.0


def members(pid: int) -> list[int]:
    """Ids of the processes that a supervisor has started."""
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mesh(tmp_path_factory: pytest.TempPathFactory, model: Path) -> AsyncIterator[Mesh]:
    """One paced worker, and a gateway of three processes with one tenant."""
    folder = tmp_path_factory.mktemp("processes")
    tenants = folder / "tenants.toml"
    tenants.write_text(tenant("acme", KEY, "concurrent = 40") + tenant("ops", OPERATORS_KEY, "operator = true"))
    settings = {
        "WEFT_GATEWAY_PROCESSES": str(PROCESSES),
        "WEFT_METRICS_PORT": str(free_port()),
        "WEFT_TENANTS_FILE": str(tenants),
    }
    async with Mesh(folder, model, worker_env=PACED, gateway_env=settings) as running:
        await until(lambda: len(listening(running)) == PROCESSES)
        yield running


def scraped(mesh: Mesh, *, public: bool = False) -> dict[tuple[str, str], float]:
    """The samples of the gateway's metrics: the sum over labels by name and process. `public`: of the HTTP port."""
    url = mesh.url() if public else f"http://127.0.0.1:{mesh.gateways[0].env['WEFT_METRICS_PORT']}"
    request = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {OPERATORS_KEY}"})
    with urllib.request.urlopen(request) as answer:
        text = answer.read().decode()
    samples: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, sample.labels["process"]
            samples[key] = samples.get(key, 0.0) + sample.value
    return samples


def listening(mesh: Mesh) -> set[str]:
    """The processes whose metrics are served."""
    return {process for name, process in scraped(mesh) if name == "process_start_time_seconds"}


def in_flight(mesh: Mesh) -> float:
    """Requests that run at any process."""
    return sum(value for (name, _), value in scraped(mesh).items() if name == "weft_gateway_requests_in_flight")


async def until(condition: Callable[[], bool]) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + WAIT_S
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def clients(mesh: Mesh, count: int) -> list[Client]:
    """Clients with a connection each."""
    return [Client(mesh.gateways[0].address, api_key=KEY, deadline_s=WAIT_S) for _ in range(count)]


async def answer(client: Client, tokens: int) -> int:
    """Streams one answer -> the number of its tokens."""
    async with client:
        stream = client.generate("a fox", max_tokens=tokens, temperature=1.0, ignore_eos=True)
        return sum([len(delta.token_ids) async for delta in stream])


async def test_calls_of_both_doors_are_spread_over_the_processes(mesh: Mesh) -> None:
    assert await asyncio.gather(*(answer(client, 4) for client in clients(mesh, 24))) == [4] * 24
    for _ in range(24):
        request = urllib.request.Request(f"{mesh.url()}/v1/models", headers={"Authorization": f"Bearer {KEY}"})
        with await asyncio.to_thread(urllib.request.urlopen, request) as reply:
            assert reply.status == 200
    samples = scraped(mesh)
    for name, total in (("weft_gateway_requests_total", 24), ("weft_http_seconds_count", 24)):
        counts = [value for (sample, _), value in samples.items() if sample == name]
        assert sum(counts) >= total
        assert len([count for count in counts if count]) > 1, (name, counts)


async def test_the_public_port_has_the_metrics_of_all_processes_for_operators(mesh: Mesh) -> None:
    name = "process_start_time_seconds"
    starts = {key: value for key, value in scraped(mesh).items() if key[0] == name}
    for _ in range(8):  # Whichever process a connection reaches.
        assert {key: value for key, value in scraped(mesh, public=True).items() if key[0] == name} == starts
    scrapes = await asyncio.gather(*(asyncio.to_thread(scraped, mesh, public=True) for _ in range(16)))
    assert all({key for key in each if key[0] == name} == starts.keys() for each in scrapes)
    assert await asyncio.to_thread(refused, mesh, {"Authorization": f"Bearer {KEY}"}) == 403
    assert await asyncio.to_thread(refused, mesh, {}) == 401


def refused(mesh: Mesh, headers: dict[str, str]) -> int:
    """The status with which the public port refuses its metrics."""
    try:
        urllib.request.urlopen(urllib.request.Request(f"{mesh.url()}/metrics", headers=headers))
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    return 200


async def test_a_limit_holds_over_all_processes(mesh: Mesh) -> None:
    request = api.GenerateRequest(prompt=api.Prompt(text="a fox"))
    request.sampling.max_tokens, request.sampling.ignore_eos = 2000, True
    calls = {asyncio.create_task(once(mesh, request)) for _ in range(60)}
    ended: set[asyncio.Task[StatusCode]] = set()
    while len(ended) < 20:
        ended, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED, timeout=WAIT_S)
        assert {call.result() for call in ended} == {StatusCode.RESOURCE_EXHAUSTED}
        await asyncio.sleep(0.05)
    await until(lambda: in_flight(mesh) == 40)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await until(lambda: in_flight(mesh) == 0)


async def once(mesh: Mesh, request: api.GenerateRequest) -> StatusCode:
    """The status of a call on a connection of its own, without any retry."""
    async with aio.insecure_channel(
        mesh.gateways[0].address, options=[("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    ) as channel:
        try:
            await InferenceStub(channel).Complete(
                request, metadata=(("authorization", f"Bearer {KEY}"),), wait_for_ready=True
            )
        except aio.AioRpcError as error:
            return error.code()
        return StatusCode.OK


async def test_a_killed_process_is_started_again_and_its_streams_continue(mesh: Mesh) -> None:
    supervisor = mesh.gateways[0].pid
    answers = asyncio.gather(*(answer(client, 100) for client in clients(mesh, 12)))
    await until(lambda: in_flight(mesh) == 12)
    before = members(supervisor)
    os.kill(before[0], signal.SIGKILL)
    assert await answers == [100] * 12
    await until(lambda: len(set(members(supervisor)) - {before[0]}) == PROCESSES and len(listening(mesh)) == PROCESSES)


async def test_replacing_every_process_is_not_noticed(mesh: Mesh) -> None:
    supervisor = mesh.gateways[0].pid
    before = set(members(supervisor))
    answers = asyncio.gather(*(answer(client, 150) for client in clients(mesh, 12)))
    await until(lambda: in_flight(mesh) == 12)
    os.kill(supervisor, signal.SIGHUP)
    late = []
    while before & set(members(supervisor)):
        late.append(await answer(clients(mesh, 1)[0], 2))
    assert await answers == [150] * 12
    assert late == [2] * len(late)
    await until(lambda: len(members(supervisor)) == PROCESSES and len(listening(mesh)) == PROCESSES)


async def test_another_gateway_is_refused_at_the_port(mesh: Mesh) -> None:
    gateway = mesh.gateways[0]
    env = {**os.environ, **gateway.env, "WEFT_LISTEN": gateway.address, "WEFT_METRICS_PORT": "0"}
    for processes in ("1", "2"):
        code, errors = await asyncio.to_thread(ended_with, {**env, "WEFT_GATEWAY_PROCESSES": processes})
        assert code == (1 if processes == "2" else os.EX_CONFIG)
        assert len([line for line in errors.splitlines() if line.startswith("weft:")]) == 1


async def test_a_setting_that_is_refused_is_refused_once() -> None:
    env = {**os.environ, "WEFT_LISTEN": "127.0.0.1:0", "WEFT_GATEWAY_HTTP_PORT": "0", "WEFT_GATEWAY_PROCESSES": "2"}
    code, errors = await asyncio.to_thread(ended_with, {**env, "WEFT_TENANTS_FILE": "/nowhere"})
    assert code == os.EX_CONFIG
    assert errors.count("WEFT_TENANTS_FILE") == 1


async def test_no_member_outlives_its_supervisor() -> None:
    env = {**os.environ, "WEFT_LISTEN": "127.0.0.1:0", "WEFT_GATEWAY_HTTP_PORT": "0", "WEFT_GATEWAY_PROCESSES": "2"}
    supervisor = started(env)
    await until(lambda: len(members(supervisor.pid)) == 2)
    children = members(supervisor.pid)
    supervisor.kill()
    await asyncio.to_thread(supervisor.communicate)  # Returns when the members, too, have closed their errors.
    await until(lambda: not any(Path(f"/proc/{pid}/stat").exists() and "Z" not in state(pid) for pid in children))


def started(env: dict[str, str]) -> "subprocess.Popen[str]":
    """A gateway with this environment."""
    return subprocess.Popen(
        [sys.executable, "-m", "services.gateway"], cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True
    )


def ended_with(env: dict[str, str]) -> tuple[int, str]:
    """The exit code and the errors of a gateway that does not start."""
    process = started(env)
    _, errors = process.communicate(timeout=WAIT_S)
    return process.returncode, errors


def state(pid: int) -> str:
    """The state of a process: R, S, Z, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


async def test_weft_serve_starts_as_many_processes_as_it_is_told(tmp_path: Path, model: Path) -> None:
    spec = plan.MeshSpec(models=[str(model)], home=tmp_path, free_ports=True, gateways=2, settings=PACED)
    async with plan.planned(spec) as planned:
        supervisor = Supervisor(planned.specs, tmp_path)
        async with supervisor.running():
            await supervisor.during(plan.wait_served(planned.address, 1, planned.reach))
            pid = supervisor.processes["gateway"].pid
            assert pid is not None
            await until(lambda: len(members(pid)) == 2)
            for _ in range(4):
                assert await answer(Client(planned.address, deadline_s=WAIT_S), 3) == 3
