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
    E: tl.constexpr, BLOCK_E: tl.constexpr, OWN: tl.constexpr, CHOSEN: tl.constexpr, BLOCK_K: tl.constexpr,
    NORMALIZED: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program chooses the experts of ROWS tokens, one choice after the other."""
    wait(PDL)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    _choose(logits, ids, weights, rows, T, stride, first_own, E, BLOCK_E, OWN, CHOSEN, BLOCK_K, NORMALIZED)


@triton.jit(do_not_specialize=["T", "first_own"])
def route_few_kernel(
    logits,  # [T, E]
    ids,  # int32 [T, k] out: numbers among the own experts, -1 for others
    weights,  # float32 [T, k] out
    order,  # int32 [T * k] out
    offsets,  # int32 [O + 1] out
    T, stride, first_own,
    E: tl.constexpr, BLOCK_E: tl.constexpr, OWN: tl.constexpr, BLOCK_O: tl.constexpr, CHOSEN: tl.constexpr,
    BLOCK_K: tl.constexpr, NORMALIZED: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program chooses the experts of all tokens and places their entries. ROWS >= T, CHUNK >= T * k."""
    wait(PDL)
    rows = tl.arange(0, ROWS)
    _choose(logits, ids, weights, rows, T, stride, first_own, E, BLOCK_E, OWN, CHOSEN, BLOCK_K, NORMALIZED)
    tl.debug_barrier()  # All threads of the program see what it has stored.
    places, lanes = tl.arange(0, CHUNK), tl.arange(0, BLOCK_O)
    expert = tl.load(ids + places, mask=places < T * CHOSEN, other=-1)
    same = (expert[:, None] == lanes[None, :]).to(tl.int32)
    count = tl.sum(same, 0)
    first = tl.cumsum(count, 0) - count
    tl.store(offsets + lanes, first, mask=lanes < OWN)
    tl.store(offsets + OWN, tl.sum(count))
    target = tl.sum(same * (first + tl.cumsum(same, 0) - 1), 1)
    tl.store(order + target, places, mask=expert >= 0)


@triton.jit
def _choose(
    logits, ids, weights, rows, T, stride, first_own,
    E: tl.constexpr, BLOCK_E: tl.constexpr, OWN: tl.constexpr, CHOSEN: tl.constexpr, BLOCK_K: tl.constexpr,
    NORMALIZED: tl.constexpr,
):  # fmt: skip
    """Stores the experts of these tokens, one choice after the other, and their weights. Of choices that are not own
    the expert is -1 and the weight 0."""
    lanes = tl.arange(0, BLOCK_E)
    known = (rows < T)[:, None] & (lanes < E)[None, :]
    place = rows.to(tl.int64)[:, None] * stride + lanes[None, :]
    scores = tl.load(logits + place, mask=known, other=float("-inf")).to(tl.float32)
    # A token with numbers that are not finite has experts, too: its own row alone is spoilt.
    scores = tl.where(known & (scores == scores), scores, float("-inf"))
    scores = tl.where(lanes[None, :] < E, tl.maximum(scores, -3e38), float("-inf"))
    top = tl.max(scores, 1)
    whole = tl.sum(tl.exp(scores - top[:, None]), 1)
    choice = tl.arange(0, BLOCK_K)[None, :]
    chances = tl.zeros_like(top)[:, None] + tl.zeros([1, BLOCK_K], tl.float32)
    own_chances = chances
    for index in tl.static_range(CHOSEN):
        best = tl.max(scores, 1)
        expert = tl.min(tl.where(scores == best[:, None], lanes[None, :], BLOCK_E), 1)
        number = expert - first_own
        own = (number >= 0) & (number < OWN)
        tl.store(ids + rows * CHOSEN + index, tl.where(own, number, -1), mask=rows < T)
        chances = tl.where(choice == index, tl.exp(best - top)[:, None], chances)
        own_chances = tl.where((choice == index) & own[:, None], chances, own_chances)
        scores = tl.where(lanes[None, :] == expert[:, None], float("-inf"), scores)
    divisor = tl.sum(chances, 1) if NORMALIZED else whole
    target = weights + rows[:, None] * CHOSEN + choice
    tl.store(target, own_chances / divisor[:, None], mask=(rows < T)[:, None] & (choice < CHOSEN))


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
    ids = torch.empty(tokens, chosen, dtype=torch.int32, device=device)
    weights = torch.empty(tokens, chosen, dtype=torch.float32, device=device)
    counts = torch.empty(chunks, len(own), dtype=torch.int32, device=device)
    order = torch.empty(entries, dtype=torch.int32, device=device)
    offsets = torch.empty(len(own) + 1, dtype=torch.int32, device=device)
    options = launch_options(device)
    block, own_block = (max(16, triton.next_power_of_2(count)) for count in (experts, len(own)))
    choice = {
        "E": experts, "BLOCK_E": block, "OWN": len(own), "CHOSEN": chosen,
        "BLOCK_K": triton.next_power_of_2(chosen), "NORMALIZED": normalized, **options,
    }  # fmt: skip
    if entries <= FEW:
        rows, places = triton.next_power_of_2(max(1, tokens)), max(16, triton.next_power_of_2(entries))
        route_few_kernel[(1,)](
            logits_TE, ids, weights, order, offsets, tokens, logits_TE.stride(0), own.start, BLOCK_O=own_block,
            ROWS=rows, CHUNK=places, num_warps=8, **choice,
        )  # fmt: skip
        return Routes(weights, order, offsets, experts)
    rows = max(1, 512 // block)
    choose_experts_kernel[(triton.cdiv(tokens, rows),)](
        logits_TE, ids, weights, tokens, logits_TE.stride(0), own.start, ROWS=rows, num_warps=4, **choice
    )
    sizes = {"OWN": len(own), "BLOCK_O": own_block, "CHUNK": CHUNK, "num_warps": 8}
    count_kernel[(chunks,)](ids, counts, entries, **sizes, **options)
    place_kernel[(chunks,)](ids, counts, order, offsets, entries, chunks, **sizes, **options)
    return Routes(weights, order, offsets, experts)
