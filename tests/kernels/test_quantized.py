"""Quantized weights: their values, splitting and joining, and the error of rounding."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels import quantized_weights
from kernels.quantized_weights import (
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    Nf4Weight,
    QuantizedWeight,
    StackedWeight,
    Weight,
)

N, K = 256, 384


def numbers(rows: int = N, columns: int = K, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02


def blockwise(weight: Tensor) -> Fp8Weight:
    scale = torch.rand(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128)) + 0.5
    return Fp8Weight((weight * 100).to(quantized_weights.FP8), scale)


def asymmetric(weight: Tensor) -> Int4Weight:
    plain = quantized_weights.quantize_int4(weight, 32)
    zero = torch.randint(16, plain.scale.shape, dtype=torch.uint8)
    return Int4Weight(plain.packed, plain.scale, zero, 32, torch.randperm(weight.shape[1]).int())


def per_tensor(weight: Tensor) -> Fp8Weight:
    return Fp8Weight((weight * 100).to(quantized_weights.FP8), torch.full((1, 1), 0.01), torch.tensor(0.5))


def grouped(weight: Tensor) -> Int8Weight:
    values, scale = quantized_weights.quantize_rows_int8(weight.reshape(-1, 32))
    return Int8Weight(values.view(weight.shape), scale.view(len(weight), -1))


MAKERS: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    **quantized_weights.QUANTIZERS,
    "int4 with zeros and an order": asymmetric,
    "int8 in groups": grouped,
    "fp8 of one scale": per_tensor,
    "fp8 in blocks": blockwise,
}


@pytest.fixture(params=MAKERS, autouse=False)
def make(request: pytest.FixtureRequest) -> Callable[[Tensor], QuantizedWeight]:
    torch.manual_seed(0)
    return MAKERS[request.param]


def bits(weight: Weight) -> Tensor:
    return quantized_weights.dequantize(weight, torch.float32)


@pytest.mark.parametrize(
    ("kind", "error", "bytes_each"),
    [("int8", 0.008, 1 + 4 / K), ("int4", 0.11, 0.5 + 4 / 128), ("fp8", 0.03, 1 + 4 / K), ("nf4", 0.1, 0.5 + 4 / 64)],
)
def test_rounded_weights_are_near_and_small(kind: str, error: float, bytes_each: float) -> None:
    weight = numbers()
    made = quantized_weights.QUANTIZERS[kind](weight)
    assert made.shape == weight.shape
    lost = (bits(made) - weight).norm() / weight.norm()
    assert error / 2 < lost < error
    overhead = 64 if kind == "nf4" else 0
    assert made.nbytes == N * K * bytes_each + overhead
    assert made.dequantize(torch.bfloat16).dtype == torch.bfloat16


def test_int4_uses_all_sixteen_values_whatever_the_sign() -> None:
    weight = numbers()
    made = quantized_weights.quantize_int4(weight)
    assert set(made.unpack().flatten().tolist()) == set(range(16))
    plain = weight.view(N, -1, 128)
    step = plain.abs().amax(2, keepdim=True) / 7
    usual = (plain / step).round() * step
    assert (bits(made) - weight).square().mean() < (usual.flatten(1) - weight).square().mean()


def test_int4_is_rounded_by_its_half_precision_scales() -> None:
    weight = numbers().bfloat16()
    made = quantized_weights.quantize_int4(weight)
    assert made.scale.dtype == torch.bfloat16
    assert (bits(made) - weight.float()).abs().amax() <= 1.05 * made.scale.abs().amax()


@pytest.mark.parametrize("kind", quantized_weights.QUANTIZERS)
def test_zeros_stay_zeros(kind: str) -> None:
    weight = numbers()
    weight[3] = 0
    weight[:, :128] = 0
    restored = bits(quantized_weights.QUANTIZERS[kind](weight))
    assert not restored[3].any()
    assert not restored[:, :128].any()
    assert restored.isfinite().all()


@pytest.mark.parametrize(("inputs", "group"), [(4096, 128), (64, 64), (96, 32), (11008, 128), (40, 8)])
def test_a_group_divides_the_inputs(inputs: int, group: int) -> None:
    assert quantized_weights.group_of(inputs) == group


def test_odd_widths_have_no_group() -> None:
    with pytest.raises(ValueError, match="36 inputs"):
        quantized_weights.group_of(36)


def test_rows_of_a_weight_are_those_of_its_numbers(make: Callable[[Tensor], QuantizedWeight]) -> None:
    weight = make(numbers())
    assert torch.equal(bits(weight.rows(128, 192)), bits(weight)[128:192])


def test_weights_of_one_kind_are_joined_to_that_kind(make: Callable[[Tensor], QuantizedWeight]) -> None:
    whole = make(numbers())
    joined = quantized_weights.concat([whole.rows(0, 128), whole.rows(128, N)])
    assert type(joined) is type(whole)
    assert torch.equal(bits(joined), bits(whole))
    assert joined.shape == (N, K)


def test_weights_move_between_devices_unchanged(make: Callable[[Tensor], QuantizedWeight]) -> None:
    weight = make(numbers())
    moved = weight.to("meta")
    assert moved.device.type == "meta"
    assert moved.shape == weight.shape
    assert moved.nbytes == weight.nbytes
    assert weight.to("cpu").device.type == "cpu"


def incompatible() -> dict[str, tuple[Weight, Weight]]:
    a, b = numbers(seed=1), numbers(seed=2)
    ordered = asymmetric(a)
    return {
        "two kinds": (quantized_weights.quantize_int8(a), quantized_weights.quantize_int4(b)),
        "one of them plain": (quantized_weights.quantize_int8(a), b),
        "int8 in groups and not": (grouped(a), quantized_weights.quantize_int8(b)),
        "two groups": (quantized_weights.quantize_int4(a, 32), quantized_weights.quantize_int4(b, 64)),
        "two orders": (ordered, asymmetric(b)),
        "one order": (ordered, quantized_weights.quantize_int4(b, 32)),
        "blocks that do not meet": (blockwise(a[:64]), blockwise(b)),
        "two input scales": (per_tensor(a), Fp8Weight(per_tensor(b).values, torch.ones(1, 1), torch.tensor(0.25))),
        "rounded inputs and plain": (
            quantized_weights.quantize_int8(a),
            Int8Weight(*quantized_weights.quantize_rows_int8(b), dynamic_activations=True),
        ),
    }


@pytest.mark.parametrize("case", incompatible())
def test_weights_of_different_kinds_are_stacked(case: str) -> None:
    first, second = incompatible()[case]
    stack = quantized_weights.concat([first, second])
    assert isinstance(stack, StackedWeight)
    rows = first.shape[0]
    assert stack.shape == (rows + N, K)
    assert stack.nbytes == first.nbytes + second.nbytes
    assert torch.equal(bits(stack), torch.cat((bits(first), bits(second))))
    assert torch.equal(bits(stack.rows(0, rows)), bits(first))
    assert torch.equal(bits(stack.to("cpu").rows(rows, rows + N)), bits(second))


def test_an_order_permutes_the_inputs() -> None:
    torch.manual_seed(0)
    weight, x = asymmetric(numbers()), numbers(5)
    assert weight.order is not None
    by_inputs = x[:, weight.order] @ weight.stored(torch.float32).T
    torch.testing.assert_close(quantized_weights.linear(x, weight), by_inputs)


def test_w8a8_rounds_its_inputs_row_by_row() -> None:
    weight = Int8Weight(*quantized_weights.quantize_rows_int8(numbers()), dynamic_activations=True)
    x = numbers(4, seed=5) * torch.tensor([[1.0], [1e-3], [1e3], [0.0]])
    values, scale = quantized_weights.quantize_rows_int8(x)
    assert values.abs().amax(1).tolist() == [127, 127, 127, 0]
    exact = (values.long() @ weight.values.long().T).float() * scale * weight.scale.T
    torch.testing.assert_close(quantized_weights.linear(x, weight), exact, rtol=1e-4, atol=1e-6)
    assert not torch.equal(quantized_weights.linear(x, weight), x @ bits(weight).T)


def test_a_stack_of_nf4_and_its_code() -> None:
    weight = quantized_weights.quantize_nf4(numbers())
    other = Nf4Weight(weight.packed, weight.absmax, weight.code.flip(0))
    assert isinstance(quantized_weights.concat([weight, other]), StackedWeight)
