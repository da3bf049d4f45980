"""The processes of a gateway: how many share its ports, their start, restart, replacement and end. Knows no requests.

One process runs as it is. Several are members: each listens at the same ports (SO_REUSEPORT), and the kernel spreads
connections over them. The process that was started only supervises them, and imports no gRPC: it restarts those that
die, replaces all of them one after the other on SIGHUP, drains them on SIGTERM, and serves the metrics of all.
"""

import asyncio
import contextlib
import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import NoReturn

import structlog
from pydantic import ValidationError
from pydantic_settings import SettingsError

from services import host, metrics, telemetry
from services.gateway.access.usage import UsageTable
from services.gateway.member import FLAG, Link, arguments
from services.gateway.settings import GatewaySettings
from services.process import refuse_to_serve

log = structlog.get_logger("processes")

MOST_BY_DEFAULT = 12
_CORES_PER_PROCESS = 2
_OTHER_CORES = 4
"""Cores that the worker, the scheduler and the cache use beside a busy gateway."""
_LOCK_NAME = "\0weft-gateway-{}"
_MOST_STARTS = 3
"""Starts of the first member, if none ever listened, before the gateway is given up."""
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S, _SETTLED_S = 0.2, 10.0, 10.0
_NO_PROCESS_S = 5.0
"""Seconds until another try where the machine has no process, memory or descriptor for a member."""
_START_S = 60.0
_SCRAPE_S = 2.0
_KILL_S = 3.0
"""Seconds after the end of the drain until a member is killed."""


def run() -> None:
    """Runs a gateway: this process alone, one member of several, or their supervisor."""
    if FLAG not in sys.argv[1:2]:
        with contextlib.suppress(ValidationError, SettingsError):  # The gateway itself refuses invalid settings.
            settings = GatewaySettings()
            count = settings.gateway_processes or default_count(host.available_cores())
            if count > 1:
                _supervise(settings, count)
    importlib.import_module("services.gateway.main").run()


def default_count(cores: int) -> int:
    """Processes of a gateway on a machine with `cores` cores: one for every two, from 8 cores on one for all but four,
    at most 12, and one outside Linux.

    The other cores are for the worker, the scheduler and the cache. Only Linux spreads connections over the listeners
    of a port.
    """
    if sys.platform != "linux":
        return 1
    return max(1, min(max(cores // _CORES_PER_PROCESS, cores - _OTHER_CORES), MOST_BY_DEFAULT))


def _supervise(settings: GatewaySettings, count: int) -> NoReturn:
    """Runs `count` members until a signal. The process ends with their exit code if they cannot serve."""
    if sys.platform != "linux":
        refuse_to_serve(f"WEFT_GATEWAY_PROCESSES {count}: several processes can share a port on Linux only")
    telemetry.setup("gateway", settings)
    with _held_ports(settings) as (listen, http_port):
        environment = {
            "WEFT_LISTEN": listen,
            "WEFT_GATEWAY_HTTP_PORT": str(http_port),
            "WEFT_METRICS_PORT": "0",  # The supervisor serves the metrics of all members.
        }
        code = asyncio.run(Supervisor(settings, count, environment).run())
    sys.exit(code)


@contextlib.contextmanager
def _held_ports(settings: GatewaySettings) -> Iterator[tuple[str, int]]:
    """Holds the public ports -> the address of gRPC and the port of HTTP, port 0 replaced by a free one.

    A bound socket without SO_REUSEPORT fails where anybody listens already, so no other gateway's port is shared by
    mistake; the named lock excludes one that has not begun to listen.
    """
    address, separator, text = settings.listen.rpartition(":")
    name = address.strip("[]")
    if not separator or not text.isdecimal():
        refuse_to_serve(f"{settings.listen} is not host:port")
    with contextlib.ExitStack() as stack:
        try:
            port = stack.enter_context(_held(name, int(text)))
        except OSError:
            sys.exit(f"weft: cannot listen at {settings.listen}: another process may use the port")
        http_port = settings.gateway_http_port
        if http_port:
            try:
                stack.enter_context(_held(name, http_port))
            except OSError as error:
                refuse_to_serve(f"WEFT_GATEWAY_HTTP_PORT {http_port}: {error.strerror}")
        yield f"{address}:{port}", http_port


@contextlib.contextmanager
def _held(name: str, port: int) -> Iterator[int]:
    """Holds a port, 0 for a free one, until the block ends. Raises OSError."""
    with socket.socket(socket.AF_INET6 if ":" in name else socket.AF_INET) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((name, port))
        taken: int = holder.getsockname()[1]
        with socket.socket(socket.AF_UNIX) as lock:
            lock.bind(_LOCK_NAME.format(f"{name}:{taken}"))
            yield taken


class _Running:
    """A member's process and the supervisor's end of its link."""

    def __init__(self, number: int, child: asyncio.subprocess.Process, link: Link) -> None:
        self.number = number
        self.child = child
        self.link = link
        self.began = time.monotonic()

    @classmethod
    async def start(cls, number: int, environment: dict[str, str], usage: UsageTable) -> "_Running":
        """Starts the process. Raises OSError."""
        own, its = socket.socketpair()
        with its:
            link = await Link.open(own)
            # `-m` alone would import from the current folder.
            path = [] if {"", os.getcwd()} & set(sys.path) else ["-P"]
            try:
                child = await asyncio.create_subprocess_exec(
                    sys.executable, *path, "-m", "services.gateway", *arguments(number, its.fileno(), usage.descriptor),
                    env={**os.environ, **environment}, pass_fds=[its.fileno(), usage.descriptor],
                )  # fmt: skip
            except OSError:
                link.close()
                raise
        return cls(number, child, link)  # Nothing is awaited in between: a process that runs has an owner.

    async def listens(self, seconds: float) -> bool:
        """Waits until the member listens. -> whether it does; not if its process ends before, or it takes longer."""
        awaited = [asyncio.ensure_future(self.link.listens.wait()), asyncio.ensure_future(self.child.wait())]
        try:
            await asyncio.wait(awaited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in awaited:
                each.cancel()
        return self.link.listens.is_set()

    async def scrape(self) -> bytes:
        """The member's metrics; empty if it does not answer."""
        return await self.link.ask(_SCRAPE_S) if self.link.listens.is_set() else b""

    async def drain(self, drain_s: float) -> None:
        """Ends the process: SIGTERM, and SIGKILL if it takes longer than its drain."""
        with contextlib.suppress(ProcessLookupError):
            self.child.terminate()
        try:
            async with asyncio.timeout(drain_s + _KILL_S):
                await self.child.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self.child.kill()
            await self.child.wait()


class Supervisor:
    """Keeps the members of one gateway running."""

    def __init__(self, settings: GatewaySettings, count: int, environment: dict[str, str]) -> None:
        """`environment`: variables of the members, beside those of this process."""
        self._settings = settings
        self._environment = environment
        self._members: list[_Running | None] = [None] * count
        self._starting = [asyncio.Lock() for _ in range(count)]
        """Held while a process starts for a place: of two, one would have no place."""
        self._living: dict[_Running, asyncio.Task[None]] = {}
        """All processes that have not ended, with or without a place, each with the task that answers it."""
        self._numbers: set[int] = set()
        self._usage = UsageTable.create()
        self._stop = asyncio.Event()
        self._code = 0
        self._first_listens = asyncio.Event()
        self._replacing: asyncio.Task[None] | None = None
        self._scraping: asyncio.Task[bytes] | None = None

    async def run(self) -> int:
        """Runs until SIGTERM or SIGINT. -> the exit code of this process."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, self._replace_soon)
        server = self._serve_metrics()
        keeping = [asyncio.create_task(self._keep(place)) for place in range(len(self._members))]
        log.info("supervising", processes=len(keeping), listen=self._environment["WEFT_LISTEN"])
        await self._stop.wait()
        starting = [*keeping, *([self._replacing] if self._replacing is not None else [])]
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)  # No process starts from here on.
        draining = [member.drain(self._settings.drain_s) for member in self._living]
        await asyncio.gather(*draining, *self._living.values())
        if server is not None:
            await server.close()
        return self._code

    async def _keep(self, place: int) -> None:
        """Starts the member of a place, and again whenever it dies. All but the first wait until that one listens: a
        setting that is refused is refused once. Later a member may be refused for a file that has changed since the
        others have read it: these serve on."""
        if place:
            await self._first_listens.wait()
        failures = 0
        while True:
            try:
                member = await self._filled(place)
            except OSError as error:
                log.warning("a gateway process cannot be started now", reason=error.strerror)
                await asyncio.sleep(_NO_PROCESS_S)
                continue
            code = await member.child.wait()
            if self._members[place] is not member:  # It was replaced.
                failures = 0
                continue
            failures = 1 if time.monotonic() - member.began > _SETTLED_S else failures + 1
            log.warning("a gateway process ended", number=member.number, code=code)
            if not self._first_listens.is_set() and (code == os.EX_CONFIG or failures >= _MOST_STARTS):
                self._code = code if code > 0 else 1
                self._stop.set()
                return
            await asyncio.sleep(min(_FIRST_BACKOFF_S * 2 ** (failures - 1), _LONGEST_BACKOFF_S))

    async def _filled(self, place: int) -> _Running:
        """The member of a place, which is started if the last one has ended. Raises OSError."""
        async with self._starting[place]:
            member = self._members[place]
            if member is None or member.child.returncode is not None:
                member = self._members[place] = await self._start()
            return member

    async def _start(self) -> _Running:
        """Starts a member under a number that no living one has. Raises OSError."""
        number = next(each for each in range(len(self._numbers) + 1) if each not in self._numbers)
        self._numbers.add(number)
        try:
            member = await _Running.start(number, self._environment, self._usage)
        except OSError:
            self._numbers.discard(number)
            raise
        self._living[member] = asyncio.create_task(self._watch(member))
        return member

    async def _watch(self, member: _Running) -> None:
        """Answers a member, and frees its number when it has ended."""
        await member.link.follow(self._scrape, self._first_listens.set)
        await member.child.wait()
        member.link.close()
        self._usage.forget(member.number)
        self._numbers.discard(member.number)
        del self._living[member]

    def _replace_soon(self) -> None:
        if not self._stop.is_set() and (self._replacing is None or self._replacing.done()):
            self._replacing = asyncio.create_task(self._replace_all())

    async def _replace_all(self) -> None:
        """Replaces the members one after the other: each ends only when its successor listens."""
        for place, starting in enumerate(self._starting):
            async with starting:  # If the old one dies meanwhile, its successor is the next one at its place.
                try:
                    successor = await self._start()
                except OSError as error:
                    log.warning("a replacement cannot be started: the others stay", reason=error.strerror)
                    return
                if not await successor.listens(_START_S):
                    log.warning("a replacement did not listen in time: the others stay", seconds=_START_S)
                    await successor.drain(0)
                    return
                old, self._members[place] = self._members[place], successor
            if old is not None:
                await old.drain(self._settings.drain_s)
        log.info("all gateway processes were replaced", processes=len(self._members))

    def _serve_metrics(self) -> metrics.MetricsServer | None:
        """Serves the metrics of all members at the gateway's port for them."""
        port, address = self._settings.metrics_port, self._settings.listen.rpartition(":")[0].strip("[]")
        if not port:
            return None
        try:
            return metrics.MetricsServer(self._scrape, address, port)
        except OSError as error:
            refuse_to_serve(f"WEFT_METRICS_PORT {port}: {error.strerror}")

    async def _scrape(self) -> bytes:
        """The metrics of all members. Questions that arrive together have one answer."""
        if self._scraping is None or self._scraping.done():
            self._scraping = asyncio.create_task(self._scrape_members())
        return await asyncio.shield(self._scraping)

    async def _scrape_members(self) -> bytes:
        members = [member for member in self._members if member is not None]
        texts = await asyncio.gather(*(member.scrape() for member in members))
        return metrics.merged({str(member.number): text for member, text in zip(members, texts, strict=True)})
