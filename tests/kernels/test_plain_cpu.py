"""Products with packed weights on the CPU against plain torch."""

import pytest
import torch

from kernels import plain_cpu
from kernels.plain_cpu import MklProduct, PackedProduct, is_mkl_faster, is_packed_faster

DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16, torch.float16) if plain_cpu.is_supported(dtype)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def test_float32_is_supported() -> None:
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    assert torch.float32 in DTYPES or not available


@pytest.mark.parametrize("rows", [0, 1, 2, 17, 64])
@pytest.mark.parametrize(("outputs", "inputs"), [(384, 384), (1000, 333), (7, 4099)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_packed_product_is_the_plain_one(dtype: torch.dtype, outputs: int, inputs: int, rows: int) -> None:
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
    x = torch.randn(rows, 2 * inputs).to(dtype)[:, ::2]  # Not contiguous.
    for stored in (weight, weight.t().contiguous().t()):
        product = PackedProduct(stored)
        assert (product.nbytes, torch.equal(product.dense(), weight)) == (weight.nbytes, True)
        for added in (bias, None):
            exact = x.double() @ weight.double().t() + (0 if added is None else added.double())
            got = product(x, added)
            assert got.dtype == dtype
            torch.testing.assert_close(got.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * inputs**0.5)


@pytest.mark.skipif(not plain_cpu.has_mkl(), reason="torch has no MKL here")
@pytest.mark.parametrize("rows", [0, 1, 2, 17, 64, 128, 301])
@pytest.mark.parametrize(("outputs", "inputs"), [(384, 384), (1000, 333), (7, 4099)])
def test_a_product_packed_by_mkl_is_the_plain_one(outputs: int, inputs: int, rows: int) -> None:
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
    x = torch.randn(rows, 2 * inputs)[:, ::2]  # Not contiguous.
    for stored in (weight, weight.t().contiguous().t()):
        product = MklProduct(stored)
        assert product.nbytes == weight.nbytes
        for added in (bias, None):
            exact = x.double() @ weight.double().t() + (0 if added is None else added.double())
            torch.testing.assert_close(product(x, added).double(), exact, rtol=1e-5, atol=1e-5 * inputs**0.5)


def test_mkl_packs_large_weights_in_float32_on_intel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_cpu, "has_mkl", lambda: True)
    for intel in (False, True):
        monkeypatch.setattr(plain_cpu, "is_intel", lambda intel=intel: intel)
        assert is_mkl_faster(torch.zeros(512, 512)) == intel
        assert not is_mkl_faster(torch.zeros(64, 64))
        assert not is_mkl_faster(torch.zeros(512, 512, dtype=torch.bfloat16))


@pytest.mark.parametrize("intel", [False, True])
def test_small_weights_and_unsupported_types_are_not_packed(monkeypatch: pytest.MonkeyPatch, intel: bool) -> None:
    monkeypatch.setattr(plain_cpu, "is_intel", lambda: intel)
    assert is_packed_faster(torch.zeros(512, 512)) == (torch.float32 in DTYPES and not intel)
    assert is_packed_faster(torch.zeros(2048, 2048)) == (torch.float32 in DTYPES)
    assert is_packed_faster(torch.zeros(512, 512, dtype=torch.bfloat16)) == (torch.bfloat16 in DTYPES)
    assert not is_packed_faster(torch.zeros(64, 64))
    assert not is_packed_faster(torch.zeros(512, 512, dtype=torch.float64))
