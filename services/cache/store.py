"""The one door to Redis: framed values on shelves bounded in bytes. Whatever Redis does, a look-up is a hit or a miss.

Knows keys, bytes and Redis; not what the values mean, nor gRPC.
"""

import asyncio
import contextlib
import functools
import hashlib
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

import redis.asyncio as redis
import structlog
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from services.cache import frames, lru_scripts
from services.cache.breaker import Breaker
from services.cache.counters import Counters, Miss

log = structlog.get_logger("cache")
Value = TypeVar("Value")

CONNECTIONS = 16
GRACE_S = 0.03
"""A look-up that is late is a miss at once, and a sign that Redis is lost after so many seconds more."""
MOST_ASKED = 1024
"""Keys that one script is asked about, so that it holds up others for less than a millisecond."""
REFUSAL_LOG_S = 60.0
"""A refusal of one sort is logged at most this often."""


@dataclass(frozen=True, slots=True)
class Namespace(Generic[Value]):
    """A kind of values that share one bound. Shelves know nothing of one another."""

    name: str
    """Part of the names in Redis; a shelf whose values change their meaning takes another name."""
    kind: frames.Kind
    parse: Callable[[bytes], Value]
    """Makes a value of its bytes; may raise anything for bytes that are none."""
    max_bytes: int
    """All values together, each with its share of Redis's own bookkeeping."""
    max_value_bytes: int
    """One value alone."""
    ttl_s: float
    """How long a value is kept after it was stored."""

    @property
    def prefix(self) -> str:
        """What its names in Redis begin with; the braces keep them in one slot of a Redis cluster."""
        return f"weft:1:{{{self.name}}}:"


@dataclass(frozen=True, slots=True)
class Budgets:
    """How long callers wait for Redis, in seconds."""

    look_up_s: float = 0.02
    store_s: float = 0.1
    connect_s: float = 0.05

    @property
    def longest_s(self) -> float:
        """How long a command may live, whoever still waits for it."""
        return self.connect_s + max(self.look_up_s, self.store_s)


class RedisUnavailable(Exception):
    """Redis did not answer a command; why, as a look-up counts it."""

    def __init__(self, miss: Miss) -> None:
        super().__init__(miss)
        self.miss = miss


class Script:
    """A Lua script, sent by its digest and, to a Redis that has forgotten it, whole."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    async def run(self, client: "redis.Redis", names: list[str], *arguments: Any) -> Any:
        """What the script returns, as redis-py gives it. Raises what redis-py raises."""
        # redis-py types these calls for its blocking and its asyncio client at once.
        try:
            answer: Any = client.evalsha(self._digest, len(names), *names, *arguments)
            return await answer
        except NoScriptError:
            answer = client.eval(self._text, len(names), *names, *arguments)
            return await answer


LOOK_UP = Script(lru_scripts.LOOK_UP)
STORE = Script(lru_scripts.STORE)
PRESENT = Script(lru_scripts.PRESENT)


class Store:
    """Shelves in one Redis. Use it within one event loop, and close it."""

    def __init__(
        self,
        url: str,
        budgets: Budgets | None = None,
        clock: Callable[[], float] = time.monotonic,
        name: str = "results",
    ) -> None:
        """`name` says in the log what is kept. Stores share nothing, so the load of one does not delay another."""
        self._name = name
        self.counters = Counters()
        self._place = place(url)
        self._budgets = budgets or Budgets()
        self._clock = clock
        self._breaker = Breaker()
        self._client = _client(url, self._budgets)
        self._slots = asyncio.Semaphore(CONNECTIONS)
        self._asking: set[asyncio.Task[Any]] = set()
        self._refusals: dict[str, float] = {}

    async def open(self) -> None:
        """Says in the log whether Redis answers. If it does not, every look-up is a miss until it does."""
        log.info("redis keeps them", of=self._name, at=self._place)
        try:
            await self._ask(self._budgets.longest_s, self._client.ping)
        except RedisUnavailable as trouble:
            self._breaker.trip(self._clock())
            self._log_lost(trouble.miss, trouble.__cause__)

    async def close(self) -> None:
        """Ends the connections and logs the counters."""
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)
        await self._client.aclose()
        log.info("cache closed", of=self._name, **self.counters.summary())

    async def get(self, shelf: Namespace[Value], key: bytes) -> Value | None:
        """The value under `key`, or None within the look-up's budget, whatever is wrong. Raises nothing."""
        found = await self._look_up(shelf, key)
        if isinstance(found, Miss):
            self.counters.misses[found] += 1
            return None
        self.counters.hits += 1
        return found

    async def put(self, shelf: Namespace[Any], key: bytes, payload: bytes) -> bool:
        """Stores bytes under `key` and says whether that is known to have happened. Raises nothing."""
        evicted = await self._store(shelf, key, payload)
        if evicted is None:
            self.counters.refused += 1
            return False
        self.counters.stores += 1
        self.counters.evictions += evicted
        return True

    async def present(self, shelf: Namespace[Any], keys: Sequence[bytes]) -> list[bool]:
        """Which of these keys have a value, whole or not; all False in doubt. Counts as a use of those that have.

        Of several, which must be of one length, the first becomes the last to be evicted. Raises nothing.
        """
        found: list[bool] = []
        for start in range(0, len(keys), MOST_ASKED):
            asked = keys[start : start + MOST_ASKED]
            arguments = [shelf.prefix, b"".join(asked).hex(), len(asked)]
            command = functools.partial(PRESENT.run, self._client, [shelf.prefix + "ledger"], *arguments)
            try:
                answer = await self._ask(self._budgets.look_up_s, command)
                found += [mark == ord("1") for mark in bytes(answer)]
            except (RedisUnavailable, TypeError, ValueError):
                break
        return found + [False] * (len(keys) - len(found))

    async def _look_up(self, shelf: Namespace[Value], key: bytes) -> Value | Miss:
        names = [shelf.prefix + key.hex(), shelf.prefix + "ledger"]
        most = shelf.max_value_bytes + frames.HEADER_BYTES
        try:
            frame = await self._ask(self._budgets.look_up_s, lambda: LOOK_UP.run(self._client, names, key.hex(), most))
        except RedisUnavailable as trouble:
            return trouble.miss
        if not frame:
            return Miss.ABSENT
        try:
            return shelf.parse(frames.unseal(shelf.kind, key, frame))
        except Exception:
            # Whatever a parser thinks of bytes that are not ours. They would stand in the way of good ones.
            with contextlib.suppress(RedisUnavailable):
                await self._ask(self._budgets.look_up_s, lambda: _done(self._client.unlink(names[0])))
            return Miss.CORRUPT

    async def _store(self, shelf: Namespace[Any], key: bytes, payload: bytes) -> int | None:
        """The number of values evicted for it, None if it was not stored."""
        frame = frames.seal(shelf.kind, key, payload)
        too_large = len(payload) > shelf.max_value_bytes or len(frame) + lru_scripts.ENTRY_BYTES > shelf.max_bytes
        # Look-ups are the probes of an open breaker: they are cheaper, and a caller waits for them anyway.
        if too_large or self._breaker.is_open:
            return None
        names = [shelf.prefix + key.hex(), shelf.prefix + "ledger"]
        arguments = [key.hex(), frame, int(shelf.ttl_s * 1000), shelf.max_bytes, shelf.prefix]
        try:
            return int(await self._ask(self._budgets.store_s, lambda: STORE.run(self._client, names, *arguments)))
        except (RedisUnavailable, TypeError, ValueError):
            return None

    async def _ask(self, budget_s: float, command: Callable[[], Awaitable[Any]]) -> Any:
        """What Redis answers within the budget. Raises RedisUnavailable."""
        if not self._breaker.allows(self._clock()):
            raise RedisUnavailable(Miss.BREAKER)
        task: asyncio.Task[Any] | None = None
        try:
            async with asyncio.timeout(budget_s):
                await self._slots.acquire()
                task = self._start(command)
                # A late answer is given up, not cut off: its connection stays whole, and one that takes longer to
                # open than a look-up may last is there for the next.
                answer = await asyncio.shield(task)
        except TimeoutError:
            # Without a task it was our own crowd that waited, not Redis.
            if task is not None:
                asyncio.get_running_loop().call_later(GRACE_S, self._judge_late, task)
            raise RedisUnavailable(Miss.TIMEOUT) from None
        return self._judged(answer)

    def _start(self, command: Callable[[], Awaitable[Any]]) -> "asyncio.Task[Any]":
        task = asyncio.create_task(_outcome(command, self._budgets.longest_s))
        self._asking.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._asking.discard(task)
        self._slots.release()

    def _judge_late(self, task: "asyncio.Task[Any]") -> None:
        """Counts a failure, unless Redis has answered by now: then our own event loop may have been what was late."""
        if not task.done() or (not task.cancelled() and _is_trouble(task.result())):
            self._failed(Miss.TIMEOUT)

    def _judged(self, answer: Any) -> Any:
        """The answer, if it is not an exception. Raises RedisUnavailable."""
        if _is_trouble(answer):
            late = isinstance(answer, (RedisTimeoutError, TimeoutError))
            miss = Miss.TIMEOUT if late else Miss.ERROR
            self._failed(miss, answer)
            raise RedisUnavailable(miss) from answer
        self._succeeded()
        if isinstance(answer, ResponseError):
            code = answer.status_code or str(answer).partition(" ")[0]
            if code == "WRONGTYPE":
                raise RedisUnavailable(Miss.CORRUPT)
            self._log_refusal(code)
            raise RedisUnavailable(Miss.ERROR)
        return answer

    def _succeeded(self) -> None:
        open_s = self._breaker.succeeded(self._clock())
        if open_s is not None:
            log.info("redis is back", of=self._name, at=self._place, lost_s=round(open_s, 3))

    def _failed(self, miss: Miss, error: Exception | None = None) -> None:
        if self._breaker.failed(self._clock()):
            self._log_lost(miss, error)

    def _log_refusal(self, code: str) -> None:
        now = self._clock()
        if now - self._refusals.get(code, -math.inf) >= REFUSAL_LOG_S:
            self._refusals[code] = now
            log.warning("redis refuses", of=self._name, code=code, at=self._place)

    def _log_lost(self, miss: Miss, error: BaseException | None) -> None:
        why = type(error).__name__ if error else str(miss)
        log.warning("redis is lost: every look-up is a miss", of=self._name, at=self._place, reason=why)


async def _done(command: Any) -> Any:
    """What a command of redis-py brings; it types these for its blocking and its asyncio client at once."""
    return await command


async def _outcome(command: Callable[[], Awaitable[Any]], limit_s: float) -> Any:
    """The answer, or the exception as a value: nobody may be waiting for it any more."""
    try:
        # redis-py ends a connection on which a command was cut off, so no answer can go to the next command.
        async with asyncio.timeout(limit_s):
            return await command()
    except Exception as error:
        return error


def _is_trouble(answer: Any) -> bool:
    """Whether Redis did not answer. A refusal is an answer: worth a line in the log, but no reason to stop asking."""
    return isinstance(answer, Exception) and not isinstance(answer, ResponseError)


def place(url: str) -> str:
    """Where a Redis is, for people to read: nothing of the URL that could be secret."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return f"unix://{parts.path}"
    return f"{parts.scheme}://{parts.hostname or 'localhost'}:{parts.port or 6379}"


def _client(url: str, budgets: Budgets) -> "redis.Redis":
    pool = redis.ConnectionPool.from_url(
        url, max_connections=CONNECTIONS, socket_connect_timeout=budgets.connect_s, protocol=2
    )
    # A URL may say more than where: what correctness rests on is not its to choose.
    pool.connection_kwargs.update(
        decode_responses=False,
        retry=Retry(NoBackoff(), 0),
        retry_on_timeout=False,
        # The limit of each command is the store's own.
        socket_timeout=None,
        driver_info=None,
    )
    return redis.Redis.from_pool(pool)
