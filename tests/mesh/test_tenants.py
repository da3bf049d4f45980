"""Tenants: authentication, limits, and isolation from each other."""

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from typer.testing import CliRunner, Result

from protos import inference_pb2 as api
from tests.mesh.harness import Answer, Mesh, Stub, ask, generate
from tests.redis_server import RedisServer
from tests.timing import timely
from weft.cli.app import app

pytestmark = pytest.mark.asyncio(loop_scope="session")
CODES = grpc.StatusCode

PACED = {"ENGINE": "paced", "WEFT_PACED_STEP_MS": "5", "MAX_BATCH_SIZE": "4", "WEFT_PACED_PREFILL_RATE": "4000"}
ONE_LANE = {"WEFT_SCHEDULER_QUEUE_TARGET_S": "0.01"}
"""Jobs that wait are in the normal lane: in the other one are those of the tenant that waits less, three for each job
of this one."""
NAMES = ("many", "few", "slow", "one", "frugal", "stranger", "reader", "operator", "late")
KEYS = {name: f"weft-key-of-{name}-which-must-stay-secret" for name in NAMES}


def entry(name: str, more: str = "") -> str:
    """A tenant's entry in the tenants' file."""
    hashed = hashlib.sha256(KEYS[name].encode()).hexdigest()
    return f'[[tenant]]\nname = "{name}"\nkeys = ["sha256:{hashed}"]\n{more}\n'


FILE = "\n".join(
    (
        entry("many"),
        entry("few"),
        entry("slow", "requests_per_second = 2.0\nburst = 3"),
        entry("one", "concurrent = 1"),
        entry("frugal", "tokens_per_minute = 100"),
        entry("stranger", 'models = ["another"]'),
        entry("reader", 'methods = ["ListModels"]'),
        entry("operator", "operator = true"),
    )
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tenants' file."""
    path = tmp_path_factory.mktemp("keys") / "tenants.toml"
    path.write_text(FILE)
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mesh(tmp_path_factory: pytest.TempPathFactory, model: Path, file: Path) -> AsyncIterator[Mesh]:
    """One paced worker with a small batch, a result cache, and a gateway that requires keys."""
    folder = tmp_path_factory.mktemp("tenants")
    with RedisServer(folder / "redis") as redis:
        async with Mesh(
            folder,
            model,
            redis_url=redis.url,
            env=ONE_LANE,
            worker_env=PACED,
            gateway_env={"WEFT_TENANTS_FILE": str(file)},
        ) as running:
            yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stub(mesh: Mesh) -> Stub:
    """A client of the mesh."""
    return mesh.stub()


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    """The metadata with a key."""
    return (("authorization", f"Bearer {key}"),)


async def answer_for(stub: Stub, name: str, request: api.GenerateRequest) -> Answer:
    """The answer to a tenant's request."""
    return await generate(stub, request, metadata=bearer(KEYS[name]))


async def refusal(call: Any) -> tuple[grpc.StatusCode, str, float]:
    """Code, reason and seconds until a retry of a call that must fail; 0 without a RetryInfo."""
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    error: Any = caught.value
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    status = rpc_status.from_call(error)
    assert status is not None, error
    for detail in status.details:
        detail.Unpack(info) or detail.Unpack(retry)
    return error.code(), info.reason, retry.retry_delay.ToTimedelta().total_seconds()


# ---- authentication ----


async def read(call: Any) -> Any:
    """The first message of a stream, or its error."""
    message = await call.read()
    if message is aio.EOF:
        raise AssertionError(f"ended with {await call.code()}")
    return message


def every_rpc(channel: aio.Channel) -> dict[str, Callable[[Any], Any]]:
    """Each method that a gateway answers, from the descriptors, as a call with metadata and an empty message."""
    services: list[Any] = [
        api.DESCRIPTOR.services_by_name["Inference"],
        health_pb2.DESCRIPTOR.services_by_name["Health"],
        reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
    ]
    methods = {f"/{service.full_name}/{method.name}": method for service in services for method in service.methods}
    return {name: calling(channel, name, method) for name, method in methods.items()}


def calling(channel: aio.Channel, name: str, method: Any) -> Callable[[Any], Any]:
    """Calls a method of whatever kind with this metadata."""
    if method.client_streaming:
        both: Any = channel.stream_stream(name)
        return lambda metadata: read(both(metadata=metadata))
    if method.server_streaming:
        server: Any = channel.unary_stream(name)
        return lambda metadata: read(server(b"", metadata=metadata))
    unary: Any = channel.unary_unary(name)
    return lambda metadata: unary(b"", metadata=metadata)


async def test_every_rpc_except_health_needs_a_key(mesh: Mesh) -> None:
    async with aio.insecure_channel(mesh.gateways[0].address) as channel:
        calls = every_rpc(channel)
        assert len(calls) >= 8
        for name, call in calls.items():
            if name.startswith("/grpc.health.v1.Health/"):
                with contextlib.suppress(aio.AioRpcError):  # The gateway may not implement each method of reflection.
                    await call(())
                continue
            assert (await refusal(call(())))[:2] == (CODES.UNAUTHENTICATED, "KEY_REQUIRED"), name
            for forged in ("", "weft-forged", KEYS["late"], KEYS["few"][:-1], KEYS["few"] + "x"):
                assert (await refusal(call(bearer(forged))))[:2] == (CODES.UNAUTHENTICATED, "KEY_UNKNOWN"), name
            basic = (("authorization", f"Basic {KEYS['few']}"),)
            assert (await refusal(call(basic)))[0] is CODES.UNAUTHENTICATED
            twice = (*bearer(KEYS["few"]), *bearer(KEYS["many"]))
            assert (await refusal(call(twice)))[0] is CODES.UNAUTHENTICATED


async def test_health_needs_no_key(mesh: Mesh) -> None:
    async with aio.insecure_channel(mesh.gateways[0].address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        reply = await health.Check(health_pb2.HealthCheckRequest(service="weft.v1.Inference"))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_key_permits_its_models_and_methods(mesh: Mesh, stub: Stub) -> None:
    assert len((await answer_for(stub, "few", ask("A tale", max_tokens=4))).ids) == 4
    reader = bearer(KEYS["reader"])
    assert (await stub.ListModels(api.ListModelsRequest(), metadata=reader)).models
    assert (await refusal(stub.Complete(ask("A tale"), metadata=reader)))[:2] == (
        CODES.PERMISSION_DENIED,
        "METHOD_DENIED",
    )
    request = ask("A tale", model=(await stub.ListModels(api.ListModelsRequest(), metadata=reader)).models[0].name)
    stranger = bearer(KEYS["stranger"])
    assert (await refusal(stub.Complete(request, metadata=stranger)))[:2] == (CODES.PERMISSION_DENIED, "MODEL_DENIED")
    assert not (await stub.ListModels(api.ListModelsRequest(), metadata=stranger)).models
    urgent = ask("A tale")
    urgent.priority = 1
    refused = await refusal(stub.Complete(urgent, metadata=bearer(KEYS["few"])))
    assert refused[:2] == (CODES.PERMISSION_DENIED, "PRIORITY_DENIED")
    request.model = "nobody's"
    with pytest.raises(aio.AioRpcError) as unknown:
        await stub.Complete(request, metadata=stranger)
    # Names of models that the tenant may not use are not listed.
    assert unknown.value.code() is CODES.NOT_FOUND
    assert unknown.value.details() == 'no model "nobody\'s": none is served'
    async with aio.insecure_channel(mesh.gateways[0].address) as channel:
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        reply = await read(reflection.ServerReflectionInfo(iter([asked]), metadata=bearer(KEYS["few"])))
        assert "weft.v1.Inference" in {each.name for each in reply.list_services_response.service}


async def test_only_an_operator_may_watch_the_mesh(stub: Stub) -> None:
    call = stub.WatchMesh(api.WatchMeshRequest(), metadata=bearer(KEYS["operator"]))
    async for snapshot in call:
        assert [worker.phase for worker in snapshot.workers] == [api.WorkerState.PHASE_READY]
        break
    call.cancel()
    for name in ("many", "reader", "stranger"):
        code, reason, _ = await refusal(
            anext(aiter(stub.WatchMesh(api.WatchMeshRequest(), metadata=bearer(KEYS[name]))))
        )
        assert (code, reason) == (CODES.PERMISSION_DENIED, "METHOD_DENIED")


async def test_no_key_is_in_a_log(mesh: Mesh) -> None:
    logs = [process.log.read_text() for process in mesh.processes]
    assert all(logs)
    assert not [key for key in KEYS.values() for log in logs if key in log]


# ---- limits ----


async def test_the_request_rate_is_limited(stub: Stub) -> None:
    request = api.ListModelsRequest()
    slow = bearer(KEYS["slow"])
    for _ in range(3):
        await stub.ListModels(request, metadata=slow)
    code, reason, retry_s = await refusal(stub.ListModels(request, metadata=slow))
    assert (code, reason) == (CODES.RESOURCE_EXHAUSTED, "RATE_LIMITED")
    assert 0 < retry_s <= 0.5
    await stub.ListModels(request, metadata=bearer(KEYS["few"]))
    await asyncio.sleep(retry_s + 0.02)
    await stub.ListModels(request, metadata=slow)


async def test_concurrent_answers_are_limited(stub: Stub) -> None:
    request = ask("A tale", max_tokens=200, temperature=1.0, ignore_eos=True)
    running = stub.Generate(request, metadata=bearer(KEYS["one"]))
    await running.read()
    code, reason, retry_s = await refusal(stub.Complete(request, metadata=bearer(KEYS["one"])))
    assert (code, reason) == (CODES.RESOURCE_EXHAUSTED, "TOO_MANY_CONCURRENT")
    assert retry_s > 0
    running.cancel()
    await asyncio.sleep(0.1)
    assert (await answer_for(stub, "one", ask("A tale", max_tokens=4))).ids


async def test_tokens_are_limited(stub: Stub) -> None:
    await answer_for(stub, "frugal", ask([5] * 80, max_tokens=30, temperature=1.0, ignore_eos=True))
    code, reason, retry_s = await refusal(stub.Complete(ask("A tale"), metadata=bearer(KEYS["frugal"])))
    assert (code, reason) == (CODES.RESOURCE_EXHAUSTED, "TOKENS_EXHAUSTED")
    assert 1 < retry_s < 10  # 110 of 100 are used: 11 tokens take 6.6 s.
    assert (await stub.ListModels(api.ListModelsRequest(), metadata=bearer(KEYS["frugal"]))).models


# ---- isolation ----


async def test_caches_are_never_shared(stub: Stub) -> None:
    """A tenant's cache is visible to others neither in content nor in time: the prompt takes 100 ms to compute."""
    request = ask([7, 11, 13, 17] * 100, max_tokens=4, seed=21, temperature=1.0)
    first = await answer_for(stub, "many", request)
    request.cache = api.CACHE_POLICY_READ_ONLY
    other = await answer_for(stub, "few", request)
    assert (other.receipt.cached_tokens, other.receipt.result_hit, other.receipt.joined) == (0, False, False)
    assert other.receipt.prefill_tokens == 400
    cold_s, other_s = first.receipt.timings.first_token_s, other.receipt.timings.first_token_s
    for _ in range(20):  # A result is stored in the background, and a look-up has 20 ms.
        again = await answer_for(stub, "many", request)
        if again.receipt.result_hit:
            break
    assert again.receipt.result_hit
    request.sampling.seed = 22
    warm = await answer_for(stub, "many", request)
    assert warm.receipt.cached_tokens >= 384
    warm_s = warm.receipt.timings.first_token_s
    print(
        f"first token: own first {cold_s * 1e3:.0f} ms, other tenant {other_s * 1e3:.0f} ms, own {warm_s * 1e3:.0f} ms"
    )
    assert warm_s < 0.1 < min(cold_s, other_s)


async def test_generations_are_never_shared(stub: Stub) -> None:
    """Equal requests of two tenants are computed twice, even with equal request ids."""
    request = ask([3, 5, 7] * 32, max_tokens=60, ignore_eos=True, seed=5)
    request.request_id = "the-same"
    leading = asyncio.create_task(answer_for(stub, "many", request))
    await asyncio.sleep(0.1)
    other, own = await asyncio.gather(answer_for(stub, "few", request), answer_for(stub, "many", request))
    assert own.receipt.joined
    assert not other.receipt.joined
    assert other.receipt.prefill_tokens == 96
    assert (await leading).ids == own.ids


@timely
async def test_tenants_offering_10_to_1_get_1_to_1(stub: Stub) -> None:
    """160 clients with longer answers against 16: both tenants get the same number of tokens, prompts included. The
    answers are not streamed, so that a busy machine has time to send the next requests while others wait."""
    served, answered = {"many": 0, "few": 0}, asyncio.Event()

    async def client(name: str, length: int, seed: int) -> None:
        while True:
            request = ask([seed, 9, 9, 9], max_tokens=length, temperature=1.0, ignore_eos=True)
            await stub.Complete(request, metadata=bearer(KEYS[name]))
            served[name] += 4 + length
            answered.set()

    tasks = [asyncio.create_task(client("few", 16, 300 + i)) for i in range(16)]
    tasks += [asyncio.create_task(client("many", 24, 100 + i)) for i in range(160)]
    try:
        async with asyncio.timeout(60):
            before = dict(served)
            while sum(served.values()) < 4000:
                answered.clear()
                await answered.wait()
                if sum(served.values()) < 1000:
                    before = dict(served)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    few, many = (served[name] - before[name] for name in ("few", "many"))
    print(f"tokens served: few {few}, many {many}")
    assert 0.9 <= few / many <= 1.1


# ---- the file ----


async def accepted(stub: Stub, name: str) -> None:
    """Waits until a tenant's key is accepted."""
    async with asyncio.timeout(5):
        while True:
            try:
                await stub.ListModels(api.ListModelsRequest(), metadata=bearer(KEYS[name]))
                return
            except aio.AioRpcError:
                await asyncio.sleep(0.05)


async def test_the_file_is_reloaded_and_running_streams_continue(mesh: Mesh, stub: Stub, file: Path) -> None:
    models, many = api.ListModelsRequest(), bearer(KEYS["many"])
    await asyncio.to_thread(file.write_text, FILE)  # An earlier run of this test may have left another one.
    await accepted(stub, "many")
    log = mesh.gateways[0].log
    logged = log.read_text().count("invalid tenants file")
    long = ask("A tale", max_tokens=1200, temperature=1.0, ignore_eos=True)
    began = asyncio.Event()
    running = asyncio.create_task(generate(stub, long, metadata=many, on_delta=lambda delta: began.set()))
    await began.wait()
    await asyncio.to_thread(file.write_text, FILE.replace(entry("many"), "") + entry("late"))
    await accepted(stub, "late")
    assert (await refusal(stub.ListModels(models, metadata=many)))[1] == "KEY_UNKNOWN"
    assert not running.done()
    # An invalid file changes nothing, and is logged once.
    await asyncio.to_thread(file.write_text, "[[tenant]]\nname = 5")
    await asyncio.sleep(1.2)
    await accepted(stub, "late")
    assert log.read_text().count("invalid tenants file") == logged + 1
    spare = file.with_suffix(".new")
    spare.write_text(FILE)
    spare.replace(file)
    await accepted(stub, "many")
    assert len((await running).ids) == 1200


BROKEN = {
    "not TOML": ("[[tenant]\n", "is not TOML"),
    "too deep": ("a = " + "[" * 100_000, "is nested too deeply"),
    "no tenants": ("", "tenant: Field required"),
    "a key as it is": (f'[[tenant]]\nname = "a"\nkeys = ["{KEYS["few"]}"]\n', "tenant.0.keys.0: "),
    "an unknown field": (entry("few", "request_per_second = 1"), "tenant.0.request_per_second: "),
    "a limit of nothing": (entry("few", "concurrent = 0"), "tenant.0.concurrent: "),
    "a tenant twice": (entry("few") + entry("few"), "names few twice"),
    "a key twice": (entry("few") + entry("few").replace('"few"', '"other"'), "other: a key is listed twice"),
    "an unknown method": (entry("few", 'methods = ["Destroy"]'), "tenant.0.methods.0: "),
    "no file": (None, "cannot be read: No such file or directory"),
}


async def test_a_gateway_does_not_start_with_an_invalid_file(tmp_path: Path, model: Path) -> None:
    async def start(number: int, text: str | None, reason: str) -> None:
        path = tmp_path / f"{number}.toml"
        if text is not None:
            path.write_text(text)
        gateway = Mesh(tmp_path / str(number), model, gateway_env={"WEFT_TENANTS_FILE": str(path)}).gateways[0]
        gateway.start()
        assert gateway.popen is not None
        assert await asyncio.to_thread(gateway.popen.wait, 30) == os.EX_CONFIG
        log = gateway.log.read_text()
        assert log.strip().splitlines()[-1].startswith(f"weft: WEFT_TENANTS_FILE {reason}"), log
        assert KEYS["few"] not in log
        assert "Traceback" not in log

    cases = list(enumerate(BROKEN.values()))
    for begin in range(0, len(cases), 3):
        await asyncio.gather(*(start(number, *case) for number, case in cases[begin : begin + 3]))


async def test_the_load_generator_sends_its_key(mesh: Mesh) -> None:
    """`weft bench` at a mesh that requires keys succeeds with a key, and fails with the reason without one."""
    lengths = ("--requests", "2", "--input-len", "8", "--output-len", "4", "--warmup", "0")

    async def bench(key: str) -> Result:
        command = ["bench", "--address", mesh.gateways[0].address, *lengths]
        return await asyncio.to_thread(CliRunner().invoke, app, command, env={"WEFT_API_KEY": key})

    served = await bench(KEYS["many"])
    assert served.exit_code == 0, served.output
    assert KEYS["many"] not in served.output
    refused = await bench("")
    assert refused.exit_code == 1
    assert "key" in refused.output
    assert "Traceback" not in refused.output
