"""Requests in flight by the name their clients gave them: a retry joins its own generation. Knows no gRPC."""

from concurrent.futures import Executor

from grpc import StatusCode

from services.errors import WeftError
from services.gateway.answers.generation import AdmittedRequest, Generation, Listening
from services.gateway.backend import Backend


class Registry:
    """Generations by tenant and request id, as long as somebody listens."""

    def __init__(self, mesh: Backend, threads: Executor) -> None:
        self._mesh = mesh
        self._threads = threads
        self._running: dict[tuple[str, str], Generation] = {}

    def __len__(self) -> int:
        return len(self._running)

    def enter(self, order: AdmittedRequest, listener: Listening) -> tuple[Generation, bool]:
        """Listens to the generation of this order, which is started unless it runs: then the second value is True.

        Raises WeftError if its id names another request.
        """
        key = (order.tenant.hash, order.request_id)
        generation = self._running.get(key)
        joins = generation is not None
        if generation is None:
            generation = self._running[key] = Generation(order, self._mesh, self._threads)
        elif generation.order.body != order.body:
            raise WeftError(
                StatusCode.ALREADY_EXISTS,
                "REQUEST_ID_IN_USE",
                "another request with this id is running",
                field="request_id",
            )
        generation.listeners.add(listener)
        return generation, joins

    async def leave(self, generation: Generation, listener: Listening) -> None:
        """Listens no more; with the last listener the generation ends."""
        generation.listeners.discard(listener)
        if not generation.listeners:
            order = generation.order
            del self._running[order.tenant.hash, order.request_id]
            if not generation.done:
                await generation.cancel()
