"""A process that holds a pool of KV blocks on a GPU, whose memory another process maps. Knows no mesh and no engine."""

import contextlib
import multiprocessing
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from kernels import kv_pages
from services.worker.kvcache.loan_copies import LoanCopies
from services.worker.kvcache.shared_memory import CannotShare
from services.worker.loader import presets
from services.worker.loader.config import read_config
from services.worker.runners.cuda.kv_pool import GpuPool
from services.worker.runners.cuda.sharing.pool import SharedGpuPool

SHAPE, BLOCK_SIZE = "llama-3.1-8b", 16
START_S = 120.0


def make_pool(blocks: int, seed: int | None = None) -> GpuPool:
    """A pool of the shape of the 8B model in bfloat16 on this process's first GPU. seed: of random contents; None: all
    bits of it are set, so that a block that was not written shows."""
    config = read_config(presets.folder_of(presets.PREFIX + SHAPE)).model
    pool = GpuPool(config, BLOCK_SIZE, torch.bfloat16, torch.device("cuda", 0))
    pool.allocate(blocks)
    generator = torch.Generator(pool.device).manual_seed(seed or 0)
    for layer in pool.layers:
        contents = kv_pages.bytes_of(layer)
        if seed is None:
            contents.fill_(255)
        else:
            contents.random_(0, 256, generator=generator)
    torch.cuda.synchronize(pool.device)
    return pool


@dataclass(frozen=True, slots=True)
class PoolProcess:
    """The process."""

    process: BaseProcess
    connection: Connection

    def ask(self, order: str, *arguments: Any) -> Any:
        """Have a method of `Holder` called there. Raises what it raises: CannotShare."""
        self.connection.send((order, arguments))
        if not self.connection.poll(START_S):
            raise TimeoutError(order)
        answer = self.connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


class Holder:
    """What the process does. Its answers are plain values."""

    def __init__(self, blocks: int, seed: int | None) -> None:
        self.pool = make_pool(blocks, seed)
        self.shared = SharedGpuPool(self.pool)

    def describe(self) -> bytes:
        """The description of its memory."""
        return self.shared.describe()

    def read(self, blocks: list[int]) -> list[bytes]:
        """The contents of blocks."""
        return self.pool.read(blocks)

    def fetch(self, description: bytes, theirs: list[int], own: list[int]) -> list[bytes]:
        """Copies blocks out of another process's pool to blocks of this one. -> their contents then."""
        mapped = self.shared.map(description)
        try:
            self.pool.write(own, mapped.copy(theirs))
            return self.pool.read(own)
        finally:
            torch.cuda.synchronize(self.pool.device)
            mapped.close()

    def borrow(self, description: bytes) -> None:
        """Maps another process's pool, to copy blocks of a loan out of it until this process ends."""
        self.copies = LoanCopies(self.shared.map(description))

    def begin(self, theirs: list[int], first: int, layers: int) -> None:
        """Copies layers of the loan's next blocks, as `LoanCopies.begin`."""
        self.copies.begin(theirs, first, layers)

    def finish(self, theirs: list[int], first: int, own: list[int]) -> list[bytes]:
        """Copies the rest of these blocks, and writes them to blocks of this pool. -> their contents then."""
        self.copies.lend(theirs, first)
        copied, _ = self.copies.copy()
        self.pool.write(own, self.copies.take(copied))
        return self.pool.read(own)


def _serve(connection: Connection, blocks: int, seed: int | None) -> None:
    holder = Holder(blocks, seed)
    with contextlib.suppress(EOFError):
        while True:
            order, arguments = connection.recv()
            try:
                connection.send(getattr(holder, order)(*arguments))
            except CannotShare as error:
                connection.send(error)


@contextlib.contextmanager
def held(blocks: int, seed: int | None, environment: Mapping[str, str]) -> Iterator[PoolProcess]:
    """A process with these environment variables and a pool, until the block ends."""
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_serve, args=(there, blocks, seed), daemon=True)
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        process.start()
    finally:
        os.environ.clear()
        os.environ.update(before)
    there.close()
    try:
        yield PoolProcess(process, here)
    finally:
        here.close()
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()
