"""fp8 products by cuBLAS: rounds the rows to fp8, fused with the norm or the gate of the MLP that comes before.

T rows, n numbers in a row. Output columns are in the order of `kernels.linear.packed`, chunks padded with zeros.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import launch_options, wait
from kernels.linear.packed import CHUNK, PackedWeight
from kernels.quantized_weights import FP8


@triton.jit
def round_rows_kernel(
    x,  # [T, n], or GATED [T, 2n]: gates, then ups; rows x_stride apart
    norm,  # [n] or None: the row is normalized first
    given,  # float32 [] or None: static scale
    out,  # fp8 [T, chunks * 128]
    scales,  # float32 [T]
    n, width, x_stride, eps,
    GATED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Round one row: x / scale; the scale is the row's largest magnitude / 448 unless one is given."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    if norm is not None:
        gain = tl.load(norm + columns, mask=inside, other=0.0).to(tl.float32)
    wait(PDL)
    numbers = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(x + row * x_stride + n + columns, mask=inside, other=0.0).to(tl.float32)
        numbers = numbers * tl.sigmoid(numbers) * up
    if norm is not None:
        inverse = 1.0 / tl.sqrt_rn(tl.sum(numbers * numbers) / n + eps)
        numbers = numbers * inverse * gain
    scale = tl.maximum(tl.max(tl.abs(numbers)), 1e-12) / 448.0 if given is None else tl.load(given)
    tl.store(scales + row, scale)
    numbers = tl.minimum(tl.maximum(numbers / scale, -448.0), 448.0)
    # Column 64p + 2j + h of a chunk becomes byte p of half h of word j.
    numbers = tl.permute(tl.reshape(numbers, [BLOCK // 128, 2, 32, 2]), (0, 2, 3, 1))
    rounded = tl.reshape(numbers, [BLOCK]).to(out.dtype.element_ty)
    tl.store(out + row * width + columns, rounded, mask=columns < width)


def round_rows(
    x: Tensor,
    norm: Tensor | None = None,
    eps: float = 0.0,
    *,
    gated: bool = False,
    given: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """fp8 [T, n padded to chunks] and scales float32 [T, 1] of x [T, n], of rms_norm(x), or of gated x [T, 2n].

    given: float32 [], a static scale in place of each row's own.
    """
    rows, n = x.shape[0], x.shape[1] // 2 if gated else x.shape[1]
    width = triton.cdiv(n, CHUNK) * CHUNK
    out = torch.empty(rows, width, dtype=FP8, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = max(CHUNK, triton.next_power_of_2(width))
    if rows:
        round_rows_kernel[(rows,)](
            x, norm, given, out, scales, n, width, x.stride(0), eps, GATED=gated, BLOCK=block,
            num_warps=min(16, max(1, block // 512)), **launch_options(x.device),
        )  # fmt: skip
    return out, scales


def multiplies(weight: PackedWeight) -> bool:
    """Whether cuBLAS can multiply with this weight: fp8 with a scale per output, on a device with fp8 tensor cores."""
    if weight.kind != "fp8" or weight.group != 0 or weight.shape[0] % 16 or weight.device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(weight.device) >= (8, 9)


def min_rows(device: torch.device) -> int:
    """The fewest rows for which an fp8 product is faster than one with fp8 weights converted to 16-bit floats."""
    return 17 if torch.cuda.get_device_capability(device)[0] == 9 else 65


def multiply(rounded: tuple[Tensor, Tensor], weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """cuBLAS product of rounded rows [T, K] with a weight for which `multiplies` holds: [T, N]."""
    values, scales = rounded
    w, scale = weight.packed.view(FP8).t(), weight.scale.view(1, -1)[:, : weight.shape[0]]
    return torch._scaled_mm(values, w, scale_a=scales, scale_b=scale, out_dtype=dtype, use_fast_accum=True)
