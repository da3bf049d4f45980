"""Mixtures of experts on the device: against the reference, with the same bits in any batch, and in a CUDA graph."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from kernels.device import shared_bytes
from kernels.moe import grouped, grouped_fp8, routing
from kernels.moe.weights import ExpertStack
from tests.kernels.cases import rand
from tests.kernels.experts import (
    check_experts,
    check_fp8_products,
    check_invariant_experts,
    check_one_token,
    check_rounded_experts,
    check_routing,
    check_split_experts,
    check_spread_experts,
)

HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
def test_routes_of_tokens_to_experts(dtype: torch.dtype) -> None:
    for tokens, experts, chosen in ((1, 8, 2), (37, 128, 8), (2048, 128, 8), (333, 6, 1), (5, 60, 4)):
        check_routing(tokens, experts, chosen, dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", ["plain", "fp8", "int8", "fp8 blocks", "int4"])
def test_experts_of_one_token(kind: str, dtype: torch.dtype) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper")
    shapes = {
        "plain": ((128, 8, 768, 2048), (8, 2, 1280, 512), (6, 4, 128, 1536), (8, 2, 14336, 1024)),
        "fp8": ((128, 8, 768, 2048), (8, 2, 1024, 4096)),
        "int8": ((40, 4, 256, 1024),),
        "fp8 blocks": ((8, 2, 1024, 2048),),
        "int4": ((8, 2, 2048, 4096),),
    }
    for shape in shapes[kind]:
        check_one_token(*shape, kind, dtype)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 8, 2, 1536, 2048, 128), (70, 16, 4, 200, 192, 64), (900, 8, 2, 770, 256, 32)], ids=str
)
def test_products_of_experts(shape: tuple[int, int, int, int, int, int], dtype: torch.dtype) -> None:
    check_experts(*shape, dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_products_of_experts_in_parts(dtype: torch.dtype) -> None:
    check_split_experts(dtype)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 128, 8, 2, 2048), (7, 60, 4, 4, 2200), (300, 128, 8, 3, 256), (64, 8, 2, 8, 256)], ids=str
)
def test_experts_spread_over_ranks(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    check_spread_experts(*shape, dtype)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
def test_invariant_experts_have_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    check_invariant_experts(dtype)


@pytest.mark.skipif(torch.cuda.get_device_capability() < (8, 9), reason="needs fp8 tensor cores")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 4, 2, 70, 200), (33, 16, 8, 1536, 2048), (300, 6, 2, 770, 384), (900, 8, 1, 522, 1160)], ids=str
)
def test_products_of_rows_rounded_to_fp8(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    tiles = grouped_fp8.SMALL if shared_bytes(torch.device("cuda", 0)) < 110 << 10 else grouped_fp8.TILES
    for tile in (None, *(tile for _, tile in tiles)):
        check_fp8_products(*shape, dtype, tile)


@pytest.mark.skipif(torch.cuda.get_device_capability() < (8, 9), reason="needs fp8 tensor cores")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", [(100, 8, 2, 1536, 2048), (700, 16, 4, 272, 200), (999, 5, 2, 512, 768)], ids=str)
def test_experts_of_many_rows_round_them(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    check_rounded_experts(*shape, dtype)


def test_a_graph_follows_the_routes_of_its_tokens() -> None:
    dtype = torch.bfloat16
    stack = ExpertStack(8, 256, 128, dtype)
    for expert in range(8):
        stack.keep(expert, rand(256, 128, dtype=dtype))
    x, logits = rand(5, 128, dtype=dtype), rand(5, 8, dtype=dtype)

    def step() -> torch.Tensor:
        return grouped.multiply(x, stack, routing.route(logits, 2, True), divide=2)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        logits.normal_()
        graph.replay()
        assert torch.equal(captured, step())
