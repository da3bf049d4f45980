"""What the Gluon products share: parts of a sum on their way through memory, what follows a product, descriptors."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.quantized import FP8


@gluon.jit
def flattened(product):
    """[64, BLOCK_M] in one dimension, so that what a thread has lies together."""
    BLOCK_M: gl.constexpr = product.shape[1]
    six = product.reshape([4, 2, 8, BLOCK_M // 8, 4, 2])
    return six.permute([3, 0, 2, 4, 1, 5]).reshape([64 * BLOCK_M])


@gluon.jit
def unflattened(flat, BLOCK_M: gl.constexpr, layout: gl.constexpr):
    """The inverse of `flattened`."""
    both = flat.reshape([BLOCK_M // 8, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5]).reshape([64, BLOCK_M])
    return gl.convert_layout(both, layout, assert_trivial=True)


@gluon.jit
def store_lines(product, bias, residual, out, columns, rows, M, N, memory: gl.constexpr):
    """product + bias + residual -> out [M, N], at these columns and rows; `memory` is the layout to write in."""
    valid = (columns < N)[:, None] & (rows < M)[None, :]
    where = rows.to(gl.int64)[None, :] * N + columns[:, None]
    if bias is None and residual is None:
        gl.store(out + where, gl.convert_layout(product.to(out.dtype.element_ty), memory), mask=valid)
    else:
        result = gl.convert_layout(product, memory)
        if bias is not None:
            result += gl.load(bias + columns, mask=columns < N, other=0.0).to(gl.float32)[:, None]
        if residual is not None:
            result += gl.load(residual + where, mask=valid, other=0.0).to(gl.float32)
        gl.store(out + where, result.to(out.dtype.element_ty), mask=valid)


@cache
def _layout(rows: int, width: int, dtype: torch.dtype) -> Any:
    """How boxes lie in shared memory."""
    kinds = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.int32: gl.int32, FP8: gl.float8e4nv}
    return gl.NVMMASharedLayout.get_default_for([rows, width], kinds[dtype])


def described(tensor: Tensor, rows: int, width: int) -> Any:
    """A matrix for the bulk copy engine, in boxes of so many rows and numbers."""
    return TensorDescriptor.from_tensor(tensor, [rows, width], _layout(rows, width, tensor.dtype))
