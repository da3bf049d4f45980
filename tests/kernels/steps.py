"""Whole steps of the GPU's runner against the CPU's: equal tokens, log-probabilities and pools for a packed step."""

import random
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from kernels import sampling
from services.worker.build.kv_calibration import measure_kv_scales
from services.worker.loader.plain import randomize
from services.worker.models.decoder import Decoder
from services.worker.models.ops import Ops
from services.worker.runners.base import StepResult
from services.worker.runners.cpu.ops import ReferenceOps
from services.worker.runners.cpu.runner import CpuRunner
from services.worker.runners.cuda.ops import TritonOps
from services.worker.runners.cuda.runner import GpuRunner
from services.worker.runners.step import Edit, SlotState, Words
from tests.tiny_config import tiny_config

_VOCAB, _LENGTH, _SLOTS, _BLOCKS, _LAST = 50, 128, 4, 12, -1
_EditOf = tuple[Edit, int, Sequence[int]]
"""Operation, slot, words."""
_RowOf = tuple[int, list[int], bool]
"""Slot, token ids (_LAST: the slot's last token), whether it samples."""


def check_steps(**model: Any) -> None:
    """Prompts in chunks, some without a sampled token; draws, penalties, bias and bans; slots that are reused.

    `model` are fields of the model's configuration."""
    gpu, cpu = _runners(_SLOTS, _LENGTH, 64, _BLOCKS, **model)
    for words in _steps():
        got, want = _without_memory_behind_draws(gpu, words), cpu.run(words)
        assert (got.finite, got.sampled.tokens) == (want.finite, want.sampled.tokens)
        _check_top_logprobs(got, want)
        for pool, other in zip(gpu.kv.layers, cpu.kv.layers, strict=True):
            torch.testing.assert_close(pool[1:], other[1:], rtol=1e-4, atol=1e-4)
    seen, expected = (runner.inspect([5, 6, 7, 8, 9]).logits() for runner in (gpu, cpu))
    assert seen.shape == (5, _VOCAB)
    np.testing.assert_allclose(seen, expected, rtol=1e-4, atol=1e-4)


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


def _runners(slots: int, length: int, step_tokens: int, blocks: int, **model: Any) -> tuple[GpuRunner, CpuRunner]:
    """The GPU's and the CPU's runner of one model."""
    fast, exact = _model(TritonOps(), **model), _model(ReferenceOps(), **model)
    for views, others in zip(fast.destinations().values(), exact.destinations().values(), strict=True):
        for view, other in zip(views, others, strict=True):
            view.copy_(other)
    ops = exact.ops
    assert isinstance(ops, ReferenceOps)
    gpu = GpuRunner(fast, TritonOps(), 16, slots, length, step_tokens, torch.float32)
    gpu.kv.allocate(blocks)
    return gpu, CpuRunner(exact, ops, blocks, 16, slots, length, torch.float32)


def _without_memory_behind_draws(gpu: GpuRunner, words: Words) -> StepResult:
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
    return gpu.collect(step)


def _check_top_logprobs(got: StepResult, want: StepResult) -> None:
    """Compares top log-probabilities; a row that did not request them may have them or not."""
    for (top,), (expected,) in zip(got.sampled.tops or [], want.sampled.tops or [], strict=True):
        assert [id for id, _ in top] == [id for id, _ in expected]
        torch.testing.assert_close([number for _, number in top], [number for _, number in expected], rtol=0, atol=1e-4)


def _model(ops: Ops, **settings: Any) -> Decoder:
    """A model of two layers, the second with a sliding window."""
    config = tiny_config(vocab_size=_VOCAB, context_length=_LENGTH, windows=(None, 20), **settings)
    model = Decoder(config, ops, torch.float32, _LENGTH)
    randomize(model, lambda phase, done, total: None)
    return model


def _steps() -> Iterator[Words]:
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


def _admit(slot: int, prompt_len: int, **settings: Any) -> _EditOf:
    greedy = SlotState(0, prompt_len, 5, 0, 0, 0, -1, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0)
    return Edit.ADMIT, slot, greedy._replace(**settings).words()


def _bits(*values: float) -> Sequence[int]:
    return array("i", array("f", values).tobytes())


def _packed(edits: list[_EditOf], rows: list[_RowOf]) -> Words:
    packed = [word for edit, slot, words in edits for word in (edit, slot, len(words), *words)]
    columns = [number for slot, ids, samples in rows for number in (slot, len(ids), samples)]
    ids = [id for row in rows for id in row[1]]
    return np.array([len(packed), len(rows), len(ids), *packed, *columns, *ids], np.int32)
