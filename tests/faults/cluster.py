"""A mesh of real processes whose links pass through proxies, the faults that it may suffer, and plain clients of it."""

import asyncio
import contextlib
import gc
import random
import signal
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from grpc import aio

from protos import inference_pb2 as api
from protos import inference_pb2_grpc as api_grpc
from protos import mesh_pb2, mesh_pb2_grpc
from services.worker.runners.paced import tokens_of
from tests.faults.history import PLAIN_OPTIONS, History, Stream
from tests.faults.proxy import Proxy
from tests.mesh.harness import Mesh, Process, Stub
from tests.ports import free_port
from weft.client.api import Client
from weft.launch.demo_model import model_folder

VOCABULARY = range(1000, 5000)
"""Token ids of which prompts are made."""
PROGRESS_S = 60.0
"""How long a test waits for progress of other processes."""
LET_GO_S = 10.0
"""Seconds within which a worker lets go of all KV blocks after its last request: a cancellation may be delayed, too."""


class Cluster(Mesh):
    """A mesh with a proxy on each link: worker to scheduler, gateway to scheduler, gateways to worker."""

    def __init__(
        self, folder: Path, *, workers: int = 2, gateways: int = 1, step_ms: float = 10.0, **more: Any
    ) -> None:
        paced = {"ENGINE": "paced", "WEFT_PACED_STEP_MS": str(step_ms), "MAX_BATCH_SIZE": "128"}
        more["worker_env"] = paced | more.get("worker_env", {})
        self._links: dict[tuple[str, str], Proxy] = {}
        super().__init__(folder, model_folder(), workers=workers, gateways=gateways, **more)
        self.folder = folder
        for process in (self.scheduler, *self.gateways, *self.workers):
            process.env["WEFT_METRICS_PORT"] = str(free_port())
        for process in (*self.gateways, *self.workers):
            self._place_proxies(process)

    def _place_proxies(self, process: Process) -> None:
        kind = "gateway" if process in self.gateways else "worker"
        link = self._links[process.name, "scheduler"] = Proxy(free_port(), self.scheduler.port)
        process.env["WEFT_SCHEDULER_ADDRESS"] = link.address
        if kind == "worker":
            link = self._links["gateway", process.name] = Proxy(free_port(), process.port)
            process.env["WEFT_ADVERTISE"] = link.address

    def add_worker(self, **env: str) -> Process:
        """Another worker with proxies of its own, not yet started; its proxies listen already."""
        worker = self.new_worker(len(self.workers), **env)
        self.workers.append(worker)
        self._place_proxies(worker)
        return worker

    async def listen(self, worker: Process) -> None:
        """Opens the proxies of a worker that was added."""
        for proxy in (self._links[worker.name, "scheduler"], self._links["gateway", worker.name]):
            await proxy.__aenter__()

    def link(self, client: Process | str, server: Process | str) -> Proxy:
        """The proxy on the link that `client` opens to `server`; all gateways share the links to a worker."""
        names = [each.name if isinstance(each, Process) else each for each in (client, server)]
        if names[1].startswith("worker"):
            names[0] = "gateway"
        return self._links[names[0], names[1]]

    async def __aenter__(self) -> Self:
        for proxy in self._links.values():
            await proxy.__aenter__()
        await super().__aenter__()
        await self.listed(len(self.workers))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:  # A suspended process cannot stop.
            if process.popen is not None and process.popen.poll() is None:
                process.popen.send_signal(signal.SIGCONT)
        await super().__aexit__(kind, error, trace)
        for proxy in self._links.values():
            await proxy.__aexit__(kind, error, trace)

    async def listed(self, workers: int) -> None:
        """Waits until each gateway lists this number of workers."""
        for number in range(len(self.gateways)):
            stub = self.stub(number)
            async with asyncio.timeout(PROGRESS_S):
                while await _workers_at(stub) != workers:  # noqa: ASYNC110 (the event is in another process)
                    await asyncio.sleep(0.02)

    async def attached(self) -> None:
        """Waits until the scheduler has a link to each gateway and worker; without it requests reach workers, too."""
        wanted = len(self.gateways), len(self.workers)
        async with aio.insecure_channel(self.scheduler.address) as channel, asyncio.timeout(PROGRESS_S):
            stub = mesh_pb2_grpc.SchedulerStub(channel)
            while await _links_at(stub) != wanted:  # noqa: ASYNC110 (the event is in another process)
                await asyncio.sleep(0.02)

    async def restored(self) -> None:
        """Heals every link, starts every process that has ended, and waits until all are linked and requests reach
        every worker again."""
        for proxy in self._links.values():
            await proxy.heal()
        for process in self.processes:
            if process.popen is None or process.popen.poll() is not None:
                process.start()
        for process in self.processes:
            await process.ready()
        await self.attached()
        for number in range(len(self.gateways)):
            stub = self.plain(number)
            async with asyncio.timeout(PROGRESS_S):
                while len(await _reached(stub, 2 * len(self.workers))) < len(self.workers):  # noqa: ASYNC110 (in other processes)
                    await asyncio.sleep(0.1)
        await self.hang_up()

    @property
    def measured(self) -> list[Process]:
        """The processes that report what they hold."""
        return [process for process in self.processes if "WEFT_METRICS_PORT" in process.env]

    async def blocks_in_use(self) -> int:
        """KV blocks of all workers that are held for jobs, once no request is left and they have had time to go."""
        end = time.monotonic() + LET_GO_S
        while (held := await self._active_blocks()) and time.monotonic() < end:  # noqa: ASYNC110 (in another process)
            await asyncio.sleep(0.02)
        return held

    async def _active_blocks(self) -> int:
        total = 0
        for worker in self.workers:
            async with aio.insecure_channel(worker.address) as channel:
                status = await mesh_pb2_grpc.WorkerStub(channel).Status(mesh_pb2.StatusRequest(), timeout=10)
            total += status.report.active_blocks
        return total

    async def hang_up(self) -> None:
        """Closes the connections of all clients."""
        channels, self._channels = self._channels, []
        for channel in channels:
            await channel.close()
        gc.collect()  # A call that was cancelled holds its connection as long as it exists.

    # ---- clients ----

    def plain(self, gateway: int = 0) -> Stub:
        """A client as gRPC makes it, which repeats nothing; with a connection of its own."""
        channel = aio.insecure_channel(self.gateways[gateway].address, options=PLAIN_OPTIONS)
        self._channels.append(channel)
        return api_grpc.InferenceStub(channel)

    def send(
        self, history: History, stub: Stub, seed: int, tokens: int, *, deadline_s: float | None = 120.0, **fields: Any
    ) -> "asyncio.Task[Stream]":
        """Sends one request, whose answer is a function of `seed`, and records it."""
        request = request_of(seed, tokens, **fields)
        stream = history.add(Stream(f"s{len(history.streams)}", reference(seed, tokens)))
        return asyncio.create_task(stream.follow(stub.Generate(request, timeout=deadline_s)))

    def send_resumable(self, history: History, client: Client, seed: int, tokens: int) -> "asyncio.Task[Stream]":
        """As `send`, through our own client."""
        stream = history.add(Stream(f"s{len(history.streams)}", reference(seed, tokens)))
        return asyncio.create_task(stream.follow_client(client, request_of(seed, tokens)))

    def client(self) -> Client:
        """Our own client, which knows all gateways."""
        return Client("ipv4:" + ",".join(gateway.address for gateway in self.gateways), deadline_s=120.0)


async def _workers_at(stub: Stub) -> int:
    with contextlib.suppress(aio.AioRpcError):
        return sum(model.workers for model in (await stub.ListModels(api.ListModelsRequest(), timeout=5)).models)
    return -1


async def _links_at(stub: "mesh_pb2_grpc.SchedulerAsyncStub") -> tuple[int, int]:
    """The gateways and the workers that are linked to the scheduler."""
    with contextlib.suppress(aio.AioRpcError):
        overview = await stub.Overview(mesh_pb2.OverviewRequest(), timeout=5)
        return overview.gateways, sum(not worker.detached for worker in overview.workers)
    return -1, -1


async def _reached(stub: Stub, requests: int) -> set[str]:
    """The ids of the workers that answered as many requests at once."""
    answers = (_workers_of(stub, seed) for seed in range(requests))
    return {worker for ids in await asyncio.gather(*answers) for worker in ids}


async def _workers_of(stub: Stub, seed: int) -> list[str]:
    """The ids of the workers that answered a short request; none if it failed."""
    workers: list[str] = []
    with contextlib.suppress(aio.AioRpcError):
        async for response in stub.Generate(request_of(seed, 4), timeout=10):
            workers += response.receipt.workers
    return workers


# ---- requests and references ----


def request_of(seed: int, tokens: int, prompt: Sequence[int] = (), **fields: Any) -> api.GenerateRequest:
    """A sampled request of `tokens` tokens; its prompt follows from the seed unless one is given."""
    ids = prompt or [random.Random(seed * 31 + at).choice(VOCABULARY) for at in range(8 + seed % 23)]
    sampling = api.Sampling(max_tokens=tokens, temperature=1.0, seed=seed, ignore_eos=True)
    form = api.Prompt(token_ids=api.TokenIds(ids=ids))
    return api.GenerateRequest(prompt=form, sampling=sampling, cache=api.CACHE_POLICY_BYPASS, **fields)


def reference(seed: int, tokens: int) -> list[int]:
    """The answer of the paced engine to `request_of`, computed here: no mesh took part in it."""
    ids: list[int] = []
    for run in range(-(-tokens // 8)):
        ids += tokens_of(seed, 0, run, _vocabulary())
    return ids[:tokens]


def _vocabulary() -> list[int]:
    if not _VOCABULARY:
        from services.worker.loader.config import load_config

        config = load_config(model_folder())
        _VOCABULARY.extend(token for token in range(config.vocab_size) if token not in config.eos_token_ids)
    return _VOCABULARY


_VOCABULARY: list[int] = []

# ---- faults, each with its proof ----


def suspend(process: Process) -> None:
    """Suspends a process with SIGSTOP; returns when the kernel reports that it is stopped."""
    assert process.popen is not None
    process.popen.send_signal(signal.SIGSTOP)
    end = time.monotonic() + 10.0
    while state_of(process) != "T":
        assert time.monotonic() < end, f"{process.name} was not suspended"
        time.sleep(0.001)


def resume(process: Process) -> None:
    """Resumes a suspended process."""
    assert process.popen is not None
    assert state_of(process) == "T", f"{process.name} is not suspended"
    process.popen.send_signal(signal.SIGCONT)


def state_of(process: Process) -> str:
    """The state of a process in /proc, such as T for stopped."""
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


async def flowing(streams: Iterable[Stream], least: int, position: int = 1) -> None:
    """Waits until at least `least` streams have `position` tokens; all must still be in flight."""
    streams = list(streams)
    async with asyncio.timeout(PROGRESS_S):
        while sum(len(stream.tokens) >= position for stream in streams) < least:
            ended = [stream for stream in streams if stream.ended_at]
            assert not ended, f"{len(ended)} streams ended early: {ended[0].code}/{ended[0].reason}"
            await asyncio.sleep(0.005)
    assert all(stream.flows for stream in streams if stream.tokens)


@contextlib.asynccontextmanager
async def steady(cluster: Cluster, history: History, stub: Stub, rate: float, tokens: int = 8) -> AsyncIterator[None]:
    """Sends `rate` requests per second while the block runs, and waits for their answers at its end."""
    tasks: list[asyncio.Task[Stream]] = []

    async def send() -> None:
        began, number = time.monotonic(), 0
        while True:
            tasks.append(cluster.send(history, stub, 100_000 + number, tokens))
            number += 1
            await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))

    sending = asyncio.create_task(send())
    try:
        yield
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await asyncio.gather(*tasks)
