"""Answers with a form: jobs that wait for its compilation, and the masks of a step's rows.

Knows matchers, jobs and masks, never a runner or a device.
"""

import itertools
import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from services.forms.request import FIELD
from services.worker.engine.active_job import ActiveJob
from services.worker.engine.inbox import Inbox
from services.worker.job import Failure, Job
from services.worker.runners.base import Top
from services.worker.structured.base import FormRefused, Forms, Masks, Matcher

UNSUPPORTED = Failure("UNIMPLEMENTED", "STRUCTURED_UNSUPPORTED", "this worker serves no structured answers")
_DEAD_END = FormRefused("no token can continue the answer")


def refused(error: FormRefused) -> Failure:
    """The failure of a job whose form cannot be compiled or followed."""
    return Failure("INVALID_ARGUMENT", "INVALID_GRAMMAR", f"{FIELD}: {error}", field=FIELD)


def following(matcher: Matcher, token_id: int) -> Failure | None:
    """Moves the matcher past the answer's next token. -> why it cannot go on, or None. The masks allowed the token, but
    the matcher may exceed its limits."""
    try:
        matcher.consume(token_id)
    except FormRefused as error:
        return refused(error)
    return None


def allowed(top: Top) -> Top:
    """The likely tokens without those that a mask forbids."""
    return [each for each in top if each[1] > -math.inf]


class FormedRow(NamedTuple):
    """A row whose tokens are drawn under masks."""

    job: ActiveJob | None
    """None: it has ended."""
    guesses: Sequence[int]

    @property
    def matcher(self) -> Matcher | None:
        """What follows the answer."""
        return self.job.matcher if self.job is not None else None


def likely(job: ActiveJob | None, guesses: Sequence[int]) -> Sequence[int]:
    """Guesses for an answer with a form: what the form prescribes, or else these as far as it allows them. None of them
    ends the answer."""
    if job is None or job.matcher is None:
        return ()
    found = job.matcher.likely(guesses)
    return found[: next((place for place, token in enumerate(found) if token in job.end_tokens), len(found))]


class StructuredJobs:
    """Jobs whose answers have a form. They arrive when it is compiled. `submit` may be called from any thread, the rest
    from the engine's."""

    forms: Forms | None = None
    """None: no such job is served."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._cancelled: dict[int, bool] = {}
        """Jobs that are being compiled, by key, and whether they were cancelled meanwhile."""
        self._masks: Masks = np.empty((0, 0), np.int32)
        """Room for the masks of a step: fresh memory would cost as much as some masks."""

    def __len__(self) -> int:
        return len(self._cancelled)

    def submit(self, job: Job) -> None:
        """Compile the job's form, then let the job arrive."""
        form, at = job.params.structured, time.monotonic()
        if form is None or self.forms is None:
            self._inbox.submit(job, at, None if form is None else UNSUPPORTED)
            return

        def opened(found: Matcher | FormRefused) -> None:
            self._inbox.submit(job, at, refused(found) if isinstance(found, FormRefused) else found)

        self._cancelled[job.key] = False
        self.forms.open(form, job.token_ids[job.prompt_len :], opened)

    def cancel(self, key: int) -> None:
        """Note that a job is not to run, if it is one of these."""
        if key in self._cancelled:
            self._cancelled[key] = True

    def arrived(self, key: int) -> bool:
        """The job has arrived. -> whether it was cancelled meanwhile."""
        return self._cancelled.pop(key, False)

    def masks_of(
        self, rows: Sequence[FormedRow], end_tokens: frozenset[int]
    ) -> tuple[Masks, list[tuple[ActiveJob, FormRefused]]]:
        """The masks of these rows, one for each token that is drawn, and the jobs that cannot be continued. The masks
        of these, and of rows whose job has ended, allow everything: what they draw is dropped. Valid until the next
        call."""
        forms = self.forms
        assert forms is not None, "a job with a form runs without forms"
        ends = list(itertools.accumulate(1 + len(row.guesses) for row in rows))
        if len(self._masks) < ends[-1]:
            self._masks = np.empty((ends[-1], forms.words), np.int32)
        masks = self._masks[: ends[-1]]
        firsts = [end - 1 - len(row.guesses) for row, end in zip(rows, ends, strict=True)]
        alone = [(row.matcher, at) for row, at in zip(rows, firsts, strict=True) if row.matcher and not row.guesses]
        forms.fill(alone, masks)
        errors = self._finish(rows, firsts, masks, end_tokens)
        follows = np.bitwise_or.reduce(masks, axis=1)[firsts]
        failed = []
        for row, first, end, error, some in zip(rows, firsts, ends, errors, follows, strict=True):
            if row.matcher and error is None and not some:
                error = _DEAD_END
            if error is not None or row.job is None:
                masks[first:end] = -1
            if error is not None and row.job is not None:
                failed.append((row.job, error))
        return masks, failed

    def _finish(
        self, rows: Sequence[FormedRow], firsts: Sequence[int], masks: Masks, end_tokens: frozenset[int]
    ) -> list[FormRefused | None]:
        """Write the masks of guesses, and allow end and stop tokens exactly where they may end the answer: where its
        form is complete, and it has min_tokens. A stop token that the form itself allows elsewhere is an ordinary token
        there. -> why an answer cannot be continued, for each row."""
        assert self.forms is not None
        errors: list[FormRefused | None] = []
        endless, stops = [], []
        for row, first in zip(rows, firsts, strict=True):
            job, matcher = row.job, row.matcher
            if job is None or matcher is None:
                errors.append(None)
                continue
            params, lines = job.job.params, masks[first : first + 1 + len(row.guesses)]
            complete = matcher.fill_along(row.guesses, lines) if row.guesses else (matcher.accepting,)
            errors.append(self.forms.failure(matcher))
            for place, whole in enumerate(complete):
                may_end = whole and job.sequence.position + place >= params.min_tokens
                if params.ignore_eos or not may_end:
                    endless.append(first + place)
                if may_end:
                    stops += [(first + place, token) for token in params.stop_token_ids]
        _forbid(masks, endless, end_tokens)
        for line, token in stops:
            masks[line, token >> 5] |= _bit(token)
        return errors


def _forbid(masks: Masks, lines: Sequence[int], tokens: frozenset[int]) -> None:
    """Forbid these tokens in some lines, all at once."""
    others: dict[int, np.int32] = {}
    for token in tokens:
        others[token >> 5] = others.get(token >> 5, np.int32(-1)) & ~_bit(token)
    for word, bits in others.items():
        masks[lines, word] &= bits


def _bit(token: int) -> np.int32:
    return np.uint32(1 << (token & 31)).view(np.int32)
