"""A real mesh for tests: service processes on loopback that a test may kill and restart."""

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import inference_pb2 as api
from protos import inference_pb2_grpc as api_grpc
from services.health import ROLE_OF
from tests.mesh.forked import Forked, forkable
from tests.ports import free_port
from weft.launch.reach import PLAIN, Reach

# The generated stubs have the asynchronous class in their types only.
if TYPE_CHECKING:
    from protos.inference_pb2_grpc import InferenceAsyncStub

    Stub: TypeAlias = InferenceAsyncStub
else:
    Stub = Any

ROOT = Path(__file__).parents[2]
START_S = 60.0
WITH_PARENT = (sys.executable, "-I", "-S", str(ROOT / "services" / "parent_death.py"))
"""Starts a process that ends when its parent dies: a test that is killed leaves none behind."""


@dataclass
class Process:
    """One service process."""

    name: str
    module: str
    health: str
    env: dict[str, str]
    log: Path
    reach: Reach = PLAIN
    port: int = field(default_factory=free_port)
    popen: subprocess.Popen[bytes] | Forked | None = None

    @property
    def address(self) -> str:
        """host:port at which the process listens."""
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The id of the process."""
        assert self.popen is not None
        return self.popen.pid

    def start(self) -> None:
        """Starts the process without waiting for it; see `ready`."""
        env = {**os.environ, **self.env, "WEFT_LISTEN": self.address, "WEFT_LOG_FORMAT": "json"}
        self.log.touch()
        if forkable(self.env):
            self.popen = Forked(self.module, env, ROOT, self.log)
            return
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                [*WITH_PARENT, str(os.getpid()), str(int(signal.SIGKILL)), sys.executable, "-m", self.module],
                cwd=ROOT,
                env=env,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def kill(self, how: signal.Signals = signal.SIGKILL) -> int:
        """Ends the process by a signal and returns its exit code."""
        assert self.popen is not None
        self.popen.send_signal(how)
        return self.popen.wait(30)

    def stop(self) -> None:
        """Ends the process with SIGTERM, and with SIGKILL if it does not stop in time."""
        if self.popen is None or self.popen.poll() is not None:
            return
        self.popen.terminate()
        try:
            self.popen.wait(15)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
            raise AssertionError(f"{self.name} did not stop on SIGTERM") from None

    async def ready(self) -> None:
        """Waits until the health check of the service answers SERVING."""
        deadline = time.monotonic() + START_S
        async with self.reach.channel(self.address, ROLE_OF.get(self.health, "gateway")) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            while time.monotonic() < deadline:
                assert self.popen is not None
                if self.popen.poll() is not None:
                    raise AssertionError(f"{self.name} exited with {self.popen.returncode}:\n{self.tail()}")
                with contextlib.suppress(aio.AioRpcError):
                    answer = await stub.Check(health_pb2.HealthCheckRequest(service=self.health), timeout=1)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                await asyncio.sleep(0.05)
        raise AssertionError(f"{self.name} is not ready after {START_S} s:\n{self.tail()}")

    def tail(self) -> str:
        """The end of the process's log."""
        return self.log.read_text(errors="replace")[-4000:]


class Mesh:
    """Scheduler, cache, workers and gateways of one model. `async with` starts and stops them."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        *,
        workers: int = 1,
        gateways: int = 1,
        redis_url: str | None = None,
        worker_env: dict[str, str] | None = None,
        gateway_env: dict[str, str] | None = None,
        env: dict[str, str] | None = None,
        reach: Reach = PLAIN,
    ) -> None:
        """`env`: further variables of all processes; `reach`: how the tests reach their ports."""
        self._env = env or {}
        self.reach = reach
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.mesh_id = secrets.token_hex(8)
        self._model = model
        self.worker_env = worker_env or {}
        self._gateway_env = gateway_env or {}
        self.scheduler = self._process("scheduler", "services.scheduler", "weft.v1.Scheduler", {})
        self.cache: Process | None = None
        if redis_url is not None:
            self.cache = self._process("cache", "services.cache", "weft.v1.Cache", {"WEFT_REDIS_URL": redis_url})
        self.workers = [self.new_worker(i) for i in range(workers)]
        self.gateways = [self._gateway(i) for i in range(gateways)]
        self._channels: list[aio.Channel] = []

    def new_worker(self, number: int, **env: str) -> Process:
        """Another worker of this mesh, not yet started."""
        settings = {
            "MODEL_NAME": str(self._model),
            "WEFT_SCHEDULER_ADDRESS": self.scheduler.address,
            "WEFT_CACHE_ADDRESS": self.cache.address if self.cache else "",
            "WEFT_THREADS": "1",
            **self.worker_env,
            **env,
        }
        return self._process(f"worker-{number}", "services.worker", "weft.v1.Worker", settings)

    def _gateway(self, number: int) -> Process:
        cache = self.cache.address if self.cache else ""
        env = {
            "WEFT_SCHEDULER_ADDRESS": self.scheduler.address,
            "WEFT_CACHE_ADDRESS": cache,
            "WEFT_GATEWAY_HTTP_PORT": str(free_port()),
            "WEFT_GATEWAY_PROCESSES": "1",
            **self._gateway_env,
        }
        return self._process(f"gateway-{number}", "services.gateway", "weft.v1.Inference", env)

    def _process(self, name: str, module: str, health: str, env: dict[str, str]) -> Process:
        env = {"WEFT_MESH_ID": self.mesh_id, **self._env, **env}
        return Process(name, module, health, env, self._folder / f"{name}.log", self.reach)

    @property
    def processes(self) -> list[Process]:
        """All processes; each comes before those that it calls."""
        cache = [self.cache] if self.cache else []
        return [*self.gateways, *self.workers, self.scheduler, *cache]

    async def __aenter__(self) -> Self:
        try:
            for process in self.processes:
                process.start()
            for process in self.processes:
                await process.ready()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def revive(self, *processes: Process) -> None:
        """Starts those of these processes, of all by default, that the first run of a repeated test has killed."""
        ended = [each for each in processes or self.processes if each.popen is None or each.popen.poll() is not None]
        for process in ended:
            process.start()
        for process in ended:
            await process.ready()

    async def close(self) -> None:
        """Stops every process."""
        for channel in self._channels:
            await channel.close()
        for process in self.processes:
            process.stop()

    def url(self, gateway: int = 0) -> str:
        """Where a gateway serves HTTP."""
        return f"http://127.0.0.1:{self.gateways[gateway].env['WEFT_GATEWAY_HTTP_PORT']}"

    def stub(self, gateway: int = 0) -> Stub:
        """A client of a gateway, with a connection of its own."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        channel = aio.insecure_channel(self.gateways[gateway].address, options=options)
        self._channels.append(channel)
        return api_grpc.InferenceStub(channel)


@dataclass
class Answer:
    """What a stream delivered: tokens, text, log-probabilities and finish reason by continuation index."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    finish: dict[int, int] = field(default_factory=dict)
    stop: dict[int, str | int] = field(default_factory=dict)
    attempts: set[int] = field(default_factory=set)
    receipt: api.Receipt = field(default_factory=api.Receipt)
    trailing: api.Receipt | None = None

    def add(self, delta: api.Delta) -> None:
        """Adds a delta. Asserts that positions have neither gaps nor repetitions."""
        tokens = self.tokens.setdefault(delta.index, [])
        assert not delta.token_ids or delta.position == len(tokens), (delta.position, len(tokens))
        assert delta.index not in self.finish, "a delta after the last one"
        tokens.extend(delta.token_ids)
        self.texts[delta.index] = self.texts.get(delta.index, "") + delta.text
        self.logprobs.setdefault(delta.index, []).extend(entry.chosen.logprob for entry in delta.logprobs)
        if delta.token_ids:
            self.attempts.add(delta.attempt)
        if delta.finish_reason:
            self.finish[delta.index] = delta.finish_reason
            which = delta.WhichOneof("stop_reason")
            if which:
                self.stop[delta.index] = getattr(delta, which)

    @property
    def text(self) -> str:
        """The text of the first continuation."""
        return self.texts.get(0, "")

    @property
    def ids(self) -> list[int]:
        """The tokens of the first continuation."""
        return self.tokens.get(0, [])


async def generate(
    stub: Stub,
    request: api.GenerateRequest,
    *,
    deadline_s: float = 60,
    metadata: tuple[tuple[str, str], ...] = (),
    on_delta: Callable[[api.Delta], None] | None = None,
) -> Answer:
    """Reads a stream to its end. Raises AioRpcError."""
    answer = Answer()
    call = stub.Generate(request, timeout=deadline_s, metadata=metadata)
    async for response in call:
        if response.WhichOneof("event") == "delta":
            answer.add(response.delta)
            if on_delta is not None:
                on_delta(response.delta)
        else:
            answer.receipt = response.receipt
    answer.trailing = receipt_of(await call.trailing_metadata())
    return answer


async def cached(stub: Stub, request: api.GenerateRequest) -> Answer:
    """Asks until the result cache answers: results are stored behind answers, and a worker may be the first."""
    while not (answer := await generate(stub, request)).receipt.result_hit:
        pass
    return answer


def receipt_of(metadata: aio.Metadata | None) -> api.Receipt | None:
    """The receipt of trailing metadata."""
    for key, value in metadata or ():
        if key == "weft-receipt-bin":
            return api.Receipt.FromString(bytes(value))  # type: ignore[arg-type]
    return None


def ask(
    prompt: str | list[int], *, max_tokens: int = 16, temperature: float = 0.0, model: str = "", **sampling: Any
) -> api.GenerateRequest:
    """A request for one continuation; greedy unless `sampling` sets a temperature."""
    form = api.Prompt(text=prompt) if isinstance(prompt, str) else api.Prompt(token_ids=api.TokenIds(ids=prompt))
    parameters = api.Sampling(max_tokens=max_tokens, temperature=temperature, **sampling)
    return api.GenerateRequest(model=model, prompt=form, sampling=parameters)
