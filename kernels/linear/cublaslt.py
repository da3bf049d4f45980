"""Calls cuBLASLt directly, with chosen tiles, for products of 65 rows and more whose tiles fill the GPU.

M rows of x, N rows of W (outputs), K columns of both. torch uses the first algorithm of cuBLASLt's heuristics, which
leaves multiprocessors without a tile or sums parts of K in a second kernel. cuBLASLt also has kernels with one tile for
each multiprocessor; `multiply` selects them. It uses the library that torch has loaded, and does nothing if that is of
another version, the GPU is not a Hopper with all its multiprocessors, or the shape does not gain.
"""

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.device import is_hopper, processors

LIBRARY = "libcublasLt.so.13"
_BFLOAT16, _FLOAT32, _COMPUTE_FLOAT32, _TRANSPOSE_A = 14, 0, 68, 3  # cuBLASLt's enumerations of types and attributes
_HOPPER = 66  # the algorithm whose tiles are loaded by the copy engine
_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)


@dataclass(frozen=True, slots=True)
class Tile:
    """The tile of one multiprocessor, and the kernel variant."""

    outputs: int
    rows: int
    cluster: int
    """cuBLASLt's number of a cluster of two tiles: 3: different outputs, which share x; 5: different rows, which share
    W."""
    option: int
    """cuBLASLt's number of a variant of the kernel."""


# Outputs of a tile -> rows of a tile -> cuBLASLt's number of the tile (cublasLtMatmulTile_t in cublasLt.h).
_NUMBERS = {
    64: {32: 13, 40: 314, 48: 315, 56: 316, 64: 15, 72: 317, 80: 318, 88: 319, 96: 26},
    96: {128: 28},
    112: {128: 165},
    128: {40: 396, 48: 397, 56: 398, 64: 18, 72: 399, 80: 400, 88: 401, 96: 33},
}
_PROGRAMS, _MIN_TILES = 132, 126
"""Multiprocessors of the Hopper that tiles are chosen for, and the fewest tiles of a round."""
_MAX_ROWS = 288
_SPACE_BYTES = 4096
"""Workspace in which kernels of several rounds count tiles. Launches share it, so they must run one after another."""


def tiles() -> Iterator[Tile]:
    """Every tile and variant that `multiply` can be given; a device may not support all of them for every shape."""
    for outputs, numbers in _NUMBERS.items():
        for rows in numbers:
            yield from (Tile(outputs, rows, cluster, option) for cluster in (3, 5) for option in (1, 2, 3))


def tile_for(rows: int, n: int) -> Tile | None:
    """The tile for x [rows, k] times W [n, k], or None where torch's choice is as fast.

    The choices were measured on one H200 with the cuBLAS that torch 2.11 loads. To find them again, after an update of
    cuBLAS or for another GPU, run `python -m bench.kernels.tune cublaslt`: it times `tiles()` against torch for the
    shapes of the benchmark models. New tile numbers come from cublasLtMatmulTile_t in cublasLt.h.
    """
    if not 64 < rows <= _MAX_ROWS:
        return None
    for outputs in (64, 128):
        for down, cluster, option in ((2, 5, 3), (4, 3, 1)):
            height = triton.cdiv(triton.cdiv(rows, down), 8) * 8
            if _fill(n, outputs, down) and height in _NUMBERS[outputs]:
                return Tile(outputs, height, cluster, option)
    for outputs, rounds, least in ((96, 1, 217), (112, 4, 233)):
        if least <= rows <= 256 and _fill(n, outputs, 2, rounds):
            return Tile(outputs, 128, 5, 2)
    return None


def _fill(n: int, outputs: int, down: int, rounds: int = 1) -> bool:
    """Whether n / outputs * down tiles fill `rounds` rounds of the GPU's multiprocessors."""
    return n % outputs == 0 and rounds * _MIN_TILES <= n // outputs * down <= rounds * _PROGRAMS


def multiply(x: Tensor, weight: Tensor, residual: Tensor | None, out: Tensor, tile: Tile | None = None) -> bool:
    """out = x @ weight.T + residual in bfloat16 -> whether it was computed; otherwise `out` is unchanged.

    x [M, K], weight [N, K]; out and residual [M, N] may be the same tensor. All are on the current device. tile: by
    default that of `tile_for`.
    """
    tile, added = tile or tile_for(len(x), len(weight)), out if residual is None else residual
    if tile is None or not x.is_cuda or not _readable(x, weight, added, out):
        return False
    plan = _plan(x.device, tile, len(x), *weight.shape, x.stride(0))
    if plan is None:
        return False
    plan.launch(x, weight, residual is not None, added, out)
    return True


def _readable(x: Tensor, *others: Tensor) -> bool:
    """Whether all are bfloat16, aligned to 16 bytes and, except for the rows of x, contiguous."""
    if x.stride(1) != 1 or not all(other.is_contiguous() for other in others):
        return False
    places = [tensor.data_ptr() for tensor in (x, *others)]
    aligned = not any(number % 16 for number in (*places, 2 * x.shape[1], 2 * x.stride(0)))
    return aligned and all(tensor.dtype == torch.bfloat16 for tensor in (x, *others))


class _Checked(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: cuBLASLt's answer about an algorithm."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class _Plan:
    """A product of one shape, ready for launches. In cuBLASLt's column-major order W is [K, N] and x is [K, M]."""

    def __init__(
        self, library: Any, handle: ctypes.c_void_p, space: Tensor, tile: Tile, m: int, n: int, k: int, stride: int
    ) -> None:
        """Raises _Unable."""
        self._library, self._handle, self._space = library, handle, space
        self._product, self._w, self._x, self._out = (ctypes.c_void_p() for _ in range(4))
        _check(library.cublasLtMatmulDescCreate(ctypes.byref(self._product), _COMPUTE_FLOAT32, _FLOAT32))
        _set(library.cublasLtMatmulDescSetAttribute, self._product, _TRANSPOSE_A, ctypes.c_int32(1))
        for layout, lines, columns, apart in ((self._w, k, n, k), (self._x, k, m, stride), (self._out, n, m, n)):
            sizes = ctypes.c_uint64(lines), ctypes.c_uint64(columns), ctypes.c_int64(apart)
            _check(library.cublasLtMatrixLayoutCreate(ctypes.byref(layout), _BFLOAT16, *sizes))
        self._algorithm = self._configured(tile)

    def _configured(self, tile: Tile) -> Any:
        library, checked = self._library, _Checked()
        algorithm = (ctypes.c_uint64 * 8)()
        kinds = _COMPUTE_FLOAT32, _FLOAT32, *[_BFLOAT16] * 4
        _check(library.cublasLtMatmulAlgoInit(self._handle, *kinds, _HOPPER, ctypes.byref(algorithm)))
        number = _NUMBERS[tile.outputs][tile.rows]
        for attribute, value in (
            (1, ctypes.c_uint32(number)),
            (2, ctypes.c_int32(1)),  # parts of K
            (5, ctypes.c_uint32(tile.option)),
            (6, ctypes.c_uint32(35)),  # K in steps of 64, as many at a time as fit
            (8, ctypes.c_uint16(tile.cluster)),
        ):
            _set(library.cublasLtMatmulAlgoConfigSetAttribute, ctypes.byref(algorithm), attribute, value)
        layouts = self._w, self._x, self._out, self._out
        algorithm_at, checked_at = ctypes.byref(algorithm), ctypes.byref(checked)
        _check(library.cublasLtMatmulAlgoCheck(self._handle, self._product, *layouts, algorithm_at, checked_at))
        if checked.state or checked.workspace > self._space.numel():
            raise _Unable
        return algorithm

    def launch(self, x: Tensor, weight: Tensor, adds: bool, added: Tensor, out: Tensor) -> None:
        """Launch out = x @ weight.T, plus `added` if `adds`, on the current stream."""
        beta, stream = _ONE if adds else _ZERO, torch.cuda.current_stream(x.device).cuda_stream
        _check(
            self._library.cublasLtMatmul(
                self._handle, self._product, ctypes.byref(_ONE), _at(weight), self._w, _at(x), self._x,
                ctypes.byref(beta), _at(added), self._out, _at(out), self._out, ctypes.byref(self._algorithm),
                _at(self._space), ctypes.c_size_t(self._space.numel()), ctypes.c_void_p(stream),
            )
        )  # fmt: skip


class _Unable(Exception):
    """cuBLASLt does not support this product."""


def _check(status: int) -> None:
    if status:
        raise _Unable(f"cuBLASLt returned status {status}")


def _set(setter: Any, target: Any, attribute: int, value: Any) -> None:
    _check(setter(target, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))))


def _at(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


@cache
def _plan(device: torch.device, tile: Tile, m: int, n: int, k: int, stride: int) -> _Plan | None:
    opened = _opened(device)
    try:
        return _Plan(*opened, tile, m, n, k, stride) if opened else None
    except _Unable:
        return None


@cache
def _opened(device: torch.device) -> tuple[Any, ctypes.c_void_p, Tensor] | None:
    """The cuBLASLt library that torch has loaded, its handle for this device, and a workspace; None if the version or
    the GPU is another."""
    handle = ctypes.c_void_p()
    if not is_hopper(device) or processors(device) != _PROGRAMS:
        return None
    try:
        library = ctypes.CDLL(LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        with torch.cuda.device(device):
            _check(library.cublasLtCreate(ctypes.byref(handle)))
    except (OSError, _Unable):
        return None
    return library, handle, torch.empty(_SPACE_BYTES, dtype=torch.uint8, device=device)
