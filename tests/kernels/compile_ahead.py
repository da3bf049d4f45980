"""Compiles every kernel ahead of time for the compute capabilities that Weft serves on. Needs no GPU.

Run as a program: `python -m tests.kernels.compile_ahead 90`. It prints a line for each kernel: what the assembler says
of registers and spills, and the shared memory.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type

from kernels import activation, attention, blocks, matmul, norm, overlap, rope_kv, sampling
from kernels.attention import Config


class Recorder:
    """Stands in for a kernel: keeps what a launch passes instead of launching."""

    def __init__(self, kernel: Any, launches: list[tuple[Any, dict[str, Any]]]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            names = [parameter.name for parameter in self.kernel.params]
            self.launches.append((self.kernel, dict(zip(names, args, strict=False)) | options))

        return launch


MODULES = (activation, attention, blocks, matmul, norm, rope_kv, sampling)


def recorded(call: Callable[[], object]) -> list[tuple[Any, dict[str, Any]]]:
    """The launches that a call would make."""
    launches: list[tuple[Any, dict[str, Any]]] = []
    originals = [
        (module, name, kernel)
        for module in MODULES
        for name, kernel in vars(module).items()
        if name.endswith("_kernel")
    ]
    try:
        for module, name, kernel in originals:
            setattr(module, name, Recorder(kernel, launches))
        call()
    finally:
        for module, name, kernel in originals:
            setattr(module, name, kernel)
    return launches


def compile_launch(kernel: Any, arguments: dict[str, Any], capability: int) -> Any:
    """Compile one launch for one capability, with the specialization that the launch would get."""
    constants: dict[tuple[int, ...], Any] = {}
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, parameter in enumerate(kernel.params):
        value = arguments.get(parameter.name)
        if parameter.is_constexpr or value is None:
            constants[(index,)], signature[parameter.name] = value, "constexpr"
        elif isinstance(value, int) and value == 1 and not parameter.do_not_specialize:
            constants[(index,)], signature[parameter.name] = 1, "constexpr"
        else:
            signature[parameter.name] = mangle_type(value, specialize=False)
            if isinstance(value, Tensor) or (
                isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize
            ):
                attributes[(index,)] = [["tt.divisibility", 16]]
    options = {name: arguments[name] for name in ("num_warps", "num_stages", "maxnreg") if name in arguments}
    if capability >= 90:
        options["launch_pdl"] = True
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def calls(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
    """Every launcher in the configurations that are served."""
    e = lambda *shape, kind=dtype: torch.empty(shape, dtype=kind)  # noqa: E731
    index = lambda *shape: torch.zeros(shape, dtype=torch.int64)  # noqa: E731
    yield "rms_norm", lambda: norm.rms_norm(e(4, 4096), e(4096), 1e-5)
    yield "add_rms_norm", lambda: norm.add_rms_norm(e(4, 4096), e(4, 4096), e(4096), 1e-5)
    yield "silu_and_mul", lambda: activation.silu_and_mul(e(4, 28672))
    for dim in (64, 128):
        kv = e(64, 16, 2, 8, dim)
        qkv = e(4, 48, dim)
        yield f"rope {dim}", lambda kv=kv, q=qkv: rope_kv.rope_and_store(q, e(4, 1, 1), e(4, 1, 1), kv, index(4), 32, 8)
        yield (
            f"rope norm {dim}",
            lambda kv=kv, q=qkv, d=dim: rope_kv.rope_and_store(
                q, e(4, 1, 1), e(4, 1, 1), kv, index(4), 32, 8, index(4), e(40, d), 1e-6
            ),
        )
        for window in (None, 4096):
            yield f"attention {dim} {window}", lambda kv=kv, q=qkv, w=window: _attend(q, kv, w)
    yield "attention 80", lambda: _attend(e(4, 36, 80), e(64, 16, 2, 4, 80), None)
    tile = matmul.EXACT if dtype == torch.float32 else matmul.Tile(64, 128, 4)
    for rows in (1, 16, 64):
        x = e(rows, 4096)
        yield f"linear {rows}", lambda x=x: matmul.linear(x, e(4096, 4096), residual=e(x.shape[0], 4096), tile=tile)
        yield (
            f"linear gated {rows}",
            lambda x=x: matmul.linear(x, e(8192, 4096), norm=e(4096), gated=True, tile=replace(tile, split=1)),
        )
    for rows in (1, 256):
        yield f"invariant {rows}", lambda rows=rows: matmul.matmul_invariant(e(rows, 4096), e(4096, 4096))
    if dtype == torch.float32:
        for vocab in (None, 1024):
            state = sampling.slot_settings(4, "cpu", vocab)
            yield f"sample {vocab}", lambda s=state: sampling.sample(e(2, 1024), s, index(2), index(2))
        yield "top", lambda: sampling.top_logprobs(e(2, 1024), e(2), 20)
    pools = [e(64, 16, 2, 8, 128)]
    addresses = index(1)
    yield "gather", lambda: blocks.gather_blocks(addresses, pools[0], index(2), e(2, 1, 16, 2, 8, 128))
    yield "scatter", lambda: blocks.scatter_blocks(addresses, pools[0], index(2), e(2, 1, 16, 2, 8, 128))


def _attend(qkv: Tensor, kv: Tensor, window: int | None, config: Config | None = None) -> None:
    kv_heads = kv.shape[3]
    heads = qkv.shape[1] - 2 * kv_heads
    whole = lambda *shape: torch.zeros(shape, dtype=torch.int32)  # noqa: E731
    plan = attention.plan_attention(
        whole(3), whole(2), whole(2, 8), heads, kv_heads, kv.shape[4], qkv.dtype, window, 1, 3, config
    )
    attention.attention(qkv[:, :heads], kv, plan, 1.0)


def compile_all(capability: int, dtype: torch.dtype) -> list[str]:
    """One line for each kernel: its name, registers, spills and shared memory."""
    lines = []
    dependent = {"PDL": True} if capability >= 90 else {"PDL": False}
    for name, call in calls(dtype):
        for kernel, arguments in recorded(call):
            compiled = compile_launch(kernel, arguments | dependent, capability)
            assert compiled.asm["cubin"]
            lines.append(f"{name}: {kernel.__name__} shared {compiled.metadata.shared}")
    return lines


if __name__ == "__main__":
    overlap.launch_options.__doc__  # noqa: B018
    for kind in [getattr(torch, name) for name in sys.argv[2:]] or (torch.bfloat16, torch.float16, torch.float32):
        print(kind, *compile_all(int(sys.argv[1]), kind), sep="\n  ")
