"""Refusals of a process that has no time, and the limits of its connections, through the public doors."""

import asyncio
import secrets
import socket
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from google.rpc import error_details_pb2
from grpc import StatusCode, aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from protos import inference_pb2 as api
from protos.inference_pb2_grpc import InferenceStub, add_InferenceServicer_to_server
from services import rpc
from services.calls import accept_probe
from services.calls.accept_probe import AcceptProbe
from services.gateway.access.load_gate import (
    BUSIEST,
    FEW_PER_S,
    LONGEST_CALM_WAIT_S,
    LONGEST_WAIT_S,
    PATIENCE,
    AdmittedShare,
    LoadGate,
)
from services.gateway.doors.grpc_gate import RefusalGate
from tests.gateway.fakes import FakeMesh, ask, until
from tests.gateway.test_refusals import reason_of
from tests.ports import free_port

# ---- the share of calls that is taken ----

MANY = 10 * FEW_PER_S
"""Calls per second."""


def simulated(offered: float, refusal_cost: float, windows: int) -> list[float]:
    """Shares over time; `offered` load and the cost of refusing all of it, in shares of the processor's time."""
    admitted, shares = AdmittedShare(), []
    for _ in range(windows):
        share = admitted.share
        shares.append(admitted.update(min(1.0, offered * share + refusal_cost * (1 - share)), MANY))
    return shares


def test_a_process_with_time_takes_every_call() -> None:
    assert set(simulated(0.9, 0.1, 100)) == {1.0}


@pytest.mark.parametrize("offered", [1.1, 2.0, 4.0, 20.0])
def test_under_overload_the_processor_stays_busy_and_no_more_is_taken(offered: float) -> None:
    shares = simulated(offered, 0.1, 400)[200:]
    done = sum(min(1.0, offered * share) for share in shares) / len(shares)
    assert done > 0.7 * BUSIEST  # The rest is for refusals, and for the search.
    assert offered * sum(shares) / len(shares) < 1.05


def test_a_burst_that_is_over_soon_refuses_nobody() -> None:
    admitted = AdmittedShare()
    for quiet in ((0.5, MANY), (1.0, FEW_PER_S)):
        assert [admitted.update(1.0, MANY) for _ in range(PATIENCE - 1)] == [1.0] * (PATIENCE - 1)
        assert admitted.update(*quiet) == 1.0
    assert [admitted.update(1.0, MANY) for _ in range(PATIENCE)][-1] < 1.0


def test_streams_that_take_all_of_the_time_refuse_no_call() -> None:
    admitted = AdmittedShare()
    assert {admitted.update(1.0, FEW_PER_S) for _ in range(200)} == {1.0}


@pytest.mark.parametrize(("busy", "calls_per_s"), [(0.3, MANY), (1.0, FEW_PER_S)])
def test_every_call_is_taken_soon_after_an_overload(busy: float, calls_per_s: float) -> None:
    admitted = AdmittedShare()
    for _ in range(200):
        admitted.update(1.0, MANY)
    assert admitted.share == pytest.approx(0.01)
    windows = 0
    while admitted.update(busy, calls_per_s) < 1.0:
        windows += 1
    assert windows * 0.05 < 1.5


def simulated_queue(offered: float, taken_s: float, refused_s: float, windows: int) -> list[tuple[float, float]]:
    """The share and the wait in each window of a process that waits for a processor half of the time: `offered` calls a
    second wait in a queue, and each takes this many seconds."""
    admitted, window_s = AdmittedShare(), 0.05
    waiting, times = 0.0, []
    for _ in range(windows):
        cost_s = admitted.share * taken_s + (1 - admitted.share) * refused_s
        waiting = max(0.0, waiting + offered * window_s - window_s / cost_s)
        times.append((admitted.update(0.5, MANY, waiting * cost_s), waiting * cost_s))
    return times


@pytest.mark.parametrize("offered", [450.0, 570.0, 1100.0])
def test_calls_that_wait_before_they_are_seen_are_an_overload(offered: float) -> None:
    times = simulated_queue(offered, taken_s=1 / 400, refused_s=1 / 1600, windows=600)[200:]
    assert max(wait_s for _, wait_s in times) < 2 * LONGEST_WAIT_S
    assert sum(share for share, _ in times) / len(times) > 0.1  # No more is refused than has to be.


def test_calls_that_are_seen_soon_are_no_overload_and_neither_are_few_late_ones() -> None:
    assert {share for share, _ in simulated_queue(350.0, taken_s=1 / 400, refused_s=1 / 1600, windows=200)} == {1.0}
    admitted = AdmittedShare()
    assert {admitted.update(0.5, FEW_PER_S, 10 * LONGEST_WAIT_S) for _ in range(200)} == {1.0}


@pytest.mark.parametrize(("offered", "refuses"), [(0.9, False), (1.5, True), (4.0, True)])
def test_in_calm_an_overload_is_known_by_calls_that_wait(offered: float, refuses: bool) -> None:
    admitted, wait_s = AdmittedShare(), 0.0
    for _ in range(40):
        wait_s = max(0.0, wait_s + (offered - 1) * 0.05)
        admitted.update(min(1.0, offered), MANY, wait_s, calm=True)
    assert (admitted.share < 1.0) is refuses


def test_in_calm_clients_that_wait_for_their_answers_are_no_overload() -> None:
    admitted = AdmittedShare()
    shares = {admitted.update(1.0, MANY, 0.9 * LONGEST_CALM_WAIT_S, calm=True) for _ in range(200)}
    assert shares == {1.0}


async def test_after_a_refusal_by_anyone_it_is_not_calm(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def update(self: AdmittedShare, busy: float, calls_per_s: float, wait_s: float, calm: bool) -> float:
        seen.append(calm)
        return 1.0

    monkeypatch.setattr(AdmittedShare, "update", update)
    refused_later = 0
    gate = LoadGate(2, lambda: 0, lambda: 0.0, lambda: refused_later)
    watching = asyncio.create_task(gate.watch())
    await until(lambda: gate.refusal() is None and len(seen) > 1)
    assert set(seen) == {True}
    refused_later = 1
    await until(lambda: gate.refusal() is None and not seen[-1])
    watching.cancel()


async def test_where_waits_are_not_measured_a_busy_loop_is_an_overload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "thread_time", time.monotonic)  # The event loop computes all of the time.
    gate = LoadGate(2, lambda: 0)
    watching = asyncio.create_task(gate.watch())
    await until(lambda: [gate.refusal() for _ in range(100)] != [None] * 100)
    watching.cancel()
    assert gate.share_now() < 1.0
    assert gate.refused


def test_the_share_stays_while_the_wait_becomes_shorter() -> None:
    admitted = AdmittedShare()
    for _ in range(PATIENCE):
        share = admitted.update(0.5, MANY, 3.0)
    assert share < 1.0
    assert admitted.update(0.5, MANY, 2.9) == share
    assert admitted.update(0.5, MANY, 2.9) < share


def test_calls_beyond_the_bound_are_refused() -> None:
    running = 0
    gate = LoadGate(2, lambda: running)
    assert gate.refusal() is None
    running = 2
    error = gate.refusal()
    assert error is not None
    assert (error.code, error.reason, gate.refused) == (StatusCode.RESOURCE_EXHAUSTED, "GATEWAY_OVERLOADED", 1)


# ---- through the doors ----


async def test_refusals_have_a_reason_and_a_delay_and_health_is_never_refused() -> None:
    port = free_port()
    async with FakeMesh(http_port=port, gateway_most_calls=1) as peers:
        peers.workers[0].hold_at = 1
        running = peers.stub.Generate(ask())
        await running.read()
        checks: Any = health_pb2_grpc.HealthStub(peers.channel)
        for _ in range(2):
            state = await checks.Check(health_pb2.HealthCheckRequest())
            assert state.status == health_pb2.HealthCheckResponse.SERVING
        for call in (peers.stub.ListModels(api.ListModelsRequest()), peers.stub.Complete(ask())):
            with pytest.raises(aio.AioRpcError) as refused:
                await call
            assert_full(refused.value)
        assert await asyncio.to_thread(fetch, port, "/v1/models") == (429, "1")
        assert await asyncio.to_thread(fetch, port, "/startupz") == (200, None)
        running.cancel()


async def test_a_refusal_waits_for_no_message_and_ends_one_that_is_still_sent() -> None:
    async with FakeMesh(gateway_most_calls=1) as peers:
        peers.workers[0].hold_at = 1
        running = peers.stub.Generate(ask())
        await running.read()
        silent: Any = peers.channel.stream_unary("/weft.v1.Inference/Complete")()
        large = peers.stub.Complete(ask("x" * (12 << 20)))
        for call in (silent, large):
            with pytest.raises(aio.AioRpcError) as refused:
                await asyncio.wait_for(call, 60)
            assert_full(refused.value)
        running.cancel()


def assert_full(error: aio.AioRpcError) -> None:
    """The error is the gate's refusal, with its reason and a delay."""
    assert error.code() is StatusCode.RESOURCE_EXHAUSTED
    status: Any = rpc_status.from_call(error)  # type: ignore[arg-type]
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(retry)
    assert (info.reason, retry.retry_delay.seconds) == ("GATEWAY_OVERLOADED", 1)


def fetch(port: int, path: str) -> tuple[int, str | None]:
    """Status of a GET request, and its header retry-after."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as reply:
            return reply.status, reply.headers["retry-after"]
    except urllib.error.HTTPError as error:
        return error.code, error.headers["retry-after"]


async def test_a_burst_of_calls_ends_without_a_bare_cancellation() -> None:
    async with FakeMesh(watches_load=True) as peers:
        calls = [peers.stub.ListModels(api.ListModelsRequest()) for _ in range(5000)]
        codes = {await call.code() for call in calls}
    assert codes <= {StatusCode.OK, StatusCode.RESOURCE_EXHAUSTED}
    assert StatusCode.OK in codes


async def test_clients_that_each_wait_for_an_answer_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "thread_time", time.monotonic)  # They take all of the event loop's time.
    async with FakeMesh(watches_load=True) as peers:

        async def client() -> set[StatusCode]:
            return {await peers.stub.ListModels(api.ListModelsRequest()).code() for _ in range(150)}

        codes = await asyncio.gather(*(client() for _ in range(12)))
    assert set.union(*codes) == {StatusCode.OK}


# ---- calls that wait until the server accepts them ----


class Counting:
    """A servicer that counts its calls."""

    def __init__(self) -> None:
        self.answered = 0

    async def ListModels(self, request: api.ListModelsRequest, context: Any) -> api.ListModelsResponse:
        """Counts the call."""
        self.answered += 1
        return api.ListModelsResponse()

    def __getattr__(self, name: str) -> Any:
        """The other methods, which nothing calls."""
        return self.ListModels


async def test_a_probe_waits_behind_the_calls_of_the_last_method_and_a_health_check_behind_none() -> None:
    probe, servicer = AcceptProbe(), Counting()
    service = rpc.Service("weft.v1.Inference", add_InferenceServicer_to_server, servicer)
    gate = RefusalGate(lambda _: None, lambda _: None, probe)
    server = await rpc.serve("127.0.0.1:0", [service], own_address=probe.address, gate=gate)
    address = f"127.0.0.1:{server.port}"
    async with aio.insecure_channel(address) as channel, aio.insecure_channel(address) as other:
        stub = InferenceStub(channel)
        checks: Any = health_pb2_grpc.HealthStub(other)
        await stub.ListModels(api.ListModelsRequest())  # All are connected.
        await checks.Check(health_pb2.HealthCheckRequest())
        await probe.open()
        calls = [asyncio.ensure_future(stub.ListModels(api.ListModelsRequest())) for _ in range(1000)]
        await until(lambda: servicer.answered > 1)
        probe.wait_s()
        await checks.Check(health_pb2.HealthCheckRequest())
        assert servicer.answered < 500
        await asyncio.gather(*calls)
        assert probe.wait_s() > 1e-2  # It waited behind nearly all of them.
    await probe.close()
    tasks = len(asyncio.all_tasks())
    assert [probe.wait_s() for _ in range(3)] == [0.0, 0.0, 0.0]
    assert len(asyncio.all_tasks()) == tasks, "a call was started"
    await server.stop(0)


async def test_a_server_that_accepts_nothing_gets_few_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept_probe, "_MOST_CALLS", 4)
    probe, before = AcceptProbe(), len(asyncio.all_tasks())
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind("\0" + probe.address.removeprefix("unix-abstract:"))
        deaf.listen()
        for _ in range(20):
            waited_s = probe.wait_s()
            await asyncio.sleep(0.005)
        assert waited_s >= 0.09  # The age of the first one.
        assert len(asyncio.all_tasks()) - before < 10  # gRPC has a task of its own for each call.
        await probe.close()


async def test_without_abstract_sockets_a_server_starts_and_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    probe = AcceptProbe()
    monkeypatch.undo()
    server = await rpc.serve("127.0.0.1:0", [], own_address=probe.address)
    await probe.open()
    assert [probe.wait_s() for _ in range(3)] == [0.0, 0.0, 0.0]
    await probe.close()
    await server.stop(0)
    assert "unix" not in probe.address


async def test_the_address_of_the_probe_asks_for_keys_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = secrets.token_hex(16)
    monkeypatch.setattr(secrets, "token_hex", lambda count: name[: 2 * count])
    file = tmp_path / "tenants.toml"
    file.write_text(f'[[tenant]]\nname = "someone"\nkeys = ["sha256:{"0" * 64}"]\n')
    async with FakeMesh(tenants_file=str(file)), aio.insecure_channel(f"unix-abstract:weft-{name}") as own:
        for metadata, reason in ((None, "KEY_REQUIRED"), ((("authorization", "Bearer weft-forged"),), "KEY_UNKNOWN")):
            with pytest.raises(aio.AioRpcError) as refused:
                await InferenceStub(own).ListModels(api.ListModelsRequest(), metadata=metadata)
            assert (refused.value.code(), reason_of(refused.value)) == (StatusCode.UNAUTHENTICATED, reason)


# ---- connections ----

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04\x00" + bytes(4)
_PING = b"\x00\x00\x08\x06\x00" + bytes(4) + bytes(8)


async def connected(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A new connection that has begun HTTP/2."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_PREFACE)
    return reader, writer


async def all_received(reader: asyncio.StreamReader) -> bytes:
    """Everything until the other side closes the connection."""
    try:
        return await asyncio.wait_for(reader.read(), 30)
    except ConnectionError:
        return b""


async def test_an_idle_connection_is_closed() -> None:
    async with FakeMesh(gateway_connection_idle_s=1) as peers:
        reader, writer = await connected(peers.server.port)
        assert await all_received(reader)
        writer.close()


async def test_an_old_connection_takes_no_more_calls_and_the_next_one_does() -> None:
    async with FakeMesh(gateway_connection_age_s=1) as peers:
        reader, writer = await connected(peers.server.port)
        assert await asyncio.wait_for(reader.readuntil(b"max_age"), 30)
        writer.close()
        for _ in range(8):
            await peers.stub.ListModels(api.ListModelsRequest())
            await asyncio.sleep(0.3)


async def test_connections_beyond_the_bound_are_closed() -> None:
    port = free_port()
    async with FakeMesh(http_port=port, gateway_most_connections=3) as peers:
        await peers.stub.ListModels(api.ListModelsRequest())
        held = [await connected(peers.server.port) for _ in range(2)]
        for reader, _ in held:
            assert await reader.read(9)
        reader, writer = await connected(peers.server.port)
        await all_received(reader)
        await peers.stub.ListModels(api.ListModelsRequest())
        sockets = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        assert (await all_received(sockets[3][0])).startswith(b"HTTP/1.1 503")
        for _, each in [*held, (reader, writer), *sockets]:
            each.close()


async def test_a_flood_of_pings_ends_its_connection() -> None:
    async with FakeMesh() as peers:
        reader, writer = await connected(peers.server.port)
        writer.write(_PING * 30)
        assert b"too_many_pings" in await all_received(reader)
        writer.close()
        await peers.stub.ListModels(api.ListModelsRequest())


async def test_calls_beyond_the_streams_of_a_connection_wait() -> None:
    async with FakeMesh(gateway_connection_streams=2) as peers:
        peers.workers[0].hold_at = 1
        running = [peers.stub.Generate(ask(prompt=api.Prompt(text=f"hello {n}"))) for n in range(2)]
        for call in running:
            await call.read()
        third = asyncio.ensure_future(peers.stub.ListModels(api.ListModelsRequest()))
        await asyncio.sleep(0.2)
        assert not third.done()
        running[0].cancel()
        await third
        running[1].cancel()
