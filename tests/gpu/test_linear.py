"""Products with quantized weights on the device against their definition: odd shapes, fresh data, poisoned outputs."""

from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from kernels import quantized_weights
from kernels.device import is_hopper
from kernels.linear import dense
from tests.kernels.cases import rand
from tests.kernels.fused import check_rotated_packed
from tests.kernels.weights import check_linear, check_nf4, check_packed, check_parts, check_rounding

HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _exact_reference() -> Iterator[None]:
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [(1, 6144, 4096, 128), (7, 1000, 2048, 64), (16, 66, 96, 32), (33, 4096, 1024, 128), (64, 130, 768, 256)],
    ids=str,
)
def test_packed_weights_of_every_kind(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    check_packed(*shape, dtype)


@pytest.mark.parametrize(
    "shape",
    [(1, 6144, 4096, 128), (1, 8704, 4096, 128), (1, 384, 3072, 128), (1, 160, 9216, 128), (2, 6400, 4096, 128),
     (3, 384, 3072, 128), (4, 6144, 4096, 128), (5, 160, 1024, 128), (8, 2048, 2048, 128), (12, 128, 256, 128),
     (30, 1024, 1280, 256), (64, 384, 768, 128), (130, 256, 1024, 128), (1030, 2176, 512, 128), (300, 1000, 128, 128),
     (260, 6144, 2048, 128), (1030, 2048, 4096, 128), (2310, 384, 256, 128), (330, 8704, 2048, 128),
     (200, 4224, 8192, 128)],
    ids=str,
)  # fmt: skip
def test_packed_weights_in_served_shapes(shape: tuple[int, int, int, int]) -> None:
    for dtype in HALVES:
        check_packed(*shape, dtype, served=True)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_rotated_queries_keys_and_values_of_quantized_weights(dtype: torch.dtype) -> None:
    if not is_hopper(torch.device("cuda", 0)):
        pytest.skip("needs a Hopper")
    served = [(1, 1024, 2048), (1, 512, 2048), (3, 512, 2048), (8, 1024, 1024)]
    for rows, n, k in (*served, (7, 1024, 1280), (16, 1024, 1280), (33, 1024, 1280)):
        stored = quantized_weights.FP8 if rows in (3, 7) else dtype
        w = rand(n, k, dtype=torch.float32) / k**0.5
        check_rotated_packed(rows, 4, 2, quantized_weights.quantize_int4(w.to(dtype), 128), dtype, stored)
        if rows <= 16:
            check_rotated_packed(rows, 4, 2, quantized_weights.quantize_fp8(w), dtype, stored)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_parts_of_products(dtype: torch.dtype) -> None:
    for rows, n, k in (
        (1, 4096, 2048),
        (8, 4096, 7168),
        (3, 4096, 3584),
        (32, 4096, 7168),
        (17, 4000, 4104),
        (1, 8192, 14336),
    ):
        check_parts(rows, n, k, dtype)
    for n in (5120, 2560):  # Parts of whole tiles would leave multiprocessors without work.
        assert dense.parts(rand(1, 8192, dtype=dtype), rand(n, 8192, dtype=dtype)) is None


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_rows_rounded_to_fp8(dtype: torch.dtype) -> None:
    for rows, n in ((1, 4096), (77, 1000), (300, 14336)):
        check_rounding(rows, n, dtype)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 64, 65, 300])
def test_products_of_any_weight_and_any_number_of_rows(rows: int, dtype: torch.dtype) -> None:
    check_nf4(66, 4096, dtype)
    n = 256 if rows > 1 else 1024  # where few outputs are compared, one that rounding and its gate hit hard shows
    check_linear(rows, n, 448, dtype)
    if rows == 1:
        check_linear(rows, n, 2048, dtype, 128)
