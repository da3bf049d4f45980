"""Single flight for equal texts: others wait for what one request computes. Knows keys and bytes."""

import asyncio
from collections.abc import Iterable, Mapping


class Flights:
    """The vectors that are being computed, by key."""

    def __init__(self) -> None:
        self._running: dict[bytes, asyncio.Future[bytes]] = {}

    def __len__(self) -> int:
        return len(self._running)

    def find(self, key: bytes) -> "asyncio.Future[bytes] | None":
        """What another request computes; None: no request does."""
        return self._running.get(key)

    def begin(self, keys: Iterable[bytes]) -> "Flight":
        """The caller computes these vectors. None of them is being computed."""
        return Flight(self._running, keys)


class Flight:
    """A `with` block in which a request computes vectors. Those that it has not landed at the end are given up: who
    waits for them computes them."""

    def __init__(self, running: "dict[bytes, asyncio.Future[bytes]]", keys: Iterable[bytes]) -> None:
        loop = asyncio.get_running_loop()
        self._running = running
        self._own: dict[bytes, asyncio.Future[bytes]] = {key: loop.create_future() for key in keys}
        assert not self._own.keys() & running.keys(), "computed twice"
        running.update(self._own)

    def __enter__(self) -> "Flight":
        return self

    def __exit__(self, *_: object) -> None:
        for key, future in self._own.items():
            del self._running[key]
            future.cancel()
        self._own.clear()

    def land(self, vectors: Mapping[bytes, bytes]) -> None:
        """These vectors are computed."""
        for key, vector in vectors.items():
            del self._running[key]
            self._own.pop(key).set_result(vector)


async def landed(future: "asyncio.Future[bytes]") -> bytes | None:
    """The vector that another request computes; None: it has given up."""
    await asyncio.wait([future])
    return None if future.cancelled() else future.result()
