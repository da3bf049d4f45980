"""Builds the messages of one continuation to scheduler and workers, for each attempt. Knows no links and no clients."""

import math
import time
from collections.abc import Sequence
from functools import cached_property

from protos import inference_pb2 as api
from protos import mesh_pb2 as mesh
from services import hashing
from services.gateway.answers.admitted import AdmittedRequest
from services.gateway.answers.retry_policy import RetryState
from services.gateway.links.result_cache import ResultKey
from services.gateway.text.journal import Journal, KeyChain, packed


class JobMessages:
    """Sample `index` of a request, as messages."""

    def __init__(
        self,
        admitted: AdmittedRequest,
        index: int,
        sampling: api.Sampling,
        prompt: Sequence[int],
        key: ResultKey | None,
    ) -> None:
        """`sampling` is resolved: max_tokens and seed are set. With a `key` the job may join an identical one."""
        self._admitted = admitted
        self._key = key
        self._prompt = prompt
        tenant, card = admitted.tenant, admitted.served.card
        self._job_id = f"{tenant.hash}/{admitted.request_id}/{index}"
        self._job = mesh.Job(
            job_id=self._job_id,
            prompt_len=len(prompt),
            sampling=sampling,
            sample_index=index,
            salt=tenant.salt,
            bypass_cache=admitted.bypass_cache,
            priority=admitted.request.priority,
            adapter=admitted.served.adapter,
        )
        if admitted.request.HasField("speculation"):
            self._job.speculation = admitted.request.speculation
        self._job.sampling.ClearField("stop")
        self._job.sampling.ClearField("include_stop_string")
        if index:  # All continuations have one prompt.
            self._job.sampling.ClearField("prompt_logprobs")
        hashed = card.block_size and not admitted.bypass_cache
        root = hashing.chain_root(tenant.salt, card.fingerprint)
        self._block_keys = KeyChain(root, card.block_size) if hashed else None

    @property
    def max_tokens(self) -> int:
        """Most tokens of the answer."""
        return self._job.sampling.max_tokens

    @property
    def sample_index(self) -> int:
        """Index of the continuation in its request."""
        return self._job.sample_index

    @property
    def wants_details(self) -> bool:
        """Log-probabilities are requested."""
        return self._job.sampling.HasField("logprobs")

    @property
    def job_id(self) -> str:
        """The id of the job, the same for all attempts."""
        return self._job_id

    @cached_property
    def fingerprint(self) -> bytes:
        """What all attempts, retries and samples of this request have in common: tenant, model and prompt. The
        scheduler counts the deaths of workers by it; other sampling must not hide them."""
        card = self._admitted.served.card
        return hashing.digest(b"weft/request/1", self._job.salt, card.fingerprint, packed(self._prompt))

    def job(self, journal: Journal, deadline: float, traceparent: str, placement: int | None) -> mesh.Job:
        """The next attempt's job for a worker, tentative without a placement. `deadline` is on `time.monotonic`."""
        job = mesh.Job()
        job.CopyFrom(self._job)
        job.attempt, job.traceparent, job.deadline_s = journal.attempt, traceparent, remaining_s(deadline)
        if placement is None:
            job.tentative = True
        else:
            job.placement = placement
        if len(journal.prompt_details) >= len(journal.prompt) - 1:
            job.sampling.ClearField("prompt_logprobs")
        job.token_ids.extend(journal.context())
        return job

    def block_keys(self, journal: Journal) -> bytes:
        """Keys of the whole blocks of prompt and answer so far, joined; empty if they are neither read nor stored."""
        return self._block_keys.extend_to(journal.context()) if self._block_keys is not None else b""

    def attach(self, journal: Journal, leader_job_id: str, traceparent: str) -> mesh.AttachJob:
        """The next attempt as a subscription to another job."""
        return mesh.AttachJob(job_id=leader_job_id, position=len(journal.tokens), traceparent=traceparent)

    def submit(self, journal: Journal, deadline: float, retry: RetryState) -> mesh.Submit:
        """The next attempt's job for the scheduler."""
        submit, context = self._submit, journal.context()
        submit.attempt = journal.attempt
        submit.prompt_tokens = len(context)
        submit.max_tokens = max(1, self.max_tokens - len(journal.tokens))
        submit.deadline_s = remaining_s(deadline)
        if journal.attempt > 1:
            submit.avoid[:] = retry.avoid
            submit.unjoinable = retry.unjoinable
            submit.lost_on, submit.lost_after = retry.lost_on, retry.lost_after
        if not retry.may_join:
            submit.identity = b""
        if self._block_keys is not None:
            submit.block_keys = self.block_keys(journal)
        return submit

    @cached_property
    def _submit(self) -> mesh.Submit:
        """The parts that no attempt changes. Made on first use: hashing the request can wait for an early attempt."""
        admitted = self._admitted
        return mesh.Submit(
            job_id=self._job_id,
            model=admitted.served.model,
            adapter=admitted.served.adapter,
            tenant=admitted.tenant.hash,
            priority=admitted.request.priority,
            sheddable=admitted.request.criticality == api.CRITICALITY_SHEDDABLE,
            identity=self._key.digest if self._key is not None else b"",
            body=admitted.body,
            traceparent=admitted.traceparent,
            fingerprint=self.fingerprint,
        )


def remaining_s(deadline: float) -> float:
    """Seconds until then, as in messages: 0 for no deadline."""
    return 0.0 if math.isinf(deadline) else max(1e-3, deadline - time.monotonic())
