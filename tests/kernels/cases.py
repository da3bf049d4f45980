"""Helpers of kernel tests: random cases for the device, poisoned outputs, comparison with the reference."""

import os
import random
from array import array
from dataclasses import replace
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from kernels import attention, kv_pages, sampling, step_io
from kernels.activation import activate, gelu
from kernels.attention.short_prefill import ShortPrefillPlan
from kernels.drafts import draft_pass, parallel_draft
from kernels.norm import normalize
from kernels.operands import Activation, Norm, NormKind, Scores
from kernels.reference import layers
from kernels.reference import sampling as reference
from kernels.sampling.slot_settings import SlotSettings, slot_settings
from kernels.sampling.token_mask import mask_logits
from kernels.sampling.top_logprobs import top_buffers, top_logprobs
from kernels.slot_edits import HEADER
from services.worker.runners.cuda import upload
from services.worker.runners.cuda.drafts.draft_model import Guessed, words_of
from services.worker.runners.cuda.step_words import StepRows, padding_step
from services.worker.runners.step import Edit, Rows, SlotState

DEVICE = "cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" else "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1.5e-3, torch.float32: 5e-6}


def error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||; NaN if any value is NaN."""
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


def close(got: Tensor, want: Tensor) -> None:
    difference = error(got, want)
    assert difference <= TOLERANCE[got.dtype], difference  # NaN fails, too


def rand(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=torch.float32, device=DEVICE).to(dtype)


def poison(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


# ---- attention ----


class Batch:
    """A step of ragged rows over a scattered pool whose unused slots hold NaN."""

    def __init__(
        self, lengths: list[int], contexts: list[int], heads: int, kv_heads: int, dim: int, block: int,
        dtype: torch.dtype, stored: torch.dtype | None = None, shared: list[int] | None = None,
    ) -> None:  # fmt: skip
        """shared: for each row, the number of leading blocks that it shares with the previous row."""
        self.lengths, self.contexts, self.heads, self.kv_heads, self.block = lengths, contexts, heads, kv_heads, block
        self.scores = Scores(dim**-0.5)
        needed = [-(-context // block) for context in contexts]
        self.pool = kv_pages.make_pool(sum(needed) + 1, block, kv_heads, dim, stored or dtype, DEVICE)
        kv_pages.bytes_of(self.pool).fill_(0xFF)  # NaN in every format
        self.kv_scales = torch.rand(2, kv_heads, device=DEVICE) + 0.5 if stored == kv_pages.FP8 else None
        order = torch.randperm(sum(needed), device=DEVICE) + 1
        self.tables = torch.zeros(len(lengths), max(*needed, 1), dtype=torch.int32, device=DEVICE)
        self.kv: list[Tensor] = []
        """For each row, the keys and values that its pages hold: [context, 2, K, D]."""
        begin = 0
        for row, (context, count) in enumerate(zip(contexts, needed, strict=True)):
            ids = order[begin : begin + count].clone()
            begin += count
            same = shared[row] if shared else 0
            ids[:same] = self.tables[row - 1, :same]
            self.tables[row, :count] = ids
            places = (ids[:, None] * block + torch.arange(block, device=DEVICE)).view(-1)[same * block : context]
            kv_pages.store(self.pool, places, rand(len(places), 2 * kv_heads, dim, dtype=dtype), self.kv_scales)
            self.kv.append(kv_pages.load(self.pool, ids, self.kv_scales, dtype).flatten(0, 1)[:context])
        tokens = sum(lengths)
        self.q = rand(tokens, heads + 2 * kv_heads, dim, dtype=dtype)[:, :heads]
        self.starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=DEVICE)

    def plan(self, window: int | None, short: int, config: attention.Config | None = None) -> attention.AttentionPlan:
        dim, dtype, rows = self.q.shape[2], self.q.dtype, len(self.lengths)
        longer = sum(length for length in self.lengths if length > short)
        served = attention.config_for(
            dim, dtype, rows, stored=self.pool.dtype, short_tokens=short, long_tokens=longer
        )  # fmt: skip
        return attention.plan_attention(
            self.starts, torch.tensor(self.contexts, dtype=torch.int32, device=DEVICE), self.tables, self.heads,
            self.kv_heads, dim, self.block, dtype, window, short, longer, config or served, self.scores.is_plain,
        )  # fmt: skip

    def run(self, window: int | None, short: int, config: attention.Config | None = None) -> Tensor:
        plan = self.plan(window, short, config)
        out = poison(self.q.shape[0], self.heads * self.q.shape[2], dtype=self.q.dtype)
        for _ in range(2 if DEVICE == "cuda" else 1):  # The interpreter is slow.
            out.fill_(float("nan"))
            attention.attention(self.q, self.pool, plan, self.scores, self.kv_scales, out)
            for counters in (plan.arrived, plan.pieces.arrived if plan.pieces else plan.arrived):
                assert not counters.any(), "the next run would find these counters"
        return out

    def run_short_prefill(self) -> Tensor:
        """Attention of all rows by the kernel for rows with few keys."""
        plan = ShortPrefillPlan(self.starts, torch.tensor(self.contexts, dtype=torch.int32, device=DEVICE), self.tables)
        out = poison(self.q.shape[0], self.heads * self.q.shape[2], dtype=self.q.dtype)
        return attention.attention(self.q, self.pool, plan, self.scores, out=out)

    def want(self, window: int | None) -> Tensor:
        parts = []
        begin = 0
        for length, context, pages in zip(self.lengths, self.contexts, self.kv, strict=True):
            q = self.q[begin : begin + length].float().transpose(0, 1)
            begin += length
            if context == 0:
                parts.append(torch.zeros(length, self.heads * q.shape[2], device=DEVICE))
                continue
            share = self.heads // self.kv_heads
            k, v = (part.float().repeat_interleave(share, 1).transpose(0, 1) for part in pages.unbind(1))
            scores = q @ k.transpose(1, 2) * self.scores.scale
            if self.scores.soft_cap is not None:
                scores = self.scores.soft_cap * torch.tanh(scores / self.scores.soft_cap)
            keys = torch.arange(context, device=DEVICE)
            queries = torch.arange(context - length, context, device=DEVICE)[:, None]
            seen = keys <= queries
            if window is not None:
                seen &= keys > queries - window
            scores = scores.masked_fill(~seen, -torch.inf)
            if self.scores.sinks is not None:
                scores = torch.cat([scores, self.scores.sinks[:, None, None].expand(-1, length, -1)], dim=-1)
            weights = torch.softmax(scores, dim=-1)[..., :context]
            parts.append((weights @ v).transpose(0, 1).flatten(1))
        return torch.cat(parts)


def random_settings(slots: int, vocab: int) -> SlotSettings:
    """Slots with random settings, histories and edits."""
    state = slot_settings(slots, DEVICE, vocab)
    assert state.history is not None
    assert state.edits is not None

    def pick(*choices: float) -> Tensor:
        return torch.tensor(random.choices(choices, k=slots))

    state.temperature.copy_(pick(0.0, 0.7, 1.0, 1.5))
    state.top_k.copy_(pick(0, 0, 1, 40, 1000))
    state.top_p.copy_(pick(1.0, 1.0, 0.95, 0.5, 0.1))
    state.min_p.copy_(pick(0.0, 0.0, 0.05))
    state.repetition.copy_(pick(1.0, 1.3))
    state.presence.copy_(pick(0.0, 0.5))
    state.frequency.copy_(pick(0.0, 0.2))
    state.seed.random_()
    state.sample.random_(0, 5)
    seen = torch.rand(slots, vocab, device=DEVICE) < 0.1
    state.history.copy_(torch.randint(0, 6, (slots, vocab), device=DEVICE) * seen)
    state.edits.normal_()
    state.edits.masked_fill_(state.edits > 2, -torch.inf)
    state.edited.random_(0, 2)
    return state


def check_edits(slots: int, blocks: int, fresh: list[tuple[int, int]], admitted: int, room: int = 1 << 14) -> None:
    """New blocks (`fresh`: for each slot the index of the first and their number) and admissions change only the slots
    that they name, also if they do not fit into one launch."""
    settings = random_settings(slots, 32)
    tables = torch.randint(0, 9, (slots, blocks), dtype=torch.int32, device=DEVICE)
    wanted = {name: getattr(settings, name).clone() for name in settings.__slots__}
    wanted_tables = tables.clone()
    words = array("i")
    edits = upload.DeviceEdits(np.empty(0, np.int32))
    order = random.sample(range(slots), len(fresh))
    for slot, (first, count) in zip(order, fresh, strict=True):
        given = torch.randint(100, 200, (count,), dtype=torch.int32)
        wanted_tables[slot, first : first + count] = given.to(DEVICE)
        edits.blocks.append(len(words))
        words.extend((Edit.BLOCKS, slot, 1 + count, first, *given.tolist()))
    for slot in random.sample(range(slots), admitted):
        state = SlotState(
            7, 9, random.getrandbits(31), -random.getrandbits(31), slot, 40, -1, *(random.random() for _ in range(6))
        )
        words.extend((Edit.RELEASE, slot, 0))
        edits.admitted.append(len(words))
        words.extend((Edit.ADMIT, slot, len(state.words()), *state.words()))
        seed = state.seed_low & 0xFFFFFFFF | state.seed_high << 32
        numbers = ("seed", seed), ("sample", slot), ("top_k", 40), ("prompt_len", 9), ("edited", 0)
        for name, value in (*numbers, *floats_of(state)):
            wanted[name][slot] = value
    edits.words = np.frombuffer(words, np.int32)
    with mock.patch.object(upload, "ROOM", room):
        uplink = upload.StepUpload(1, tables, settings)
        uplink.send(2, HEADER + 1, edits)
    assert torch.equal(tables, wanted_tables)
    for name, value in wanted.items():
        assert torch.equal(getattr(settings, name), value), name


def floats_of(state: SlotState) -> list[tuple[str, float]]:
    """The floating-point settings of a slot, with their names in SlotSettings."""
    return [
        ("temperature", state.temperature), ("top_p", state.top_p), ("min_p", state.min_p),
        ("repetition", state.repetition_penalty), ("presence", state.presence_penalty),
        ("frequency", state.frequency_penalty),
    ]  # fmt: skip


def check_step_lists(rows: list[tuple[int, int, bool, bool]], sizes: tuple[int, int, int], block: int) -> None:
    """rows: (tokens, context, whether its tokens are given, whether it samples); lists are padded to `sizes`. Some of
    the slots draw under masks, later."""
    count, padding, width = len(rows), len(rows) + 3, 40
    owners = random.sample(range(padding), count)
    lengths, contexts = [row[0] for row in rows], [row[1] for row in rows]
    ids = [random.randrange(900) if given else -1 for length, _, given, _ in rows for _ in range(length)]
    known = Rows(owners, lengths, [int(row[3]) for row in rows], np.array(ids, np.int32))
    words = np.full(step_io.words_of(*sizes) + 4, 77, np.int32)
    masked = frozenset(random.sample(owners, count // 3))
    assert StepRows(known, contexts, masked).lay_out(words.data, 4, sizes) == len(words)
    sent = torch.from_numpy(words[4:]).to(DEVICE)
    last, prompt_lens = (torch.randint(0, 900, (padding + 1,), device=DEVICE) for _ in range(2))
    tables = torch.randint(0, 99, (padding + 1, width), dtype=torch.int32, device=DEVICE)
    row_tables = torch.full((sizes[1], width), -7, dtype=torch.int32, device=DEVICE)
    got = step_io.step_inputs(sent, *sizes, row_tables)
    step_io.unpack(sent, last, prompt_lens, tables, got, block)
    token_ids, positions, places, given = [], [], [], iter(ids)
    for owner, (length, context, is_given, _) in zip(owners, rows, strict=True):
        for position in range(context - length, context):
            token_id = next(given)
            token_ids.append(token_id if is_given else int(last[owner]))
            positions.append(position)
            places.append(int(tables[owner, position // block]) * block + position % block)
    unused = sizes[0] - len(token_ids)
    assert got.token_ids.tolist() == token_ids + [0] * unused
    assert got.positions.tolist() == positions + [0] * unused
    assert got.slot_mapping.tolist() == places + [-1] * unused
    ends = np.cumsum(lengths).tolist()
    assert got.starts.tolist() == [0, *ends, *ends[-1:] * (sizes[1] - count)]
    assert got.contexts.tolist() == contexts + [0] * (sizes[1] - count)
    for row, (owner, context) in enumerate(zip(owners, contexts, strict=True)):
        whole = -(-context // block)
        assert torch.equal(row_tables[row, :whole], tables[owner, :whole])
        assert row_tables[row, whole:].eq(-7).all()
    chosen = [row for row in range(count) if rows[row][3]]
    idle = sizes[2] - len(chosen)
    assert got.sampled.tolist() == [ends[row] - 1 for row in chosen] + [0] * idle
    drawing = [padding if owners[row] in masked else owners[row] for row in chosen]
    assert got.sample_slots.tolist() == drawing + [padding] * idle
    for row, slot, position in zip(chosen, drawing, got.sample_positions.tolist(), strict=False):
        assert slot == padding or position == contexts[row] - int(prompt_lens[slot])


def check_padding_tokens(tokens: int, sizes: tuple[int, int, int], block: int) -> None:
    """Padding tokens, even more than a sequence may have, get positions that every rotation table has."""
    words = np.full(step_io.words_of(*sizes), 77, np.int32)
    assert padding_step(tokens).lay_out(words.data, 0, sizes) == len(words)
    sent = torch.from_numpy(words).to(DEVICE)
    slot_words = torch.full((3,), 5, device=DEVICE)
    tables, row_tables = (torch.full((rows, 2), 7, dtype=torch.int32, device=DEVICE) for rows in (3, sizes[1]))
    got = step_io.step_inputs(sent, *sizes, row_tables)
    step_io.unpack(sent, slot_words, slot_words, tables, got, block)
    assert got.token_ids.tolist() == got.positions.tolist() == [0] * sizes[0]
    assert got.slot_mapping.tolist() == [-1] * sizes[0]
    assert row_tables.eq(7).all()
    assert got.sample_slots.tolist() == [2] * sizes[2]


def check_draft_pass(held: int, wanted: list[int]) -> None:
    """A pass of a draft model of `held` rows, the last ones padding; the others want these guesses, of 8 at most."""
    count, slots = len(wanted), held + 3
    owners, contexts = random.sample(range(slots), count), random.sample(range(1, 900), count)
    rows = [Guessed(*row) for row in zip(owners, ([7, row] for row in range(count)), contexts, wanted, strict=True)]
    words = words_of(rows, held, 8)
    sent = torch.tensor([*words, *[77] * 4], dtype=torch.int32, device=DEVICE)
    last = torch.full((slots + 1,), -5, device=DEVICE)
    guesses = torch.full((slots + 1, 8), -5, dtype=torch.int32, device=DEVICE)
    tables = torch.zeros(slots + 1, 64, dtype=torch.int32, device=DEVICE)
    inputs = step_io.step_inputs(sent, held, held, held, tables[:-1])

    def check_inputs(token_ids: list[int], ends: list[int], computed: list[bool]) -> None:
        """Of rows that are not computed, token 0 at position 0 is."""
        step_io.unpack(sent, last, torch.zeros_like(last), tables, inputs, 16)
        assert inputs.starts.tolist() == [min(row, count) for row in range(held + 1)]
        assert inputs.token_ids.tolist() == [id if on else 0 for id, on in zip(token_ids, computed, strict=True)]
        assert inputs.contexts.tolist() == [end if on else 0 for end, on in zip(ends, computed, strict=True)]
        assert inputs.positions.tolist() == [end - 1 if on else 0 for end, on in zip(ends, computed, strict=True)]
        assert inputs.slot_mapping.ge(0).tolist() == computed
        drawing = [*owners, *[slots] * (held - count)]
        assert inputs.sample_slots.tolist() == [
            slot if on else slots for slot, on in zip(drawing, computed, strict=True)
        ]
        assert inputs.sample_positions.tolist() == inputs.contexts.tolist()

    ends, padding = [*contexts, *[0] * (held - count)], [0] * (held - count)
    check_inputs([*range(count), *padding], ends, [row < count for row in range(held)])
    drawn = torch.randint(0, 900, (held,), device=DEVICE)
    draft_pass.advance(drawn, inputs.sample_slots, last, sent, guesses)
    expected_last, expected = [-5] * (slots + 1), [[-5] * 8 for _ in range(slots + 1)]
    for row in range(count):
        if wanted[row]:
            expected_last[owners[row]] = expected[owners[row]][0] = int(drawn[row])
    assert (last.tolist(), guesses.tolist()) == (expected_last, expected)
    check_inputs(drawn.tolist(), [end + 1 for end in ends], [number > 1 for number in [*wanted, *padding]])
    places, left, end = draft_pass.lists_of(held)
    assert sent[places : places + count].tolist() == [
        slot * 8 + (n > 0) for slot, n in zip(owners, wanted, strict=True)
    ]
    assert sent[left : left + held].tolist() == [*(max(number - 1, 0) for number in wanted), *padding]
    assert end == len(words)
    assert sent[end:].eq(77).all()


class _CheckedStep(NamedTuple):
    """A step that checks guesses, on the device, with random slots, contexts and guesses."""

    owners: list[int]
    """The slot of each row."""
    contexts: list[int]
    words: Tensor
    sizes: tuple[int, int, int]
    kept: Tensor
    last: Tensor
    guesses: Tensor


def _checked_step(held: int, drawn: list[tuple[int, int]]) -> _CheckedStep:
    """Its rows have these lengths and keep these draws; the graph has `held` rows."""
    count, slots = len(drawn), held + 3
    lengths = [length for length, _ in drawn]
    owners, contexts = random.sample(range(slots), count), random.sample(range(9, 900), count)
    sizes = held * max(lengths), held, held * max(lengths)
    words = np.full(step_io.words_of(*sizes), 77, np.int32)
    rows = Rows(owners, lengths, lengths, np.full(sum(lengths), -2, np.int32))
    StepRows(rows, contexts).lay_out(words.data, 0, sizes)
    kept = torch.full((held,), 77, dtype=torch.int32, device=DEVICE)
    kept[:count] = torch.tensor([draws for _, draws in drawn])
    last = torch.randint(0, 900, (slots + 1,), device=DEVICE)
    guesses = torch.randint(0, 900, (slots + 1, 8), dtype=torch.int32, device=DEVICE)
    return _CheckedStep(owners, contexts, torch.from_numpy(words).to(DEVICE), sizes, kept, last, guesses)


def check_pass_behind_a_step(held: int, drawn: list[tuple[int, int]], redo: bool) -> None:
    """The words of the passes behind a step whose rows have these lengths and keep these draws; the graphs of both have
    `held` rows. redo: the first pass has all draws."""
    count, slots, step = len(drawn), held + 3, _checked_step(held, drawn)
    owners, contexts, last, guesses = step.owners, step.contexts, step.last, step.guesses
    lengths, kept = ([row[part] for row in drawn] for part in (0, 1))

    rows, expected = [], {}
    for slot, length, context, draws in zip(owners, lengths, contexts, kept, strict=True):
        if length > 1 and draws:
            first = 0 if redo else draws - 1 - (draws == length)
            right = guesses[slot, first : draws - 1].tolist()
            expected[slot] = [*right, int(last[slot])], context - length + draws + 1, length - 1
        rows.append(expected.get(slot))
    first_at = draft_pass.lists_of(held)[-1]
    longest = max(lengths) if redo else 2
    size = first_at + step_io.words_of(longest * held, held, held)
    sent = torch.full((size + 4,), 77, dtype=torch.int32, device=DEVICE)
    draft_pass.follow(step.words, step.sizes, count, step.kept, last, guesses, sent, held, longest, redo)
    assert sent[-4:].eq(77).all()
    places, left, _ = (int(at) for at in draft_pass.lists_of(held))
    assert sent[left : left + held].tolist() == [*(row[2] if row else 0 for row in rows), *[0] * (held - count)]
    assert [int(sent[places + at]) for at, row in enumerate(rows) if row] == [
        slot * 8 for slot, row in zip(owners, rows, strict=True) if row
    ]

    tables, none = torch.ones(slots + 1, 64, dtype=torch.int32, device=DEVICE), torch.full_like(last, -9)
    for tokens, at in ((longest * held, first_at), (held, 0)):
        inputs = step_io.step_inputs(sent[at:], tokens, held, held, tables[:-1].clone())
        step_io.unpack(sent[at:], none, torch.zeros_like(last), tables, inputs, 16)
        ids, positions, starts = inputs.token_ids.tolist(), inputs.positions.tolist(), inputs.starts.tolist()
        assert inputs.contexts.tolist() == [*(row[1] if row else 0 for row in rows), *[0] * (held - count)]
        assert inputs.sample_slots.tolist() == [
            *(slot if row else slots for slot, row in zip(owners, rows, strict=True)), *[slots] * (held - count)
        ]  # fmt: skip
        for number, row in enumerate(rows):
            begin, end = starts[number : number + 2]
            if row is None:
                assert inputs.slot_mapping[begin:end].eq(-1).all()
                continue
            wanted = row[0] if at else row[0][-1:]
            assert ids[begin:end] == wanted
            assert positions[begin:end] == [*range(row[1] - len(wanted), row[1])]
            assert int(inputs.sampled[number]) == end - 1


def check_parallel_pass(held: int, drawn: list[tuple[int, int]], depth: int, all_of: int = 0) -> None:
    """The words of a pass of a parallel draft model behind a step whose rows have these lengths and keep these draws,
    and where its guesses go. all_of: guesses that each row with some gets; 0: as many as it had."""
    count, slots, mask, step = len(drawn), held + 3, 901, _checked_step(held, drawn)
    owners, contexts, last, guesses = step.owners, step.contexts, step.last, step.guesses
    tokens, samples = 2 * depth * held, depth * held
    sent = torch.full((step_io.words_of(tokens, held, samples) + 4,), 77, dtype=torch.int32, device=DEVICE)
    parallel_draft.begin(step.words, step.sizes, count, step.kept, last, guesses, sent, held, depth, all_of, mask)
    assert sent[-4:].eq(77).all()

    tables, none = torch.ones(slots + 1, 64, dtype=torch.int32, device=DEVICE), torch.full_like(last, -9)
    inputs = step_io.step_inputs(sent, tokens, held, samples, tables[:-1].clone(), guesses=True)
    step_io.unpack(sent, none, torch.zeros_like(last), tables, inputs, 16, guesses)
    ids, positions, starts = inputs.token_ids.tolist(), inputs.positions.tolist(), inputs.starts.tolist()
    expected_slots, drawing, before = [], torch.randint(0, 900, (samples,), device=DEVICE), guesses.clone()
    for row in range(held):
        begin, end = starts[row : row + 2]
        length, draws = drawn[row] if row < count else (0, 0)
        wanted = (all_of or length - 1) if draws and length > 1 else 0
        if wanted <= 0:
            assert begin == end
            expected_slots += [slots] * depth
            continue
        slot, known = owners[row], contexts[row] - length + draws + 1
        assert ids[begin:end] == [*before[slot, : draws - 1].tolist(), int(last[slot]), *[mask] * (wanted - 1)]
        assert positions[begin:end] == [*range(known - draws, known + wanted - 1)]
        assert inputs.sampled[row * depth :][:wanted].tolist() == [*range(end - wanted, end)]
        assert inputs.sample_positions[row * depth :][:wanted].tolist() == [*range(known, known + wanted)]
        expected_slots += [*[slot] * wanted, *[slots] * (depth - wanted)]
        before[slot, :wanted] = drawing[row * depth :][:wanted]
    assert inputs.sample_slots.tolist() == expected_slots
    parallel_draft.store(drawing, inputs.sample_slots, guesses, depth)
    assert torch.equal(guesses[:-1], before[:-1])


def check_masks(samples: int, masks: int, vocab: int, words: int, dtype: torch.dtype) -> None:
    """Random masks over some lines of logits, the second one of no line; tokens beyond a mask's last word are
    forbidden."""
    logits, lines = rand(samples, vocab, dtype=dtype), torch.randperm(samples, device=DEVICE)[:masks]
    lines[1:2] = -1
    packed = torch.randint(-(1 << 31), 1 << 31, (masks, words), device=DEVICE).int()
    want = logits.clone()
    reference.mask_logits(want, lines, packed)
    mask_logits(logits, lines, packed)
    assert torch.equal(logits, want)
    for mask, line in enumerate(lines.tolist()):
        if line < 0:
            continue
        forbidden = [
            token for token in range(vocab) if token // 32 >= words or not packed[mask, token // 32] >> token % 32 & 1
        ]
        assert torch.isneginf(logits[line]).nonzero()[:, 0].tolist() == forbidden


def check_sampling(rows: int, slots: int, vocab: int, rounded: bool, most: int, chunk: int | None, block: int) -> None:
    """One step of `sample` and `top_logprobs` against the reference, which runs on the CPU."""
    logits = torch.randn(rows, vocab, device=DEVICE) * 3
    if rounded:
        logits = logits.bfloat16().float()  # many equal values
    state = random_settings(slots, vocab)
    where = torch.randperm(slots, device=DEVICE)[:rows]
    positions = torch.randint(0, 4000, (rows,), device=DEVICE)
    x = shaped(logits, state, where)
    at = where.cpu()
    noise = reference.gumbel_noise(state.seed.cpu()[at], positions.cpu(), state.sample.cpu()[at], vocab)
    expected = torch.where(state.temperature.cpu()[at] > 0, reference.choose(x, noise), reference.choose(x))
    assert state.history is not None
    before = state.history.clone()
    got = sampling.sample(logits, state, where, positions, chunk=chunk or sampling.CHUNK, block=block)
    tokens = got.tokens.cpu()
    wrong = (tokens != expected).nonzero()[:, 0].tolist()
    # By rounding, the nucleus of top-p may have one token more or less.
    assert all(float(state.top_p[where][row]) < 1 for row in wrong), wrong
    assert len(wrong) <= 1, wrong
    penal = (state.repetition != 1) | (state.presence != 0) | (state.frequency != 0)
    for row, slot in enumerate(at.tolist()):
        word = (int(before[slot, tokens[row]]) | 1) + 2
        assert int(state.history[slot, tokens[row]]) == (word if penal[slot] else int(before[slot, tokens[row]]))
    own, ids, best = reference.log_probs(logits.cpu(), tokens, most)
    assert torch.allclose(got.logprobs.cpu(), own, atol=2e-5)
    top = top_buffers(rows, vocab, most, logits.device, chunk or 2048)
    top_logprobs(logits, got.totals, top)
    assert torch.allclose(top.best.cpu(), best, atol=2e-5)
    assert torch.equal(logits.gather(1, top.ids).cpu(), logits.cpu().gather(1, ids))


def shaped(logits: Tensor, state: SlotSettings, where: Tensor) -> Tensor:
    """The reference's logits after penalties, edits, temperature and truncation."""
    x, where = logits.cpu().clone(), where.cpu()
    settings = {name: getattr(state, name).cpu() for name in state.__slots__}
    history = settings["history"][where]
    reference.repeat_penalty(x, (history & 1).bool(), settings["repetition"][where])
    reference.count_penalties(x, (history >> 1).float(), settings["presence"][where], settings["frequency"][where])
    x += torch.where((settings["edited"][where] != 0)[:, None], settings["edits"][where], 0.0)
    hot = (settings["temperature"][where] > 0).nonzero()[:, 0]
    x[hot] = x[hot] / settings["temperature"][where][hot, None]
    x[hot] = reference.keep_top_k(x[hot], settings["top_k"][where][hot])
    nucleus = hot[settings["top_p"][where][hot] < 1]
    x[nucleus] = reference.keep_top_p(x[nucleus], settings["top_p"][where][nucleus])
    x[hot] = reference.keep_min_p(x[hot], settings["min_p"][where][hot])
    return x


# ---- norms and activations ----


def check_layer_norm(rows: int, n: int, dtype: torch.dtype) -> None:
    """Rows far from zero, with and without a bias, some not contiguous; a single row has the same bits."""
    wide = rand(rows, n + 7, dtype=dtype) * 3 + 20
    weight, bias = rand(n, dtype=dtype), rand(n, dtype=dtype)
    x = wide[:, :n]
    for shift in (None, bias):
        want = layers.normalize(x.double(), _doubled(Norm(weight, 1e-5, NormKind.LAYER, shift)))
        got = normalize(x, Norm(weight, 1e-5, NormKind.LAYER, shift))
        close(got, want)
        assert torch.equal(normalize(x[-1:], Norm(weight, 1e-5, NormKind.LAYER, shift)), got[-1:])


def check_gelu(rows: int, n: int, dtype: torch.dtype) -> None:
    """Both kinds of GELU, in new memory and in place, gated, for large arguments; a single row has the same bits."""
    x = rand(rows, n, dtype=dtype) * 4
    x[0, :2] = torch.tensor([-30.0, 30.0], dtype=dtype)
    halves = torch.cat([x, rand(rows, n, dtype=dtype)], 1)
    close(
        activate(halves, Activation.GATED_GELU_TANH),
        layers.activate(halves.double(), Activation.GATED_GELU_TANH),
    )
    for activation in (Activation.GELU, Activation.GELU_TANH):
        tanh = activation is Activation.GELU_TANH
        out = poison(rows, n, dtype=dtype)
        assert gelu(x, tanh=tanh, out=out) is out
        close(out, layers.activate(x.double(), activation))
        assert torch.equal(activate(x.clone(), activation), out)
        assert torch.equal(activate(x[-1:].clone(), activation), out[-1:])


def _doubled(norm: Norm) -> Norm:
    return replace(norm, weight=norm.weight.double(), bias=None if norm.bias is None else norm.bias.double())
