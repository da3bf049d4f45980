"""A launched step, and what it reports: words in host memory that are valid when the step is over.

Launches nothing. The words of a step with S samples: S tokens, the log-probabilities of these, S totals of their
logits, and then for each row how many draws are kept, or for each token whether its numbers are finite.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kernels import step_io
from services.worker.runners.cuda.layer_events import Mark
from services.worker.runners.cuda.logprobs import TopLogprobs
from services.worker.runners.cuda.masked_draws import MaskedRows
from services.worker.runners.cuda.scores import PromptLines
from services.worker.runners.cuda.step_words import StagingBuffer, StepRows

_FEW_ROWS, _FEW_TOKENS = 8, 1024
"""Most rows and tokens of a step whose report is read without numpy, which a first token would wait for: after some
milliseconds of rest a dozen of its calls take 40 us."""


class Report:
    """Host memory for the report of a step."""

    __slots__ = ("tensor", "words")

    def __init__(self, size: int, pinned: bool) -> None:
        self.tensor = torch.zeros(size, dtype=torch.int32, pin_memory=pinned)
        self.words: StagingBuffer = self.tensor.numpy().data


@dataclass(slots=True)
class GpuStep:
    """A launched step. What it reports may be read when it is over."""

    number: int
    """As counted by `StepUpload`."""
    rows: StepRows
    samples: int
    """Length S of the report's lists."""
    report: Report
    """Begins with `Computed.report`, valid after `done`."""
    tops: TopLogprobs
    done: torch.cuda.Event | None
    """None: the step is over already (no GPU)."""
    began: torch.cuda.Event | None
    """When its first kernel could start, if gaps are measured."""
    masked: MaskedRows | None = None
    """Rows that draw later, under masks."""
    prompts: PromptLines | None = None
    """Its lines of prompts whose log-probabilities are asked for."""
    layers: Sequence[Mark] = ()
    """When some of its layers are computed."""

    @property
    def undrawn(self) -> bool:
        """Whether it has rows that draw when masks arrive."""
        return self.masked is not None

    @property
    def has_guesses(self) -> bool:
        """Whether it is to be collected before the next one is launched."""
        return self.rows.guesses > 0

    def drawn(self) -> list[int]:
        """The token of each sample."""
        return self.report.words[: self.rows.sizes[2]].tolist()

    def logprobs(self) -> list[float]:
        """Those of the tokens; none if no row asks for any."""
        size, samples = self.samples, self.rows.sizes[2]
        return _floats(self.report.words[size : size + samples]) if self.tops.wanted else []

    def kept(self) -> list[int]:
        """Of each row of a step with guesses, how many draws are kept; 0: its numbers are not finite."""
        return self.report.words[step_io.aligned(3 * self.samples) :][: len(self.rows.contexts)].tolist()

    def finite(self) -> list[bool]:
        """Of each row of a step without guesses, whether all its numbers are finite."""
        tokens, rows, _ = self.rows.sizes
        return finite_of_few(self) if rows <= _FEW_ROWS and tokens <= _FEW_TOKENS else finite_of_many(self)


def finite_of_many(step: GpuStep) -> list[bool]:
    """As `GpuStep.finite`."""
    tokens, rows, samples = step.rows.sizes
    report, size = np.frombuffer(step.report.words, np.int32), step.samples
    finite = np.ones(rows, np.bool_)
    if not step.rows.answers:
        lines = report[step_io.aligned(3 * size) :][:tokens]
        finite = np.minimum.reduceat(lines, [0, *step.rows.ends[:-1]]) > 0
    finite[step.rows.sampling] &= np.isfinite(report[2 * size :][:samples].view(np.float32))
    found: list[bool] = finite.tolist()
    return found


def finite_of_few(step: GpuStep) -> list[bool]:
    """The same for few rows of few tokens."""
    tokens, rows, samples = step.rows.sizes
    words, size = step.report.words, step.samples
    finite = [True] * rows
    if not step.rows.answers:
        lines, ends = words[step_io.aligned(3 * size) :][:tokens].tolist(), step.rows.ends
        finite = [min(lines[begin:end]) > 0 for begin, end in zip([0, *ends], ends, strict=False)]
    totals = _floats(words[2 * size : 2 * size + samples])
    for row, total in zip(step.rows.sampling, totals, strict=True):
        finite[row] = finite[row] and math.isfinite(total)
    return finite


def _floats(words: StagingBuffer) -> list[float]:
    """The floats whose bits these words are."""
    floats: Any = words.cast("B").cast("f")
    return list(floats)
