"""What drawn tokens do to an answer: they are reported up to its end. Knows one job at a time, never a step."""

from collections.abc import Sequence
from typing import NamedTuple

from services.worker.engine.active_job import ActiveJob
from services.worker.engine.structured import allowed, following
from services.worker.job import EndReason, Failure, TokenOut
from services.worker.runners.base import Top
from services.worker.structured.base import Matcher


class Ending(NamedTuple):
    """Why an answer ends with the tokens that were drawn last."""

    kept: int
    """How many of them belong to it."""
    reason: EndReason
    stop_token_id: int | None = None
    error: Failure | None = None


def advance(
    job: ActiveJob,
    drawn: Sequence[int],
    logprobs: Sequence[float] | None,
    tops: Sequence[Top] | None,
    reported: list[TokenOut],
) -> Ending | None:
    """Report the answer's next tokens. -> its end, if it ends. Tokens behind an end are dropped.

    logprobs, tops: of each token, if the job asks for them.
    """
    if job.matcher is not None:
        return _advance_in_form(job, job.matcher, drawn, logprobs, tops, reported)
    request, sequence = job.job, job.sequence
    begin = position = len(sequence.tokens) - request.prompt_len
    most = sequence.limit - request.prompt_len
    for token_id in drawn:
        if token_id in job.end_tokens and position >= request.params.min_tokens:
            return Ending(position - begin, EndReason.STOP, token_id)
        if logprobs is None:
            reported.append(TokenOut(request.key, position, token_id))
        else:
            top = tops[position - begin] if tops else None
            reported.append(TokenOut(request.key, position, token_id, logprobs[position - begin], top))
        position += 1
        if position == most:
            return Ending(position - begin, EndReason.LENGTH)
    return None


def _advance_in_form(
    job: ActiveJob,
    matcher: Matcher,
    drawn: Sequence[int],
    logprobs: Sequence[float] | None,
    tops: Sequence[Top] | None,
    reported: list[TokenOut],
) -> Ending | None:
    """A token may end the answer where the form is complete, and the answer ends where nothing can follow."""
    begin, params, most = job.sequence.position, job.job.params, job.sequence.limit - job.job.prompt_len
    for place, token_id in enumerate(drawn):
        if token_id in job.end_tokens and matcher.accepting and begin + place >= params.min_tokens:
            return Ending(place, EndReason.STOP, token_id)
        error = following(matcher, token_id)
        if error is not None:
            return Ending(place, EndReason.ERROR, error=error)
        top = allowed(tops[place]) if tops else None
        reported.append(TokenOut(job.job.key, begin + place, token_id, logprobs[place] if logprobs else None, top))
        if matcher.ended:
            return Ending(place + 1, EndReason.STOP)
        if begin + place + 1 == most:
            return Ending(place + 1, EndReason.LENGTH)
    return None
