"""Mixtures of experts on the device against their reference: odd shapes, poisoned outputs, every kind of weight."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from kernels import quantized_weights
from kernels.linear import packed
from kernels.moe import grouped, grouped_fp8, one_token, reference, routing
from kernels.moe.tiles import Tile
from kernels.moe.weights import ExpertStack
from kernels.operands import Activation, Norm
from kernels.quantized_weights import Fp8Weight, Weight
from kernels.reference import layers
from tests.kernels.cases import DEVICE, TOLERANCE, close, error, rand
from tests.kernels.weights import weights


@contextmanager
def poisoned() -> Iterator[None]:
    """New tensors without values hold NaN, or numbers that are no index."""
    empty = torch.empty

    def make(*shape: Any, **settings: Any) -> Tensor:
        made = empty(*shape, **settings)
        return made.fill_(float("nan") if made.is_floating_point() else 77_777)

    with mock.patch.object(torch, "empty", make):
        yield


def check_routing(tokens: int, experts: int, chosen: int, dtype: torch.dtype) -> None:
    """Weights, order and offsets, of all experts and of own ones alone; with equal logits, and with a token whose
    numbers are not finite."""
    for normalized, own in ((False, None), (True, range(experts // 2, experts)), (True, None)):
        logits = rand(tokens, experts + 3, dtype=dtype)[:, :experts]
        if tokens > 2:
            logits[1] = 0
        with poisoned():
            got = routing.route(logits, chosen, normalized, own)
        want = reference.route(logits.cpu(), chosen, normalized, own)
        torch.testing.assert_close(got.weights_Tk.cpu(), want.weights_Tk, rtol=1e-5, atol=1e-7)
        assert got.offsets.tolist() == want.offsets.tolist()
        assert got.experts == want.experts == experts
        entries = int(want.offsets[-1])
        assert got.order[:entries].tolist() == want.order[:entries].tolist()
    if tokens > 2:
        logits[0], logits[2] = float("nan"), float("inf")
        spoilt = routing.route(logits, chosen, True)
        assert sorted(spoilt.order.tolist()) == list(range(tokens * chosen))
        torch.testing.assert_close(spoilt.weights_Tk[1].cpu(), want.weights_Tk[1], rtol=1e-5, atol=1e-7)


def check_logits(experts: int, k: int, dtype: torch.dtype) -> None:
    """Norm and product of one token in one launch."""
    norm, weight = Norm(rand(k, dtype=dtype), 1e-6), rand(experts, k, dtype=dtype) / k**0.5
    x = rand(1, k, dtype=dtype)
    with poisoned():
        normed, chances = one_token.norm_router(x, norm, weight, 2, True)
    close(normed, layers.normalize(x.double(), norm))
    close(chances.logits, normed.double() @ weight.double().t())


def check_experts(tokens: int, experts: int, chosen: int, n: int, k: int, group: int, dtype: torch.dtype) -> None:
    """Products of tokens and of entries with every kind of weight, and their weighted sum."""
    kinds = [list(weights(n, k, group, dtype)) for _ in range(experts)]
    if dtype == torch.float32:  # slow in the interpreter
        kinds = [each[1:2] for each in kinds]
    plain: list[Weight] = [rand(n, k, dtype=dtype) / k**0.5 for _ in range(experts)]
    fourth: list[Weight] = [quantized_weights.quantize_nf4(rand(n, k, dtype=torch.float32)) for _ in range(experts)]
    for number, case in enumerate((plain, fourth, *map(list, zip(*kinds, strict=True)))):
        stack = ExpertStack(experts, n, k, dtype)
        for expert in random.sample(range(experts), experts):
            stack.keep(expert, case[expert])
        routes = routing.route(rand(tokens, experts, dtype=dtype), chosen, True)
        for divide, invariant in ((chosen, False), (1, True)):
            x = rand(len(routes.order) // divide, k, dtype=dtype)
            with poisoned():
                got = grouped.multiply(x, stack, routes, divide=divide, invariant=invariant)
            close(got, reference.multiply(x.double(), case, routes, divide=divide))
        if number in (0, 2):
            check_gate(x, stack, case, routes)
        residual = rand(tokens, n, dtype=dtype)
        wanted = residual.double()
        reference.add_weighted(wanted, reference.multiply(x.double(), case, routes, divide=1), routes.weights_Tk)
        with poisoned():
            grouped.multiply_add(residual, x, stack, routes)
        close(residual, wanted)


def check_one_token(experts: int, chosen: int, width: int, k: int, kind: str, dtype: torch.dtype) -> None:
    """All experts of one token, again and again with the same counters."""

    def made(outputs: int, inputs: int) -> Weight:
        weight: Tensor = rand(outputs, inputs, dtype=torch.float32) / inputs**0.5
        if kind == "plain":
            return weight.to(dtype)
        if kind == "int4":
            return quantized_weights.quantize_int4(weight.to(dtype), 128)
        if kind == "int8":
            return quantized_weights.quantize_int8(weight)
        rows = quantized_weights.quantize_fp8(weight)
        if kind == "fp8":
            return rows
        blocks = torch.rand(-(-outputs // 128), inputs // 128, device=DEVICE) * 2e-3
        return quantized_weights.Fp8Weight(rows.values, blocks)

    first: list[Weight] = [made(2 * width, k) for _ in range(experts)]
    second: list[Weight] = [made(k, width) for _ in range(experts)]
    up, down = ExpertStack(experts, 2 * width, k, dtype), ExpertStack(experts, k, width, dtype)
    for expert in range(experts):
        up.keep(expert, first[expert])
        down.keep(expert, second[expert])
    norm, weight = Norm(torch.ones(k, dtype=dtype, device=DEVICE), 1e-6), rand(experts, k, dtype=dtype) / k**0.5
    for normalized in (True, False, True):
        residual = rand(1, k, dtype=dtype)
        with poisoned():
            x, chances = one_token.norm_router(rand(1, k, dtype=dtype), norm, weight, chosen, normalized)
            wanted = residual.double()
            assert one_token.add_experts(residual, x, chances, Activation.GATED_SILU, up, down)
        close(chances.logits, x.double() @ weight.double().t())
        routes = reference.route(chances.logits, chosen, normalized)
        products = reference.multiply(x.double(), first, routes, divide=chosen)
        hidden = torch.nn.functional.silu(products[:, :width]) * products[:, width:]
        reference.add_weighted(wanted, reference.multiply(hidden, second, routes, divide=1), routes.weights_Tk)
        close(residual, wanted)


def check_gate(x: Tensor, stack: ExpertStack, case: list[Weight], routes: reference.Routes) -> None:
    """The activation of the products of entries; gated, of the first and the second half of the outputs."""
    wanted = activated(reference.multiply(x.double(), case, routes, divide=1))
    for activation in (Activation.GATED_SILU, Activation.GATED_GELU_TANH, Activation.GELU):
        with poisoned():
            got = grouped.multiply_activate(x, stack, routes, activation, divide=1)
        close(got, wanted[activation])


def activated(products: Tensor) -> dict[Activation, Tensor]:
    """Activations of products; gated, of the first and the second half of the outputs."""
    gate, up = products.chunk(2, 1)
    return {
        Activation.GATED_SILU: torch.nn.functional.silu(gate) * up,
        Activation.GATED_GELU_TANH: torch.nn.functional.gelu(gate, approximate="tanh") * up,
        Activation.GELU: torch.nn.functional.gelu(products),
    }


def fp8_experts(count: int, n: int, k: int, dtype: torch.dtype) -> tuple[list[Fp8Weight], ExpertStack]:
    """Random weights with a scale for each output."""
    case = [quantized_weights.quantize_fp8(rand(n, k, dtype=torch.float32) / k**0.5) for _ in range(count)]
    stack = ExpertStack(count, n, k, dtype)
    for expert, weight in enumerate(case):
        stack.keep(expert, weight)
    return case, stack


def check_fp8_products(
    tokens: int, experts: int, chosen: int, n: int, k: int, dtype: torch.dtype, tile: Tile | None = None
) -> None:
    """Products of rows rounded to fp8, plain and gated, with all experts and with half of them; one expert has a row of
    each token, and another one none."""
    for own in (range(experts), range(experts // 2, experts)):
        case, stack = fp8_experts(len(own), n, k, dtype)
        logits = rand(tokens, experts, dtype=dtype)
        logits[:, own.start], logits[:, own.stop - 1] = -100, 100
        routes = routing.route(logits, chosen, True, own)
        written = routes.order[: int(routes.offsets[-1])].long()
        for divide in (chosen, 1):
            x = quantized_weights.quantize_fp8(rand(tokens * chosen // divide, k, dtype=torch.float32))
            rounded = packed.pack_weight(x).packed.view(quantized_weights.FP8), x.scale
            products = reference.multiply(x.dequantize(torch.float64), case, routes, divide=divide)
            wanted = activated(products)
            for gate, want in (
                ("", products), ("silu", wanted[Activation.GATED_SILU]), ("gelu", wanted[Activation.GATED_GELU_TANH])
            ):  # fmt: skip
                with poisoned():
                    got = grouped_fp8.multiply(rounded, stack, routes, dtype, divide=divide, gate=gate, tile=tile)
                close(got[written], want[written])
                assert int(got.isfinite().all(1).sum()) == len(written), "rows of other ranks' experts are written"


def check_rounded_experts(tokens: int, experts: int, chosen: int, n: int, k: int, dtype: torch.dtype) -> None:
    """Both products of a layer whose rows are rounded, against products of rows that are not."""
    most = 0.2 if DEVICE == "cpu" else 0.05  # Triton's interpreter rounds worse, see `check_rounding`.
    case, stack = fp8_experts(experts, n, k, dtype)
    routes = routing.route(rand(tokens, experts, dtype=dtype), chosen, True)
    x, residual = rand(tokens, k, dtype=dtype), rand(tokens, n, dtype=dtype)
    wanted = activated(reference.multiply(x.double(), case, routes, divide=chosen))
    entries = rand(tokens * chosen, k, dtype=dtype)
    total = residual.double()
    reference.add_weighted(total, reference.multiply(entries.double(), case, routes, divide=1), routes.weights_Tk)
    with poisoned():
        for activation, want in wanted.items():
            got = grouped.multiply_activate(x, stack, routes, activation, divide=chosen)
            assert TOLERANCE[dtype] < error(got, want) < most, "not rounded, or wrong"
        grouped.multiply_add(residual, entries, stack, routes)
    assert TOLERANCE[dtype] < error(residual, total) < most, "not rounded, or wrong"


def check_split_experts(dtype: torch.dtype) -> None:
    """Few rows of many inputs: each product is a sum of parts."""
    n, k, experts, chosen, tokens = 70, 2200, 4, 2, 3
    case: list[Weight] = [
        quantized_weights.quantize_int8(rand(n, k, dtype=torch.float32) / k**0.5) for _ in range(experts)
    ]
    stack = ExpertStack(experts, n, k, dtype)
    for expert, weight in enumerate(case):
        stack.keep(expert, weight)
    routes = routing.route(rand(tokens, experts, dtype=dtype), chosen, True)
    x, residual = rand(tokens * chosen, k, dtype=dtype), rand(tokens, n, dtype=dtype)
    wanted = residual.double()
    reference.add_weighted(wanted, reference.multiply(x.double(), case, routes, divide=1), routes.weights_Tk)
    with poisoned():
        grouped.multiply_add(residual, x, stack, routes)
    close(residual, wanted)


def check_spread_experts(tokens: int, experts: int, chosen: int, ranks: int, k: int, dtype: torch.dtype) -> None:
    """Each rank has some of the experts: what all add is what one device adds. No other expert's entry is read."""
    n = 70
    logits, x = rand(tokens, experts, dtype=dtype), rand(tokens * chosen, k, dtype=dtype)
    plain = [rand(n, k, dtype=torch.float32) / k**0.5 for _ in range(experts)]
    kinds: list[list[Weight]] = [[weight.to(dtype) for weight in plain]]
    if dtype != torch.float32:
        kinds.append([quantized_weights.quantize_int8(weight) for weight in plain])
    whole = reference.route(logits, chosen, True)
    for case in kinds:
        wanted, total = (torch.zeros(tokens, n, dtype=torch.float64, device=DEVICE) for _ in range(2))
        reference.add_weighted(wanted, reference.multiply(x.double(), case, whole, divide=1), whole.weights_Tk)
        for rank in range(ranks):
            own = range(rank * experts // ranks, (rank + 1) * experts // ranks)
            stack = ExpertStack(len(own), n, k, dtype)
            for place, expert in enumerate(own):
                stack.keep(place, case[expert])
            part = torch.zeros(tokens, n, dtype=dtype, device=DEVICE)
            with poisoned():
                routes = routing.route(logits, chosen, True, own)
                grouped.multiply_add(part, x, stack, routes)
            mine = reference.route(logits, chosen, True, own)
            expected = torch.zeros_like(wanted)
            reference.add_weighted(
                expected, reference.multiply(x.double(), case[own.start : own.stop], mine, divide=1), mine.weights_Tk
            )
            close(part, expected)
            assert not part[mine.weights_Tk.sum(1) == 0].any(), "a token without own experts"
            total += part
        close(total.to(dtype), wanted)


def check_invariant_experts(dtype: torch.dtype) -> None:
    """A token has the same bits alone and among others, whatever experts those have."""
    stack = ExpertStack(4, 40, 64, dtype)
    for expert in range(4):
        stack.keep(expert, rand(40, 64, dtype=dtype))
    x, logits = rand(70, 64, dtype=dtype), rand(70, 4, dtype=dtype)

    def run(rows: slice) -> Tensor:
        routes = routing.route(logits[rows], 2, True)
        results = grouped.multiply(x[rows], stack, routes, divide=2, invariant=True)
        total = torch.zeros(len(x[rows]), 40, dtype=dtype, device=DEVICE)
        grouped.add_weighted(total, results, routes.weights_Tk)
        return total

    whole = run(slice(0, 70))
    for rows in (slice(5, 6), slice(3, 40)):
        assert torch.equal(run(rows), whole[rows])
