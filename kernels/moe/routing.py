"""Routing on the device: which experts compute which tokens, as `kernels.moe.reference` defines it, and the entries in
the order of their experts (a counting sort). Nothing is read by the host, so a CUDA graph can hold it.

    T tokens    E experts of a layer    k experts that compute a token    entry t * k + i: the i-th choice of token t
    O own experts: those from number `first_own` on, whose weights this rank has; others have no entries
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import launch_options, wait
from kernels.moe.reference import Routes

CHUNK = 128
"""Entries that a program of the sort places."""
FEW = 256
"""Entries up to which one program does it all."""


@triton.jit(do_not_specialize=["T", "first_own"])
def choose_experts_kernel(
    logits,  # [T, E]
    ids,  # int32 [T, k] out: numbers among the own experts, -1 for others
    weights,  # float32 [T, k] out
    T, stride, first_own,
    E: tl.constexpr, BLOCK_E: tl.constexpr, OWN: tl.constexpr, CHOSEN: tl.constexpr, NORMALIZED: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program chooses the experts of ROWS tokens."""
    wait(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    choice = _choose(logits, weights, rows, T, stride, first_own, E, BLOCK_E, OWN, CHOSEN, NORMALIZED)
    number = tl.arange(0, BLOCK_E) - first_own
    number = tl.where((number >= 0) & (number < OWN), number, -1)
    numbers = tl.broadcast_to(number[None, :], [ROWS, BLOCK_E])
    tl.store(ids + rows[:, None] * CHOSEN + choice, numbers, mask=choice >= 0)


@triton.jit(do_not_specialize=["T", "first_own"])
def route_few_kernel(
    logits,  # [T, E]
    weights,  # float32 [T, k] out
    order,  # int32 [T * k] out
    offsets,  # int32 [O + 1] out
    T, stride, first_own,
    E: tl.constexpr, BLOCK_E: tl.constexpr, OWN: tl.constexpr, CHOSEN: tl.constexpr, NORMALIZED: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program chooses the experts of all tokens and places their entries. ROWS >= T."""
    wait(PDL)
    rows = tl.arange(0, ROWS)
    choice = _choose(logits, weights, rows, T, stride, first_own, E, BLOCK_E, OWN, CHOSEN, NORMALIZED)
    number = tl.arange(0, BLOCK_E) - first_own
    own = (number >= 0) & (number < OWN)
    has = (choice >= 0) & own[None, :]  # A token chooses an expert once, so its entries are in the order of the tokens.
    count = tl.sum(has.to(tl.int32), 0)
    first = tl.cumsum(count, 0) - count
    tl.store(offsets + number, first, mask=own)
    tl.store(offsets + OWN, tl.sum(count))
    place = first[None, :] + tl.cumsum(has.to(tl.int32), 0) - 1
    tl.store(order + place, rows[:, None] * CHOSEN + choice, mask=has)


@triton.jit
def _choose(
    logits, weights, rows, T, stride, first_own,
    E: tl.constexpr, BLOCK_E: tl.constexpr, OWN: tl.constexpr, CHOSEN: tl.constexpr, NORMALIZED: tl.constexpr,
):  # fmt: skip
    """Which choice of a token an expert is, -1 if none: [rows, BLOCK_E]. Stores the weights of the choices, 0 for those
    that are not own."""
    lanes = tl.arange(0, BLOCK_E)
    known = (rows < T)[:, None] & (lanes < E)[None, :]
    found = tl.load(logits + rows.to(tl.int64)[:, None] * stride + lanes[None, :], mask=known, other=0.0)
    keys = _keys(found, lanes, E)
    TAKEN: tl.constexpr = -(1 << 47) if found.dtype.primitive_bitwidth == 32 else -(1 << 31)  # below every key
    choice = tl.full(keys.shape, -1, tl.int32)
    for index in tl.static_range(CHOSEN):
        here = keys == tl.max(keys, 1)[:, None]
        choice = tl.where(here, index, choice)
        keys = tl.where(here, TAKEN, keys)
    # A token with numbers that are not finite has experts, too: its own row alone is spoilt.
    scores = found.to(tl.float32)
    scores = tl.where(scores == scores, tl.maximum(scores, -3e38), -3e38)
    scores = tl.where((lanes < E)[None, :], scores, float("-inf"))
    chances = tl.exp(scores - tl.max(scores, 1)[:, None])
    divisor = tl.sum(tl.where(choice >= 0, chances, 0.0) if NORMALIZED else chances, 1)
    choice = tl.where((rows < T)[:, None], choice, -1)
    own = (lanes >= first_own) & (lanes < first_own + OWN)
    target = weights + rows[:, None] * CHOSEN + choice
    tl.store(target, tl.where(own[None, :], chances / divisor[:, None], 0.0), mask=choice >= 0)
    return choice


@triton.jit
def _keys(scores, lanes, E: tl.constexpr):
    """Integers in the order of the scores [rows, BLOCK_E], of equal scores the lower expert last: one maximum finds the
    likeliest expert. What is no number comes before all numbers, and lanes from E on before these."""
    least: tl.constexpr = -(1 << scores.dtype.primitive_bitwidth - 1)
    if scores.dtype.primitive_bitwidth == 32:
        bits = scores.to(tl.int32, bitcast=True)
        bits = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    else:
        bits = scores.to(tl.int16, bitcast=True).to(tl.int32)
        bits = bits ^ ((bits >> 31) & 0x7FFF)
    number = scores.to(tl.float32)
    bits = tl.where(number == 0, 0, tl.where(number == number, bits, least + 1))
    bits = tl.where((lanes < E)[None, :], bits, least)
    return bits * 65536 + (65535 - lanes)[None, :]


@triton.jit(do_not_specialize=["entries"])
def count_kernel(
    ids,  # int32 [entries]
    counts,  # int32 [chunks, O] out
    entries,
    OWN: tl.constexpr, BLOCK_O: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program c counts the entries of each own expert in chunk c."""
    wait(PDL)
    places = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    lanes = tl.arange(0, BLOCK_O)
    expert = tl.load(ids + places, mask=places < entries, other=-1)
    count = tl.sum((expert[:, None] == lanes[None, :]).to(tl.int32), 0)
    tl.store(counts + tl.program_id(0) * OWN + lanes, count, mask=lanes < OWN)


@triton.jit(do_not_specialize=["entries", "chunks"])
def place_kernel(
    ids,  # int32 [entries]
    counts,  # int32 [chunks, O]
    order,  # int32 [entries] out
    offsets,  # int32 [O + 1] out
    entries, chunks,
    OWN: tl.constexpr, BLOCK_O: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program c places the entries of chunk c behind those of lower own experts and of earlier chunks."""
    wait(PDL)
    chunk = tl.program_id(0)
    lanes = tl.arange(0, BLOCK_O)
    whole = tl.zeros([BLOCK_O], tl.int32)
    earlier = tl.zeros([BLOCK_O], tl.int32)
    for other in range(chunks):
        count = tl.load(counts + other * OWN + lanes, mask=lanes < OWN, other=0)
        whole += count
        earlier += tl.where(other < chunk, count, 0)
    first = tl.cumsum(whole, 0) - whole
    if chunk == 0:
        tl.store(offsets + lanes, first, mask=lanes < OWN)
        tl.store(offsets + OWN, tl.sum(whole))
    places = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(ids + places, mask=places < entries, other=-1)
    same = (expert[:, None] == lanes[None, :]).to(tl.int32)
    target = tl.sum(same * (first + earlier + tl.cumsum(same, 0) - 1), 1)
    tl.store(order + target, places, mask=expert >= 0)


def route(logits_TE: Tensor, chosen: int, normalized: bool, own: range | None = None) -> Routes:
    """As `kernels.moe.reference.route`, in one launch or three; order and offsets are int32."""
    tokens, experts = logits_TE.shape
    own = range(experts) if own is None else own
    assert 0 < chosen <= experts, (chosen, experts)
    assert 0 <= own.start < own.stop <= experts, (own, experts)
    assert logits_TE.stride(1) == 1
    entries, device = tokens * chosen, logits_TE.device
    chunks = max(1, triton.cdiv(entries, CHUNK))
    weights = torch.empty(tokens, chosen, dtype=torch.float32, device=device)
    order = torch.empty(entries, dtype=torch.int32, device=device)
    offsets = torch.empty(len(own) + 1, dtype=torch.int32, device=device)
    options = launch_options(device)
    block, own_block = (max(16, triton.next_power_of_2(count)) for count in (experts, len(own)))
    choice = {
        "E": experts, "BLOCK_E": block, "OWN": len(own), "CHOSEN": chosen, "NORMALIZED": normalized, **options,
    }  # fmt: skip
    if entries <= FEW:
        rows = triton.next_power_of_2(max(1, tokens))
        route_few_kernel[(1,)](
            logits_TE, weights, order, offsets, tokens, logits_TE.stride(0), own.start, ROWS=rows, num_warps=8, **choice
        )
        return Routes(weights, order, offsets, experts)
    ids = torch.empty(tokens, chosen, dtype=torch.int32, device=device)
    counts = torch.empty(chunks, len(own), dtype=torch.int32, device=device)
    rows = max(1, 512 // block)
    choose_experts_kernel[(triton.cdiv(tokens, rows),)](
        logits_TE, ids, weights, tokens, logits_TE.stride(0), own.start, ROWS=rows, num_warps=4, **choice
    )
    sizes = {"OWN": len(own), "BLOCK_O": own_block, "CHUNK": CHUNK, "num_warps": 8}
    count_kernel[(chunks,)](ids, counts, entries, **sizes, **options)
    place_kernel[(chunks,)](ids, counts, order, offsets, entries, chunks, **sizes, **options)
    return Routes(weights, order, offsets, experts)
