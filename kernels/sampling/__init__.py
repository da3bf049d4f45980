"""Samples tokens from logits in two launches: penalties, logit bias, temperature, top-k, top-p, min-p, the keyed Gumbel
draw, log-probabilities. Knows rows and the slots that hold their settings, never jobs.

    S rows that sample    V vocabulary    C chunks of a row

`scan_kernel` reads each logit once and stores for each chunk the largest logit, the sum of exponentials and the best
token after noise. `choose_kernel` merges the chunks. If the best token survives the cut (top-k, top-p, min-p), it is
the result, because the cut only removes competitors; otherwise the chunks with values above the cut are read again. So
greedy rows and rows with temperature alone read their logits once, and rows with min-p nearly always once. The
thresholds of top-k and top-p are found by counting in sections of the value range, without a sort.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dependent_launch import launch_options, wait
from kernels.sampling.gumbel import best_of, uniform
from kernels.sampling.shaping import settings_of, shaped
from kernels.sampling.slot_settings import Samples, SlotSettings
from kernels.sampling.threshold import cut_of

STATS = 7
CHUNK = 512
"""Logits per program: those of one warp, so that no reduction waits for another warp."""


@triton.jit
def scan_kernel(
    logits,  # [S, V], rows `stride` apart
    slots,  # int64 [S]
    positions,  # int64 [S]
    temperatures, repetitions, presences, frequencies,  # float32 [slots]
    seeds, samples,  # int64 [slots]
    history,  # int32 [slots, V] or None: bit 0: seen; above it: how often generated
    edits,  # float32 [slots, V] or None: added
    edited_slots,  # int8 [slots]: whether a slot has edits
    guesses,  # int64 [S] or None: the token before each sample
    places,  # int32 [S] or None: how many of the tokens up to it are guesses of its row
    top_ps,  # float32 [slots]
    stats,  # float32 [S, STATS, C] out
    V, C, stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    row, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0)
    slot = tl.load(slots + row)
    knobs = settings_of(temperatures, repetitions, presences, frequencies, edited_slots, slot)
    shape = (logits + row * stride, history, edits, slot * V, V, knobs, guesses, places, row)
    temperature = knobs[0]
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    raw, x = shaped(shape, ids)
    raw_top, top = tl.max(raw), tl.max(x)
    raw_total = tl.sum(tl.exp(raw - tl.maximum(raw_top, -1e30)))
    total = 0.0
    if (temperature > 0) & (tl.load(top_ps + slot) < 1):
        total = tl.sum(tl.exp(x - tl.maximum(top, -1e30)))
    u = x
    if temperature > 0:
        u = uniform(tl.load(seeds + slot), ids, tl.load(positions + row).to(tl.int32),
                     tl.load(samples + slot).to(tl.int32), BLOCK)  # fmt: skip
    nothing = tl.full((), float("-inf"), tl.float32)
    best, best_id, best_x = best_of(x, u, ids, temperature > 0, nothing, tl.full((), 0x7FFFFFFF, tl.int32), nothing)
    place = stats + row * 7 * C + chunk
    tl.store(place, raw_top)
    tl.store(place + C, raw_total)
    tl.store(place + 2 * C, top)
    tl.store(place + 3 * C, total)
    tl.store(place + 4 * C, best)
    tl.store(place + 5 * C, best_id.to(tl.float32, bitcast=True))
    tl.store(place + 6 * C, best_x)


@triton.jit
def choose_kernel(
    logits,  # [S, V]
    slots,  # int64 [S]
    positions,  # int64 [S]
    temperatures, repetitions, presences, frequencies,  # float32 [slots]
    seeds, samples,  # int64 [slots]
    history, edits, edited_slots, guesses, places,
    top_ks,  # int64 [slots]: 0 keeps all
    top_ps, min_ps,  # float32 [slots]: 1 and 0 keep all
    stats,  # float32 [S, STATS, C]
    tokens,  # int64 [S] out
    logprobs,  # float32 [S] out: of the token, in the raw logits
    totals,  # float32 [S] out: log of the sum of exponentials of the raw logits
    V, C, stride,
    CHUNK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    knobs = settings_of(temperatures, repetitions, presences, frequencies, edited_slots, slot)
    shape = (logits + row * stride, history, edits, slot * V, V, knobs, guesses, places, row)
    temperature = knobs[0]
    chunks = tl.arange(0, BLOCK_C)
    place = stats + row * 7 * C + chunks
    known = chunks < C
    raw_tops = tl.load(place, mask=known, other=float("-inf"))
    raw_totals = tl.load(place + C, mask=known, other=0.0)
    tops = tl.load(place + 2 * C, mask=known, other=float("-inf"))
    sums = tl.load(place + 3 * C, mask=known, other=0.0)
    scores = tl.load(place + 4 * C, mask=known, other=float("-inf"))
    candidates = tl.load(place + 5 * C, mask=known, other=0.0).to(tl.int32, bitcast=True)
    values = tl.load(place + 6 * C, mask=known, other=float("-inf"))
    raw_top, top = tl.max(raw_tops), tl.max(tops)
    log_total = raw_top + tl.log(tl.sum(raw_totals * tl.exp(raw_tops - raw_top)))
    best = tl.max(scores)
    token = tl.min(tl.where(known & (scores == best), candidates, 0x7FFFFFFF))
    value = tl.max(tl.where(known & (candidates == token), values, float("-inf")))

    if temperature > 0:
        top_k, top_p, min_p = tl.load(top_ks + slot), tl.load(top_ps + slot), tl.load(min_ps + slot)
        mass = tl.sum(sums * tl.exp(tops - top))
        threshold, cut, limit = cut_of(shape, V, top, mass, top_k, top_p, min_p, BLOCK)
        if (value < threshold) | ((value == cut) & (token >= limit)):
            best, value = tl.full((), float("-inf"), tl.float32), tl.full((), float("-inf"), tl.float32)
            token = tl.full((), 0x7FFFFFFF, tl.int32)
            # Chunks with the best uncut score first; a chunk whose uncut score is not better cannot change the result.
            hopes = tl.where(known & (tops >= threshold), scores, float("-inf"))
            hope = tl.max(hopes)
            while hope > best:
                chunk = tl.min(tl.where(hopes == hope, chunks, 0x7FFFFFFF))
                ids = chunk * CHUNK + tl.arange(0, CHUNK)
                _, x = shaped(shape, ids)
                x = tl.where((x < threshold) | ((x == cut) & (ids >= limit)), float("-inf"), x)
                u = uniform(tl.load(seeds + slot), ids, tl.load(positions + row).to(tl.int32),
                             tl.load(samples + slot).to(tl.int32), CHUNK)  # fmt: skip
                best, token, value = best_of(x, u, ids, True, best, token, value)
                hopes = tl.where(chunks == chunk, float("-inf"), hopes)
                hope = tl.max(hopes)
    token = tl.where(token < V, token, 0)  # no finite logit at all
    tl.store(tokens + row, token.to(tl.int64))
    own = tl.load(logits + row * stride + token).to(tl.float32)
    tl.store(logprobs + row, own - log_total)
    tl.store(totals + row, log_total)
    if history is not None and places is None:  # noqa: SIM102 (a constant of the compiler, then a value)
        if knobs[4]:
            word = history + slot * V + token
            tl.store(word, (tl.load(word) | 1) + 2)


def sample(
    logits_SV: Tensor,
    settings: SlotSettings,
    slots_S: Tensor,
    positions_S: Tensor,
    out: Samples | None = None,
    chunk: int = CHUNK,
    warps: int | None = None,
    block: int = 4096,
    guesses: Tensor | None = None,
    places: Tensor | None = None,
) -> Samples:
    """Choose a token for each row: repetition, presence and frequency penalty, bias, temperature, top-k, top-p, min-p,
    then the largest logit plus the noise of `reference.sampling.gumbel_noise` (none at temperature 0).

    logits_SV [S, V] of any float dtype, read only. slots_S int64 [S]: the slot of a row's settings. positions_S int64
    [S]: position of the new token in its answer. Two launches, no host sync.

    guesses int64 [S], places int32 [S]: of a step with guesses the token before each sample, and how many of the tokens
    up to it are guesses of its row. Penalties count these; the history is left to `kernels.drafts.guesses.accept`.
    """
    rows, vocab = logits_SV.shape
    assert logits_SV.stride(1) == 1
    device = logits_SV.device
    if out is None:
        out = Samples(
            torch.empty(rows, dtype=torch.int64, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
        )
    if rows == 0:
        return out
    chunks = triton.cdiv(vocab, chunk)
    stats = torch.empty(rows, STATS, chunks, dtype=torch.float32, device=device)
    s = settings
    common = (
        logits_SV, slots_S, positions_S, s.temperature, s.repetition, s.presence, s.frequency, s.seed, s.sample,
        s.history, s.edits, s.edited, guesses, places,
    )  # fmt: skip
    stride = logits_SV.stride(0)
    scan_kernel[(chunks, rows)](
        *common,
        s.top_p,
        stats,
        vocab,
        chunks,
        stride,
        BLOCK=chunk,
        num_warps=warps or max(1, chunk // 512),
        **launch_options(device),
    )
    choose_kernel[(rows,)](
        *common, s.top_k, s.top_p, s.min_p, stats, out.tokens, out.logprobs, out.totals, vocab, chunks, stride,
        CHUNK=chunk, BLOCK_C=triton.next_power_of_2(chunks), BLOCK=block, num_warps=max(1, min(16, block // 256)),
        **launch_options(device),
    )  # fmt: skip
    return out
