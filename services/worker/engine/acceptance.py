"""Which jobs end as they arrive, and why. Pure: knows the planner's limits, never a step."""

from services.worker.engine.adapters import UNSUPPORTED
from services.worker.engine.answers import Ending
from services.worker.job import EndReason, Failure
from services.worker.planner.planner import Planner
from services.worker.planner.sequence import Sequence
from services.worker.structured.base import Matcher

TOO_LONG = Failure("INVALID_ARGUMENT", "INVALID", "the prompt is empty or does not fit the model's context")
NO_ROOM = Failure("RESOURCE_EXHAUSTED", "KV_EXHAUSTED", "the request needs more KV memory than this worker has")


def ending_at_arrival(
    sequence: Sequence, form: Matcher | Failure | None, planner: Planner, max_seq_length: int
) -> Ending | None:
    """The end of a job that has nothing to compute or cannot run; None: it runs."""
    job = sequence.job
    if isinstance(form, Failure):
        return Ending(0, EndReason.ERROR, error=form)
    if form is not None and form.ended:  # An earlier attempt completed it.
        return Ending(0, EndReason.STOP)
    if job.adapter is not None and not planner.adapters.count:
        return Ending(0, EndReason.ERROR, error=UNSUPPORTED)
    if not job.token_ids or job.prompt_len >= max_seq_length:
        return Ending(0, EndReason.ERROR, error=TOO_LONG)
    if sequence.total >= sequence.limit:
        return Ending(0, EndReason.LENGTH)
    if not planner.fits(sequence):
        return Ending(0, EndReason.ERROR, error=NO_ROOM)
    return None
