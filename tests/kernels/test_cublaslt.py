"""The choice of cuBLASLt tiles; the products themselves are tested on a GPU."""

import ctypes
from typing import Any
from unittest import mock

import pytest
import torch

from kernels.linear import cublaslt

CUDA = torch.device("cuda", 0)


def test_tiles_fill_the_chip_and_hold_all_rows() -> None:
    for rows in range(65, 289):
        for outputs, rounds in ((2048, 1), (4096, 1), (6144, 1), (8192, 1), (28672, 4)):
            tile = cublaslt.tile_for(rows, outputs)
            if tile is not None:
                down = -(-rows // tile.rows)
                assert rounds * 126 <= down * outputs // tile.outputs <= rounds * 132
        assert cublaslt.tile_for(rows, 4096) is not None


def test_other_shapes_are_left_to_torch() -> None:
    for rows, outputs in ((64, 4096), (289, 4096), (128, 6144), (200, 28672), (256, 128256), (128, 4100), (128, 48)):
        assert cublaslt.tile_for(rows, outputs) is None


def test_a_cpu_has_no_cublaslt_plan() -> None:
    x, weight = torch.ones(128, 16, dtype=torch.bfloat16), torch.ones(4096, 16, dtype=torch.bfloat16)
    assert not cublaslt.multiply(x, weight, None, torch.empty(128, 4096, dtype=torch.bfloat16))


@pytest.mark.parametrize(("hopper", "processors", "asks"), [(False, 132, 0), (True, 114, 0), (True, 132, 1)])
def test_other_chips_and_other_libraries_are_left_to_torch(
    monkeypatch: pytest.MonkeyPatch, hopper: bool, processors: int, asks: int
) -> None:
    opened = mock.Mock(side_effect=OSError)
    monkeypatch.setattr(cublaslt, "is_hopper", lambda device: hopper)
    monkeypatch.setattr(cublaslt, "processors", lambda device: processors)
    monkeypatch.setattr(ctypes, "CDLL", opened)
    assert cublaslt._opened.__wrapped__(CUDA) is None
    assert opened.call_count == asks


CALLS = (
    "MatmulDescCreate",
    "MatmulDescSetAttribute",
    "MatrixLayoutCreate",
    "MatmulAlgoInit",
    "MatmulAlgoConfigSetAttribute",
    "MatmulAlgoCheck",
)


def plan_with(monkeypatch: pytest.MonkeyPatch, library: mock.Mock) -> object:
    opened = library, ctypes.c_void_p(), torch.empty(4096, dtype=torch.uint8)
    monkeypatch.setattr(cublaslt, "_opened", lambda device: opened)
    tile = cublaslt.tile_for(128, 4096)
    assert tile is not None
    return cublaslt._plan.__wrapped__(CUDA, tile, 128, 4096, 4096, 4096)


def library(**statuses: int) -> mock.Mock:
    """A library that returns these statuses, and success for all other calls."""
    return mock.Mock(**{f"cublasLt{call}.return_value": statuses.get(call, 0) for call in CALLS})


@pytest.mark.parametrize("call", CALLS)
def test_a_library_that_reports_an_error_is_not_used(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    assert plan_with(monkeypatch, library()) is not None
    assert plan_with(monkeypatch, library(**{call: 7})) is None


def test_a_kernel_that_needs_a_larger_workspace_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(*arguments: Any) -> int:
        arguments[-1]._obj.workspace = 1 << 20
        return 0

    greedy = library()
    greedy.cublasLtMatmulAlgoCheck.side_effect = check
    assert plan_with(monkeypatch, greedy) is None


def test_rows_must_have_the_alignment_that_the_library_needs() -> None:
    x, weight, out = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((128, 72), (64, 64), (128, 64)))
    readable = cublaslt._readable
    assert readable(x[:, :64], weight, out)
    assert not readable(x[:, 4:68], weight, out)  # not at a multiple of 16 bytes
    assert not readable(x[:, :60], weight, out)
    assert not readable(x.view(96, 96).t(), weight, out)
    assert not readable(x[:, :64], weight.t(), out)
    assert not readable(x[:, :64], weight, out[:, :32])
    assert not readable(x[:, :64], weight.half(), out)
