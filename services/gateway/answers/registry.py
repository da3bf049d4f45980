"""Running generations by tenant and request id: a retry joins its own generation. Knows no protocol."""

from grpc import StatusCode

from services.errors import WeftError
from services.gateway.answers.admitted import AdmittedRequest
from services.gateway.answers.generation import Generation, Observer
from services.gateway.backend import Backend


class Registry:
    """Generations that have subscribers."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._running: dict[tuple[str, str], Generation] = {}

    def __len__(self) -> int:
        return len(self._running)

    def enter(self, admitted: AdmittedRequest, subscriber: Observer) -> tuple[Generation, bool]:
        """Subscribes to the generation of this request, and starts it unless it runs. -> it, and whether it ran.

        Raises WeftError if another request with the same id is running.
        """
        key = (admitted.tenant.hash, admitted.request_id)
        generation = self._running.get(key)
        joins = generation is not None
        if generation is None:
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

    async def leave(self, generation: Generation, subscriber: Observer) -> None:
        """Ends a subscription, and the generation with its last one."""
        generation.subscribers.discard(subscriber)
        if not generation.subscribers:
            admitted = generation.admitted
            del self._running[admitted.tenant.hash, admitted.request_id]
            if not generation.done:
                await generation.cancel()
