"""Connects an engine to the cache service and to other workers, with which it shares prefixes. Knows no block."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from grpc import aio

from protos import cache_pb2_grpc as cache_grpc
from services import host, metrics, rpc
from services.block_messages import Rounding
from services.security import mesh_id as mesh_ids
from services.worker.engine.base import Engine
from services.worker.kvcache.mapped_peer import Borrower
from services.worker.kvcache.peer_tier import PeerStores
from services.worker.kvcache.remote_tier import RemoteStore, log
from services.worker.kvcache.shared_memory import CannotShare, SharedMemory

_CONNECT_S = 0.5


@contextlib.asynccontextmanager
async def shared_prefixes(
    address: str, engine: Engine, counts: metrics.Metrics, mesh_id: str = ""
) -> AsyncIterator[None]:
    """Lets an engine share prefixes through the cache service at `address`, unless that is empty, inside the block.

    The engine must not run yet. The metrics of fetches and offers are added to `counts`.
    """
    if not address or not engine.block_layout:
        yield
        return
    async with rpc.link_channel(address, "cache") as channel:
        stub = cache_grpc.CacheStub(channel)
        store = RemoteStore(stub, engine.block_layout, engine.block_bytes, mesh_ids.metadata(mesh_id))
        engine.use_remote(store)
        _add_metrics(counts, store)
        running = asyncio.create_task(store.run())
        try:
            yield
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            log.info("prefix sharing has ended", fetches=dict(store.fetches), offers=dict(store.offers))


@contextlib.asynccontextmanager
async def peer_prefixes(
    engine: Engine,
    counts: metrics.Metrics,
    secret: bytes,
    mesh_id: str = "",
    memory: SharedMemory | None = None,
    rounding: Rounding | None = None,
) -> AsyncIterator[None]:
    """Lets an engine fetch prefixes from other workers inside the block. `secret` keys the frames of blocks. memory: of
    its pool; blocks are copied out of that of other workers of this host, if it is given. rounding: of its blocks; if
    given, it asks for fp8 where they come over gRPC.

    The engine must not run yet. The metrics of fetches are added to `counts`.
    """
    if not engine.block_layout:
        yield
        return

    def connect(address: str) -> aio.Channel:
        return rpc.link_channel(address, "worker", connect_s=_CONNECT_S)

    copying = ThreadPoolExecutor(1, "borrow")
    borrower = None if memory is None else Borrower(memory, host.identity(), copying)
    own_id = mesh_ids.metadata(mesh_id)
    peers = PeerStores(engine.block_layout, engine.block_bytes, connect, secret, own_id, borrower, rounding)
    engine.use_peers(peers.at)
    counts.total(
        "weft_worker_peer_fetches",
        "Prefixes requested from other workers, by outcome.",
        lambda: metrics.by_label(peers.fetches.items()),
        "outcome",
    )
    counts.total(
        "weft_worker_peer_blocks",
        "Blocks that came from other workers, by their way: out of their memory, or over gRPC, there also in fp8.",
        lambda: metrics.by_label(peers.received.items()),
        "way",
    )
    try:
        yield
    finally:
        await peers.close()
        copying.shutdown(wait=False)
        blocks = dict(peers.received)
        log.info("fetching from other workers has ended", fetches=dict(peers.fetches), blocks=blocks)


def rounding_of(engine: Engine) -> Rounding | None:
    """How blocks of the engine are rounded to fp8; None: they have 8 bits already, or no contents."""
    if not engine.block_layout:
        return None
    from services.worker.kvcache import fp8_rounding  # Torch, which only engines with contents of blocks need.

    return fp8_rounding.rounding_of(engine.block_dtype, engine.block_bytes)


def described(memory: SharedMemory | None) -> bytes:
    """The description of a pool's memory for other workers of this host; empty if it cannot be shared."""
    if memory is None:
        return b""
    try:
        return memory.describe()
    except CannotShare as error:
        log.info("other workers cannot map this worker's memory: blocks go over gRPC", reason=str(error))
        return b""


def _add_metrics(counts: metrics.Metrics, store: RemoteStore) -> None:
    counts.total(
        "weft_worker_prefix_fetches",
        "Prefixes requested from the cache service, by outcome.",
        lambda: metrics.by_label(store.fetches.items()),
        "outcome",
    )
    counts.total(
        "weft_worker_prefix_offers",
        "Blocks offered to the cache service, by outcome.",
        lambda: metrics.by_label(store.offers.items()),
        "outcome",
    )
    counts.gauge(
        "weft_worker_fetch_bytes_per_second",
        "Measured speed of fetching KV from the cache service; 0 while unknown.",
        lambda: 1 / store.link.byte_s if store.link.byte_s else 0.0,
    )
