"""The tiers in other workers: fetches contents of blocks, and measures how fast each link is.

Blocks come out of the other worker's memory if this process can map it, and over gRPC otherwise.

Runs on the event loop; the engine's thread calls `PeerStores.at` and the methods of `BlockStore`. Knows addresses and
frames, not why a worker has blocks. After an error fewer blocks are fetched, and the error is counted.
"""

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import structlog
from grpc import aio

from protos import cache_pb2 as cache
from protos import mesh_pb2 as mesh
from protos import mesh_pb2_grpc as mesh_grpc
from services.block_messages import Rounding, unseal_block
from services.security import frames
from services.worker.kvcache.mapped_peer import Borrower, MappedPeer
from services.worker.kvcache.shared_memory import CannotShare
from services.worker.kvcache.tiers import BlockRequest
from services.worker.kvcache.transfer_cost import TransferCost

log = structlog.get_logger("worker.peers")

MEASURE_S = 5.0
"""Seconds between measurements of a link that is too slow for any job: nothing else shows that it became faster."""
_MEASURE_BYTES = 256 << 10
_MEASURE_LIMIT_S = 3.0
_LEAST_MEASURED_BYTES = 64 << 10  # of the messages of a transfer that measures the link
_DOWN_S = 1.0
"""Seconds without a request to a worker that did not answer."""
MOST_PEERS = 64
"""Workers that are remembered, and connections that are kept open; the least recently used are dropped first."""

Work = Callable[[], Coroutine[Any, Any, None]]
Connect = Callable[[str], aio.Channel]


class PeerStore:
    """A `BlockStore` that is another worker."""

    def __init__(self, peers: "PeerStores", address: str) -> None:
        self._wire = TransferCost()
        self._peers, self._address = peers, address
        self._memory: MappedPeer | None = None
        if peers.borrower is not None:
            self._memory = MappedPeer(
                peers.borrower, address, peers.layout, peers.block_bytes, self._stub, peers.metadata
            )
        self._down_until = 0.0
        self._measured_at = 0.0
        self._rounds = peers.rounding is not None
        """Whether the other worker sends rounded contents, as far as it has stated it."""

    @property
    def link(self) -> TransferCost:
        """The measured speed from the other worker to this one, on the way that blocks take."""
        return self._memory.link if self._memory is not None and self._memory.mapped else self._wire

    @property
    def _moved_bytes(self) -> int:
        """Bytes that a block takes on this way."""
        rounding = self._peers.rounding
        if rounding is None or not self._rounds or self.link is not self._wire:
            return self._peers.block_bytes
        return rounding.rounded_bytes

    # ---- the engine's thread ----

    def is_faster(self, blocks: int, recompute_s: float) -> bool:
        """Predicted from the measured link. The first request measures it, within its own budget; where fetching is
        slower, the link is measured again from time to time."""
        if time.monotonic() < self._down_until:
            return False
        if not self.link.known:
            return recompute_s > 0
        faster = self.link.is_faster(blocks * self._moved_bytes, recompute_s)
        if not faster and time.monotonic() - self._measured_at > MEASURE_S:
            self._measured_at = time.monotonic()
            self._peers.start(self._measure_again)
        return faster

    def fetch(self, request: BlockRequest) -> None:
        """Ask the other worker."""
        self._peers.start(lambda: self._fetch(request))

    def lacks(self, keys: Sequence[bytes], recompute_s: float) -> list[bytes]:
        """None: a worker is offered no blocks."""
        return []

    def offer(self, key: bytes, payload: bytes) -> bool:
        """Not taken."""
        return False

    # ---- the event loop ----

    async def _fetch(self, request: BlockRequest) -> None:
        outcome = "failed"
        try:
            async with asyncio.timeout(request.budget_s):
                borrows = self._memory is not None and await self._memory.ready()
                if not self.link.known:
                    await self._measure()
                if request.follow or self.is_faster(len(request.keys), request.budget_s):
                    outcome = await (self._borrow(request) if borrows else self._receive(request))
                else:
                    outcome = "too_slow"
        except TimeoutError:
            outcome = "late"
        except aio.AioRpcError as error:
            self._down_until = time.monotonic() + _DOWN_S
            log.debug("fetch failed", at=self._address, code=error.code().name)
        except CannotShare as error:
            log.warning("blocks could not be copied", at=self._address, reason=str(error))
        finally:
            self._peers.fetches[outcome] += 1
            request.answer(request, None)

    async def _borrow(self, request: BlockRequest) -> str:
        """Copy the contents out of the other worker's memory. -> the outcome."""
        assert self._memory is not None, "no memory is shared"
        return await self._memory.borrow(request, self._peers.count_copied)

    async def _receive(self, request: BlockRequest) -> str:
        """Pass on the contents as they arrive. -> the outcome."""
        blocks = _Frames(request.keys, self._peers)
        listed = cache.BlockList(keys=b"".join(request.keys), layout=self._peers.layout)
        wanted = mesh.ReadBlocksRequest(blocks=listed, follow=request.follow, format=self._peers.format, in_parts=True)
        call = self._stub().ReadBlocks(wanted, metadata=self._peers.metadata)
        flow = _Flow(self._wire)
        try:
            async for response in call:
                flow.arrived(sum(len(piece.data) for piece in response.pieces), response.more)
                self._rounds = response.format == mesh.BLOCK_FORMAT_FP8
                if contents := await blocks.add(response):
                    self._peers.received["grpc_fp8" if self._rounds else "grpc"] += len(contents)
                    request.answer(request, contents)
                if request.abandoned:
                    return "abandoned"
        except frames.FrameError:
            log.warning("a worker sent a damaged block", at=self._address)
            return "damaged"
        finally:
            call.cancel()
            flow.end()
        return "fetched" if blocks.whole else "absent"

    async def _measure_again(self) -> None:
        try:
            async with asyncio.timeout(_MEASURE_LIMIT_S):
                await self._measure()
        except (TimeoutError, aio.AioRpcError):
            self._down_until = time.monotonic() + _DOWN_S

    async def _measure(self) -> None:
        """Fetch one random byte, then many. The very first call connects, which is not measured."""
        self._measured_at = time.monotonic()
        await self._probe(1)
        link = self._wire
        link.answered(await self._probe(1))
        link.moved(_MEASURE_BYTES, await self._probe(_MEASURE_BYTES))
        log.debug("link measured", at=self._address, latency_s=link.latency_s, byte_s=link.byte_s)

    async def _probe(self, count: int) -> float:
        """Seconds until `count` random bytes have arrived."""
        stub = self._stub()
        began = time.monotonic()
        asked = mesh.ReadBlocksRequest(probe_bytes=count, format=self._peers.format)
        async for response in stub.ReadBlocks(asked, metadata=self._peers.metadata):
            self._rounds = response.format == mesh.BLOCK_FORMAT_FP8
        return time.monotonic() - began

    def _stub(self) -> "mesh_grpc.WorkerAsyncStub":
        return mesh_grpc.WorkerStub(self._peers.channel(self._address))

    async def close(self) -> None:
        """Unmap the other worker's memory."""
        if self._memory is not None:
            await self._memory.close()


class PeerStores:
    """The tiers of all other workers. `run` must run for any of them to do anything."""

    def __init__(
        self,
        layout: str,
        block_bytes: int,
        connect: Connect,
        secret: bytes = b"",
        metadata: tuple[tuple[str, str], ...] = (),
        borrower: Borrower | None = None,
        rounding: Rounding | None = None,
    ) -> None:
        """`connect` opens a channel to a worker; `secret` keys the frames of its blocks. borrower: maps the memory of
        other workers; None: all blocks come over gRPC. rounding: blocks that come over gRPC are asked for in fp8; None:
        they come in the pool's own format."""
        self.layout, self.block_bytes = layout.encode(), block_bytes
        self.secret, self.metadata, self.borrower = secret, metadata, borrower
        self.rounding = rounding
        self.format = mesh.BLOCK_FORMAT_UNSPECIFIED if rounding is None else mesh.BLOCK_FORMAT_FP8
        self.fetches: Counter[str] = Counter()
        """Requests by outcome: fetched, absent, too_slow, late, abandoned, revoked, damaged, failed."""
        self.received: Counter[str] = Counter()
        """Blocks so far, by their way: memory, grpc or grpc_fp8."""
        self._connect = connect
        self._loop = asyncio.get_running_loop()
        self._stores: OrderedDict[str, PeerStore] = OrderedDict()
        self._channels: OrderedDict[str, aio.Channel] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    def at(self, address: str) -> PeerStore:
        """The tier of the worker at this host:port. The engine's thread calls it."""
        if address not in self._stores:
            self._stores[address] = PeerStore(self, address)
        self._stores.move_to_end(address)
        while len(self._stores) > MOST_PEERS:
            _, forgotten = self._stores.popitem(last=False)
            self.start(forgotten.close)
        return self._stores[address]

    def count_copied(self, blocks: int) -> None:
        """So many blocks came out of another worker's memory."""
        self.received["memory"] += blocks

    def start(self, work: Work) -> None:
        """Run this on the event loop. May be called from any thread."""
        self._loop.call_soon_threadsafe(self._start, work)

    def _start(self, work: Work) -> None:
        task = asyncio.create_task(work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def channel(self, address: str) -> aio.Channel:
        """The channel to a worker, opened at its first use. May close that of another one."""
        if address not in self._channels:
            self._channels[address] = self._connect(address)
        self._channels.move_to_end(address)
        while len(self._channels) > MOST_PEERS:
            _, unused = self._channels.popitem(last=False)
            self._start(unused.close)
        return self._channels[address]

    async def close(self) -> None:
        """End all fetches, unmap all memory and close all channels."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *(store.close() for store in self._stores.values()), return_exceptions=True)
        for channel in self._channels.values():
            await channel.close()


class _Frames:
    """Joins pieces to frames, as they arrive in order, and parts to blocks; checks and expands them."""

    def __init__(self, keys: Sequence[bytes], peers: PeerStores) -> None:
        self.whole = 0
        """Blocks that have arrived."""
        self._keys, self._peers = keys, peers
        self._pieces: list[bytes] = []
        self._begun: dict[int, bytes] = {}
        """Contents of blocks that are not whole, by their places."""

    async def add(self, message: mesh.ReadBlocksResponse) -> list[bytes]:
        """-> the contents of blocks that are whole now, in the pool's format. Raises FrameError for what is not the
        next part of a block, or has a format that was not asked for."""
        if message.format not in (mesh.BLOCK_FORMAT_UNSPECIFIED, self._peers.format):
            raise frames.FrameError("a format that was not asked for")
        ended = {piece.index: frame for piece in message.pieces if (frame := self._join(piece)) is not None}
        parts = await asyncio.to_thread(self._unseal, ended, message)
        made = [self._add(index, contents, message) for index, contents in parts.items()]
        return [contents for contents in made if contents is not None]

    def _join(self, piece: cache.BlockPiece) -> bytes | None:
        """-> the frame that ends with the piece."""
        if not self.whole <= piece.index < len(self._keys):
            raise frames.FrameError("not one of the next blocks")
        self._pieces.append(piece.data)
        if not piece.last:
            return None
        frame, self._pieces = b"".join(self._pieces), []
        return frame

    def _unseal(self, ended: dict[int, bytes], message: mesh.ReadBlocksResponse) -> dict[int, bytes]:
        peers = self._peers
        rounding = peers.rounding if message.format == mesh.BLOCK_FORMAT_FP8 else None
        return {
            index: unseal_block(self._keys[index], peers.layout, frame, peers.secret, rounding, message.offset)
            for index, frame in ended.items()
        }

    def _add(self, index: int, part: bytes, message: mesh.ReadBlocksResponse) -> bytes | None:
        """-> the contents of the block if they are whole."""
        before = self._begun.pop(index, b"") if message.offset else b""
        contents, size = before + part, self._peers.block_bytes
        if len(before) != message.offset:
            raise frames.FrameError("not the next part of a block")
        if message.partial and len(contents) < size:
            self._begun[index] = contents
            return None
        if index != self.whole or len(contents) != size:
            raise frames.FrameError("not the contents of the next block")
        self._begun.pop(index, None)
        self.whole += 1
        return contents


class _Flow:
    """Measures a link by the messages that the other worker did not have to compute first."""

    def __init__(self, link: TransferCost) -> None:
        self._link = link
        self._last: float | None = None
        """When the last message arrived, if the next one follows at once."""
        self._bytes, self._seconds = 0, 0.0

    def arrived(self, count: int, more: bool) -> None:
        """A message with `count` bytes of contents arrived. more: the next one follows at once."""
        now = time.monotonic()
        if self._last is not None:
            self._bytes += count
            self._seconds += now - self._last
        self._last = now if more else None

    def end(self) -> None:
        """Record what was measured."""
        if self._bytes >= _LEAST_MEASURED_BYTES:
            self._link.moved(self._bytes, self._seconds + (self._link.latency_s or 0.0))
