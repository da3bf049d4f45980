"""Products with quantized weights on the CPU against their definition; a row has the same bits in any batch."""

import itertools

import pytest
import torch
from torch import Tensor

from kernels import quantized_cpu, quantized_weights
from kernels.quantized_weights import Int4Weight, Int8Weight, StackedWeight, Weight

K = 256


def numbers(rows: int, columns: int = K, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def asymmetric(weight: Tensor, group: int) -> Int4Weight:
    plain = quantized_weights.quantize_int4(weight, group)
    zero = torch.randint(16, plain.scale.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(2)).int()
    return Int4Weight(plain.packed, plain.scale, zero, group, order)


def w8a8(weight: Tensor) -> Int8Weight:
    return Int8Weight(*quantized_weights.quantize_rows_int8(weight), dynamic_activations=True)


def grouped(weight: Tensor) -> Int8Weight:
    values, scale = quantized_weights.quantize_rows_int8(weight.view(-1, 32))
    return Int8Weight(values.view(weight.shape), scale.view(len(weight), -1))


WEIGHTS: dict[str, tuple[Weight, float]] = {
    "int8": (quantized_weights.quantize_int8(numbers(96)), 6e-5),
    "int8, large": (quantized_weights.quantize_int8(numbers(1 << 12)), 6e-5),
    "int8 in groups": (grouped(numbers(96)), 1e-6),
    "w8a8": (w8a8(numbers(96)), 1e-6),
    "w8a8, large": (w8a8(numbers(1 << 12)), 1e-6),
    "int4": (quantized_weights.quantize_int4(numbers(96)), 5e-3),
    "int4, groups of 64, zeros and an order": (asymmetric(numbers(96), 64), 5e-3),
    "int4, one group": (quantized_weights.quantize_int4(numbers(96), K), 5e-3),
    "int4, a group too small": (quantized_weights.quantize_int4(numbers(96), 16), 1e-6),
    "int4, odd outputs": (quantized_weights.quantize_int4(numbers(97), 32), 1e-6),
    "fp8": (quantized_weights.quantize_fp8(numbers(96)), 1e-6),
    "nf4": (quantized_weights.quantize_nf4(numbers(96)), 1e-6),
    "stack": (StackedWeight((quantized_weights.quantize_int8(numbers(32)), numbers(64), w8a8(numbers(16)))), 6e-5),
}


@pytest.fixture(params=WEIGHTS)
def case(request: pytest.FixtureRequest) -> tuple[Weight, float]:
    return WEIGHTS[request.param]


def product(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    prepared = quantized_cpu.prepare(weight, x.dtype)
    return torch.nn.functional.linear(x, prepared, bias) if isinstance(prepared, Tensor) else prepared(x, bias)


@pytest.mark.parametrize("rows", [1, 2, 17])
@pytest.mark.parametrize("biased", [False, True])
def test_products_follow_the_definition(case: tuple[Weight, float], rows: int, biased: bool) -> None:
    weight, tolerance = case
    x = numbers(rows, seed=7) * torch.logspace(-2, 2, rows)[:, None]
    bias = numbers(1, weight.shape[0])[0] if biased else None
    expected = quantized_weights.linear(x, weight, bias)
    error = (product(x, weight, bias) - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < tolerance


def test_products_in_bfloat16(case: tuple[Weight, float]) -> None:
    weight, _ = case
    x = numbers(5, seed=7).bfloat16()
    got, expected = product(x, weight), quantized_weights.linear(x.float(), weight)
    assert got.dtype == torch.bfloat16
    assert (got - expected).norm() / expected.norm() < 8e-3


@pytest.mark.parametrize(
    "name", [name for name in WEIGHTS if not isinstance(quantized_cpu.prepare(WEIGHTS[name][0], torch.float32), Tensor)]
)
def test_a_row_has_the_same_bits_in_any_batch(name: str) -> None:
    prepared = quantized_cpu.prepare(WEIGHTS[name][0], torch.float32)
    assert not isinstance(prepared, Tensor)
    x = numbers(40, seed=7)
    whole = prepared(x)
    for first, last in itertools.combinations((0, 1, 2, 3, 17, 32, 40), 2):
        assert torch.equal(prepared(x[first:last]), whole[first:last])


@pytest.mark.parametrize("terms", [1, 1023, 1024, 1025, 3000])
def test_floats_multiply_integers_exactly(terms: int) -> None:
    """Also the largest sums, in all tiles of the weight."""
    chance = torch.Generator().manual_seed(terms)
    values, weight = (torch.randint(-128, 128, (rows, terms), generator=chance).to(torch.int8) for rows in (5, 700))
    values[0], values[1], weight[:3], weight[-3:] = -128, 127, -128, 127
    expected = (values.double() @ weight.double().T).float()  # Their sums are integers that a double holds.
    assert torch.equal(quantized_cpu._sums_in_floats(values, weight), expected)


@pytest.mark.parametrize("name", [name for name in WEIGHTS if "8" in name and "fp8" not in name])
def test_processors_without_an_instruction_for_int8_compute_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = WEIGHTS[name][0], numbers(17, seed=7)
    products = []
    for has_instruction in (True, False):
        monkeypatch.setattr(quantized_cpu, "_packed_is_exact", lambda answer=has_instruction: answer)
        monkeypatch.setattr(quantized_cpu, "_PACK_FROM", 1 << 40)  # Packed ones saturate without the instruction.
        products.append(product(x, weight))
    assert torch.equal(*products)


def test_int8_and_int4_stay_small(case: tuple[Weight, float]) -> None:
    weight, _ = case
    prepared = quantized_cpu.prepare(weight, torch.float32)
    if isinstance(prepared, Tensor):
        assert prepared.nbytes == 4 * weight.shape.numel()
    else:
        assert prepared.nbytes <= 1.3 * weight.nbytes


def test_a_row_of_zeros_gives_zeros() -> None:
    for weight in (quantized_weights.quantize_int8(numbers(96)), w8a8(numbers(1 << 12))):
        assert not product(torch.zeros(3, K), weight).any()
