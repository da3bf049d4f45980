"""Converts jobs for encoders from messages of the Run link to the engine's plain values. Knows no links."""

import time
from array import array

import numpy as np

from protos import mesh_pb2 as mesh
from services.validate import check_token_ids
from services.validate_encode import check_encode_task
from services.worker.job import EncodeTask, Job, SamplingParams

_NO_SAMPLING = SamplingParams(max_tokens=1)


def job_of(message: mesh.Job, key: int, card: mesh.ModelCard) -> Job:
    """The engine's job for a message with texts to encode, which is validated here. Raises WeftError."""
    check_encode_task(message, card)
    task = message.encode
    ids = np.array(message.token_ids, np.uint32)  # Many times faster than reading the repeated field itself.
    check_token_ids("token_ids", (int(ids.max()),), card)
    token_ids = array("i", ids.tobytes())
    return Job(
        key=key,
        token_ids=token_ids,
        prompt_len=len(token_ids),
        params=_NO_SAMPLING,
        bypass_cache=True,
        deadline=deadline_of(message),
        priority=message.priority,
        encode=EncodeTask(tuple(task.lengths), tuple(task.seconds), task.dimensions, task.normalize),
    )


def deadline_of(message: mesh.Job) -> float | None:
    """When a job must have ended, on `time.monotonic`."""
    return time.monotonic() + message.deadline_s if message.deadline_s > 0 else None
