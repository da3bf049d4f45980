"""What ranks exchange while they compute: sums, gathered columns, activations. The only door to torch.distributed.

Ranks on CPUs are connected by gloo over the loopback interface and meet in a file. A sum is added up in the order of
the ranks, in float32: it has the same bits on all ranks and does not depend on the number of rows. Knows tensors and
ranks, never layers or jobs.
"""

import datetime
import weakref
from collections import deque
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from services.worker.parallel.topology import Grid

_MEET_S = 1800.0
"""Seconds that ranks wait for one another. A hung rank is found sooner, by the worker's missing progress."""
_ROW, _COLUMN, _ALL = "ranks of a stage", "stages", "all ranks"
_LOOPBACK = "127.0.0.1"
dist: Any = torch.distributed
"""Its stubs leave out what each backend has of its own."""


class Collectives:
    """A rank's connections to the ranks that share its layers, and to the stages before and after it."""

    def __init__(self, grid: Grid, rank: int, meeting: Path) -> None:
        """Meet the others, which name the same file. Returns when all are connected."""
        self.grid, place = grid, grid.place(rank)
        self.tensor, self._stage = place.tensor, place.stage
        self._store = dist.FileStore(str(meeting), grid.ranks)
        self._groups = {
            _ROW: _connect(self._store, f"stage/{place.stage}", place.tensor, grid.tensor),
            _COLUMN: _connect(self._store, f"column/{place.tensor}", place.stage, grid.pipeline),
            _ALL: _connect(self._store, "all", rank, grid.ranks),
        }
        # Threads of a group that outlives the interpreter would abort the process.
        weakref.finalize(self, self._groups.clear)
        self._sent: deque[tuple[Any, Tensor]] = deque()
        """Activations that the next stage may not have taken yet."""

    # ---- among all ranks ----

    def least(self, number: int) -> int:
        """The least of all ranks' numbers."""
        if self.grid.ranks == 1:
            return number
        found = torch.tensor([number])
        self._groups[_ALL].allreduce([found], dist.ReduceOp.MIN).wait()
        return int(found)

    # ---- among the ranks of a stage ----

    def add_sum(self, residual: Tensor, part: Tensor, bias: Tensor | None = None) -> None:
        """residual += the sum of all ranks' parts, + bias, which each rank has whole. All [T, n] of one dtype."""
        total = self.sum(part)
        residual.add_(total if bias is None else total.add_(bias))

    def settle(self) -> None:
        """End sums that were begun: on a CPU there are none."""

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in its dtype."""
        if self.grid.tensor == 1:
            return x
        first, *others = self._gather(x)
        total = first.float()
        for other in others:
            total = total + other.float()
        return total.to(x.dtype)

    def first(self, ids: Tensor) -> Tensor:
        """The first rank's ids [n, m], whole numbers below 2^24, which float32 has exactly."""
        if self.grid.tensor == 1:
            return ids
        own = ids if self.tensor == 0 else torch.zeros_like(ids)
        return self.sum(own.float()).to(ids.dtype)

    def take_rows(self, token_ids: Tensor, table: Tensor, first: int) -> Tensor | None:
        """The rows [T, width] for token_ids, int64 [T], of a table that ranks share: `table` [n, width] is this rank's
        part, from row `first` on. None: there is no faster way than to sum what each rank has."""
        return None

    def largest(self, x: Tensor) -> Tensor:
        """The largest of all ranks' numbers, for each place of x."""
        return x if self.grid.tensor == 1 else torch.stack(self._gather(x)).amax(0)

    def gather_columns(self, x: Tensor, widths: list[int]) -> Tensor:
        """All ranks' columns side by side: x [rows, widths[rank]] -> [rows, sum(widths)]."""
        if self.grid.tensor == 1:
            return x
        padded = x.new_zeros(x.shape[0], max(widths))
        padded[:, : x.shape[1]] = x
        parts = self._gather(padded)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def _gather(self, x: Tensor) -> list[Tensor]:
        own = x.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.grid.tensor)]
        # As bytes: gloo does not know every number format.
        octets = [part.view(-1).view(torch.uint8) for part in parts]
        self._groups[_ROW].allgather([octets], [own.view(-1).view(torch.uint8)]).wait()
        return parts

    # ---- between stages ----

    def send(self, x: Tensor) -> None:
        """Send activations to the next stage, which may still compute the steps before."""
        while len(self._sent) >= self.grid.pipeline:
            self._sent.popleft()[0].wait()
        octets = x.contiguous().view(-1).view(torch.uint8)
        self._sent.append((self._groups[_COLUMN].send([octets], self._stage + 1, 0), octets))

    def receive(self, x: Tensor) -> Tensor:
        """Fill x with the activations that the stage before has sent; returns it."""
        self._groups[_COLUMN].recv([x.view(-1).view(torch.uint8)], self._stage - 1, 0).wait()
        return x


def _connect(store: Any, name: str, rank: int, ranks: int) -> Any:
    """A group of ranks; None: the rank is alone."""
    if ranks == 1:
        return None
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
    options._timeout = datetime.timedelta(seconds=_MEET_S)
    return dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, ranks, options)
