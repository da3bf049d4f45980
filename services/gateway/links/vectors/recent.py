"""Vectors that a gateway process keeps after it found them in the cache, so that a repeated text needs no call of the
cache service. Knows keys and bytes."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping

LIFE_S = 60.0
"""Seconds for which a kept vector is an answer."""


class RecentVectors:
    """The most recently used vectors, within a number of bytes and for `LIFE_S`."""

    def __init__(self, most_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """most_bytes: of all vectors; 0: none are kept."""
        self._most_bytes, self._clock = most_bytes, clock
        self._held: OrderedDict[bytes, tuple[float, bytes]] = OrderedDict()
        """By key: until when, and the vector; the one that was used last is the last."""
        self._bytes = 0

    def find(self, keys: Iterable[bytes]) -> dict[bytes, bytes]:
        """The vectors that are held, by key."""
        now, found = self._clock(), {}
        for key in keys:
            until, vector = self._held.get(key, (0.0, b""))
            if until > now:
                self._held.move_to_end(key)
                found[key] = vector
        return found

    def keep(self, vectors: Mapping[bytes, bytes]) -> None:
        """Hold vectors that were found in the cache."""
        until = self._clock() + LIFE_S
        for key, vector in vectors.items():
            self._bytes += len(vector) - len(self._held.pop(key, (0.0, b""))[1])
            self._held[key] = until, vector
        while self._bytes > self._most_bytes:
            _, (_, vector) = self._held.popitem(last=False)
            self._bytes -= len(vector)
