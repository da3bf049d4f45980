"""The connection to Redis: each command has a time limit, and a circuit breaker stops commands to a failing Redis.

Knows commands and outcomes, never keys or values.
"""

import asyncio
import contextlib
import hashlib
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import redis.asyncio as redis
import structlog
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from services.cache.breaker import Breaker
from services.cache.counters import Miss

log = structlog.get_logger("cache")

CONNECTIONS = 16
LATE_ANSWER_S = 0.03
"""A command that exceeds its time limit by this much counts as a failure of Redis."""
REFUSAL_LOG_S = 60.0
"""Refusals with the same error code are logged at most this often."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long callers wait for Redis, in seconds."""

    look_up_s: float = 0.02
    store_s: float = 0.1
    connect_s: float = 0.05

    @property
    def longest_s(self) -> float:
        """How long a command may run, whether or not its caller still waits."""
        return self.connect_s + max(self.look_up_s, self.store_s)


class RedisUnavailable(Exception):
    """Redis did not execute a command; `miss` is the reason that a look-up counts."""

    def __init__(self, miss: Miss) -> None:
        super().__init__(miss)
        self.miss = miss


class Script:
    """A Lua script. It is sent by its SHA-1 digest and, if Redis does not know that, as a whole."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    async def run(self, connections: "Connections", names: list[str], *arguments: Any) -> Any:
        """Returns what the script returns, as redis-py types it. Raises what redis-py raises."""
        try:
            return await connections.command("EVALSHA", self._digest, len(names), *names, *arguments)
        except NoScriptError:
            return await connections.command("EVAL", self._text, len(names), *names, *arguments)


class Connections:
    """Sends commands on connections of redis-py that are kept; the caller bounds how many commands run at a time.

    redis-py's client takes a connection from its pool for each command and looks whether it still works, which costs a
    sixth of a look-up. Here one that does not is replaced when a command fails on it, and all idle ones with it.
    """

    def __init__(self, pool: Any) -> None:
        """pool: redis.asyncio.ConnectionPool, whose methods have no types."""
        self._pool = pool
        self._idle: list[Any] = []

    async def command(self, *words: Any) -> Any:
        """The answer to a command, which may be executed twice. Raises what redis-py raises."""
        if self._idle:
            with contextlib.suppress(RedisConnectionError):
                return await self._on(self._idle.pop(), words)
        return await self._on(await self._pool.get_connection(), words)

    async def close(self) -> None:
        """Closes all connections."""
        await self._pool.aclose()

    async def _on(self, connection: Any, words: tuple[Any, ...]) -> Any:
        keeps = False
        try:
            await connection.send_command(*words, check_health=False)
            answer = await connection.read_response()
            keeps = True
            return answer
        except ResponseError:
            keeps = True
            raise
        finally:
            if keeps:
                self._idle.append(connection)
            else:
                await self._give_back(connection)

    async def _give_back(self, broken: Any) -> None:
        """Returns a connection to the pool, and those that are idle: they may have died as it did, without a word, and
        each would cost a command its time limit."""
        idle, self._idle = self._idle, []
        await self._pool.release(broken)
        for connection in idle:
            await connection.disconnect(nowait=True)
            await self._pool.release(connection)


class RedisClient:
    """Runs commands in one Redis. Use it within one event loop, and close it."""

    def __init__(self, url: str, timeouts: Timeouts, clock: Callable[[], float], name: str) -> None:
        """`name` is the store in the log lines."""
        self.timeouts = timeouts
        self._name = name
        self._address = display_address(url)
        self._clock = clock
        self._breaker = Breaker()
        self._connections = Connections(_pool(url, timeouts))
        self._slots = asyncio.Semaphore(CONNECTIONS)
        self._running: set[asyncio.Task[Any]] = set()
        self._refusals: dict[str, float] = {}

    @property
    def is_failing(self) -> bool:
        """Whether the breaker is open: only probes reach Redis."""
        return self._breaker.is_open

    async def open(self) -> None:
        """Logs whether Redis answers. If it does not, the breaker opens."""
        log.info("using redis", store=self._name, address=self._address)
        try:
            await self._execute(self.timeouts.longest_s, lambda: self._connections.command("PING"))
        except RedisUnavailable as error:
            self._breaker.trip(self._clock())
            self._log_unavailable(error.miss, error.__cause__)

    async def close(self) -> None:
        """Cancels the running commands and closes the connections."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._connections.close()

    async def run(self, limit_s: float, script: Script, names: list[str], *arguments: Any) -> Any:
        """Runs a script; `names` are its keys. Raises RedisUnavailable, at the latest after `limit_s` seconds."""
        return await self._execute(limit_s, lambda: script.run(self._connections, names, *arguments))

    async def delete(self, limit_s: float, names: list[str]) -> None:
        """Deletes values. Raises RedisUnavailable, at the latest after `limit_s` seconds."""
        await self._execute(limit_s, lambda: self._connections.command("UNLINK", *names))

    async def _execute(self, limit_s: float, command: Callable[[], Awaitable[Any]]) -> Any:
        if not self._breaker.allows(self._clock()):
            raise RedisUnavailable(Miss.BREAKER)
        task: asyncio.Task[Any] | None = None
        try:
            async with asyncio.timeout(limit_s):
                await self._slots.acquire()
                task = self._start(command)
                # A late command is abandoned, not cancelled: its connection stays usable, and a connection that takes
                # longer to open than a look-up may last is ready for the next command.
                answer = await asyncio.shield(task)
        except TimeoutError:
            # Without a task the command waited for a free connection: that is load, no failure of Redis.
            if task is not None:
                asyncio.get_running_loop().call_later(LATE_ANSWER_S, self._check_late, task)
            raise RedisUnavailable(Miss.TIMEOUT) from None
        return self._checked(answer)

    def _start(self, command: Callable[[], Awaitable[Any]]) -> "asyncio.Task[Any]":
        task = asyncio.create_task(_outcome(command, self.timeouts.longest_s))
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._running.discard(task)
        self._slots.release()

    def _check_late(self, task: "asyncio.Task[Any]") -> None:
        """Counts a failure unless Redis has answered by now: then the delay may be that of this event loop."""
        if not task.done() or (not task.cancelled() and _is_failure(task.result())):
            self._count_failure(Miss.TIMEOUT)

    def _checked(self, answer: Any) -> Any:
        """The answer if it is not an exception. Raises RedisUnavailable."""
        if _is_failure(answer):
            late = isinstance(answer, (RedisTimeoutError, TimeoutError))
            miss = Miss.TIMEOUT if late else Miss.ERROR
            self._count_failure(miss, answer)
            raise RedisUnavailable(miss) from answer
        self._count_success()
        if isinstance(answer, ResponseError):
            self._log_refusal(answer.status_code or str(answer).partition(" ")[0])
            raise RedisUnavailable(Miss.ERROR)
        return answer

    def _count_success(self) -> None:
        open_s = self._breaker.succeeded(self._clock())
        if open_s is not None:
            log.info("redis is available again", store=self._name, address=self._address, down_s=round(open_s, 3))

    def _count_failure(self, miss: Miss, error: Exception | None = None) -> None:
        if self._breaker.failed(self._clock()):
            self._log_unavailable(miss, error)

    def _log_refusal(self, code: str) -> None:
        now = self._clock()
        if now - self._refusals.get(code, -math.inf) >= REFUSAL_LOG_S:
            self._refusals[code] = now
            log.warning("redis refused a command", store=self._name, code=code, address=self._address)

    def _log_unavailable(self, miss: Miss, error: BaseException | None) -> None:
        reason = type(error).__name__ if error else str(miss)
        log.warning(
            "redis is unavailable: every look-up is a miss", store=self._name, address=self._address, reason=reason
        )


async def _outcome(command: Callable[[], Awaitable[Any]], limit_s: float) -> Any:
    """The answer of a command, or its exception as a value: the caller may have stopped waiting."""
    try:
        # redis-py closes a connection whose command was cancelled, so no late answer can go to the next command.
        async with asyncio.timeout(limit_s):
            return await command()
    except Exception as error:
        return error


def _is_failure(answer: Any) -> bool:
    """Whether Redis did not answer. An error reply is an answer: it is logged, but the breaker does not count it."""
    return isinstance(answer, Exception) and not isinstance(answer, ResponseError)


def display_address(url: str) -> str:
    """The address in a Redis URL for log lines, without user, password, database and options."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return f"unix://{parts.path}"
    return f"{parts.scheme}://{parts.hostname or 'localhost'}:{parts.port or 6379}"


def _pool(url: str, timeouts: Timeouts) -> redis.ConnectionPool:
    connections = redis.ConnectionPool.from_url(
        url, max_connections=CONNECTIONS, socket_connect_timeout=timeouts.connect_s, protocol=2
    )
    # A URL may contain options; those that correctness depends on are set here.
    connections.connection_kwargs.update(
        decode_responses=False,
        retry=Retry(NoBackoff(), 0),
        retry_on_timeout=False,
        # The time limit of each command is set by `RedisClient`.
        socket_timeout=None,
        driver_info=None,
    )
    return connections
