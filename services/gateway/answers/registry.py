"""Running generations by tenant and request id: a retry joins its own generation. Knows no protocol."""

import time

from grpc import StatusCode

from protos import inference_pb2 as api
from services.errors import WeftError
from services.gateway.answers.admitted import AdmittedRequest
from services.gateway.answers.generation import Generation, Observer
from services.gateway.backend import Backend
from services.gateway.links.early_refusal import EarlyRefusal
from services.gateway.links.queue_share import QUEUE_FULL
from services.gateway.links.unmeetable import REASON, UnmeetableDeadlines
from services.gateway.links.unread_submissions import SCHEDULER_OVERLOADED


class Registry:
    """Generations that have subscribers."""

    def __init__(self, backend: Backend, early: EarlyRefusal) -> None:
        self._backend, self._early = backend, early
        self._running: dict[tuple[str, str], Generation] = {}
        self._unmeetable = UnmeetableDeadlines()

    def __len__(self) -> int:
        return len(self._running)

    def enter(self, admitted: AdmittedRequest, subscriber: Observer) -> tuple[Generation, bool]:
        """Subscribes to the generation of this request, and starts it unless it runs. -> it, and whether it ran.

        Raises WeftError if another request with the same id is running, or if a new one has no room in the queue or no
        time.
        """
        key = (admitted.tenant.hash, admitted.request_id)
        generation = self._running.get(key)
        joins = generation is not None
        if generation is None:
            if not admitted.repeatable:  # No result and no other request can answer it: refused before it is tokenized.
                self._check_room(admitted)
                self._check_time(admitted, subscriber)
            generation = self._running[key] = Generation(admitted, self._backend)
        elif generation.admitted.body != admitted.body:
            raise WeftError(
                StatusCode.ALREADY_EXISTS,
                "REQUEST_ID_IN_USE",
                "another request with this id is running",
                field="request_id",
            )
        generation.subscribers.add(subscriber)
        return generation, joins

    def _check_room(self, admitted: AdmittedRequest) -> None:
        sheddable = admitted.request.criticality == api.CRITICALITY_SHEDDABLE
        error = self._backend.scheduler.refusal(admitted.served.model, admitted.tenant.hash, sheddable)
        if error is not None:
            self._early.note(found=False)
            raise error

    def _check_time(self, admitted: AdmittedRequest, subscriber: Observer) -> None:
        now = time.monotonic()
        error = self._unmeetable.refusal(admitted.place, admitted.request, subscriber.deadline - now, now)
        if error is not None:
            raise error

    async def leave(self, generation: Generation, subscriber: Observer) -> None:
        """Ends a subscription, and the generation with its last one."""
        generation.subscribers.discard(subscriber)
        if any(each.costs.hit for each in generation.continuations):
            self._early.note(found=True)
        elif generation.error is not None and generation.error.reason in (QUEUE_FULL, SCHEDULER_OVERLOADED):
            self._early.note(found=False)
        # A retry avoids workers that take other requests: its refusal shows nothing about these.
        if generation.error is not None and generation.error.reason == REASON and not generation.retried:
            now, admitted = time.monotonic(), generation.admitted
            left_s = subscriber.deadline - now
            self._unmeetable.note(admitted.place, admitted.request, left_s, generation.error, now)
        if not generation.subscribers:
            admitted = generation.admitted
            del self._running[admitted.tenant.hash, admitted.request_id]
            if not generation.done:
                await generation.cancel()
