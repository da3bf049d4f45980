"""Exchanges of ranks that are processes: their memory is files that all map, their kernels are interpreted."""

import multiprocessing
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.tensor  # `assert_close` needs its 500 modules: imported here, not in each rank.
from torch import Tensor

from kernels.operands import Norm
from kernels.peers import stages as peer_stages
from kernels.peers import sums as peer_sums
from kernels.peers import words as peer_words
from kernels.peers.stages import Link
from kernels.peers.words import Peers

RANKS, CAPACITY, WAIT_S = 2, 1 << 18, 240.0


class Room:
    """Memory that the ranks share, and what one of them sees of it."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self._mapped: list[Tensor] = []

    def peers(self, exchanges: int = 0) -> Peers:
        """This rank's way to the others. exchanges: so far."""
        inboxes = [self.address(f"inbox {rank}", peer_words.inbox_bytes(RANKS)) for rank in range(RANKS)]
        parcels = [self.address(f"parcels {rank}", peer_words.parcel_bytes(RANKS, CAPACITY)) for rank in range(RANKS)]
        return Peers(self.rank, torch.tensor(inboxes), torch.tensor(parcels), CAPACITY, counts(exchanges))

    def link(self, stage: int, transfers: int = 0) -> Link:
        """The way from a stage to the next one. transfers: sent and taken so far."""
        parcels = self.address(f"stage {stage}", peer_stages.parcel_bytes(CAPACITY))
        taken = self.address(f"taken {stage}", 64)
        if transfers:
            self._mapped[-1].view(torch.int32)[0] = transfers
        return Link(parcels, taken, CAPACITY, counts(transfers))

    def address(self, name: str, size: int) -> int:
        """Of memory that every rank maps by this name; zeros at first."""
        with (self.folder / name).open("ab") as file:
            file.truncate(size)
        self._mapped.append(torch.from_numpy(np.memmap(self.folder / name, np.uint8, "r+")))
        return self._mapped[-1].data_ptr()


def counts(exchanges: int) -> Tensor:
    """Of a rank or link that has made so many exchanges."""
    return torch.tensor([exchanges, 0], dtype=torch.int32)


def check_sums(room: Room) -> None:
    """Short and long ones, with and without a residual and a bias; columns of both lengths."""
    peers = room.peers()
    for seed, (rows, width, dtype) in enumerate(
        [(3, 130, torch.float16), (1, 77, torch.float32), (70, 4000, torch.float16), (5, 64, torch.float16)]
    ):
        draw = torch.Generator().manual_seed(seed)
        parts = [torch.randn(rows, width, generator=draw).to(dtype) for _ in range(RANKS)]
        residual = torch.randn(rows, width, generator=draw).to(dtype)
        bias = torch.randn(width, generator=draw).to(dtype) if seed % 2 else None
        out = torch.full_like(residual, float("nan"))
        peer_sums.add_sum(parts[room.rank], peers, out, residual if seed else None, bias)
        expected = sum((part.float() for part in parts), torch.zeros(rows, width))
        expected += (residual if seed else torch.zeros(1)).float() + (torch.zeros(1) if bias is None else bias).float()
        torch.testing.assert_close(out, expected.to(dtype), rtol=2e-3, atol=2e-3)
        assert torch.equal(peer_sums.gather_columns(parts[room.rank], peers), torch.cat(parts, 1))
    assert peers.state.tolist() == [8, 0]


def check_norms(room: Room) -> None:
    """A sum and the norm that follows it in one kernel, between other exchanges."""
    peers = room.peers()
    for seed, (rows, width, dtype) in enumerate([(1, 77, torch.float32), (5, 192, torch.float16)]):
        draw = torch.Generator().manual_seed(seed)
        parts = [torch.randn(rows, width, generator=draw).to(dtype) for _ in range(RANKS)]
        residual, scale = (
            torch.randn(rows, width, generator=draw).to(dtype),
            torch.rand(width, generator=draw).to(dtype),
        )
        bias = torch.randn(width, generator=draw).to(dtype) if seed else None
        expected = sum((part.float() for part in parts), residual.float()) + (0 if bias is None else bias.float())
        normed = expected * torch.rsqrt(expected.square().mean(1, keepdim=True) + 1e-5) * scale.float()
        out = peer_sums.add_sum_and_normalize(parts[room.rank], peers, residual, Norm(scale, 1e-5), bias)
        torch.testing.assert_close(residual, expected.to(dtype), rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(out, normed.to(dtype), rtol=4e-3, atol=4e-3)
        peer_sums.add_sum(residual, peers, residual)


def check_parts(room: Room) -> None:
    """The parts of a rank's product are added up in the kernel of the sum, or of the sum and the norm."""
    peers = room.peers()
    for seed, (split, rows, width) in enumerate([(2, 1, 130), (4, 3, 64), (1, 2, 258)]):
        draw = torch.Generator().manual_seed(seed)
        parts = torch.randn(RANKS, split, rows, width, generator=draw)
        residual, scale = torch.randn(rows, width, generator=draw).half(), torch.rand(width, generator=draw).half()
        expected = parts.sum(1).half().float().sum(0) + residual.float()
        normed = expected * torch.rsqrt(expected.square().mean(1, keepdim=True) + 1e-5) * scale.float()
        own, total = parts[room.rank].contiguous(), torch.full_like(residual, float("nan"))
        peer_sums.add_sum(own, peers, total, residual)
        out = peer_sums.add_sum_and_normalize(own, peers, residual, Norm(scale, 1e-5))
        assert torch.equal(total, residual)
        torch.testing.assert_close(residual, expected.half(), rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(out, normed.half(), rtol=4e-3, atol=4e-3)


def check_rows(room: Room) -> None:
    """Rows of a table whose parts ranks have, of unequal numbers of rows; a token that no rank has is zeros."""
    peers, firsts = room.peers(), (0, 7, 12)
    for seed, (width, dtype) in enumerate([(130, torch.float16), (77, torch.float32), (2600, torch.float16)]):
        draw = torch.Generator().manual_seed(seed)
        table = torch.randn(firsts[-1], width, generator=draw).to(dtype)
        ids = torch.tensor([0, 6, 7, 11, -1])
        first, after = firsts[room.rank], firsts[room.rank + 1]
        found = peer_sums.take_rows(ids, table[first:after].clone(), first, peers)
        assert torch.equal(found[:-1], table[ids[:-1]])
        assert not found[-1].any()
    assert peers.state.tolist() == [3, 0]


def check_stages(room: Room) -> None:
    """Several transfers, of different lengths, which the sender begins before the first was taken."""
    link = room.link(0)
    for seed, words in enumerate((10, 5000, 2048, 1, 2049)):
        x = torch.randn(words, generator=torch.Generator().manual_seed(seed))
        if room.rank == 0:
            peer_stages.send(x, link)
        else:
            found = torch.full_like(x, float("nan"))
            peer_stages.receive(found, link)
            assert torch.equal(found, x)


def check_counts_that_wrap(room: Room) -> None:
    """Short and long exchanges and transfers, whose counts go on from 2^31 - 1 at -2^31."""
    peers, link = room.peers(2**31 - 3), room.link(0, 2**31 - 3)
    for seed, words in enumerate((10, 140_000, 10, 140_000, 10)):
        parts = torch.randn(RANKS, 1, words, generator=torch.Generator().manual_seed(seed))
        out = torch.full_like(parts[0], float("nan"))
        peer_sums.add_sum(parts[room.rank].clone(), peers, out)
        assert torch.equal(out, parts[0] + parts[1])
        if room.rank == 0:
            peer_stages.send(parts[0].clone(), link)
        else:
            found = torch.full_like(parts[0], float("nan"))
            peer_stages.receive(found, link)
            assert torch.equal(found, parts[0])
    assert peers.state[0] == link.state[0] == 2 - 2**31


def on_ranks(check: Callable[[Room], None]) -> None:
    """Run a check on ranks of their own."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="weft-peers-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, from Python 3.12 on
        ends = [fork.Pipe() for _ in range(RANKS)]
        ranks = [
            fork.Process(target=_run, args=(check, Room(Path(folder), rank), ends[rank][1]), daemon=True)
            for rank in range(RANKS)
        ]
        for rank in ranks:
            rank.start()
        try:
            for number, (end, _) in enumerate(ends):
                assert end.poll(WAIT_S), f"rank {number} does not end"
                error = end.recv()
                assert not error, f"rank {number}: {error}"
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()


def _run(check: Callable[[Room], None], room: Room, end: Any) -> None:
    try:
        check(room)
        end.send("")
    except BaseException:
        end.send(traceback.format_exc())
