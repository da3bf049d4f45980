"""Checks of fused kernels for few rows: queries, keys and values with rotation, and whole steps of such rows."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kernels import attention, linear, quantized_weights
from kernels.linear import qkv_rope
from kernels.linear.dense_hopper import Shape
from kernels.linear.gemv import packed as packed_gemv
from kernels.linear.split_k import Tile
from kernels.operands import Norm
from kernels.quantized_weights import Weight
from kernels.reference import layers as reference
from services.worker.job import Adapter
from services.worker.models.config import ModelConfig
from services.worker.models.decoder import Decoder
from services.worker.models.layers import StepTensors
from services.worker.models.ops import RopeTables
from services.worker.models.rope import rope_tables
from services.worker.models.rope_settings import Rope
from services.worker.runners.cuda.adapters import GpuAdapters, TiledAdapters
from services.worker.runners.cuda.ops import TritonOps
from tests.kernels.cases import DEVICE, close, rand


def check_rotated_qkv(
    rows: int, heads: int, kv_heads: int, dim: int, k: int, tile: Tile | Shape | packed_gemv.Shape, dtype: torch.dtype,
    normed: bool = False,
) -> None:  # fmt: skip
    """The fused kernel against a projection, then rotation and writing to the pool. normed: with a norm of queries and
    keys."""
    qk_norm = Norm(rand(heads + kv_heads, dim, dtype=dtype), 1e-6) if normed else None
    weight = rand((heads + 2 * kv_heads) * dim, k, dtype=dtype) / k**0.5
    x = rand(rows, k, dtype=dtype)

    def rotated(bias: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, pool: Tensor, places: Tensor) -> Tensor:
        return qkv_rope.rotated_qkv(x, weight, bias, cos, sin, positions, pool, places, heads, tile, qk_norm)

    _check_rotated(rotated, x.double() @ weight.double().T, heads, kv_heads, dim, dtype, dtype, qk_norm)


def check_rotated_packed(
    rows: int, heads: int, kv_heads: int, weight: Weight, dtype: torch.dtype, stored: torch.dtype
) -> None:
    """The same as `check_rotated_qkv` for a normalized x and a quantized weight."""
    dim = weight.shape[0] // (heads + 2 * kv_heads)
    x, gamma = rand(rows, weight.shape[1], dtype=dtype), rand(weight.shape[1], dtype=dtype)
    norm, laid = Norm(gamma, 1e-5), linear.prepare(weight, dtype)

    def rotated(bias: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, pool: Tensor, places: Tensor) -> Tensor:
        found = linear.rotated_qkv(x, laid, bias, norm, cos, sin, positions, pool, places, heads)
        assert found is not None
        return found

    normed = reference.rms_norm(x.double(), gamma.double(), 1e-5)
    _check_rotated(rotated, quantized_weights.linear(normed, weight), heads, kv_heads, dim, dtype, stored)


def _check_rotated(
    rotated: Callable[..., Tensor], product: Tensor, heads: int, kv_heads: int, dim: int, dtype: torch.dtype,
    stored: torch.dtype, qk_norm: Norm | None = None,
) -> None:  # fmt: skip
    """rotated(bias, cos, sin, positions, pool, places) against what follows from the product [M, (H + 2G) * D]."""
    rows, bias = len(product), rand(product.shape[1], dtype=dtype)
    cos, sin = (table.to(DEVICE) for table in rope_tables(Rope(10_000.0), dim, 90, dtype))
    positions, places = torch.randint(0, 90, (rows,), device=DEVICE), torch.randperm(96, device=DEVICE)[:rows]
    angles = cos[positions].double(), sin[positions].double()
    turned = (product + bias.double()).view(rows, -1, dim)
    if qk_norm is not None:
        rotating = heads + kv_heads
        turned[:, :rotating] = reference.rms_norm(turned[:, :rotating], qk_norm.weight.double(), qk_norm.eps)
    for count in {1, min(1, rows - 1)}:  # rows that are not stored; a single row is stored in one of two runs
        pool = rand(6, 16, 2, kv_heads, dim, dtype=dtype).to(stored)
        nowhere, expected_pool, kept = places.clone(), pool.double(), places[:count]
        nowhere[:count] = -1
        before = expected_pool.view(96, -1)[kept].clone()
        close(rotated(bias, cos, sin, positions, pool, nowhere),
              reference.rope_and_store(turned.clone(), *angles, expected_pool, places, heads, kv_heads))  # fmt: skip
        expected_pool.view(96, -1)[kept] = before
        if stored == dtype:
            close(pool, expected_pool)
        else:  # three bits behind the first, of what normalized rows of this dtype give
            allowed = expected_pool.abs() / 15 + 2 * torch.finfo(dtype).eps
            assert ((pool.double() - expected_pool).abs() <= allowed).all()


def step_of_answers(
    config: ModelConfig, ops: TritonOps, seed: int, adapted: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """Logits of the next tokens of three rows, and the pools afterwards; all values are drawn from the seed. adapted:
    the rows have two adapters and none."""
    torch.manual_seed(seed)
    dtype = torch.float16
    model = Decoder(config, ops, dtype, config.context_length, DEVICE)
    for views in model.destinations().values():
        for view in views:
            view.copy_(torch.randn(view.shape) * 0.1 + (view.ndim == 1))
    pools = [torch.randn(7, 16, 2, config.kv_heads, config.head_dim, device=DEVICE).to(dtype) for _ in model.layers]
    starts, contexts, tables = (
        torch.tensor(numbers, dtype=torch.int32, device=DEVICE)
        for numbers in ([0, 1, 2, 3], [5, 17, 30], [[1, 2], [3, 4], [5, 6]])
    )
    positions = contexts.long() - 1
    places = tables[torch.arange(3), positions // 16].long() * 16 + positions % 16
    plans = {
        window: attention.plan_attention(
            starts,
            contexts,
            tables,
            config.heads,
            config.kv_heads,
            config.head_dim,
            16,
            dtype,
            window,
            1,
            0,
            attention.TINY,
        )
        for window in set(config.windows)
    }
    ropes = model.ropes(lambda cos, sin: RopeTables(cos, sin, positions))
    step = StepTensors(positions, positions, ropes, places, plans, None, _adapters(model) if adapted else None)
    return model.logits(model.forward(step, pools)[0]), pools


def _adapters(model: Decoder) -> TiledAdapters:
    """Random adapters of the first and the last of three rows."""
    pages = GpuAdapters(model, 2, 16, 3)
    for slot in (1, 2):
        stored = {
            module: (torch.randn(16, product.inputs, device="cpu") * 0.1, torch.randn(outputs, 16, device="cpu") * 0.1)
            for product in model.adaptable()
            for module, outputs in zip(product.modules, product.outputs, strict=True)
        }
        weights, nbytes = pages.prepare(stored)
        pages.load(slot, Adapter(f"{slot}", bytes([slot]), 16, nbytes, weights))
        while not pages.loaded(slot):
            pass
    return pages.send(np.array([2, 0, 1]), 3, 0)
