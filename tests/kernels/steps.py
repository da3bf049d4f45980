"""Whole steps of the GPU's runner against the CPU's: equal tokens, log-probabilities and pools for a packed step."""

import copy
import math
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from kernels import sampling
from services.worker.build.kv_calibration import measure_kv_scales
from services.worker.job import Adapter
from services.worker.loader.plain import randomize
from services.worker.models.decoder import Decoder
from services.worker.models.draft_heads import DraftHeads, HeadsConfig
from services.worker.models.ops import Ops
from services.worker.runners.base import Masks, StepResult
from services.worker.runners.cpu.adapters import CpuAdapters
from services.worker.runners.cpu.drafts.draft_model import CpuDraftModel
from services.worker.runners.cpu.drafts.heads import CpuHeads
from services.worker.runners.cpu.drafts.parallel_draft import CpuParallelDraft
from services.worker.runners.cpu.ops import ReferenceOps
from services.worker.runners.cpu.runner import CpuRunner
from services.worker.runners.cuda.adapters import GpuAdapters
from services.worker.runners.cuda.drafts.draft_model import GpuDraftModel
from services.worker.runners.cuda.drafts.heads import GpuHeads
from services.worker.runners.cuda.drafts.parallel_draft import GpuParallelDraft
from services.worker.runners.cuda.forward import Computed
from services.worker.runners.cuda.gpu_step import finite_of_few, finite_of_many
from services.worker.runners.cuda.ops import TritonOps
from services.worker.runners.cuda.runner import GpuRunner
from services.worker.runners.step import Edit, SlotState, Words
from tests.tiny_config import tiny_config

_VOCAB, _LENGTH, _SLOTS, _BLOCKS, _LAST, _OWN = 50, 128, 4, 12, -1, -2
_DRAWN: dict[str, Any] = {"temperature": 1.0, "seed_low": 9}
_EditOf = tuple[Edit, int, Sequence[int]]
"""Operation, slot, words."""
_RowOf = tuple[int, list[int], int]
"""Slot, token ids (_LAST: the slot's last token), how many of them are sampled from."""


def check_steps(**model: Any) -> None:
    """Prompts in chunks, some without a sampled token; draws, penalties, bias, bans and masks; slots that are reused.

    `model` are fields of the model's configuration."""
    gpu, cpu = _runners(_SLOTS, _LENGTH, 64, _BLOCKS, **model)
    for words, masks in _steps():
        got, want = _without_memory_behind_draws(gpu, words, masks), _run(cpu, words, masks)
        assert (got.finite, got.sampled.tokens) == (want.finite, want.sampled.tokens)
        _check_scores(got, want)
        if masks is not None:
            _check_masked(got, masks)
        _check_top_logprobs(got, want)
        for pool, other in zip(gpu.kv.layers, cpu.kv.layers, strict=True):
            torch.testing.assert_close(pool[1:], other[1:], rtol=1e-4, atol=1e-4)
    for text in ([5, 6, 7, 8, 9], [4]):
        seen, expected = (runner.inspect(text).logits() for runner in (gpu, cpu))
        assert seen.shape == (len(text), _VOCAB)
        np.testing.assert_allclose(seen, expected, rtol=1e-4, atol=1e-4)


def check_parts_of_a_step() -> None:
    """The parts of a step whose launch failed: both are launched, then both are drawn, then both are collected. The
    second has the memory of the first one's logits, as with a graph that is replayed twice."""
    gpu, cpu = _runners(_SLOTS, _LENGTH, 64, _BLOCKS)
    logits, compute = torch.empty(_SLOTS, _VOCAB), gpu.forward.run

    def computed(*arguments: Any, **options: Any) -> Computed:
        found = compute(*arguments, **options)
        assert found is not None
        return replace(found, logits=logits[: len(found.logits)].copy_(found.logits))

    gpu.forward.run = computed  # type: ignore[method-assign]
    parts, allowed = [], [_masks([31, 32, 40, 8]), _masks([3, 9, 49])]
    for slot, ids in enumerate(([7, 9, 30, 41], [8, 3])):
        edits = [_admit(slot, len(ids), temperature=1.0, logprobs=2), (Edit.BLOCKS, slot, [0, 1 + slot])]
        parts.append(_packed([*edits, (Edit.MASK, slot, [])], [(slot, ids, True)]))
    steps = [gpu.launch(words) for words in parts]
    for step, masks in zip(steps, allowed, strict=True):
        gpu.draw(step, masks)
    for step, words, masks in zip(steps, parts, allowed, strict=True):
        got, want = gpu.collect(step), _run(cpu, words, masks)
        assert got.sampled.tokens == want.sampled.tokens
        _check_scores(got, want)
        _check_masked(got, masks)
    _compare(gpu, cpu, _packed([(Edit.RELEASE, 1, []), _admit(1, 2)], [(1, [8, 3], True)]))


def check_guesses() -> None:
    """Rows of guesses beside a plain row: some right, some wrong, with penalties, draws, bias and log-probabilities.
    A plain step after them finds the slots' last tokens, positions and counts."""
    gpu, cpu = _runners(3, 32, 32, 6)
    penalties = {"repetition_penalty": 1.4, "frequency_penalty": 0.8, "presence_penalty": 0.3}
    begins = [
        _admit(0, 5, temperature=0.9, logprobs=2, **penalties),
        (Edit.HISTORY, 0, [5, 7, 9, 9, 30, 41]),
        (Edit.BIAS, 0, [4, *_bits(2.5)]),
        *(_admit(1, 2), _admit(2, 1, temperature=1.0, seed_low=9)),
        *((Edit.BLOCKS, slot, [0, 1 + 2 * slot, 2 + 2 * slot]) for slot in range(3)),
    ]
    _compare(gpu, cpu, _packed(begins, [(0, [7, 9, 9, 30, 41], 1), (1, [8, 3], 1), (2, [5], 1)]))
    kept = []
    for wrong in ((3, 1), (0, 2)):
        rows: list[_RowOf] = []
        for slot, place in enumerate(wrong):
            guesses = _would_draw(cpu, slot, 3)
            guesses[place:] = [guess ^ 1 for guess in guesses[place:]]
            rows.append((slot, [_LAST, *guesses], 4))
        rows.append((2, [_LAST], 1))
        kept += [len(tokens) for tokens in _compare(gpu, cpu, _packed([], rows)).sampled.tokens]
    assert kept == [4, 2, 1, 1, 3, 1]
    _compare(gpu, cpu, _packed([], [(slot, [_LAST], 1) for slot in (2, 0, 1)]))


def check_guesses_under_masks() -> None:
    """Rows of right and wrong guesses that draw under masks, with penalties, draws and log-probabilities, beside one
    that draws under a mask without guesses, and rows of guesses without masks; then in two parts, as after a failed
    launch, and a plain step after them."""
    gpu, cpu = _runners(4, 32, 40, 9)
    penalties = {"repetition_penalty": 1.4, "frequency_penalty": 0.8, "presence_penalty": 0.3}
    begins = [
        *(_admit(0, 5, temperature=0.9, logprobs=2, **penalties), (Edit.HISTORY, 0, [5, 7, 9, 9, 30, 41])),
        *(_admit(1, 2), _admit(2, 1, temperature=1.0, seed_low=9), _admit(3, 3, temperature=0.8, logprobs=1)),
        *((Edit.BLOCKS, slot, [0, 1 + 2 * slot, 2 + 2 * slot]) for slot in range(4)),
    ]
    prompts: list[_RowOf] = [(0, [7, 9, 9, 30, 41], 1), (1, [8, 3], 1), (2, [5], 1), (3, [6, 6, 2], 1)]
    _compare(gpu, cpu, _packed(begins, prompts))
    masked, few = {0, 2, 3}, [*range(0, _VOCAB, 3)]
    masks = {slot: _masks(*[few[slot + place :] for place in range(4)]) for slot in masked}
    marks: list[_EditOf] = [(Edit.MASK, slot, []) for slot in masked]
    for wrong in ({0: 3, 1: 1, 3: 0}, {0: 1, 1: 3, 3: 2}):
        rows: list[_RowOf] = []
        for slot, place in wrong.items():
            guesses = _would_draw(cpu, slot, 3, marks, masks.get(slot))
            rows.append((slot, [_LAST, *guesses[:place], *(guess ^ 1 for guess in guesses[place:])], 4))
        rows.insert(2, (2, [_LAST], 1))
        words, given = _packed(marks, rows), np.concatenate([masks[0], masks[2][:1], masks[3]])
        step = gpu.launch(words)
        gpu.draw(step, given)
        got, want = gpu.collect(step), _run(cpu, words, given)
        assert [len(tokens) for tokens in want.sampled.tokens] == [wrong[0] + 1, wrong[1] + 1, 1, wrong[3] + 1]
        _check_sampled(got, want)
        marks = []
    parts = [(_packed([], rows[:2]), masks[0]), (_packed([], rows[2:]), np.concatenate([masks[2][:1], masks[3]]))]
    steps = [gpu.launch(words) for words, _ in parts]
    for step, (_, given) in zip(steps, parts, strict=True):
        gpu.draw(step, given)
    for step, (words, given) in zip(steps, parts, strict=True):
        _check_sampled(gpu.collect(step), _run(cpu, words, given))
    free: list[_EditOf] = [(Edit.RELEASE, slot, []) for slot in masked]
    _compare(gpu, cpu, _packed(free, [(1, [_LAST], 1)]))


def check_draft_guesses() -> None:
    """The draft is the served model itself: its guesses are right, of rows that want one, three and none; behind its
    last guesses, behind a prompt, where it has caught up, and where they were made behind the step before."""
    gpu, cpu = _runners(3, 48, 32, 9, drafts=True)
    sequences, computed = [[7, 9, 9, 30, 41], [8, 3], [5]], [0, 0, 0]
    words = _three_prompts(sequences)
    followed = []
    wanted = (3, 1, 0), (2, 3, 1), (0, 0, 0), (1, 3, 2), (3, 0, 1), (2, 2, 1), (2, 1, 1)
    for counts in (None, *wanted, (7, 7, 7), (7, 7, 7), (3, 3, 3), (2, 1, 1)):
        if counts is not None:
            words = _own_guesses(counts, sequences, computed)
        drawn = _compare(gpu, cpu, words).sampled.tokens
        followed.append(dict(gpu._followed))
        for slot, tokens in enumerate(drawn):
            assert counts is None or len(tokens) == 1 + counts[slot], "a guess of the model itself is right"
            if counts is not None and (counts[slot] or not any(counts)):
                computed[slot] = len(sequences[slot]) + max(counts[slot] - 1, 0)
            sequences[slot] += tokens
    assert followed[2] == {0: 2, 1: 3, 2: 1}
    assert [len(each) for each in followed] == [0, 0, 3, 0, 0, 2, 3, 3, 3, 3, 3, 0], "none where blocks end"


def check_parallel_guesses() -> None:
    """A parallel draft model guesses what it guesses on a CPU: behind a prompt, in catch-ups, of rows that want one,
    three and no guesses, behind right and wrong ones, and behind the step before."""
    gpu, cpu = _runners(3, 48, 32, 9, drafts=True, mask_token=11)
    mine, other = gpu.draft, cpu.draft
    assert isinstance(mine, GpuParallelDraft)
    assert isinstance(other, CpuParallelDraft)
    sequences, computed = [[*range(7, 21)], [8, 3], [5]], [0, 0, 0]
    words = _three_prompts(sequences)
    checked, followed, guessed = _checked_guesses(gpu), 0, 0
    for counts in (None, (3, 1, 0), (0, 2, 3), (4, 1, 1), (2, 1, 1), (3, 1, 2), (0, 0, 0), (4, 4, 4)):
        if counts is not None:
            words = _own_guesses(counts, sequences, computed)
        guesses = _recorded_guesses(other)
        followed += sum(0 < count <= gpu._followed.get(slot, 0) for slot, count in enumerate(counts or ()))
        for slot, tokens in enumerate(_compare(gpu, cpu, words).sampled.tokens):
            if counts is not None and (counts[slot] or not any(counts)):
                assert checked[slot, : counts[slot]].tolist() == guesses[slot]
                guessed += counts[slot]
                computed[slot] = len(sequences[slot])
            sequences[slot] += tokens
        for slot, count in enumerate(computed):
            for pool, exact in zip(mine.kv.layers, other.kv.layers, strict=True):
                keys, expected = (layer[1 + 3 * slot :].flatten(0, 1)[:count] for layer in (pool, exact))
                torch.testing.assert_close(keys, expected, rtol=1e-4, atol=1e-4)
    assert followed > 4
    assert guessed > 20


def check_heads_guesses() -> None:
    """Draft heads guess what they guess on a CPU, from the same hidden states: in catch-ups, in first passes of several
    tokens, of rows that want one, three and no guesses, after a prefix that came without hidden states, and behind the
    step before."""
    gpu, cpu = _runners(3, 48, 32, 9, heads=_heads_config())
    mine, other = gpu.draft, cpu.draft
    assert isinstance(mine, GpuHeads)
    assert isinstance(other, CpuHeads)
    sequences, computed = [[*range(7, 21)], [8, 3], [5]], [0, 0, 0]
    words = _three_prompts(sequences)
    guessed: list[int] = []
    checked, followed = _checked_guesses(gpu), 0
    for counts in (None, (3, 1, 0), (0, 2, 3), (4, 1, 1), (2, 1, 1), (3, 1, 2)):
        if counts is not None:
            words = _own_guesses(counts, sequences, computed)
        guesses = _recorded_guesses(other)
        followed += sum(0 < count <= gpu._followed.get(slot, 0) for slot, count in enumerate(counts or ()))
        for slot, tokens in enumerate(_compare(gpu, cpu, words).sampled.tokens):
            if counts is not None and counts[slot]:
                found = checked[slot, : counts[slot]].tolist()
                assert found == guesses[slot]
                guessed += found
                computed[slot] = len(sequences[slot])
            sequences[slot] += tokens
        torch.testing.assert_close(mine.hidden.states[1:], other.hidden._states[1:], rtol=1e-4, atol=1e-4)
        for slot, count in enumerate(computed):  # Of guesses, the two may compute more or fewer.
            keys, expected = (heads.kv.layers[0][1 + 3 * slot :].flatten(0, 1)[:count] for heads in (mine, other))
            torch.testing.assert_close(keys, expected, rtol=1e-4, atol=1e-4)
        if counts == (3, 1, 0):
            for runner in (gpu, cpu):
                runner.kv.write([1], runner.kv.read([1]))
    assert followed > 4
    assert len(set(guessed)) > 3
    assert all(token % 2 for token in guessed), "a token that the heads' own head does not have"


def _three_prompts(prompts: Sequence[Sequence[int]]) -> Words:
    """The first step of three sequences with three blocks each; the second one is sampled."""
    begins = [_admit(slot, len(ids), **(_DRAWN if slot == 1 else {})) for slot, ids in enumerate(prompts)]
    begins += [(Edit.BLOCKS, slot, [0, *range(1 + 3 * slot, 4 + 3 * slot)]) for slot in range(3)]
    return _packed(begins, [(slot, [*ids], 1) for slot, ids in enumerate(prompts)])


def _own_guesses(counts: Sequence[int], sequences: Sequence[Sequence[int]], computed: Sequence[int]) -> Words:
    """A step in which slot i has `counts[i]` guesses of the draft model. The draft model has computed `computed[i]`
    tokens of the sequence; it computes the rest for the slots with guesses, or for all slots where none has any."""
    edits: list[_EditOf] = [
        (Edit.DRAFT, slot, [computed[slot], *sequences[slot][computed[slot] :]])
        for slot, count in enumerate(counts)
        if count or not any(counts)
    ]
    return _packed(edits, [(slot, [_LAST, *[_OWN] * count], 1 + count) for slot, count in enumerate(counts)])


def _checked_guesses(gpu: GpuRunner) -> torch.Tensor:
    """The table of guesses that the last step has read: a draft guesses behind a step at once."""
    table, follow = gpu.forward.own_guesses.clone(), gpu._follow

    def recorded(*arguments: Any) -> None:
        table.copy_(gpu.forward.own_guesses)
        follow(*arguments)

    gpu._follow = recorded  # type: ignore[assignment, method-assign]
    return table


def _recorded_guesses(draft: CpuDraftModel) -> dict[int, list[int]]:
    """Each slot's guesses of the next step."""
    found: dict[int, list[int]] = {}

    def guess(*arguments: Any) -> dict[int, list[int]]:
        found.update(type(draft).guess(draft, *arguments))
        return found

    draft.guess = guess  # type: ignore[method-assign,assignment]
    return found


def _heads_config() -> HeadsConfig:
    """Heads that read the streams before both layers of the tiny model, and guess every second token."""
    tokens = tuple(range(1, _VOCAB, 2))
    layer = tiny_config(layers=1, vocab_size=len(tokens), context_length=_LENGTH)
    return HeadsConfig(layer, (0, 1), tokens, _VOCAB, 2, "")


def check_steps_with_adapters() -> None:
    """Rows of two adapters and of none: prompts, answers, guesses; then a slot whose next sequence has no adapter."""
    gpu, cpu = _runners(3, 48, 32, 9, adapters=2)
    for slot in (1, 2):
        _load_adapter(slot, gpu, cpu)
    begins = [*(_admit(slot, 4, logprobs=2) for slot in range(3)), (Edit.ADAPTER, 0, [2]), (Edit.ADAPTER, 2, [1])]
    begins += [(Edit.BLOCKS, slot, [0, *range(1 + 3 * slot, 4 + 3 * slot)]) for slot in range(3)]
    prompts: list[_RowOf] = [(slot, [7, 9, 30, 41], 1) for slot in range(3)]
    first = _compare(gpu, cpu, _packed(begins, prompts)).sampled
    assert first.logprobs is not None
    assert len({each[0] for each in first.logprobs}) == 3, "the adapters change nothing"
    _compare(gpu, cpu, _packed([], [(slot, [_LAST], 1) for slot in (1, 2, 0)]))
    _compare(gpu, cpu, _packed([], [(0, [_LAST, 3, 4], 3), (2, [_LAST], 1)]))
    again = [_admit(0, 2), (Edit.BLOCKS, 0, [0, 1, 2])]
    _compare(gpu, cpu, _packed(again, [(0, [8, 3], 1), (1, [_LAST], 1)]))
    for pool, other in zip(gpu.kv.layers, cpu.kv.layers, strict=True):
        torch.testing.assert_close(pool[1:], other[1:], rtol=1e-4, atol=1e-4)


def _load_adapter(slot: int, gpu: GpuRunner, cpu: CpuRunner) -> None:
    """Loads one adapter of random matrices to both runners."""
    stored = {
        module: (torch.randn(5, product.inputs) / 7, torch.randn(outputs, 5) / 3)
        for product in cpu.model.adaptable()
        for module, outputs in zip(product.modules, product.outputs, strict=True)
        if "k_proj" not in module
    }
    for pages in (gpu.adapters, cpu.adapters):
        assert pages is not None
        weights, nbytes = pages.prepare(stored)
        pages.load(slot, Adapter(f"{slot}", bytes([slot]), 5, nbytes, weights))
        assert pages.loaded(slot)


def _compare(gpu: GpuRunner, cpu: CpuRunner, words: Words) -> StepResult:
    step = gpu.launch(words)
    if not step.rows.guesses:
        assert finite_of_many(step) == finite_of_few(step)
    got, want = gpu.collect(step), cpu.run(words)
    assert (got.finite, got.sampled.tokens) == (want.finite, want.sampled.tokens)
    for mine, other in zip(got.sampled.tops or [], want.sampled.tops or [], strict=True):
        for top, expected in zip(mine, other, strict=True):
            if expected:
                assert [id for id, _ in top[: len(expected)]] == [id for id, _ in expected]
    counts = [[len(numbers) for numbers in result.sampled.logprobs or []] for result in (got, want)]
    assert counts[0] == counts[1]
    return want


def _check_sampled(got: StepResult, want: StepResult) -> None:
    """Compares tokens, and log-probabilities where they are asked for; the likely tokens that a mask allows."""
    assert (got.finite, got.sampled.tokens) == (want.finite, want.sampled.tokens)
    compared = 0
    for row in range(len(want.sampled.tokens)):
        assert want.sampled.tops
        assert want.sampled.logprobs
        assert got.sampled.tops
        assert got.sampled.logprobs
        for place, ours in enumerate(got.sampled.logprobs[row]):
            expected = [each for each in want.sampled.tops[row][place] if each[1] > -math.inf]
            found = got.sampled.tops[row][place][: len(expected)]
            assert [token for token, _ in found] == [token for token, _ in expected]
            torch.testing.assert_close([x for _, x in found], [x for _, x in expected], rtol=0, atol=1e-4)
            if expected:
                torch.testing.assert_close(ours, want.sampled.logprobs[row][place], rtol=0, atol=1e-4)
                compared += 1
    assert compared


def _would_draw(
    cpu: CpuRunner, slot: int, count: int, edits: Sequence[_EditOf] = (), masks: Masks | None = None
) -> list[int]:
    """The next tokens of a slot, drawn by a copy of the runner; masks: one for each."""
    other, tokens = copy.deepcopy(cpu), []
    for place in range(count):
        words = _packed([] if place else [*edits], [(slot, [_LAST], True)])
        tokens += _run(other, words, None if masks is None else masks[place : place + 1]).sampled.tokens[0]
    return tokens


def check_measured_scales() -> None:
    """Compares the measured scales of keys and values, by a prompt whose last block is not full."""
    gpu, cpu = _runners(1, 40, 40, 3)
    for runner in (gpu, cpu):
        measure_kv_scales(runner, 40, 3)
    for layer, other in zip(gpu.model.layers, cpu.model.layers, strict=True):
        scales, wanted = layer.attention.kv_scales, other.attention.kv_scales
        assert scales is not None
        assert wanted is not None
        assert scales.tolist() == wanted.tolist()


def _runners(
    slots: int,
    length: int,
    step_tokens: int,
    blocks: int,
    drafts: bool = False,
    heads: HeadsConfig | None = None,
    adapters: int = 0,
    **model: Any,
) -> tuple[GpuRunner, CpuRunner]:
    """The GPU's and the CPU's runner of one model; drafts: which is its own draft model, too; heads: random ones guess
    for it. adapters: slots of adapters."""
    fast, exact = _model(TritonOps(), **model), _model(ReferenceOps(), **model)
    _copy_weights(fast, exact)
    ops = exact.ops
    assert isinstance(ops, ReferenceOps)
    pages = GpuAdapters(fast, adapters, 8, step_tokens) if adapters else None
    host_pages = CpuAdapters(exact, ops, adapters) if adapters else None
    gpu = GpuRunner(fast, TritonOps(), 16, slots, length, step_tokens, torch.float32, guesses=8, adapters=pages)
    gpu.kv.allocate(blocks)
    draft: CpuDraftModel | None = None
    if heads is not None:
        small, large = (DraftHeads(heads, base, torch.float32, length) for base in (fast, exact))
        for views in large.destinations().values():
            views[0].normal_(1.0 if views[0].ndim == 1 else 0.0, 0.2)
        _copy_weights(small, large)
        guessing = gpu.use_draft(small, torch.float32)
        guessing.allocate(blocks)
        _hold_graphs(guessing)
        draft = CpuHeads(large, ops, blocks, 16, torch.float32)
    if drafts:
        guessing = gpu.use_draft(fast, torch.float32)
        guessing.allocate(blocks)
        guessing.launch_all()
        _hold_graphs(guessing)
        made = CpuDraftModel if exact.config.mask_token is None else CpuParallelDraft
        draft = made(exact, ops, blocks, 16, torch.float32)
    return gpu, CpuRunner(exact, ops, blocks, 16, slots, length, torch.float32, draft, host_pages)


def _hold_graphs(guessing: GpuDraftModel) -> None:
    """Hold passes and catch-ups as graphs do: padded."""
    guessing._graphs = {each: partial(guessing._pass, *each) for each in guessing._passes()}
    guessing._catch_ups = {each: guessing._empty_catch_up(each) for each in guessing._catch_up_sizes()}


def _copy_weights(to: Decoder, of: Decoder) -> None:
    for views, others in zip(to.destinations().values(), of.destinations().values(), strict=True):
        for view, other in zip(views, others, strict=True):
            view.copy_(other)


def _run(cpu: CpuRunner, words: Words, masks: Masks | None) -> StepResult:
    step = cpu.launch(words)
    if masks is not None:
        cpu.draw(step, masks)
    return cpu.collect(step)


def _without_memory_behind_draws(gpu: GpuRunner, words: Words, masks: Masks | None) -> StepResult:
    """A step. Once its tokens are drawn its slots have advanced: nothing that may fail comes behind, for the engine
    would launch the same rows again."""
    with pytest.MonkeyPatch.context() as patch:
        sample = sampling.sample

        def nothing(*_: object, **__: object) -> None:
            raise MemoryError

        def drawn(*arguments: Any) -> Any:
            samples = sample(*arguments)
            for name in ("empty", "zeros"):
                patch.setattr(torch, name, nothing)
            return samples

        patch.setattr(sampling, "sample", drawn)
        gpu._reports.clear()
        step = gpu.launch(words)
    if masks is not None:
        gpu.draw(step, masks)
    return gpu.collect(step)


def _check_top_logprobs(got: StepResult, want: StepResult) -> None:
    """Compares top log-probabilities; a row that did not request them may have them or not. Forbidden tokens, which are
    equally likely, have no order."""
    for (top,), (expected,) in zip(got.sampled.tops or [], want.sampled.tops or [], strict=True):
        assert len(top) == len(expected)
        top, expected = ([each for each in tokens if each[1] > -np.inf] for tokens in (top, expected))
        assert [id for id, _ in top] == [id for id, _ in expected]
        torch.testing.assert_close([number for _, number in top], [number for _, number in expected], rtol=0, atol=1e-4)


def _check_masked(result: StepResult, masks: Masks) -> None:
    """The most restrictive mask was obeyed: one row at least drew a token of it."""
    few = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little").sum(1).argmin()
    allowed = {token for token in range(_VOCAB) if masks[few, token // 32] >> token % 32 & 1}
    assert any(set(tokens) <= allowed for tokens in result.sampled.tokens)


def _check_scores(got: StepResult, want: StepResult) -> None:
    """Compares log-probabilities of prompts."""
    assert got.scores.keys() == want.scores.keys()
    for row, (logprobs, tops) in got.scores.items():
        expected, wanted = want.scores[row]
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-4)
        assert [[id for id, _ in top] for top in tops] == [[id for id, _ in top] for top in wanted]
        for top, other in zip(tops, wanted, strict=True):
            torch.testing.assert_close([x for _, x in top], [x for _, x in other], rtol=0, atol=1e-4)


def _model(ops: Ops, **settings: Any) -> Decoder:
    """A model of two layers, the second with a sliding window."""
    config = tiny_config(vocab_size=_VOCAB, context_length=_LENGTH, windows=(None, 20), **settings)
    model = Decoder(config, ops, torch.float32, _LENGTH)
    randomize(model, lambda phase, done, total: None)
    return model


def _steps() -> Iterator[tuple[Words, Masks | None]]:
    """Packed steps, and the masks of rows that draw later."""
    for words in _free_steps():
        yield words, None
    draw = random.Random(2)
    prompt = [draw.randrange(_VOCAB) for _ in range(12)]
    edits = [
        *((Edit.RELEASE, slot, []) for slot in (0, 1, 2)),
        _admit(0, 12, temperature=1.0, logprobs=5, repetition_penalty=1.4),
        (Edit.BLOCKS, 0, [0, 5, 3]),
        (Edit.HISTORY, 0, [12, *prompt]),
        (Edit.MASK, 0, []),
        _admit(1, 7, logprobs=2),
        (Edit.BLOCKS, 1, [0, 10]),
        _admit(2, 5, temperature=0.8, top_k=4, top_p=0.9),
        (Edit.BLOCKS, 2, [0, 4]),
        (Edit.BIAS, 2, [3, 7, *_bits(2.0, -1.0)]),
        (Edit.MASK, 2, []),
    ]
    prompts: list[_RowOf] = [(0, prompt, True), (1, prompt[:7], True), (2, prompt[:5], True)]
    yield _packed(edits, prompts), _masks([31, 32, 40, 8], [3, 9, 49])
    few = _masks([1], list(range(_VOCAB)))
    yield _packed([], [(2, [_LAST], True), (1, [_LAST], True), (0, [_LAST], True)]), few
    yield _packed([(Edit.RELEASE, slot, []) for slot in (0, 2)], [(1, [_LAST], True)]), None


def _masks(*allowed: list[int]) -> Masks:
    """A mask for each list of tokens."""
    bits = np.zeros((len(allowed), 64), np.uint8)
    for line, tokens in enumerate(allowed):
        bits[line, tokens] = 1
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


def _free_steps() -> Iterator[Words]:
    draw = random.Random(1)
    long, short = ([draw.randrange(_VOCAB) for _ in range(count)] for count in (30, 9))
    yield _packed([_admit(0, 30, temperature=1.0, logprobs=3), (Edit.BLOCKS, 0, [0, 5, 3])], [(0, long[:20], False)])
    yield _packed(
        [
            _admit(2, 9, repetition_penalty=1.3),
            (Edit.HISTORY, 2, [9, *short]),
            (Edit.BIAS, 2, [3, 7, *_bits(2.0, -1.0)]),
            (Edit.BAN, 2, [2, 7, 9]),
            (Edit.BLOCKS, 2, [0, 4]),
        ],
        [(0, long[20:], True), (2, short, True)],
    )
    yield _packed([], [(0, [_LAST], True), (2, [_LAST], True)])
    yield _packed(
        [
            (Edit.RELEASE, 2, []),
            _admit(2, 1),
            (Edit.BLOCKS, 2, [0, 9]),
            _admit(1, 9, temperature=0.7, seed_low=-9, logprobs=0),
            (Edit.BLOCKS, 1, [0, 10]),
        ],
        [(0, [_LAST], True), (2, [5], True), (1, short[:4], False)],
    )
    yield _packed([], [(1, short[4:], True), (0, [_LAST], True), (2, [_LAST], True)])
    yield _packed([(Edit.BLOCKS, 0, [2, 7])], [(0, [_LAST], True)])
    # An answer of four tokens that goes on, beside one without bad words; the first step draws nothing for it.
    yield _packed(
        [
            _admit(3, 5),
            (Edit.BLOCKS, 3, [0, 11]),
            (Edit.SCORE, 3, [3, *short[1:5]]),
            (Edit.BIAS, 3, [7, *_bits(3.0)]),
            _forbidden(draw, short[5:]),
        ],
        [(3, short[:4], False), (0, [_LAST], True)],
    )
    yield _packed([], [(3, short[4:], True), (0, [_LAST], True)])
    for _ in range(4):
        yield _packed([], [(3, [_LAST], True)])


def _admit(slot: int, prompt_len: int, **settings: Any) -> _EditOf:
    greedy = SlotState(0, prompt_len, 5, 0, 0, 0, -1, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0)
    return Edit.ADMIT, slot, greedy._replace(**settings).words()


def _forbidden(draw: random.Random, answer: list[int]) -> _EditOf:
    """Half of all tokens, and of the others many pairs and triples."""
    forbidden = [[token] for token in range(0, _VOCAB, 2)]
    for length, count in ((2, 200), (3, 300)):
        forbidden += [[draw.randrange(1, _VOCAB, 2) for _ in range(length)] for _ in range(count)]
    words = [word for each in forbidden for word in (len(each), *each)]
    return Edit.FORBID, 3, [len(answer), 2, *answer[-2:], *words]


def _bits(*values: float) -> Sequence[int]:
    return array("i", array("f", values).tobytes())


def _packed(edits: list[_EditOf], rows: list[_RowOf]) -> Words:
    packed = [word for edit, slot, words in edits for word in (edit, slot, len(words), *words)]
    columns = [number for slot, ids, samples in rows for number in (slot, len(ids), samples)]
    ids = [id for row in rows for id in row[1]]
    return np.array([len(packed), len(rows), len(ids), *packed, *columns, *ids], np.int32)
