"""Adapters on a grid of ranks: rank 0 sends each rank its part of an adapter, and the slot that it goes to.

Each rank has a host copy of its part of every adapter that the worker serves. The copies have numbers; they are made
and dropped with rank 0's own one. Knows matrices and slots, never jobs.
"""

import itertools
import queue
import struct
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from services.worker.job import Adapter
from services.worker.models.adapter_parts import AdapterParts
from services.worker.models.lora import Matrices
from services.worker.parallel.channel import Kind
from services.worker.runners.base import PreparedPages

_NUMBER = struct.Struct("=i")
_MODULE = struct.Struct("=5i")
"""Number of the adapter, index in `_DTYPES`, r, inputs, outputs."""
_LOAD = struct.Struct("=2i")
"""Slot, number of the adapter."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PAUSE_S = 2e-4
"""Between two modules: locks are not fair, and a step may wait for the channel."""


class OrderSender(Protocol):
    """Sends what rank 0 orders. Any thread may call it."""

    def order(self, kind: Kind, *parts: bytes) -> None:
        """Send the same message to all other ranks. Raises RanksLost."""

    def order_one(self, number: int, kind: Kind, *parts: bytes) -> None:
        """Send a message to rank `number` + 1. Raises RanksLost."""

    def order_living(self, kind: Kind, *parts: bytes) -> None:
        """Send the same message to all other ranks that are still there."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class SharedAdapter:
    """The host copy of an adapter of which each rank has a part."""

    number: int
    own: Any = None
    """The part of rank 0, as its pages made it."""


class RanksAdapters:
    """`PreparedPages` of a grid of which this process is rank 0."""

    def __init__(self, orders: OrderSender, own: PreparedPages, parts: AdapterParts) -> None:
        """own: the pages of this rank; parts: cuts adapters."""
        self.slots = own.slots
        self._orders, self._own, self._parts = orders, own, parts
        self._numbers = itertools.count()
        self._dropped: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        """Numbers of copies that are to be dropped; None: these pages are gone."""
        threading.Thread(target=_drop, args=(self._dropped, orders), name="dropped-adapters", daemon=True).start()
        weakref.finalize(self, self._dropped.put, None).atexit = False

    def prepare(self, stored: Matrices) -> tuple[SharedAdapter, int]:
        """Make a host copy of each rank's part of an adapter -> rank 0's copy, and the bytes of that copy and of the
        parts that were sent to the other ranks. Any thread may call it. Raises CheckpointError."""
        own, *others = self._parts.cut(stored)
        shared = SharedAdapter(next(self._numbers))
        weakref.finalize(shared, self._dropped.put, shared.number).atexit = False
        for rank, part in enumerate(others):
            for name, matrices in part.items():
                self._orders.order_one(rank, Kind.MODULE, *write_module(shared.number, name, *matrices))
                time.sleep(_PAUSE_S)
            self._orders.order_one(rank, Kind.KEEP, _NUMBER.pack(shared.number))
        shared.own, nbytes = self._own.prepare(own)
        return shared, nbytes + sum(a.nbytes + b.nbytes for part in others for a, b in part.values())

    def load(self, slot: int, adapter: Adapter) -> None:
        """Begin to copy an adapter to a slot on all ranks."""
        shared: SharedAdapter = adapter.weights
        self._orders.order(Kind.LOAD, _LOAD.pack(slot, shared.number))
        self._own.load(slot, replace(adapter, weights=shared.own))

    def loaded(self, slot: int) -> bool:
        """Whether rank 0's copy is complete. On other ranks a step that uses the slot waits for theirs."""
        return self._own.loaded(slot)


def _drop(dropped: "queue.SimpleQueue[int | None]", orders: OrderSender) -> None:
    """Send the other ranks the numbers of copies that they are to drop. A copy may be let go of anywhere, even while a
    message is sent: so a thread of its own sends these."""
    while (number := dropped.get()) is not None:
        orders.order_living(Kind.DROP, _NUMBER.pack(number))


class HeldAdapters:
    """The copies of a rank other than 0."""

    def __init__(self, pages: PreparedPages) -> None:
        self._pages = pages
        self._arriving: defaultdict[int, list[bytes]] = defaultdict(list)
        """The modules that have arrived of each adapter."""
        self._copies: dict[int, Future[tuple[Any, int]]] = {}
        self._thread = ThreadPoolExecutor(1, "adapters")
        """Makes copies beside the steps."""

    def obey(self, kind: Kind, content: bytes) -> None:
        """Do what rank 0 orders about adapters."""
        if kind is Kind.LOAD:
            slot, number = _LOAD.unpack(content)
            weights, nbytes = self._copies[number].result()
            self._pages.load(slot, Adapter(str(number), b"", 0, nbytes, weights))
            return
        (number,) = _NUMBER.unpack_from(content)
        if kind is Kind.MODULE:
            self._arriving[number].append(content)
        elif kind is Kind.KEEP:
            self._copies[number] = self._thread.submit(self._prepare, self._arriving.pop(number, []))
        elif kind is Kind.DROP:
            self._arriving.pop(number, None)
            self._copies.pop(number, None)

    def _prepare(self, contents: Sequence[bytes]) -> tuple[Any, int]:
        return self._pages.prepare(dict(map(read_module, contents)))


# ---- messages ----


def write_module(number: int, name: str, a: Tensor, b: Tensor) -> list[bytes]:
    """The matrices of a module of the adapter with this number: sizes, A, B, name."""
    sizes = _MODULE.pack(number, _DTYPES.index(a.dtype), *a.shape, len(b))
    return [sizes, *(each.contiguous().view(torch.uint8).numpy().tobytes() for each in (a, b)), name.encode()]


def read_module(content: bytes) -> tuple[str, tuple[Tensor, Tensor]]:
    """The name of the module, A and B."""
    _, index, rank, inputs, outputs = _MODULE.unpack_from(content)
    dtype, numbers = _DTYPES[index], rank * (inputs + outputs)
    matrices = torch.frombuffer(bytearray(content), dtype=dtype, count=numbers, offset=_MODULE.size)
    a, b = matrices[: rank * inputs].view(rank, inputs), matrices[rank * inputs :].view(outputs, rank)
    return content[_MODULE.size + numbers * dtype.itemsize :].decode(), (a, b)
