"""Framed values in Redis, in namespaces of bounded size. Whatever Redis does, a look-up is a hit or a miss.

Knows keys and bytes; not what the values mean, nor gRPC, nor how Redis is reached.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import structlog

from services.cache import lru_scripts
from services.cache.counters import Miss, StoreCounters
from services.cache.redis_client import RedisClient, RedisUnavailable, Script, Timeouts
from services.security import frames

log = structlog.get_logger("cache")
Value = TypeVar("Value")

MOST_KEYS_PER_SCRIPT = 1024
"""Keys that one script checks for presence, so that it blocks Redis for less than a millisecond."""


@dataclass(frozen=True, slots=True)
class Namespace(Generic[Value]):
    """Values of one kind that share one bound. Namespaces are independent of one another."""

    name: str
    """Part of the names in Redis; a namespace whose values change their meaning takes another name."""
    kind: frames.Kind
    parse: Callable[[bytes], Value]
    """Converts bytes to a value; may raise any exception for malformed bytes."""
    max_bytes: int
    """Bound of all values together, including what Redis itself needs to store each."""
    max_value_bytes: int
    """Bound of one value."""
    ttl_s: float
    """How long a value is kept after it was stored."""

    @property
    def prefix(self) -> str:
        """The beginning of all names in Redis; the braces keep them in one slot of a Redis cluster."""
        return f"weft:1:{{{self.name}}}:"

    @property
    def index(self) -> str:
        """The name of the LRU index in Redis."""
        return self.prefix + lru_scripts.INDEX_NAME

    def has_room(self, frame: bytes) -> bool:
        """Whether a framed value is within the bounds."""
        fits = len(frame) + lru_scripts.ENTRY_BYTES <= self.max_bytes
        return fits and len(frame) <= self.max_value_bytes + frames.HEADER_BYTES


LOOK_UP = Script(lru_scripts.LOOK_UP)
STORE = Script(lru_scripts.STORE)
PRESENT = Script(lru_scripts.PRESENT)


class Store:
    """Namespaces in one Redis. Use it within one event loop, and close it."""

    def __init__(
        self,
        url: str,
        timeouts: Timeouts | None = None,
        clock: Callable[[], float] = time.monotonic,
        name: str = "results",
        secret: bytes = b"",
    ) -> None:
        """`name` is the store in log lines; a value that was not made with `secret` is a miss.

        Stores share no connection, so the load of one does not delay another.
        """
        self._name = name
        self._secret = secret
        self.counters = StoreCounters()
        self._timeouts = timeouts or Timeouts()
        self._client = RedisClient(url, self._timeouts, clock, name)

    async def open(self) -> None:
        """Logs whether Redis answers. While it does not, every look-up is a miss."""
        await self._client.open()

    async def close(self) -> None:
        """Closes the connections and logs the counters."""
        await self._client.close()
        log.info("store closed", store=self._name, **self.counters.summary())

    async def get(self, namespace: Namespace[Value], key: bytes) -> Value | None:
        """The value under `key`, or None for a miss; returns within the look-up's time limit. Raises nothing."""
        return (await self.get_all(namespace, [key]))[0]

    async def get_all(self, namespace: Namespace[Value], keys: Sequence[bytes]) -> list[Value | None]:
        """For each key its value, or None for a miss; one script looks all up, within the look-up's time limit.

        All keys must have one length. The caller bounds their number: Redis serves nobody else meanwhile. Raises
        nothing.
        """
        values: list[Value | None] = []
        damaged: list[str] = []
        for key, frame in zip(keys, await self._look_up(namespace, keys), strict=True):
            found = self._opened(namespace, key, frame)
            if isinstance(found, Miss):
                self.counters.misses[found] += 1
                values.append(None)
                # The damaged value would keep a good one from being stored.
                damaged += [namespace.prefix + key.hex()] if found is Miss.CORRUPT else []
            else:
                self.counters.hits += 1
                values.append(found)
        if damaged:
            with contextlib.suppress(RedisUnavailable):
                await self._client.delete(self._timeouts.look_up_s, damaged)
        return values

    async def put(self, namespace: Namespace[Any], key: bytes, payload: bytes) -> bool:
        """Stores bytes under `key`; returns whether Redis confirmed it in time. Raises nothing."""
        return await self.put_all(namespace, [(key, payload)]) == 1

    async def put_all(self, namespace: Namespace[Any], entries: Sequence[tuple[bytes, bytes]]) -> int:
        """Stores bytes under each key, all by one script; returns how many Redis confirmed in time.

        The caller bounds their number: Redis serves nobody else meanwhile. Raises nothing.
        """
        sealed = [(key, frames.seal(namespace.kind, key, payload, self._secret)) for key, payload in entries]
        fitting = [(key, frame) for key, frame in sealed if namespace.has_room(frame)]
        evicted = await self._store(namespace, fitting) if fitting else None
        stored = len(fitting) if evicted is not None else 0
        self.counters.stores += stored
        self.counters.refused += len(entries) - stored
        self.counters.evictions += evicted or 0
        return stored

    async def present(self, namespace: Namespace[Any], keys: Sequence[bytes]) -> list[bool]:
        """Which of these keys have a value, damaged or not; False where Redis does not answer.

        Present values count as used; the first key becomes the most recently used. All keys must have one length.
        Raises nothing.
        """
        found: list[bool] = []
        for start in range(0, len(keys), MOST_KEYS_PER_SCRIPT):
            part = keys[start : start + MOST_KEYS_PER_SCRIPT]
            arguments = [namespace.prefix, b"".join(part).hex(), len(part)]
            try:
                answer = await self._client.run(self._timeouts.look_up_s, PRESENT, [namespace.index], *arguments)
                found += [mark == ord("1") for mark in bytes(answer)]
            except (RedisUnavailable, TypeError, ValueError):
                break
        return found + [False] * (len(keys) - len(found))

    async def _look_up(self, namespace: Namespace[Any], keys: Sequence[bytes]) -> list[bytes | Miss]:
        """For each key the frame in Redis, or why there is none."""
        max_frame_bytes = namespace.max_value_bytes + frames.HEADER_BYTES
        arguments = [namespace.prefix, b"".join(keys).hex(), len(keys), max_frame_bytes]
        try:
            found = await self._client.run(self._timeouts.look_up_s, LOOK_UP, [namespace.index], *arguments)
        except RedisUnavailable as error:
            return [error.miss] * len(keys)
        if not isinstance(found, list) or len(found) != len(keys):
            return [Miss.ERROR] * len(keys)
        return [Miss.CORRUPT if not isinstance(frame, bytes) else frame or Miss.ABSENT for frame in found]

    def _opened(self, namespace: Namespace[Value], key: bytes, frame: bytes | Miss) -> Value | Miss:
        if isinstance(frame, Miss):
            return frame
        try:
            return namespace.parse(frames.unseal(namespace.kind, key, frame, self._secret))
        except Exception:  # A parser may raise any exception for foreign bytes.
            return Miss.CORRUPT

    async def _store(self, namespace: Namespace[Any], entries: Sequence[tuple[bytes, bytes]]) -> int | None:
        """The number of values that were evicted for the new ones; None if these were not stored."""
        # Only look-ups probe a failing Redis: they are cheaper, and a caller waits for them anyway.
        if self._client.is_failing:
            return None
        arguments: list[Any] = [namespace.prefix, int(namespace.ttl_s * 1000), namespace.max_bytes]
        for key, frame in entries:
            arguments += [key.hex(), frame]
        try:
            return int(await self._client.run(self._timeouts.store_s, STORE, [namespace.index], *arguments))
        except (RedisUnavailable, TypeError, ValueError):
            return None
