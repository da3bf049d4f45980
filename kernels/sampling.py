"""From logits to tokens in two launches: penalties, edits, temperature, top-k, top-p, min-p, the keyed Gumbel draw,
log-probabilities. Knows rows and the slots that keep their state, never jobs.

    S rows that sample    V vocabulary    C chunks of a row

`scan_kernel` reads each logit once and leaves what a chunk has to say: its largest logit, its sum of exponentials, its
best token after noise. `choose_kernel` merges them. The best token of all that also survives the cut (top-k, top-p,
min-p) is the answer, since the cut only removes competitors; only when it does not survive are the chunks that reach
the cut read again. So greedy rows and rows with temperature alone read their logits once, min-p nearly always once; the
thresholds of top-k and top-p are searched by counting in sections of the value range, without a sort.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.overlap import begin, launch_options

STATS = 7


@triton.jit
def _uniform(seed, ids, position, sample, BLOCK: tl.constexpr):
    """u of `reference.gumbel_noise` for BLOCK consecutive ids, the first a multiple of 4. Exact in float32."""
    lanes = tl.min(ids) // 4 + tl.arange(0, BLOCK // 4)
    a, b, c, d = tl.philox(seed, lanes, lanes * 0 + position, lanes * 0 + sample, lanes * 0)
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [BLOCK])
    return ((words >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit
def _rough_gumbel(u):
    """-log(-log(u)) to about 1e-5: the fast logarithm, and a series close to 1, where it is poor and noise large."""
    v = 1.0 - u
    series = v * (1.0 + v * (0.5 + v * (0.33333333 + v * (0.25 + v * (0.2 + v * 0.16666667)))))
    return -tl.log(tl.where(v < 0.0625, series, -tl.log(u)))


@triton.jit
def _shaped(
    logits, history, edits, row, slot, ids, V, temperature, repetition, presence, frequency, penal, edited, stride
):  # fmt: skip
    """Raw logits of the ids, and what they become before the cut, both float32."""
    inside = ids < V
    raw = tl.load(logits + row * stride + ids, mask=inside, other=float("-inf")).to(tl.float32)
    x = raw
    if history is not None:
        word = tl.load(history + slot * V + ids, mask=tl.where(penal, inside, False), other=0)
        x = tl.where((word & 1) == 0, x, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition))
        count = (word >> 1).to(tl.float32)
        x = x - tl.where(count > 0, presence, 0.0) - count * frequency
    if edits is not None:
        x = x + tl.load(edits + slot * V + ids, mask=tl.where(edited, inside, False), other=0.0)
    return raw, tl.where(temperature > 0, tl.div_rn(x, tl.where(temperature > 0, temperature, 1.0)), x)


@triton.jit
def _best(x, u, ids, drawn, best, best_id, best_x):
    """The better of the best so far and the best of x + noise; the lowest id of equals.

    All candidates are ranked with rough noise; those that could win get exact noise, in float64, one after the other.
    """
    rough = x
    if drawn:
        rough = x + _rough_gumbel(u)
    top = tl.max(rough)
    margin = tl.where(drawn, 1e-4 + 1e-6 * tl.abs(top), 0.0)
    while (top > float("-inf")) & (top + margin > best):
        id = tl.min(tl.where(rough == top, ids, 0x7FFFFFFF))
        chosen = ids == id
        own = tl.sum(tl.where(chosen, x, 0.0))
        score = own
        if drawn:
            exact = tl.sum(tl.where(chosen, u, 0.0)).to(tl.float64)
            score = own + (-tl.log(-tl.log(exact))).to(tl.float32)
        better = (score > best) | ((score == best) & (id < best_id))
        best_id = tl.where(better, id, best_id)
        best_x = tl.where(better, own, best_x)
        best = tl.where(better, score, best)
        rough = tl.where(chosen, float("-inf"), rough)
        top = tl.max(rough)
    return best, best_id, best_x


@triton.jit
def _settings(temperatures, repetitions, presences, frequencies, edited_slots, slot):
    temperature = tl.load(temperatures + slot)
    repetition, presence, frequency = (
        tl.load(repetitions + slot),
        tl.load(presences + slot),
        tl.load(frequencies + slot),
    )
    edited = tl.load(edited_slots + slot) != 0
    penal = tl.abs(repetition - 1.0) + tl.abs(presence) + tl.abs(frequency) > 0.0
    return temperature, repetition, presence, frequency, penal, edited


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
    top_ps,  # float32 [slots]
    stats,  # float32 [S, STATS, C] out
    V, C, stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0)
    slot = tl.load(slots + row)
    temperature, repetition, presence, frequency, penal, edited = _settings(
        temperatures, repetitions, presences, frequencies, edited_slots, slot
    )
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    raw, x = _shaped(
        logits, history, edits, row, slot, ids, V, temperature, repetition, presence, frequency, penal, edited, stride
    )
    raw_top, top = tl.max(raw), tl.max(x)
    raw_total = tl.sum(tl.exp(raw - tl.maximum(raw_top, -1e30)))
    total = 0.0
    if (temperature > 0) & (tl.load(top_ps + slot) < 1):
        total = tl.sum(tl.exp(x - tl.maximum(top, -1e30)))
    u = x
    if temperature > 0:
        u = _uniform(tl.load(seeds + slot), ids, tl.load(positions + row).to(tl.int32),
                     tl.load(samples + slot).to(tl.int32), BLOCK)  # fmt: skip
    nothing = tl.full((), float("-inf"), tl.float32)
    best, best_id, best_x = _best(x, u, ids, temperature > 0, nothing, tl.full((), 0x7FFFFFFF, tl.int32), nothing)
    place = stats + row * 7 * C + chunk
    tl.store(place, raw_top)
    tl.store(place + C, raw_total)
    tl.store(place + 2 * C, top)
    tl.store(place + 3 * C, total)
    tl.store(place + 4 * C, best)
    tl.store(place + 5 * C, best_id.to(tl.float32, bitcast=True))
    tl.store(place + 6 * C, best_x)


@triton.jit
def _search(
    logits, history, edits, row, slot, V, temperature, repetition, presence, frequency, penal, edited, stride,
    top, low, target, MASS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest value t for which the tokens with x >= t number `target` (MASS: weigh it, by exp(x - top)).

    Each pass counts in five sections of the range and goes on in the one that holds t, until one value is left.
    """
    high = top
    answer = low
    closed = True  # the first section holds its upper end, too
    searching = True
    while searching:
        width = high - low
        t1, t2, t3, t4 = low + 0.2 * width, low + 0.4 * width, low + 0.6 * width, low + 0.8 * width
        if closed:  # What is searched lies close to the top.
            t1, t2, t3, t4 = high - width / 2, high - width / 8, high - width / 32, high - width / 128
        n1 = tl.zeros([BLOCK], tl.float32)
        n2, n3, n4, n5 = n1, n1, n1, n1
        least = tl.full([BLOCK], float("inf"), tl.float32)
        most = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in tl.range(0, V, BLOCK, num_stages=3):
            ids = start + tl.arange(0, BLOCK)
            _, x = _shaped(
                logits,
                history,
                edits,
                row,
                slot,
                ids,
                V,
                temperature,
                repetition,
                presence,
                frequency,
                penal,
                edited,
                stride,
            )
            weight = tl.exp(x - top) if MASS else tl.where(x > float("-inf"), 1.0, 0.0)
            n1 += tl.where(x >= t1, weight, 0.0)
            n2 += tl.where(x >= t2, weight, 0.0)
            n3 += tl.where(x >= t3, weight, 0.0)
            n4 += tl.where(x >= t4, weight, 0.0)
            n5 += tl.where(x >= high, weight, 0.0)
            inside = (x >= low) & ((x < high) | (closed & (x == high)))
            least = tl.minimum(least, tl.where(inside, x, float("inf")))
            most = tl.maximum(most, tl.where(inside, x, float("-inf")))
        smallest, largest = tl.min(least), tl.max(most)
        if smallest >= largest:
            answer = tl.where(smallest < float("inf"), smallest, low)
            searching = False
        elif closed & (tl.sum(n5) >= target):
            answer = high
            searching = False
        else:
            c1, c2, c3, c4 = tl.sum(n1) >= target, tl.sum(n2) >= target, tl.sum(n3) >= target, tl.sum(n4) >= target
            new_low = tl.where(c4, t4, tl.where(c3, t3, tl.where(c2, t2, tl.where(c1, t1, low))))
            new_high = tl.where(c4, high, tl.where(c3, t4, tl.where(c2, t3, tl.where(c1, t2, t1))))
            closed = closed & c4
            # Rounding may leave nothing to divide; then the ends are neighbours.
            searching = (new_low > low) | (new_high < high)
            low, high, answer = new_low, new_high, new_low
    return answer


@triton.jit
def _tie_limit(
    logits, history, edits, row, slot, V, temperature, repetition, presence, frequency, penal, edited, stride,
    top, threshold, mass, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of the tokens with exactly the threshold, the lower ids come first: the first id too many to reach `mass`."""
    above = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, V, BLOCK, num_stages=3):
        ids = start + tl.arange(0, BLOCK)
        _, x = _shaped(
            logits,
            history,
            edits,
            row,
            slot,
            ids,
            V,
            temperature,
            repetition,
            presence,
            frequency,
            penal,
            edited,
            stride,
        )
        above += tl.where(x > threshold, tl.exp(x - top), 0.0)
    kept = tl.maximum(tl.ceil((mass - tl.sum(above)) / tl.exp(threshold - top)), 1.0).to(tl.int32)
    limit = V
    ties = 0
    start = 0
    while (start < V) & (ties <= kept):
        ids = start + tl.arange(0, BLOCK)
        _, x = _shaped(
            logits,
            history,
            edits,
            row,
            slot,
            ids,
            V,
            temperature,
            repetition,
            presence,
            frequency,
            penal,
            edited,
            stride,
        )
        tie = (x == threshold).to(tl.int32)
        rank = ties + tl.cumsum(tie, 0)
        limit = tl.minimum(limit, tl.min(tl.where((tie == 1) & (rank > kept), ids, V)))
        ties += tl.sum(tie)
        start += BLOCK
    return limit


@triton.jit
def choose_kernel(
    logits,  # [S, V]
    slots,  # int64 [S]
    positions,  # int64 [S]
    temperatures, repetitions, presences, frequencies,  # float32 [slots]
    seeds, samples,  # int64 [slots]
    history, edits, edited_slots,
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
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    temperature, repetition, presence, frequency, penal, edited = _settings(
        temperatures, repetitions, presences, frequencies, edited_slots, slot
    )
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
        threshold = float("-inf")
        cut = float("-inf")  # top-p's own threshold
        limit = V
        mass = tl.sum(sums * tl.exp(tops - top))
        if (top_k > 0) & (top_k < V):
            threshold = _search(
                logits, history, edits, row, slot, V, temperature, repetition, presence, frequency, penal,
                edited, stride,
                top, top - 1e4, top_k.to(tl.float32), False, BLOCK,
            )  # fmt: skip
            if top_p < 1:
                kept = tl.zeros([BLOCK], tl.float32)
                for start in tl.range(0, V, BLOCK, num_stages=3):
                    ids = start + tl.arange(0, BLOCK)
                    _, x = _shaped(logits, history, edits, row, slot, ids, V, temperature, repetition, presence,
                                   frequency, penal, edited, stride)  # fmt: skip
                    kept += tl.where(x >= threshold, tl.exp(x - top), 0.0)
                mass = tl.sum(kept)
        if top_p < 1:
            low = tl.maximum(threshold, top - 90.0)  # below it exp(x - top) is 0
            cut = _search(
                logits, history, edits, row, slot, V, temperature, repetition, presence, frequency, penal,
                edited, stride,
                top, low, top_p * mass, True, BLOCK,
            )  # fmt: skip
            limit = _tie_limit(
                logits, history, edits, row, slot, V, temperature, repetition, presence, frequency, penal,
                edited, stride,
                top, cut, top_p * mass, BLOCK,
            )  # fmt: skip
            threshold = tl.maximum(threshold, cut)
        if min_p > 0:
            threshold = tl.maximum(threshold, top + tl.log(min_p))
        if (value < threshold) | ((value == cut) & (token >= limit)):
            best, value = tl.full((), float("-inf"), tl.float32), tl.full((), float("-inf"), tl.float32)
            token = tl.full((), 0x7FFFFFFF, tl.int32)
            # The chunk of the highest hope first: a chunk whose best without the cut is no better cannot change it.
            hopes = tl.where(known & (tops >= threshold), scores, float("-inf"))
            hope = tl.max(hopes)
            while hope > best:
                chunk = tl.min(tl.where(hopes == hope, chunks, 0x7FFFFFFF))
                ids = chunk * CHUNK + tl.arange(0, CHUNK)
                _, x = _shaped(
                    logits, history, edits, row, slot, ids, V, temperature, repetition, presence, frequency, penal,
                    edited, stride,
                )  # fmt: skip
                x = tl.where((x < threshold) | ((x == cut) & (ids >= limit)), float("-inf"), x)
                u = _uniform(tl.load(seeds + slot), ids, tl.load(positions + row).to(tl.int32),
                             tl.load(samples + slot).to(tl.int32), CHUNK)  # fmt: skip
                best, token, value = _best(x, u, ids, True, best, token, value)
                hopes = tl.where(chunks == chunk, float("-inf"), hopes)
                hope = tl.max(hopes)
    token = tl.where(token < V, token, 0)  # no finite logit at all
    tl.store(tokens + row, token.to(tl.int64))
    own = tl.load(logits + row * stride + token).to(tl.float32)
    tl.store(logprobs + row, own - log_total)
    tl.store(totals + row, log_total)
    if history is not None:  # noqa: SIM102 (a constant of the compiler, then a value)
        if penal:
            word = history + slot * V + token
            tl.store(word, (tl.load(word) | 1) + 2)


@triton.jit
def top_kernel(
    values,  # [S, n]: logits or, in the second round, the chunks' best
    ids,  # int32 [S, n] or None: the column itself
    totals,  # float32 [S] or None: subtracted
    best,  # float32 [S, C, most] out
    best_ids,  # int32 or int64 [S, C, most] out
    n, stride, most,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The `most` largest of BLOCK columns, in order; the lowest id of equals."""
    begin(PDL)
    row, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0)
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(values + row * stride + columns, mask=columns < n, other=float("-inf")).to(tl.float32)
    own = columns
    if ids is not None:
        own = tl.load(ids + row * stride + columns, mask=columns < n, other=0x7FFFFFFF)
    place = (row * tl.num_programs(0) + chunk) * most
    less = tl.load(totals + row) if totals is not None else 0.0
    free = columns < n
    for rank in range(most):
        top = tl.max(tl.where(free, x, float("-inf")))
        id = tl.min(tl.where(free & (x == top), own, 0x7FFFFFFF))
        tl.store(best + place + rank, top - less)
        tl.store(best_ids + place + rank, id.to(best_ids.dtype.element_ty))
        free = free & (own != id)


# ---- state and launch ----


@dataclass(frozen=True, slots=True)
class SlotSettings:
    """How each slot samples, on the device; the engine edits single slots in place."""

    temperature: Tensor
    """float32 [slots]; 0 is greedy."""
    top_k: Tensor
    """int64 [slots]; 0 keeps all."""
    top_p: Tensor
    """float32 [slots]; 1 keeps all."""
    min_p: Tensor
    """float32 [slots]; 0 keeps all."""
    seed: Tensor
    """int64 [slots], the bits of an unsigned 64-bit seed."""
    sample: Tensor
    """int64 [slots]: sample index."""
    repetition: Tensor
    """float32 [slots]; 1 is off."""
    presence: Tensor
    """float32 [slots]; 0 is off."""
    frequency: Tensor
    """float32 [slots]; 0 is off."""
    edited: Tensor
    """int8 [slots]: whether the slot has edits."""
    history: Tensor | None = None
    """int32 [slots, V]: bit 0 says that the token was seen (prompt or answer), the bits above how often it was
    generated. Kept up to date by `sample` in slots with penalties. None: no slot has penalties."""
    edits: Tensor | None = None
    """float32 [slots, V]: added to the logits; -inf bans. None: no slot has edits."""


def slot_settings(slots: int, device: torch.device | str, vocab: int | None = None) -> SlotSettings:
    """All slots greedy, nothing cut, no penalties; with a vocabulary also the tables for history and edits."""

    def full(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((slots,), value, dtype=dtype, device=device)

    def table(dtype: torch.dtype) -> Tensor | None:
        return None if vocab is None else torch.zeros(slots, vocab, dtype=dtype, device=device)

    return SlotSettings(
        temperature=full(0), top_k=full(0, torch.int64), top_p=full(1), min_p=full(0), seed=full(0, torch.int64),
        sample=full(0, torch.int64), repetition=full(1), presence=full(0), frequency=full(0),
        edited=full(0, torch.int8), history=table(torch.int32), edits=table(torch.float32),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Samples:
    """What S rows brought."""

    tokens: Tensor
    """int64 [S]."""
    logprobs: Tensor
    """float32 [S]: natural log-probability of the token, of the raw logits."""
    totals: Tensor
    """float32 [S]: logsumexp of the raw logits."""


def sample(
    logits_SV: Tensor,
    settings: SlotSettings,
    slots_S: Tensor,
    positions_S: Tensor,
    out: Samples | None = None,
    chunk: int | None = None,
    warps: int | None = None,
    block: int = 4096,
) -> Samples:
    """Choose a token for each row: repetition, presence and frequency penalty, edits, temperature, top-k, top-p, min-p,
    then the largest logit plus the noise of `reference.gumbel_noise` (none at temperature 0).

    logits_SV [S, V] of any float dtype, read only. slots_S int64 [S]: where a row's settings are. positions_S int64
    [S]: of the new token in its answer. Two launches, no host waits.
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
    chunk = chunk or (2048 if rows <= 8 else 1024)
    chunks = triton.cdiv(vocab, chunk)
    stats = torch.empty(rows, STATS, chunks, dtype=torch.float32, device=device)
    s = settings
    common = (
        logits_SV, slots_S, positions_S, s.temperature, s.repetition, s.presence, s.frequency, s.seed, s.sample,
        s.history, s.edits, s.edited,
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
        num_warps=warps or (8 if chunk >= 2048 else 2),
        **launch_options(device),
    )
    choose_kernel[(rows,)](
        *common, s.top_k, s.top_p, s.min_p, stats, out.tokens, out.logprobs, out.totals, vocab, chunks, stride,
        CHUNK=chunk, BLOCK_C=triton.next_power_of_2(chunks), BLOCK=block, num_warps=max(1, min(16, block // 256)),
        **launch_options(device),
    )  # fmt: skip
    return out


def top_logprobs(logits_SV: Tensor, totals_S: Tensor, most: int, chunk: int = 2048) -> tuple[Tensor, Tensor]:
    """Ids (int64) and log-probabilities (float32) of the `most` likely tokens of each row, both [S, most]."""
    rows, vocab = logits_SV.shape
    device = logits_SV.device
    chunks = triton.cdiv(vocab, chunk)
    some = torch.empty(rows, chunks * most, dtype=torch.float32, device=device)
    some_ids = torch.empty(rows, chunks * most, dtype=torch.int32, device=device)
    best = torch.empty(rows, most, dtype=torch.float32, device=device)
    ids = torch.empty(rows, most, dtype=torch.int64, device=device)
    if rows and most:
        width = chunks * most
        top_kernel[(chunks, rows)](
            logits_SV, None, None, some, some_ids, vocab, logits_SV.stride(0), most, BLOCK=chunk, num_warps=4,
            **launch_options(device),
        )  # fmt: skip
        top_kernel[(1, rows)](
            some, some_ids, totals_S, best, ids, width, width, most, BLOCK=triton.next_power_of_2(width), num_warps=8,
            **launch_options(device),
        )  # fmt: skip
    return ids, best
