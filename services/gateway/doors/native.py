"""The public door weft.v1.Inference: one call after the other, from validation to the receipt.

Knows gRPC contexts; how answers come about is the business of generations.
"""

import asyncio
from concurrent.futures import Executor
from functools import partial

from protos import inference_pb2 as api
from services import validate
from services.errors import WeftError, internal
from services.gateway.access.authorizer import Authorizer
from services.gateway.access.errors import denied
from services.gateway.access.tenants import Tenant
from services.gateway.answers.call import Call, Context, cancelled
from services.gateway.answers.collect import Collector
from services.gateway.answers.deadline import Deadline
from services.gateway.answers.generation import AdmittedRequest
from services.gateway.answers.receipt import Phase
from services.gateway.answers.registry import Registry
from services.gateway.answers.subscriber import Deliver, Greet, Subscriber
from services.gateway.backend import Backend
from services.gateway.doors.grpc_gate import metadata_of
from services.gateway.links.catalog import Served
from services.gateway.links.scheduler_link import no_scheduler


class InferenceService:
    """Serves weft.v1.Inference."""

    def __init__(self, mesh: Backend, access: Authorizer, threads: Executor) -> None:
        self._mesh = mesh
        self._access = access
        self._threads = threads
        self._registry = Registry(mesh, threads)

    async def Generate(self, request: api.GenerateRequest, context: Context) -> None:
        """Streams the answer, and last the receipt."""

        await self._serve(request, context, context.write, partial(context.send_initial_metadata, ()))

    async def Complete(self, request: api.GenerateRequest, context: Context) -> api.CompleteResponse:
        """The whole answer."""
        collector = Collector()
        await self._serve(request, context, collector.add)
        return collector.response

    async def Tokenize(self, request: api.TokenizeRequest, context: Context) -> api.TokenizeResponse:
        """Text or chat to token ids."""
        tenant = self._access.request(metadata_of(context))
        validate.check_known(request, "request")
        validate.check_prompt(request.prompt)
        served = await self._find(request.model, tenant)
        text = await self._mesh.catalog.text(served)
        loop = asyncio.get_running_loop()
        token_ids = await loop.run_in_executor(self._threads, text.encode, request.prompt)
        validate.check_tokens(token_ids, api.Sampling(), served.card)
        return api.TokenizeResponse(token_ids=token_ids, pieces=map(text.piece, token_ids))

    async def ListModels(self, request: api.ListModelsRequest, context: Context) -> api.ListModelsResponse:
        """The models served now, and those that are being loaded."""
        tenant = self._access.request(metadata_of(context))
        validate.check_known(request, "request")
        await self._know_models()
        return api.ListModelsResponse(models=await self._mesh.catalog.listing(tenant))

    async def _serve(
        self, request: api.GenerateRequest, context: Context, deliver: Deliver, greet: Greet | None = None
    ) -> None:
        """Answers one request. The receipt is in the trailing metadata however it ends."""
        metadata = metadata_of(context)
        visit = Call(request, context, metadata, self._mesh.metrics)
        patience = Deadline(visit.timeline, visit.remaining_s, self._mesh.settings.gateway_stall_s)
        try:
            with patience, self._access.answering(metadata, lambda: _tokens(visit)) as tenant:
                order = await self._admit(visit, tenant)
                await self._follow(visit, order, deliver, greet)
                receipt = visit.conclude()
                visit.timeline.enter(Phase.DELIVER)
                await deliver(api.GenerateResponse(receipt=receipt))
        except WeftError as error:
            visit.conclude(error)
            raise
        except asyncio.CancelledError:
            visit.conclude(cancelled())
            raise
        except Exception:
            visit.conclude(internal())
            raise
        finally:
            visit.end()

    async def _admit(self, visit: Call, tenant: Tenant) -> AdmittedRequest:
        request = visit.request
        validate.check_request(request)
        if request.priority > tenant.most_priority:
            raise denied("this key is not for so high a priority", "PRIORITY_DENIED", "priority")
        visit.timeline.enter(Phase.REMOTE)
        served = await self._find(request.model, tenant)
        visit.timeline.enter(Phase.OWN)
        visit.found(served)
        validate.check_sampling(request.sampling, served.card)
        return AdmittedRequest(
            request=request,
            request_id=visit.request_id,
            tenant=tenant,
            served=served,
            traceparent=visit.traceparent,
        )

    async def _follow(self, visit: Call, order: AdmittedRequest, deliver: Deliver, greet: Greet | None) -> None:
        listener = Subscriber(visit.timeline, visit.deadline)
        visit.generation, visit.joined = self._registry.enter(order, listener)
        try:
            await listener.follow(visit.generation, deliver, greet)
        finally:
            await self._registry.leave(visit.generation, listener)

    async def _find(self, name: str, tenant: Tenant) -> Served:
        await self._know_models()
        return self._mesh.catalog.find(name, tenant)

    async def _know_models(self) -> None:
        """Waits until the scheduler has told its models the first time: before, nobody can know."""
        known = self._mesh.dispatch.models_known
        if not known.is_set():
            try:
                async with asyncio.timeout(self._mesh.settings.gateway_scheduler_wait_s):
                    await known.wait()
            except TimeoutError:
                raise no_scheduler() from None


def _tokens(visit: Call) -> int:
    """Tokens of prompt and answers, as a tenant's budget counts them: also those from a cache."""
    generation = visit.generation
    if generation is None:
        return 0
    return generation.prompt_tokens + sum(len(each.journal.tokens) for each in generation.continuations)
