"""Streams weights from safetensors files to a GPU: each thread reads pieces into pinned memory and copies them on.

Knows bytes and their destinations, never what a tensor is for.
"""

import os
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from services.worker.errors import CheckpointError
from services.worker.loader.plain import check_tensors
from services.worker.loader.tensors import Checkpoint
from services.worker.models.decoder import Decoder
from services.worker.options import Progress

PIECE_BYTES = 32 << 20
THREADS = 8


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some whole rows of a tensor: where they are in a file, and their destinations."""

    path: Path
    shard: int
    offset: int
    bytes: int
    dtype: torch.dtype
    targets: tuple[Tensor, ...]
    """Views on the device, each of the shape of these rows."""


def stream_weights(model: Decoder, checkpoint: Checkpoint, progress: Progress) -> None:
    """Fill the model; progress counts shards. Raises CheckpointError."""
    destinations = model.destinations()
    check_tensors(model, destinations, checkpoint)
    pieces = sorted(_pieces(destinations, checkpoint), key=lambda piece: (piece.shard, piece.offset))
    left = Counter(piece.shard for piece in pieces)
    lock, local, shards = threading.Lock(), threading.local(), len(checkpoint.shards)
    progress("weights", 0, shards)

    def load(piece: _Piece) -> None:
        if not hasattr(local, "staging"):
            local.staging = _Staging(model.embedding.device)
        local.staging.load(piece)
        with lock:
            left[piece.shard] -= 1
            if not left[piece.shard]:
                progress("weights", sum(not count for count in left.values()), shards)

    try:
        with ThreadPoolExecutor(THREADS, thread_name_prefix="weights") as pool:
            for _ in pool.map(load, pieces):
                pass
    except OSError as error:
        raise CheckpointError(f"a shard cannot be read: {type(error).__name__}") from None
    torch.cuda.synchronize()
    progress("weights", shards, shards)
    _check_finite(destinations)


def read_through(checkpoint: Checkpoint) -> None:
    """Read all shards as `stream_weights` does and discard the bytes: the baseline that loading is measured against."""

    def read(part: tuple[Path, int]) -> None:
        path, offset = part
        if not hasattr(local, "buffer"):
            local.buffer = bytearray(PIECE_BYTES)
        size = min(PIECE_BYTES, path.stat().st_size - offset)
        _read(path, offset, memoryview(local.buffer)[:size])

    local = threading.local()
    parts = [(path, offset) for path in checkpoint.shards for offset in range(0, path.stat().st_size, PIECE_BYTES)]
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(read, parts):
            pass


class _Staging:
    """One thread's two pinned buffers and its stream: one buffer is filled while the other is copied to the device."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.set_device(device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._sent = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._next = 0

    def load(self, piece: _Piece) -> None:
        """Read a piece and copy it to its destinations."""
        current, self._next = self._next, 1 - self._next
        self._sent[current].synchronize()
        buffer = self._buffers[current][: piece.bytes]
        _read(piece.path, piece.offset, memoryview(buffer.numpy().data))
        numbers = buffer.view(piece.dtype)
        with torch.cuda.stream(self._stream):
            for target in piece.targets:
                source = numbers.view(target.shape)
                if piece.dtype == target.dtype and target.is_contiguous():
                    target.copy_(source, non_blocking=True)
                else:  # converted, or transposed, on the device
                    target.copy_(source.to(target.device, non_blocking=True))
            self._sent[current].record()


def _read(path: Path, offset: int, buffer: memoryview) -> None:
    with path.open("rb", buffering=0) as file:
        done = 0
        while done < len(buffer):
            count = os.preadv(file.fileno(), [buffer[done:]], offset + done)
            if not count:
                raise CheckpointError(f"{path.name} ends too early")
            done += count


def _pieces(destinations: dict[str, list[Tensor]], checkpoint: Checkpoint) -> Iterator[_Piece]:
    for name, views in destinations.items():
        header = checkpoint.headers[name]
        rows = header.shape[0] if header.shape else 1
        row_bytes = header.nbytes // rows
        step = max(1, PIECE_BYTES // row_bytes)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            yield _Piece(
                checkpoint.shards[header.shard],
                header.shard,
                header.offset + first * row_bytes,
                count * row_bytes,
                header.dtype,
                tuple(view[first : first + count] for view in views),
            )


def _check_finite(destinations: dict[str, list[Tensor]]) -> None:
    """Raises CheckpointError for a tensor with infinities or NaN. The device is waited for once, for all tensors."""
    good = torch.stack([views[0].sum(dtype=torch.float32) for views in destinations.values()]).isfinite().tolist()
    for name, finite in zip(destinations, good, strict=True):
        if not finite:
            raise CheckpointError(f"tensor {name} holds numbers that are not finite")
