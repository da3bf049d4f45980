"""What ranks on GPUs exchange while they compute: sums, columns and activations, over peer memory, each in one kernel.

The sum of a product of few rows waits for the norm that follows it and is a part of its kernel. All of it may be
captured in CUDA graphs. What only the host needs goes over gloo, as on CPUs. Knows tensors and ranks, never layers or
jobs.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kernels.operands import Norm
from kernels.peers import memory as peer_memory
from kernels.peers import stages as peer_stages
from kernels.peers import sums as peer_sums
from kernels.peers import words as peer_words
from kernels.peers.stages import Link
from kernels.peers.words import Peers
from services.worker.parallel.collectives import _COLUMN, _ROW, Collectives
from services.worker.parallel.topology import Grid


@dataclass(frozen=True, slots=True)
class PeerWords:
    """Words, of four bytes, of the largest exchanges."""

    sums: int
    """Of a sum or of columns; larger ones are exchanged in pieces."""
    stages: int
    """Of the activations of a step."""


@dataclass(frozen=True, slots=True)
class _Sum:
    """residual += the sum of all ranks' parts + bias."""

    residual: Tensor
    part: Tensor
    """[T, n], or float32 [S, T, n], to be added up first."""
    bias: Tensor | None


class GpuCollectives(Collectives):
    """A rank's connections to others, each of which has a GPU of its own: this process's current device."""

    def __init__(self, grid: Grid, rank: int, meeting: Path, words: PeerWords) -> None:
        """Raises PeerMemoryError where a device cannot reach another one's memory."""
        super().__init__(grid, rank, meeting)
        self._postponed: _Sum | None = None
        self._normed: tuple[Tensor, Norm, Tensor] | None = None
        """A residual stream, a norm, and what this made of it."""
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._peers = self._open_peers(words.sums) if grid.tensor > 1 else None
        self._before: Link | None = None
        self._after: Link | None = None
        if grid.pipeline > 1:
            self._before, self._after = self._open_links(words.stages)

    # ---- sums ----

    def add_sum(self, residual: Tensor, part: Tensor, bias: Tensor | None = None) -> None:
        """residual += the sum of all ranks' parts, + bias, which each rank has whole. All [T, n] of one dtype."""
        self.settle()
        assert self._peers is not None, "a rank alone has no sums"
        for piece, target in zip(self._pieces(part), self._pieces(residual), strict=True):
            peer_sums.add_sum(piece, self._peers, target, target, bias)

    def take_rows(self, token_ids: Tensor, table: Tensor, first: int) -> Tensor | None:
        """As `Collectives.take_rows`; None also where there are too many for one exchange of words."""
        if self._peers is None or not _is_short(table, len(token_ids)):
            return None
        return peer_sums.take_rows(token_ids, table, first, self._peers)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in its dtype."""
        if self._peers is None:
            return x
        total = x.contiguous().clone()
        for piece in self._pieces(total):
            peer_sums.add_sum(piece, self._peers, piece)
        return total

    def gather_columns(self, x: Tensor, widths: list[int]) -> Tensor:
        """All ranks' columns side by side: x [rows, widths[rank]] -> [rows, sum(widths)]."""
        if self._peers is None:
            return x
        width = -(-max(widths) // 2) * 2
        if x.shape[1] < width:
            x = torch.nn.functional.pad(x, (0, width - x.shape[1]))
        found = [peer_sums.gather_columns(piece, self._peers) for piece in self._pieces(x.contiguous())]
        columns = found[0] if len(found) == 1 else torch.cat(found)
        if all(each == width for each in widths):
            return columns
        return torch.cat([columns[:, at * width : at * width + each] for at, each in enumerate(widths)], 1)

    def _pieces(self, x: Tensor) -> list[Tensor]:
        """The rows of x, in pieces for which there is room."""
        assert self._peers is not None
        pieces: tuple[Tensor, ...] = x.split(self._peers.capacity // peer_sums.row_words(x))  # type: ignore[no-untyped-call]
        return list(pieces)

    # ---- sums that wait for a norm ----

    def adds_parts(self, residual: Tensor) -> bool:
        """Whether `postpone_sum` takes parts of a product for this residual stream."""
        return residual.element_size() == 2 and _is_short(residual, len(residual))

    def postpone_sum(self, residual: Tensor, part: Tensor, bias: Tensor | None) -> None:
        """`add_sum`, which `normalized` or `settle` completes. Large ones are complete at once. part may be float32
        [S, T, n] where `adds_parts`: its sum over S is the rank's part."""
        self.settle()
        if _is_short(residual, len(residual)):
            self._postponed = _Sum(residual, part, bias)
        else:
            self.add_sum(residual, part, bias)

    def normalized(self, x: Tensor, norm: Norm) -> Tensor | None:
        """The norm of x, with a sum that was postponed in the same kernel. None: none was, or the kernel does not know
        the norm."""
        if self._normed is not None and self._normed[0] is x and self._normed[1] is norm:
            return self._normed[2]
        one = self._postponed
        if one is None or one.residual is not x or not peer_sums.normalizes(x, norm):
            self.settle()
            return None
        assert self._peers is not None
        self._postponed = None
        normed = peer_sums.add_sum_and_normalize(one.part, self._peers, x, norm, one.bias)
        self._normed = x, norm, normed
        return normed

    def settle(self) -> None:
        """Complete a sum that was postponed."""
        one, self._postponed, self._normed = self._postponed, None, None
        if one is not None:
            assert self._peers is not None
            peer_sums.add_sum(one.part, self._peers, one.residual, one.residual, one.bias)

    # ---- between stages ----

    def send(self, x: Tensor) -> None:
        """Send activations to the next stage, which may still compute the steps before."""
        assert self._after is not None
        peer_stages.send(x.contiguous(), self._after)

    def receive(self, x: Tensor) -> Tensor:
        """Fill x with the activations that the stage before has sent; returns it."""
        assert self._before is not None
        peer_stages.receive(x, self._before)
        return x

    # ---- connections ----

    def _open_peers(self, words: int) -> Peers:
        ranks = self.grid.tensor
        inboxes = self._shared(_ROW, peer_words.inbox_bytes(ranks))
        parcels = self._shared(_ROW, peer_words.parcel_bytes(ranks, words))
        return Peers(self.tensor, self._on_device(inboxes), self._on_device(parcels), words, self._counts())

    def _open_links(self, words: int) -> tuple[Link | None, Link | None]:
        """The ways from the stage before and to the next one; None at the ends."""
        stage = self._stage
        parcels, taken = self._shared(_COLUMN, peer_stages.parcel_bytes(words)), self._shared(_COLUMN, _COUNT_BYTES)
        before = Link(parcels[stage], taken[stage - 1], words, self._counts()) if stage else None
        is_last = stage == self.grid.pipeline - 1
        return before, None if is_last else Link(parcels[stage + 1], taken[stage], words, self._counts())

    def _shared(self, name: str, size: int) -> list[int]:
        """Allocate memory of this size on all ranks of a group -> its address on each, as this rank reaches it."""
        group, own = self._groups[name], peer_memory.allocate(size)
        handle = torch.frombuffer(bytearray(peer_memory.export(own)), dtype=torch.uint8)
        handles = [torch.empty_like(handle) for _ in range(group.size())]
        group.allgather([handles], [handle]).wait()
        return [
            own if rank == group.rank() else peer_memory.open_exported(bytes(handle.numpy()))
            for rank, handle in enumerate(handles)
        ]

    def _on_device(self, addresses: list[int]) -> Tensor:
        return torch.tensor(addresses, dtype=torch.int64, device=self._device)

    def _counts(self) -> Tensor:
        return torch.zeros(2, dtype=torch.int32, device=self._device)


_COUNT_BYTES = 64


def _is_short(like: Tensor, rows: int) -> bool:
    """Whether so many rows as those of `like` [.., n] go through inboxes."""
    return 0 < rows * peer_sums.row_words(like) <= peer_words.SHORT_WORDS


class UnconnectedCollectives(GpuCollectives):
    """The same kernels for one rank alone, whose launches are recorded to be compiled and not run."""

    def __init__(self, grid: Grid, words: PeerWords, device: torch.device) -> None:
        """Of the grid's first rank."""
        self.grid, self.tensor, self._device, self._postponed, self._normed = grid, 0, device, None, None
        addresses = self._on_device([0] * grid.tensor)
        self._peers = Peers(0, addresses, addresses, words.sums, self._counts())
