"""Compiles every kernel ahead of time for the supported compute capabilities. Needs no GPU.

Run as a program: `python -m tests.kernels.compile_ahead 90 bfloat16`. It prints a line for each kernel with its use of
shared memory. For one capability and type, WHOLE, it compiles every served configuration; for others those calls alone
that are named in EVERYWHERE: what a capability lacks is an instruction for some type, or shared memory.
Kernels whose content did not change are remembered (`compile_record.py`); `--fresh` compiles and records everything.
"""

import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import mangle_type

from kernels import (
    activation,
    attention,
    block_copy,
    kv_pages,
    lora,
    norm,
    quantized_weights,
    rope_kv,
    sampling,
    slot_edits,
    step_io,
    texts,
)
from kernels.attention import packed_texts, short_prefill
from kernels.drafts import draft_pass, guesses, hidden_states, parallel_draft
from kernels.linear import (
    dense,
    dense_hopper,
    fp8,
    nf4,
    packed,
    packed_gemm,
    qkv_rope,
    resident_hopper,
    resident_norm_hopper,
    split_k,
)
from kernels.linear.gemv import dense as dense_gemv
from kernels.linear.split_k import Tile
from kernels.lora import fused
from kernels.moe import grouped, grouped_fp8, one_token, routing
from kernels.moe.reference import Routes
from kernels.moe.weights import ExpertStack
from kernels.operands import Activation, Norm, NormKind, Pooling, Scores
from kernels.peers import stages as peer_stages
from kernels.peers import sums as peer_sums
from kernels.peers.stages import Link
from kernels.peers.words import Peers
from kernels.sampling import token_mask, top_logprobs
from kernels.sampling.slot_settings import slot_settings
from tests.kernels.compile_record import Compiled, CompileRecord


class Recorder:
    """Replaces a kernel: records the arguments of a launch and launches nothing."""

    def __init__(self, kernel: Any, launches: list[tuple[Any, dict[str, Any]]]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            names = [parameter.name for parameter in self.kernel.params]
            self.launches.append((self.kernel, dict(zip(names, args, strict=False)) | options))

        return launch


Launch = tuple[str, Any, dict[str, Any]]
"""Name of the call, kernel, arguments and options."""
WHOLE = 90, torch.bfloat16
"""The capability and type for which every configuration is compiled."""
EVERYWHERE = frozenset(
    {
        "accept 1024 0.5", "adapted down 1 16", "adapted gated 64 16", "adapted o 64 16", "adapted qkv 64 16",
        "add layer norm", "advance", "attention 128", "attention capped 256 True", "attention of 9 tokens",
        "attention torch.float8_e4m3fn False", "attention torch.int8 False", "begin masks", "columns of ranks 128",
        "dequantize fp8 blocks", "dequantize int4 128", "dequantize int4 64", "dequantize int8", "dequantize nf4",
        "edit", "embed texts", "experts added", "experts added in parts", "experts fp8 600", "experts gated int4 1",
        "experts gated plain 1", "experts int4 zeros 600", "experts of rounded rows plain 600",
        "experts of rounded rows silu 600", "finite", "follow", "fp8 blocks 200", "gelu True", "int4 128 200",
        "int4 32 gated 64", "int4 64 200", "int8 64 200", "int8 64 gated 1", "invariant 256", "keep", "keep states",
        "layer_norm", "linear 64", "linear down 16", "linear gated 128", "linear gated 64", "lora 16", "lora 256",
        "mask", "packed texts 4096 128", "packed texts 4096 64", "parts 8", "pool texts Pooling.MAX", "qkv 1 64",
        "received activations", "rms_norm", "rope norm 128", "rope torch.float8_e4m3fn", "rope torch.int8",
        "round gated rows", "round rows", "route 128", "route 40", "route 600", "rows of ranks", "sample None",
        "sample guesses 1024", "scatter", "sent activations", "silu_and_mul", "states before", "store guesses",
        "sum and norm",
        "sum of parts", "sum of parts and norm", "sum of ranks 128", "top", "unpack guesses",
    }
)  # fmt: skip
"""Calls that launch each kernel with each combination of types, in a configuration of much shared memory."""
PLAIN, CAPPED = Scores(1.0), Scores(1.0, 50.0, torch.zeros(32))
# The largest shared memory of one program in bytes, by compute capability.
MOST_SHARED = {80: 166_912, 89: 101_376, 90: 232_448}
MODULES = (
    activation,
    attention,
    short_prefill,
    block_copy,
    draft_pass,
    guesses,
    hidden_states,
    slot_edits,
    fp8,
    dense,
    packed_gemm,
    nf4,
    dense_gemv,
    dense_hopper,
    resident_hopper,
    resident_norm_hopper,
    lora,
    fused,
    norm,
    packed_texts,
    parallel_draft,
    peer_stages,
    peer_sums,
    texts,
    grouped,
    grouped_fp8,
    one_token,
    routing,
    qkv_rope,
    rope_kv,
    sampling,
    step_io,
    token_mask,
    top_logprobs,
    packed,
)


def recorded(call: Callable[[], object]) -> list[tuple[Any, dict[str, Any]]]:
    """The launches of a call, recorded without a device."""
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


def compile_launch(record: CompileRecord, kernel: Any, arguments: dict[str, Any], capability: int) -> Compiled:
    """Compiles one launch for one capability, with the specialization of its arguments."""
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
    options: dict[str, Any] = {
        name: arguments[name]
        for name in ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")
        if name in arguments
    }
    if capability >= 90:
        options["launch_pdl"] = True
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, attributes)
    return record.compile(source, GPUTarget("cuda", capability, 32), options)


def kinds(launches: list[Launch]) -> set[tuple[str, frozenset[torch.dtype]]]:
    """The kernels that are launched, each with the types of its tensors."""
    return {
        (kernel.__name__, frozenset(value.dtype for value in arguments.values() if isinstance(value, Tensor)))
        for _, kernel, arguments in launches
    }


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def index(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def calls(dtype: torch.dtype, capability: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, call) of every launcher in its served configurations."""
    new = partial(empty, dtype=dtype)
    yield from layer_calls(new)
    yield from attention_calls(new, capability)
    yield from linear_calls(new, capability)
    yield from expert_calls(new)
    if capability >= 89 and dtype.itemsize == 2:
        yield from fp8_expert_calls(new)
    if capability == 90 and dtype.itemsize == 2:
        yield from one_token_calls(new)
    yield from text_calls(new)
    if capability == 90 and dtype == torch.bfloat16:
        yield from resident_calls(new)
    yield from step_calls(new)
    yield from rank_calls(new)
    if dtype != torch.float32:  # Logits have one type beside any type of weights.
        yield from sampling_calls(partial(empty, dtype=torch.float32))


def layer_calls(new: Callable[..., Tensor]) -> Iterator[tuple[str, Callable[[], object]]]:
    """Norms, activations and adapters."""
    dtype = new(1).dtype
    yield "rms_norm", partial(norm.rms_norm, new(4, 4096), new(4096), 1e-5)
    yield "layer_norm", partial(norm.layer_norm, new(4, 768), new(768), new(768), 1e-5)
    yield "layer_norm without bias", partial(norm.layer_norm, new(4, 768), new(768), None, 1e-5)
    yield "silu_and_mul", partial(activation.silu_and_mul, new(4, 28672))
    widest = [(256, 14336, (4096,))] if dtype == torch.float32 else []
    for rank, inputs, outputs in ((16, 4096, (4096, 1024, 1024)), *widest):
        stack = lora.AdapterStack.empty(1, rank, inputs, outputs, dtype)
        words = torch.zeros(2, 3, dtype=torch.int32)
        yield f"lora {rank}", partial(lora.add_adapters, new(4, sum(outputs)), new(4, inputs), stack, words[0], words)
    if dtype != torch.float32:
        yield from adapted_calls(new)
    for tanh in (False, True):
        yield f"gelu {tanh}", partial(activation.gelu, new(4, 3072), tanh=tanh)


def adapted_calls(new: Callable[..., Tensor]) -> Iterator[tuple[str, Callable[[], object]]]:
    """Products and what adapters add to them, as an 8B model has them."""
    dtype = new(1).dtype
    for name, rows, rank, inputs, outputs in (
        ("qkv", 64, 16, 4096, (4096, 1024, 1024)), ("o", 64, 16, 4096, (4096,)),
        ("gated", 64, 16, 4096, (14336, 14336)), ("gated", 4, 64, 4096, (14336, 14336)),
        ("down", 64, 16, 14336, (4096,)), ("down", 1, 16, 14336, (4096,)),
    ):  # fmt: skip
        stack, x = lora.AdapterStack.empty(1, rank, inputs, outputs, dtype), new(rows, inputs)
        tile = fused.tile_for(x, stack, name == "gated")
        assert tile is not None
        residual = new(rows, outputs[0]) if name in ("o", "down") else None
        chosen, owners = (torch.zeros(len(outputs), width, dtype=torch.int32) for width in (33, rows))
        yield f"adapted {name} {rows} {rank}", partial(
            fused.linear, x, new(sum(outputs), inputs), None, stack, chosen, owners, tile=tile, residual=residual,
            gated=name == "gated",
        )  # fmt: skip


def attention_calls(new: Callable[..., Tensor], capability: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Rotation and attention, and copies of pages."""
    for dim in (64, 128):
        pool, qkv, angles = new(64, 16, 2, 8, dim), new(4, 48, dim), new(4, 1, dim)
        rope = partial(rope_kv.rope_and_store, qkv, angles, angles, pool, index(4), 32, 8)
        yield f"rope {dim}", rope
        yield f"rope norm {dim}", partial(rope, index(4), new(40, dim), 1e-6)
        yield f"attention {dim}", partial(attend, qkv, pool, None)
        yield f"attention {dim} invariant", partial(attend, qkv, pool, None, invariant=True)
    for stored in (kv_pages.INT8, kv_pages.FP8) if capability >= 89 else (kv_pages.INT8,):
        pool, qkv, angles = kv_pages.make_pool(64, 16, 8, 128, stored), new(4, 48, 128), new(4, 1, 128)
        scales = torch.empty(2, 8) if stored == kv_pages.FP8 else None
        yield f"rope {stored}", partial(rope_kv.rope_and_store, qkv, angles, angles, pool, index(4), 32, 8, index(4),
                                        kv_scales=scales)  # fmt: skip
        for invariant in (False, True):
            yield f"attention {stored} {invariant}", partial(attend, qkv, pool, None, invariant, scales)
        small = kv_pages.make_pool(64, 16, 8, 64, stored)
        yield f"attention {stored} 64", partial(attend, new(4, 48, 64), small, 4096, scales=scales)
    yield "attention window", partial(attend, new(4, 48, 128), new(64, 16, 2, 8, 128), 4096)
    yield "attention capped", partial(attend, new(4, 48, 128), new(64, 16, 2, 8, 128), 4096, scores=CAPPED)
    for invariant in (False, True):
        wide = new(4, 16, 256), new(64, 16, 2, 4, 256)
        yield f"attention capped 256 {invariant}", partial(attend, *wide, None, invariant, scores=CAPPED)
    yield "attention 80", partial(attend, new(4, 36, 80), new(64, 16, 2, 4, 80), None)
    for tokens in (2, 3, 5, 9):
        yield f"attention of {tokens} tokens", partial(attend, new(2 * tokens, 48, 128), new(64, 16, 2, 8, 128), None,
                                                       short_tokens=tokens)  # fmt: skip
    pool, staging = new(64, 16, 2, 8, 128), new(2, 1, 16, 2, 8, 128)
    yield "gather", partial(block_copy.gather_blocks, index(1), pool, index(2), staging)
    yield "scatter", partial(block_copy.scatter_blocks, index(1), pool, index(2), staging)


def linear_calls(new: Callable[..., Tensor], capability: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Products with plain and with quantized weights."""
    dtype = new(1).dtype
    exact = dtype == torch.float32
    tile = Tile(16, 32, 4, stages=2) if exact else Tile(64, 128, 4)
    for rows in (1, 64):
        x, residual = new(rows, 4096), new(rows, 4096)
        yield f"linear {rows}", partial(dense.linear, x, new(4096, 4096), residual=residual, tile=tile)
        whole = replace(tile, split=1)
        yield f"linear gated {rows}", partial(dense.linear, x, new(8192, 4096), gated=True, tile=whole)
    if not exact:
        yield from fused_calls(new, capability)
    for rows in (1, 256):
        yield f"invariant {rows}", partial(dense.matmul_invariant, new(rows, 4096), new(4096, 4096))
    if not exact:
        yield from quantized_calls(new)
        if capability >= 89:
            yield "round rows", partial(fp8.round_rows, new(4, 4096), new(4096), 1e-5)
            yield "round gated rows", partial(fp8.round_rows, new(4, 28672), gated=True)


def rank_calls(new: Callable[..., Tensor]) -> Iterator[tuple[str, Callable[[], object]]]:
    """What ranks exchange."""
    residual, no_count = new(4, 4096), torch.zeros(2, dtype=torch.int32)
    peers = Peers(0, index(2), index(2), 1 << 20, no_count)
    for rows in (4, 32, 128):
        part = new(rows, 4096)
        yield f"sum of ranks {rows}", partial(peer_sums.add_sum, part, peers, part)
        yield f"columns of ranks {rows}", partial(peer_sums.gather_columns, part, peers)
    yield "sum of ranks added", partial(peer_sums.add_sum, residual, peers, residual, residual, new(4096))
    norm = Norm(new(4096), 1e-5)
    yield "sum and norm", partial(peer_sums.add_sum_and_normalize, residual, peers, residual, norm, new(4096))
    if residual.itemsize == 2:
        parts = torch.empty(2, 4, 4096)
        yield "sum of parts and norm", partial(peer_sums.add_sum_and_normalize, parts, peers, residual, norm)
        yield "sum of parts", partial(peer_sums.add_sum, parts, peers, residual, residual)
    yield "rows of ranks", partial(peer_sums.take_rows, index(3), new(99, 4096), 7, peers)
    for name, move in (("sent", peer_stages.send), ("received", peer_stages.receive)):
        yield f"{name} activations", partial(move, residual, Link(1 << 40, 1 << 40, 1 << 20, no_count))


def step_calls(new: Callable[..., Tensor]) -> Iterator[tuple[str, Callable[[], object]]]:
    """What begins and ends a step."""
    step, last, tables = torch.zeros(99, dtype=torch.int32), index(5), torch.zeros(5, 8, dtype=torch.int32)
    yield "unpack", partial(step_io.unpack, step, last, last, tables, step_io.step_inputs(step, 9, 2, 2, tables), 16)
    guessed = step_io.step_inputs(step, 8, 2, 8, tables, guesses=True)
    own = torch.zeros(5, 8, dtype=torch.int32)
    yield "unpack guesses", partial(step_io.unpack, step, last, last, tables, guessed, 16, own)
    yield "advance", partial(draft_pass.advance, index(2), index(2), last, step, step)
    yield "follow", partial(draft_pass.follow, step, (8, 2, 8), 2, step[:2], last, own, step, 2)
    begun = step, (8, 2, 8), 2, step[:2], last, own, step, 2, 4, 0, 7
    yield "begin masks", partial(parallel_draft.begin, *begun)
    yield "store guesses", partial(parallel_draft.store, index(8), index(8), own, 4)
    yield "keep states", partial(hidden_states.keep, new(9, 4096), index(9), new(32, 3 * 4096), 4096)
    yield "states before", partial(hidden_states.before, guessed, new(32, 3 * 4096), 16)
    yield "finite", partial(step_io.finite_lines, new(9, 4096), step[:9])
    yield "mask", partial(token_mask.mask_logits, new(4, 1024), index(2), torch.zeros(2, 32, dtype=torch.int32))


def sampling_calls(new: Callable[..., Tensor]) -> Iterator[tuple[str, Callable[[], object]]]:
    """From logits to tokens, and the settings of slots."""
    step, last, tables = torch.zeros(99, dtype=torch.int32), index(5), torch.zeros(5, 8, dtype=torch.int32)
    for vocab in (None, 1024):
        state = slot_settings(4, "cpu", vocab)
        yield f"sample {vocab}", partial(sampling.sample, new(2, 1024), state, index(2), index(2))
        places = torch.zeros(2, dtype=torch.int32)
        yield f"sample guesses {vocab}", partial(sampling.sample, new(2, 1024), state, index(2), index(2),
                                                 guesses=index(2), places=places)  # fmt: skip
        for forced in (None, 0.5):
            yield f"accept {vocab} {forced}", partial(
                guesses.accept, index(2), new(2), index(2), step[:2], index(2), index(2), state, last, step[2:3],
                forced,
            )  # fmt: skip
    yield "edit", partial(slot_edits.edit_slots, step, tables, slot_settings(4, "cpu"))
    yield "keep", partial(step_io.store_sampled, index(2), new(2), new(2), index(2), last, step[:6].view(3, 2))
    yield (
        "top",
        partial(top_logprobs.top_logprobs, new(2, 1024), new(2), top_logprobs.top_buffers(2, 1024, 20, new(1).device)),
    )


def fused_calls(new: Callable[..., Tensor], capability: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Queries, keys and values with their rotation, the gate of many rows, and products on a Hopper, as they serve."""
    tile = dense.tile_for(128, 14336, 4096, True, new(1).dtype)
    yield "linear gated 128", partial(dense.linear, new(128, 4096), new(28672, 4096), gated=True, tile=tile)
    for rows in (16, 32):
        tile = dense.tile_for(rows, 4096, 14336, False, new(1).dtype)
        x, residual = new(rows, 14336), new(rows, 4096)
        yield f"linear down {rows}", partial(dense.linear, x, new(4096, 14336), residual=residual, tile=tile)
    hopper = capability == 90
    if hopper:
        for rows, dim in ((8, 128), (1, 64)):
            plan = short_prefill.ShortPrefillPlan(
                *(torch.zeros(n, dtype=torch.int32) for n in (rows + 1, rows, (rows, 8)))
            )
            arguments = new(128, 48, dim)[:, :32], new(64, 16, 2, 8, dim), plan
            if arguments[0].itemsize == 2:
                yield f"short prefill {rows}", partial(attention.attention, *arguments, PLAIN)
                yield f"capped short prefill {rows}", partial(attention.attention, *arguments, CAPPED)
    for rows, dim in ((1, 64), (8, 128), (32, 128)):
        x, angles, pool = new(rows, 4096), new(99, 1, dim), new(64, 16, 2, 8, dim)
        row = dense_gemv.shape_for(48 * dim, 4096, False) if hopper and rows == 1 else None
        for shape in (
            qkv_rope.tile_for(x, 48 * dim, dim), dense_hopper.rotated_shape_for(rows, dim) if hopper else None, row
        ):  # fmt: skip
            if shape is not None:
                yield f"qkv {rows} {dim}", partial(
                    qkv_rope.rotated_qkv, x, new(48 * dim, 4096), new(48 * dim), angles, angles, index(rows), pool,
                    index(rows), 32, shape,
                )  # fmt: skip
        shape = dense_hopper.rotated_shape_for(rows, dim) if hopper else None
        if shape is not None:
            yield f"qkv norm {rows}", partial(
                qkv_rope.rotated_qkv, x, new(48 * dim, 4096), None, angles, angles, index(rows), pool, index(rows), 32,
                shape, Norm(new(40, dim), 1e-6),
            )  # fmt: skip
    shapes = ((4096, 14336, False), (2048, 2048, False), (8192, 2048, True), (64, 64, False))
    for n, k, gated in shapes if hopper else ():
        shape = dense_hopper.shape_for(8, n, k, gated)
        x, weight, added = new(8, k), new(2 * n if gated else n, k), None if gated else new(8, n)
        yield f"hopper product {n}", partial(dense.linear, x, weight, residual=added, gated=gated, tile=shape)
    for n, k, gated in ((2048, 4096, False), (8192, 8192, False), (16384, 16384, False), (14336, 4096, True)) * hopper:
        row, added = dense_gemv.shape_for(n, k, gated), None if gated else new(1, n)
        assert row is not None
        weight = new(2 * n if gated else n, k)
        yield f"row {n} {k}", partial(dense_gemv.linear, new(1, k), weight, None, added, gated, new(1, n), row)
    yield (
        "parts 8",
        partial(dense.parts, new(8, 2048), new(4096, 2048), dense.tile_for(8, 4096, 2048, False, new(1).dtype)),
    )
    if hopper:
        shape = dense_hopper.shape_for(8, 4096, 7168, False)
        yield "hopper parts", partial(dense.parts, new(8, 7168), new(4096, 7168), shape)


def quantized_calls(new: Callable[..., Tensor]) -> Iterator[tuple[str, Callable[[], object]]]:
    octets = torch.zeros(256, 512, dtype=torch.uint8)
    weights: dict[str, quantized_weights.Int4Weight | quantized_weights.Int8Weight | quantized_weights.Fp8Weight] = {
        "int8": quantized_weights.Int8Weight(octets.view(torch.int8), torch.ones(256, 1)),
        "int8 64": quantized_weights.Int8Weight(octets.view(torch.int8), torch.ones(256, 8)),
        "int8 128": quantized_weights.Int8Weight(octets.view(torch.int8), torch.ones(256, 4)),
        "fp8": quantized_weights.Fp8Weight(octets.view(quantized_weights.FP8), torch.ones(256, 1)),
        "fp8 blocks": quantized_weights.Fp8Weight(octets.view(quantized_weights.FP8), torch.ones(2, 4)),
    }
    for group, zero in ((128, False), (64, True), (32, False)):
        zeros = octets[:, : 512 // group] if zero else None
        weights[f"int4 {group}"] = quantized_weights.Int4Weight(octets[:, :256], new(256, 512 // group), zeros, group)
    normal = quantized_weights.Nf4Weight(octets, torch.ones(4096), torch.ones(16))
    yield "dequantize nf4", partial(nf4.dequantize_nf4, normal, new(1).dtype)
    for number, (name, weight) in enumerate(weights.items()):
        laid = packed.pack_weight(weight)
        # Each kind of weight with the largest blocks and with one of the four smaller shapes.
        for rows, gated in ((200, False), ((1, False), (1, True), (64, False), (64, True))[number % 4]):
            x, residual = new(rows, 512), None if gated else new(rows, 256)
            call = partial(packed_gemm.linear_packed, x, laid, residual=residual, gated=gated)
            yield f"{name} gated {rows}" if gated else f"{name} {rows}", call
        yield f"dequantize {name}", partial(packed.dequantize, laid, x.dtype)


def expert_calls(new: Callable[..., Tensor]) -> Iterator[tuple[str, Callable[[], object]]]:
    """Routing, and products of experts in each format, for few and many tokens."""
    octets, dtype = torch.zeros(256, 512, dtype=torch.uint8), new(1).dtype
    kinds: dict[str, quantized_weights.Weight] = {
        "plain": new(256, 512),
        "int8": quantized_weights.Int8Weight(octets.view(torch.int8), torch.ones(256, 1)),
        "fp8": quantized_weights.Fp8Weight(octets.view(quantized_weights.FP8), torch.ones(256, 1)),
        "fp8 blocks": quantized_weights.Fp8Weight(octets.view(quantized_weights.FP8), torch.ones(2, 4)),
        "int4": quantized_weights.Int4Weight(octets[:, :256], new(256, 4), None, 128),
        "int4 zeros": quantized_weights.Int4Weight(
            octets[:, :256], new(256, 16), octets[:, :16], 32, torch.zeros(512, dtype=torch.int32)
        ),
    }
    sizes = {"int8": (1,), "fp8": (600,), "fp8 blocks": (40,), "int4": (1,), "int4 zeros": (600,)}
    for tokens, chosen in ((1, 2), (40, 2), (600, 8)):
        order, offsets = (torch.zeros(count, dtype=torch.int32) for count in (tokens * chosen, 9))
        routes = Routes(torch.ones(tokens, chosen), order, offsets, 8)
        yield f"route {tokens}", partial(routing.route, new(tokens, 8), chosen, tokens > 1)
        for kind, weight in kinds.items():
            if kind != "plain" and tokens not in sizes[kind]:
                continue
            stack = ExpertStack(8, 256, 512, dtype)
            stack.keep(0, weight)
            yield (
                f"experts {kind} {tokens}",
                partial(grouped.multiply, new(tokens, 512), stack, routes, divide=chosen, invariant=tokens == 40),
            )
            if kind in ("plain", "int4") and tokens == 1:
                gated = partial(grouped.multiply_activate, new(tokens, 512), stack, routes, Activation.GATED_SILU)
                yield f"experts gated {kind} {tokens}", partial(gated, divide=chosen)
    yield "route 128", partial(routing.route, new(64, 128), 8, False)
    for tokens in (1, 64):
        yield f"route own {tokens}", partial(routing.route, new(tokens, 128), 8, True, range(64, 128))
    wide = ExpertStack(8, 256, 2048, dtype)
    wide.keep(0, quantized_weights.Int8Weight(torch.zeros(256, 2048, dtype=torch.int8), torch.ones(256, 1)))
    routes = Routes(torch.ones(1, 2), torch.zeros(2, dtype=torch.int32), torch.zeros(9, dtype=torch.int32), 8)
    yield "experts added in parts", partial(grouped.multiply_add, new(1, 256), new(2, 2048), wide, routes)
    added = partial(grouped.add_weighted, new(4, 2048), new(32, 2048), torch.ones(4, 8))
    yield "experts added", added
    yield "own experts added", partial(added, partial=True)


def fp8_expert_calls(new: Callable[..., Tensor]) -> Iterator[tuple[str, Callable[[], object]]]:
    """Products of experts of rows rounded to fp8, with each tile."""
    octets, dtype = torch.zeros(256, 512, dtype=torch.uint8), new(1).dtype
    stack = ExpertStack(8, 256, 512, dtype)
    stack.keep(0, quantized_weights.Fp8Weight(octets.view(quantized_weights.FP8), torch.ones(256, 1)))
    for tokens, gates in ((160, ("", "silu")), (320, ("silu", "gelu")), (600, ("", "silu"))):
        order, offsets = (torch.zeros(count, dtype=torch.int32) for count in (2 * tokens, 9))
        routes = Routes(torch.ones(tokens, 2), order, offsets, 8)
        rounded = torch.zeros(tokens, 512, dtype=quantized_weights.FP8), torch.ones(tokens, 1)
        for gate in gates:
            call = partial(grouped_fp8.multiply, rounded, stack, routes, dtype, divide=2, gate=gate)
            yield f"experts of rounded rows {gate or 'plain'} {tokens}", call


def one_token_calls(new: Callable[..., Tensor]) -> Iterator[tuple[str, Callable[[], object]]]:
    """The experts of one token, in the shape of Qwen3-30B-A3B."""
    row, logits = new(1, 2048), new(1, 128)
    yield "logits of one token", partial(one_token.norm_router, row, Norm(new(2048), 1e-6), new(128, 2048), 8, True)
    for kind, experts, width, k, chosen in (("narrow", 128, 768, 2048, 8), ("wide", 8, 14336, 4096, 2)):
        first = dense_gemv.experts_shape_for(2 * width, k, True, chosen)
        second = dense_gemv.experts_shape_for(k, width, False, chosen)
        assert first is not None
        assert second is not None
        row, up, down, logits = new(1, k), new(experts, 2 * width, k), new(experts, k, width), new(1, experts)
        hidden = new(1, chosen * width)
        yield f"{kind} experts gated", partial(dense_gemv.experts_up, row, up, logits, chosen, True, first)
        yield f"{kind} experts added", partial(dense_gemv.experts_down, row, hidden, down, logits, chosen, second)


def text_calls(new: Callable[..., Tensor]) -> Iterator[tuple[str, Callable[[], object]]]:
    """The kernels of encoders, in the shapes of MiniLM and BERT; for wide heads the largest programs."""
    layer_norm = Norm(new(384), 1e-12, NormKind.LAYER, new(384))
    ids, tables = torch.zeros(99, dtype=torch.int32), (new(99, 384), new(99, 384), new(2, 384))
    yield "embed texts", partial(texts.embed_texts, ids, ids, ids, *tables, layer_norm)
    yield "add layer norm", partial(norm.add_layer_norm, new(99, 384), new(384), new(99, 384), layer_norm)
    for pooling in Pooling:
        yield f"pool texts {pooling}", partial(texts.pool_texts, new(99, 384), ids[:5], pooling)
    exact = new(1).dtype == torch.float32
    for tokens, heads, dim in ((4096, 12, 64),) if exact else ((64, 12, 32), (4096, 12, 64), (4096, 8, 128)):
        plan = packed_texts.TilePlan(ids.view(-1, 3), packed_texts.shape_for(tokens, dim, new(1).dtype))
        yield f"packed texts {tokens} {dim}", partial(packed_texts.attend_packed, new(99, 3 * heads * dim), plan, heads)


def resident_calls(new: Callable[..., Tensor]) -> Iterator[tuple[str, Callable[[], object]]]:
    """Products of MiniLM whose weights stay in shared memory."""
    for gelu in (False, True):
        given = new(16384, 384), new(1536, 384), new(1536)
        yield f"resident product {gelu}", partial(resident_hopper.linear, *given, gelu=gelu)
    layer_norm = Norm(new(384), 1e-12, NormKind.LAYER, new(384))
    for bias in (None, new(384)):
        rows = new(16384, 384), new(384, 384), bias, new(16384, 384), layer_norm
        yield f"resident norm {bias is not None}", partial(resident_norm_hopper.linear_add_norm, *rows)


def attend(
    qkv: Tensor,
    pool: Tensor,
    window: int | None,
    invariant: bool = False,
    scales: Tensor | None = None,
    short_tokens: int = 1,
    scores: Scores = PLAIN,
) -> None:
    kv_heads, dim = pool.shape[3:]
    heads = qkv.shape[1] - 2 * kv_heads
    starts, contexts, tables = (torch.zeros(shape, dtype=torch.int32) for shape in ((33,), (32,), (32, 8)))
    config = attention.config_for(dim, qkv.dtype, 32, invariant, pool.dtype)
    plan = attention.plan_attention(
        starts,
        contexts,
        tables,
        heads,
        kv_heads,
        dim,
        kv_pages.block_size_of(pool),
        qkv.dtype,
        window,
        short_tokens,
        3 if short_tokens == 1 else 0,
        config,
        scores.is_plain,
    )
    attention.attention(qkv[:, :heads], pool, plan, scores, scales)


def compile_prefill_hopper(record: CompileRecord, dim: int, windowed: bool, stored: torch.dtype) -> Compiled:
    """Compiles the attention of prompts, for capability 9.0 only."""
    from kernels.attention import prefill_hopper

    fixed: dict[str, int | None] = {
        "SHARE": 4, "D": dim, "P": 16, "ROWS": prefill_hopper.ROWS, "TILE": prefill_hopper.TILE,
        "PAGE": prefill_hopper.PAGE, "STAGES": prefill_hopper.STAGES, "RING": prefill_hopper.RING,
        "BLOCK_R": 128, "WINDOW": windowed,
    }  # fmt: skip
    if stored != kv_pages.FP8:
        fixed["head_scales"] = None
    kinds = dict.fromkeys(("q", "out"), "*bf16") | dict.fromkeys(("starts", "contexts", "tables"), "*i32")
    kind = mangle_type(torch.empty(0, dtype=stored))[1:]
    kinds["pool"] = f"tensordesc<{kind}{prefill_hopper.box(stored, dim)},{prefill_hopper.layout(stored, dim)!r}>"
    kinds |= {"scale": "fp32", "head_scales": "*fp32"}
    return compile_gluon(record, prefill_hopper.prefill_hopper_kernel, fixed, kinds, {"num_warps": 4})


def compile_decode(
    record: CompileRecord, dim: int, stored: torch.dtype, shape: attention.DecodePrograms, share: int, tokens: int
) -> Compiled:
    """Compiles the attention of few short rows, for capability 9.0 only. share: query heads per key/value head; tokens:
    most of a row."""
    from kernels.attention import decode_hopper

    fixed: dict[str, int | None] = {
        "K": 8, "SHARE": share, "D": dim, "P": 16, "LINES": triton.next_power_of_2(share * tokens),
        "TILE": shape.keys, "STAGES": shape.stages, "WARPS": shape.warps,
    }  # fmt: skip
    if stored != kv_pages.FP8:
        fixed["head_scales"] = None
    kinds = dict.fromkeys(("q", "out"), "*bf16") | dict.fromkeys(("tables", "records", "arrived"), "*i32")
    kinds |= {"kv": mangle_type(torch.empty(0, dtype=stored)), "parts": "*fp32", "head_scales": "*fp32"}
    return compile_gluon(
        record, decode_hopper.decode_hopper_kernel, fixed, kinds | {"scale": "fp32"}, {"num_warps": shape.warps}
    )


def compile_gluon(
    record: CompileRecord, kernel: Any, fixed: dict[str, Any], kinds: dict[str, str], options: dict[str, Any]
) -> Compiled:
    """Compiles a Gluon kernel, for capability 9.0 only. kinds: types of arguments that are not `fixed` nor int32."""
    from triton.experimental.gluon._runtime import GluonASTSource

    names = [parameter.name for parameter in kernel.params]
    signature = {name: "constexpr" if name in fixed else kinds.get(name, "i32") for name in names}
    constants = {(place,): fixed[name] for place, name in enumerate(names) if name in fixed}
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if signature[name][0] == "*"}
    source = GluonASTSource(kernel, signature, constants, aligned)
    return record.compile(source, GPUTarget("cuda", 90, 32), options)


def compile_packed_hopper(record: CompileRecord) -> Iterator[tuple[str, Compiled]]:
    """Products with packed weights, in shapes that are served."""
    from kernels.linear import packed_hopper
    from kernels.linear.gluon_common import NO_POOL
    from kernels.linear.packed_hopper_kernel import packed_hopper_kernel

    # With these inputs few rows are multiplied here, too, not by the kernel of one row.
    octets, bf16 = torch.zeros(768, 1152, dtype=torch.uint8), torch.bfloat16
    int4 = quantized_weights.Int4Weight(octets[:, :576], torch.ones(768, 9, dtype=bf16), None, 128)
    rows_fp8 = quantized_weights.Fp8Weight(octets.view(quantized_weights.FP8), torch.ones(768, 1))
    small = quantized_weights.Int4Weight(octets[:64, :64], torch.ones(64, 1, dtype=bf16), None, 128)
    groups = quantized_weights.Int8Weight(octets.view(torch.int8), torch.ones(768, 9))
    Weight = quantized_weights.Int4Weight | quantized_weights.Int8Weight | quantized_weights.Fp8Weight
    Case = tuple[str, Weight, int, bool, bool, torch.dtype | None]
    cases: list[Case] = [
        ("int4 gated", int4, 2, True, False, None), ("int4 rotated", int4, 2, False, False, bf16),
        ("int4 zeros", replace(int4, zero=octets[:, :9]), 64, False, False, None),
        ("int4", int4, 32, False, False, None), ("int4 of one chunk", small, 1, False, False, None),
        ("fp8", rows_fp8, 8, False, False, None), ("fp8 rotated", rows_fp8, 8, False, False, quantized_weights.FP8),
        ("fp8 rounded", rows_fp8, 64, False, True, None), ("int8 groups gated", groups, 8, True, False, None),
        ("int8 groups", groups, 200, False, False, None), ("int8 groups rotated", groups, 32, False, False, bf16),
    ]  # fmt: skip
    for name, weight, rows, gated, rounded, stored in cases:
        laid = packed.pack_weight(weight)
        n, k = laid.shape
        x = torch.zeros(rows, k, dtype=quantized_weights.FP8 if rounded else bf16)
        out = torch.zeros(rows, n // 2 if gated else n, dtype=bf16)
        shape = packed_hopper.shape_for(laid, rows, gated, rounded)
        assert isinstance(shape, packed_hopper.Shape)
        scales, residual = torch.ones(rows, 1) if rounded else None, None if gated or stored else out
        pool = NO_POOL
        if stored:
            kv_pool, angles = torch.zeros(9, 16, 2, 1, 128, dtype=stored), torch.zeros(9, 1, 128, dtype=bf16)
            pool = {"cos": angles, "sin": angles, "positions": index(rows), "kv": kv_pool, "slot_mapping": index(rows)}
            pool |= {"H": 4, "G": 1}
        _, given = packed_hopper.launch(x, laid, None, residual, gated, out, shape, scales, 132, pool)
        yield f"{name} {rows}", compile_given(record, packed_hopper_kernel, given)


RowWeight = quantized_weights.Int4Weight | quantized_weights.Int8Weight | quantized_weights.Fp8Weight


def row_cases() -> Iterator[tuple[str, RowWeight, int, bool, int]]:
    """Weights for products of a few rows, some with as many inputs as their shape takes; the rows, whether they are
    gated, and the head dimension of queries, keys and values or 0."""
    from kernels.linear.gemv.packed import (
        FEWEST_INPUTS_OF_MANY_TILES,
        LONG_INPUTS,
        MAX_INPUTS,
        MAX_INPUTS_OF_FOUR_BITS,
    )

    def int4(n: int, k: int, zeros: bool = False) -> quantized_weights.Int4Weight:
        octets, scale = torch.zeros(n, k // 2, dtype=torch.uint8), torch.ones(n, k // 128, dtype=torch.bfloat16)
        return quantized_weights.Int4Weight(octets, scale, octets[:, : k // 128] if zeros else None, 128)

    def fp8(n: int, k: int, *scales: int) -> quantized_weights.Fp8Weight:
        return quantized_weights.Fp8Weight(torch.zeros(n, k, dtype=quantized_weights.FP8), torch.ones(scales or (n, 1)))

    yield "int4 gated", int4(2176, 2048), 1, True, 0
    yield "int4 zeros", int4(2176, 2048, zeros=True), 1, False, 0
    yield "int4 of float32 scales", replace(coarse := int4(2176, 2048), scale=coarse.scale.float()), 1, False, 0
    yield "int4 of few tiles in short boxes", int4(256, MAX_INPUTS[2] - 1024), 1, False, 0
    yield "int4 of few tiles and most inputs", int4(256, MAX_INPUTS[2]), 1, False, 0
    yield "int4 in short boxes", int4(2176, MAX_INPUTS[2] - 1024), 1, False, 0
    yield "int4 of most inputs", int4(2176, MAX_INPUTS[2]), 1, False, 0
    yield "int4 rotated in one round", int4(34 * 128, MAX_INPUTS[3]), 1, False, 128
    yield "int4 of most inputs, two rows", int4(256, MAX_INPUTS_OF_FOUR_BITS // 2), 2, False, 0
    yield "int4 zeros, three rows", int4(256, 4096, zeros=True), 3, False, 0
    yield "int4 rotated, eight rows", int4(512, 2048), 8, False, 64
    yield "fp8 rotated", fp8(768, 2048), 1, False, 128
    short = LONG_INPUTS[0][0] - 1024
    yield "fp8 in one round", fp8(6336, short), 1, False, 0
    yield "fp8 in some rounds", fp8(6400, short), 1, True, 0
    yield "fp8 of long inputs", fp8(256, LONG_INPUTS[0][-1]), 1, False, 0
    yield "fp8 in one round, two rows", fp8(6336, 5120), 2, False, 64
    yield "fp8 of long inputs, two rows", fp8(256, LONG_INPUTS[0][0]), 2, False, 0
    yield "fp8 of most inputs, two rows", fp8(256, MAX_INPUTS[2] // 2), 2, False, 0
    yield "fp8 in some rounds, four rows", fp8(6400, FEWEST_INPUTS_OF_MANY_TILES), 4, True, 0
    blocks = LONG_INPUTS[128][-1]
    yield "fp8 blocks of long inputs", fp8(256, blocks, 2, blocks // 128), 1, True, 0
    octets = torch.zeros(768, 2048, dtype=torch.int8)
    yield "int8 groups", quantized_weights.Int8Weight(octets, torch.ones(768, 16)), 1, False, 0
    yield "int8 groups, eight rows", quantized_weights.Int8Weight(octets, torch.ones(768, 16)), 8, True, 0


def compile_packed_gemv(record: CompileRecord) -> Iterator[tuple[str, Compiled]]:
    """Products of one row and of a few, in shapes that are served."""
    from kernels.linear.gemv import packed as packed_gemv
    from kernels.linear.gemv.kernel import gemv_kernel
    from kernels.linear.gluon_common import NO_POOL, pool_arguments

    for name, weight, rows, gated, dim in row_cases():
        laid = packed.pack_weight(weight)
        n, k = laid.shape
        x, out = (torch.zeros(rows, width, dtype=torch.bfloat16) for width in (k, n // 2 if gated else n))
        shape = packed_gemv.shape_for(laid, rows)
        assert shape is not None
        angles, kv_pool = (torch.zeros(*size, dim, dtype=torch.bfloat16) for size in ((9, 1), (9, 16, 2, 1)))
        pool = pool_arguments(angles, angles, index(rows), kv_pool, index(rows), n // dim - 2) if dim else NO_POOL
        added = None if gated or dim else out
        _, given = packed_gemv.launch(x, laid, None, added, gated, out, shape, 132, pool)
        compiled = compile_given(record, gemv_kernel, given)
        products = 8 * shape.chunks // shape.warps
        assert compiled.mma_sync == products, "each warp multiplies a chunk at a time"
        # A multiprocessor reserves 1 KiB for each of its programs.
        assert shape.per_sm * (compiled.shared + 1024) <= MOST_SHARED[90] + 1024, f"{name}: too few fit"
        yield name, compiled


def compile_listed_gemv(record: CompileRecord) -> Iterator[tuple[str, Compiled]]:
    """Products of the experts of one token, in shapes that are served."""
    from kernels.linear.gemv import packed as packed_gemv
    from kernels.linear.gemv.kernel import gemv_kernel

    fp8, blocks, int4, coarse = "fp8", "blocks", "int4", "int4 of float32 scales"
    cases = (
        (fp8, 1536, 2048, 8, True), (fp8, 2048, 768, 8, False), (int4, 256, 4096, 2, True),
        (int4, 256, 14336, 2, False), (coarse, 256, 4096, 2, True), (blocks, 256, 4096, 2, True),
        (blocks, 256, 2048, 2, False),
    )  # fmt: skip
    for kind, n, k, chosen, gated in cases:
        four_bits = kind in (int4, coarse)
        octets = torch.zeros(n, k // 2 if four_bits else k, dtype=torch.uint8)
        weight: quantized_weights.Weight
        if four_bits:
            scale = torch.ones(n, k // 128, dtype=torch.float32 if kind == coarse else torch.bfloat16)
            weight = quantized_weights.Int4Weight(octets, scale, None, 128)
        else:
            scale = torch.ones(n, 1) if kind == fp8 else torch.ones(n // 128, k // 128)
            weight = quantized_weights.Fp8Weight(octets.view(quantized_weights.FP8), scale)
        stack = ExpertStack(2, n, k, torch.bfloat16)
        stack.keep(0, weight)
        laid, logits = stack.weight, torch.zeros(1, 128 if chosen == 8 else 8, dtype=torch.bfloat16)
        assert isinstance(laid, packed.PackedWeight)
        shape = packed_gemv.experts_shape_for(laid, gated, chosen)
        assert shape is not None
        x = torch.zeros(1, k if gated else k * chosen, dtype=torch.bfloat16)
        out = torch.zeros(1, chosen * n // 2 if gated else n, dtype=torch.bfloat16)
        added = None if gated else out
        _, given = packed_gemv.launch_experts(x, laid, added, out, logits, chosen, not gated, shape, 132)
        compiled = compile_given(record, gemv_kernel, given)
        assert compiled.mma_sync == 8 * shape.chunks // shape.warps, "each warp multiplies a chunk at a time"
        assert shape.per_sm * (compiled.shared + 1024) <= MOST_SHARED[90] + 1024, f"{kind}: too few fit"
        yield f"{kind} experts {'gated' if gated else 'added'}", compiled


def compile_packed_prefill(record: CompileRecord) -> Iterator[tuple[str, Compiled]]:
    """Products of many rows with weights of four bits, in shapes that are served."""
    from kernels.linear import packed_prefill
    from kernels.linear.packed_prefill_kernel import packed_prefill_kernel

    octets = torch.zeros(512, 1024, dtype=torch.uint8)
    int4 = quantized_weights.Int4Weight(octets[:, :512], torch.ones(512, 8, dtype=torch.bfloat16), None, 128)
    zeros = replace(int4, zero=octets[:, :8])
    narrow, middle, wide, tall = (getattr(packed_prefill, name) for name in ("NARROW", "MIDDLE", "WIDE", "TALL"))
    cases = (
        ("gated", int4, 100, True, narrow),
        ("gated", int4, 384, True, middle),
        ("zeros", zeros, 320, False, tall),
        ("zeros", zeros, 9000, False, wide),
    )
    for name, weight, rows, gated, shape in cases:
        x, out = (torch.zeros(rows, width, dtype=torch.bfloat16) for width in (1024, 256 if gated else 512))
        added = None if gated else out
        _, given = packed_prefill.launch(x, packed.pack_weight(weight), None, added, gated, out, shape, 132)
        compiled = compile_given(record, packed_prefill_kernel, given)
        products = 2 * 8 * (2 if shape.tail else 1)
        assert compiled.wgmma == products, "products of both warpgroups, each but once"
        yield f"int4 {name} {rows}", compiled


def compile_given(record: CompileRecord, kernel: Any, given: dict[str, Any]) -> Compiled:
    """Compiles a Gluon kernel for the arguments of one launch."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    boxes = {place: value for place, value in given.items() if isinstance(value, TensorDescriptor)}
    options = {option: given[option] for option in ("num_warps", "maxnreg") if given.get(option)}
    kinds = {
        place: f"tensordesc<{mangle_type(box.base)[1:]}{list(box.block_shape)},{box.layout!r}>"
        for place, box in boxes.items()
    }
    kinds |= {place: mangle_type(value) for place, value in given.items() if isinstance(value, Tensor)}
    constant = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    free = {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
    fixed = {
        place: value
        for place, value in given.items()
        if place in constant or value is None or (isinstance(value, int) and value == 1 and place not in free)
    }
    return compile_gluon(record, kernel, fixed, kinds, options)


def compile_all(record: CompileRecord, capability: int, dtype: torch.dtype) -> list[str]:
    """One line for each kernel: its name and shared memory."""
    lines = []
    dependent = {"PDL": capability >= 90, "ASM": True}
    dense_programs, row_programs, resident_programs, norm_programs, adapter_programs = (
        mock.patch.object(module, name, return_value=132)
        for module, name in ((dense_hopper, "processors"), (dense_gemv, "processors"),
                             (resident_hopper, "processors"), (resident_norm_hopper, "processors"),
                             (fused, "_processors"))
    )  # fmt: skip
    split, experts, fp8_experts = (
        mock.patch.object(module, "shared_bytes", return_value=MOST_SHARED[capability])
        for module in (split_k, grouped, grouped_fp8)
    )
    with (
        dense_programs, row_programs, resident_programs, norm_programs, adapter_programs, split, experts, fp8_experts
    ):  # fmt: skip
        launches = [(name, *launch) for name, call in calls(dtype, capability) for launch in recorded(call)]
    if (capability, dtype) != WHOLE:
        chosen = [launch for launch in launches if launch[0] in EVERYWHERE]
        assert kinds(chosen) == kinds(launches), kinds(launches) - kinds(chosen)
        launches = chosen
    for name, kernel, arguments in launches:
        compiled = compile_launch(record, kernel, arguments | dependent, capability)
        assert compiled.shared <= MOST_SHARED[capability], f"{name}: {kernel.__name__}"
        lines.append(f"{name}: {kernel.__name__} shared {compiled.shared}")
    if (capability, dtype) == WHOLE:
        cases = (
            (64, False, dtype),
            (128, False, dtype),
            (128, True, dtype),
            (64, True, kv_pages.FP8),
            (128, False, kv_pages.FP8),
        )
        for dim, windowed, stored in cases:
            compiled = compile_prefill_hopper(record, dim, windowed, stored)
            assert compiled.shared <= MOST_SHARED[capability]
            lines.append(f"attention {dim} {stored}: prefill_hopper_kernel shared {compiled.shared}")
        decode = [
            (64, dtype, attention.HOPPER_DECODE[1], 4, 1),
            *((128, dtype, attention.HOPPER_DECODE[rows], 4, 1) for rows in (1, 16)),
            *((128, dtype, attention.HOPPER_GUESSES[rows], 4, 5) for rows in (1, 16)),
        ]
        decode += [
            (128, kv_pages.FP8, attention.HOPPER_DECODE_FP8[4], 4, 1),
            (128, kv_pages.FP8, attention.HOPPER_DECODE_FP8[4], 4, 9),
            (64, dtype, attention.HOPPER_DECODE[1], 1, 1),
            (128, dtype, attention.HOPPER_DECODE[1], 7, 1),
            (128, dtype, attention.HOPPER_GUESSES[16], 7, 9),
            *(
                (128, stored, attention.HOPPER_PIECES, share, 64 // share)
                for stored in (dtype, kv_pages.FP8)
                for share in (1, 4)
            ),
            (64, dtype, attention.HOPPER_PIECES, 4, 16),
        ]
        for dim, stored, programs, share, tokens in decode:
            compiled = compile_decode(record, dim, stored, programs, share, tokens)
            assert compiled.shared <= MOST_SHARED[capability]
            lines.append(f"attention {dim} {stored} {share} {tokens}: decode_hopper_kernel shared {compiled.shared}")
        for name, compiled in compile_packed_hopper(record):
            assert compiled.shared <= MOST_SHARED[capability], name
            lines.append(f"{name}: packed_hopper_kernel shared {compiled.shared}")
        for name, compiled in (*compile_packed_gemv(record), *compile_listed_gemv(record)):
            lines.append(f"{name}: gemv_kernel shared {compiled.shared}")
        for name, compiled in compile_packed_prefill(record):
            assert compiled.shared <= MOST_SHARED[capability], name
            lines.append(f"{name}: packed_prefill_kernel shared {compiled.shared}")
    return lines


if __name__ == "__main__":
    gc.disable()  # A fifth of the time, as compilers make many objects that live on.
    capability, kind, *fresh = sys.argv[1:]
    record = CompileRecord(f"sm_{capability}-{kind}", fresh == ["--fresh"])
    print(*compile_all(record, int(capability), getattr(torch, kind)), sep="\n")
    print(f"{len(record.used)} kernels, {record.compiled} compiled, the others remembered")
    if record.fresh:
        record.write()
