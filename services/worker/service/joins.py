"""Subscriptions to jobs of other requests: late ones, and those that arrive before their job. Knows no engine."""

import asyncio
from collections import defaultdict

from protos import inference_pb2 as api
from protos import mesh_pb2 as mesh
from services.errors import WeftError
from services.worker.job import Ended, EndReason
from services.worker.service import codec
from services.worker.service.job_record import JOB_NOT_FOUND, JobRecord, Subscriber
from services.worker.service.tracing import record_attach

ATTACH_WAIT_S = 1.0
"""How long a subscription waits for its job: the job's own gateway may still be sending it."""


def join(record: JobRecord, link: Subscriber, message: mesh.AttachJob) -> None:
    """Sends a job's tokens so far, then its further tokens, or its end if it has ended."""
    record_attach(message.traceparent, record.traceparent)
    try:
        tokens = record.tokens_from(message.position)
    except WeftError as error:
        link.send_end(codec.failed(message.stream_id, error))
        return
    link.send_tokens(message.stream_id, tokens)
    if record.ended is not None:
        link.send_end(_late_end(record, record.ended, message.stream_id))
    else:
        record.subscribe(link, message.stream_id)


class WaitingJoins:
    """Subscriptions that wait for their job, by job id."""

    def __init__(self) -> None:
        self._waiting_for_job: dict[str, list[tuple[Subscriber, mesh.AttachJob]]] = defaultdict(list)

    def add(self, link: Subscriber, message: mesh.AttachJob) -> None:
        """Waits for the job, at most ATTACH_WAIT_S: then the subscription fails, retryably."""
        self._waiting_for_job[message.job_id].append((link, message))
        asyncio.get_running_loop().call_later(ATTACH_WAIT_S, self._expire, link, message)

    def take(self, job_id: str) -> list[tuple[Subscriber, mesh.AttachJob]]:
        """Removes and returns the subscriptions that wait for a job."""
        return self._waiting_for_job.pop(job_id, [])

    def discard(self, link: Subscriber, stream_id: int | None = None) -> None:
        """Removes one stream of a link, or all of them."""
        for job_id, waiting in list(self._waiting_for_job.items()):
            waiting[:] = [each for each in waiting if each[0] is not link or stream_id not in (None, each[1].stream_id)]
            if not waiting:
                del self._waiting_for_job[job_id]

    def _expire(self, link: Subscriber, message: mesh.AttachJob) -> None:
        waiting = self._waiting_for_job.get(message.job_id, [])
        if (link, message) in waiting:
            waiting.remove((link, message))
            if not waiting:
                del self._waiting_for_job[message.job_id]
            link.send_end(codec.failed(message.stream_id, JOB_NOT_FOUND))


def _late_end(record: JobRecord, ended: Ended, stream_id: int) -> mesh.JobEnd:
    """The end of a job for a late subscriber. A cancelled answer is incomplete: it needs another attempt."""
    end = codec.end_of(ended, stream_id, record.handed_off)
    if ended.reason is EndReason.CANCELLED:
        end.reason = api.FINISH_REASON_ERROR
        end.failure.CopyFrom(JOB_NOT_FOUND.failure())
    return end
