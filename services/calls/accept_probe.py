"""Measures how long calls wait until a gRPC server of this process accepts them. Knows no load and no requests.

gRPC's own threads read a call; Python accepts some of each method at a turn of its event loop. Calls that arrive faster
wait between the two, where no handler sees them. A call of the process to its own server, of the method that was called
last, waits behind them, too.
"""

import asyncio
import secrets
import sys
import time
from collections.abc import Sequence

import grpc
from grpc import aio

_MOST_CALLS = 256
"""Calls under way at once, those of 12 s. While the server accepts none, the age of the oldest one is the measure; with
few calls a wait that becomes shorter would be seen late."""
_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]


class AcceptProbe:
    """Calls a server of this process at an address of its own: the public port may belong to several processes. Outside
    Linux there is no such address, and nothing is measured."""

    def __init__(self) -> None:
        self.address = f"unix-abstract:weft-{secrets.token_hex(16)}" if sys.platform == "linux" else ""
        """Where the server has to listen, too: a socket of this machine, without a file. Empty for none."""
        self.method = "/grpc.health.v1.Health/Check"
        """The one whose calls are measured."""
        self.answer: grpc.Status = _Answer()
        """The status with which the server's gate has to refuse the calls of this probe."""
        self._secret = secrets.token_hex(16)
        self._channel: aio.Channel | None = None
        self._unanswered: dict[asyncio.Task[None], float] = {}
        """The calls that wait, in the order of their start, each with its time."""
        self._last_s = 0.0
        """How long the last one took that was answered."""

    async def open(self) -> None:
        """Connects. gRPC keeps the first call of a server in memory: it is to be this one."""
        if self.address:
            await self._call(time.monotonic())

    def made(self, credentials: Sequence[str]) -> bool:
        """Whether a call with these values of `authorization` is one of this probe."""
        return len(credentials) == 1 and credentials[0] == self._secret

    def wait_s(self) -> float:
        """How many seconds a call waits now; starts another call, which measures it for later."""
        if not self.address:
            return 0.0
        now = time.monotonic()
        if len(self._unanswered) < _MOST_CALLS:
            call = asyncio.create_task(self._call(now))
            self._unanswered[call] = now
            call.add_done_callback(self._unanswered.pop)
        return max(self._last_s, now - next(iter(self._unanswered.values())))

    async def close(self) -> None:
        """Ends the calls and the connection; from now on nothing is measured."""
        self.address = ""
        for call in list(self._unanswered):
            call.cancel()
        if self._channel is not None:
            await self._channel.close()

    async def _call(self, began: float) -> None:
        if self._channel is None:
            self._channel = aio.insecure_channel(self.address, options=_OPTIONS)
        call: aio.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(self.method)
        try:
            await call(b"", metadata=(("authorization", self._secret),))
        except aio.AioRpcError as error:
            if error.code() is self.answer.code:  # Else the server stops.
                self._last_s = time.monotonic() - began


class _Answer(grpc.Status):
    """Ends the calls of a probe."""

    code = grpc.StatusCode.ABORTED
    details = "a probe of the gateway itself"
    trailing_metadata = ()
