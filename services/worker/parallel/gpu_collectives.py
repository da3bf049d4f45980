"""What ranks on GPUs exchange while they compute: small sums over peer memory in one kernel, large ones by NCCL.

What only the host needs goes over gloo, as on CPUs. All of it may be captured in CUDA graphs. Knows tensors and ranks,
never layers or jobs.
"""

import os
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels import peer_memory, peer_sums
from kernels.peer_sums import Peers
from services.worker.parallel.collectives import _COLUMN, _ROW, Collectives, dist
from services.worker.parallel.topology import Grid


class GpuCollectives(Collectives):
    """A rank's connections to others, each of which has a GPU of its own: this process's current device."""

    def __init__(self, grid: Grid, rank: int, meeting: Path, words: int, *, invariant: bool = False) -> None:
        """words: of four bytes, that the largest exchange over peer memory has. invariant: larger sums are exchanged in
        pieces, so that a row's sum has the same bits among any number of rows. Raises PeerMemoryError where a device
        cannot reach another one's memory."""
        super().__init__(grid, rank, meeting)
        place = grid.place(rank)
        self._invariant = invariant
        self._device = torch.device("cuda", torch.cuda.current_device())
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        self._nccl: dict[str, Any] = {
            _ROW: self._connect_nccl(f"nccl/stage/{place.stage}", place.tensor, grid.tensor),
            _COLUMN: self._connect_nccl(f"nccl/column/{place.tensor}", place.stage, grid.pipeline),
        }
        weakref.finalize(self, self._nccl.clear)
        self._peers = self._open_peers(words) if grid.tensor > 1 else None

    # ---- among the ranks of a stage ----

    def add_sum(self, residual: Tensor, part: Tensor, bias: Tensor | None = None) -> None:
        """residual += the sum of all ranks' parts, + bias, which each rank has whole. All [T, n] of one dtype."""
        if self._peers is None or not self._over_peer_memory(part):
            super().add_sum(residual, part, bias)
            return
        rows = self._rows_at_once(part)
        for piece, target in zip(part.split(rows), residual.split(rows), strict=True):  # type: ignore[no-untyped-call]
            peer_sums.add_sum(piece, self._peers, target, target, bias)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in its dtype."""
        if self._peers is None:
            return x
        total = x.contiguous().clone()
        if self._over_peer_memory(x):
            for piece in total.split(self._rows_at_once(x)):  # type: ignore[no-untyped-call]
                peer_sums.add_sum(piece, self._peers, piece)
            return total
        return self._reduced(total, dist.ReduceOp.SUM)

    def largest(self, x: Tensor) -> Tensor:
        """The largest of all ranks' numbers, for each place of x."""
        if self._peers is None:
            return x
        return self._reduced(x.clone(), dist.ReduceOp.MAX)

    def gather_columns(self, x: Tensor, widths: list[int]) -> Tensor:
        """All ranks' columns side by side: x [rows, widths[rank]] -> [rows, sum(widths)]."""
        if self._peers is None:
            return x
        if len(set(widths)) > 1 or not peer_sums.serves(x):
            return super().gather_columns(x, widths)
        pieces = x.contiguous().split(self._rows_at_once(x))  # type: ignore[no-untyped-call]
        found = [peer_sums.gather_columns(piece, self._peers) for piece in pieces]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _over_peer_memory(self, x: Tensor) -> bool:
        return peer_sums.serves(x) and (self._invariant or len(x) <= self._rows_at_once(x))

    def _rows_at_once(self, x: Tensor) -> int:
        assert self._peers is not None
        return self._peers.capacity // peer_sums.row_words(x)

    def _reduced(self, x: Tensor, operation: Any) -> Tensor:
        self._nccl[_ROW].allreduce([x], operation).wait()
        return x

    def _gather(self, x: Tensor) -> list[Tensor]:
        parts = x.new_empty(self.grid.tensor, *x.shape)
        self._nccl[_ROW]._allgather_base(parts, x.contiguous()).wait()
        return list(parts)

    # ---- between stages ----

    def send(self, x: Tensor) -> None:
        """Send activations to the next stage, which may still compute the steps before."""
        self._nccl[_COLUMN].send([x.contiguous()], self._stage + 1, 0).wait()

    def receive(self, x: Tensor) -> Tensor:
        """Fill x with the activations that the stage before has sent; returns it."""
        self._nccl[_COLUMN].recv([x], self._stage - 1, 0).wait()
        return x

    # ---- connections ----

    def _connect_nccl(self, name: str, rank: int, ranks: int) -> Any:
        """A group of ranks; None: the rank is alone."""
        if ranks == 1:
            return None
        group = dist.ProcessGroupNCCL(dist.PrefixStore(name, self._store), rank, ranks)
        group.allreduce([torch.zeros(1, device=self._device)]).wait()  # connects, which no capture may contain
        return group

    def _open_peers(self, words: int) -> Peers:
        ranks = self.grid.tensor
        inboxes, parcels = (
            self._shared(peer_sums.inbox_bytes(ranks)),
            self._shared(peer_sums.parcel_bytes(ranks, words)),
        )
        return Peers(self.tensor, inboxes, parcels, words, torch.zeros(2, dtype=torch.int32, device=self._device))

    def _shared(self, size: int) -> Tensor:
        """Allocate memory of this size on all ranks -> int64 [R]: its address on each, as this rank reaches it."""
        own = peer_memory.allocate(size)
        handle = torch.frombuffer(bytearray(peer_memory.export(own)), dtype=torch.uint8)
        handles = [torch.empty_like(handle) for _ in range(self.grid.tensor)]
        self._groups[_ROW].allgather([handles], [handle]).wait()
        addresses = [
            own if rank == self.tensor else peer_memory.open_exported(bytes(handle.numpy()))
            for rank, handle in enumerate(handles)
        ]
        return torch.tensor(addresses, dtype=torch.int64, device=self._device)


class UnconnectedCollectives(GpuCollectives):
    """The same kernels for one rank alone, whose launches are recorded to be compiled and not run."""

    def __init__(self, grid: Grid, words: int, device: torch.device, *, invariant: bool = False) -> None:
        """Of the grid's first rank."""
        self.grid, self.tensor, self._invariant = grid, 0, invariant
        addresses = torch.zeros(grid.tensor, dtype=torch.int64, device=device)
        self._peers = Peers(0, addresses, addresses, words, torch.zeros(2, dtype=torch.int32, device=device))

    def _reduced(self, x: Tensor, operation: Any) -> Tensor:
        return x

    def _gather(self, x: Tensor) -> list[Tensor]:
        return [x] * self.grid.tensor
