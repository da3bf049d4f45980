"""Answers with a form: jobs that wait for its compilation, and the masks of a step's rows.

Knows matchers, jobs and masks, never a runner or a device.
"""

import math
import time
from collections.abc import Sequence

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
        self, jobs: Sequence[ActiveJob | None], end_tokens: frozenset[int]
    ) -> tuple[Masks, list[tuple[ActiveJob, FormRefused]]]:
        """The masks of rows that belong to these jobs, and the jobs that cannot be continued. The masks of these, and
        of rows whose job has ended (None), allow everything: what they draw is dropped. Valid until the next call."""
        forms = self.forms
        assert forms is not None, "a job with a form runs without forms"
        if len(self._masks) < len(jobs):
            self._masks = np.empty((len(jobs), forms.words), np.int32)
        masks = self._masks[: len(jobs)]
        forms.fill([(job.matcher, line) for line, job in enumerate(jobs) if job and job.matcher], masks)
        failed = []
        for line, job in enumerate(jobs):
            if job is None or job.matcher is None:
                masks[line] = -1
                continue
            error = forms.failure(job.matcher)
            if error is None:
                _set_ends(masks[line], job, end_tokens)
                error = None if masks[line].any() else _DEAD_END
            if error is not None:
                masks[line] = -1
                failed.append((job, error))
        return masks, failed


def _set_ends(line: Masks, job: ActiveJob, end_tokens: frozenset[int]) -> None:
    """Allow end and stop tokens exactly where they may end the answer: where its form is complete, and it has
    min_tokens. A stop token that the form itself allows elsewhere is an ordinary token there."""
    params = job.job.params
    assert job.matcher is not None
    may_end = job.matcher.accepting and job.sequence.position >= params.min_tokens
    if params.ignore_eos or not may_end:
        for token in end_tokens:
            line[token >> 5] &= ~_bit(token)
    if may_end:
        for token in params.stop_token_ids:
            line[token >> 5] |= _bit(token)


def _bit(token: int) -> np.int32:
    return np.uint32(1 << (token & 31)).view(np.int32)
