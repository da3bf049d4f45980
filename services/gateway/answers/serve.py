"""Serves Calls, from validation to receipt, and the small requests beside them. Knows no protocol."""

import asyncio
from collections.abc import AsyncGenerator

from protos import inference_pb2 as api
from services import validate
from services.gateway.access.authorizer import Authorizer, Credentials
from services.gateway.access.errors import denied
from services.gateway.access.tenants import Tenant
from services.gateway.answers.admitted import AdmittedRequest
from services.gateway.answers.call import Call
from services.gateway.answers.call_record import CallRecord
from services.gateway.answers.deadline import Deadline
from services.gateway.answers.finish import FinishOnce
from services.gateway.answers.receipt import Phase
from services.gateway.answers.registry import Registry
from services.gateway.answers.subscriber import Subscriber
from services.gateway.backend import Backend
from services.gateway.links.adapters import Served
from services.gateway.links.early_refusal import EarlyRefusal
from services.gateway.links.scheduler_link import no_scheduler
from services.gateway.text.encoder import SMALL_BYTES
from services.validate_encode import check_task


class AnswerService:
    """Serves the requests of all doors."""

    def __init__(self, backend: Backend, access: Authorizer) -> None:
        self._backend = backend
        self._access = access
        self.early_refusal = EarlyRefusal(access, backend.catalog, backend.scheduler)
        self._registry = Registry(backend, self.early_refusal)
        self._models_known = backend.scheduler.models_known

    async def serve(self, call: Call) -> None:
        """Answers one call: delivers deltas and receipt, and calls `finish` with the receipt however the call ends.

        Raises WeftError if the call failed, which its door translates to its protocol.
        """
        record = CallRecord(call, self._backend.metrics)
        stall_s = self._backend.settings.gateway_stall_s
        with FinishOnce(record, call.finish) as ending, Deadline(record.timeline, call.remaining_s, stall_s):
            ending.receipt = await self._answer(call, record)

    async def tokenize(self, request: api.TokenizeRequest, credentials: Credentials) -> api.TokenizeResponse:
        """The token ids of a prompt, and the text of each. Raises WeftError."""
        tenant = self.admit("Tokenize", credentials)
        if request.ByteSize() > SMALL_BYTES:
            await self._check_size(request, tenant)
        validate.check_known(request, "request")
        validate.check_prompt(request.prompt)
        served = await self.find(request.model, tenant)
        text = await self._backend.catalog.text(served)
        most = served.card.context_length
        token_ids = await self._backend.encoder.encode(text, request.prompt, tenant.name, most)
        validate.check_tokens(token_ids, api.Sampling(), served.card)
        return api.TokenizeResponse(token_ids=token_ids, pieces=map(text.piece, token_ids))

    async def list_models(self, request: api.ListModelsRequest, credentials: Credentials) -> api.ListModelsResponse:
        """The models that are served or being loaded, as far as the tenant may use them. Raises WeftError."""
        tenant = self.admit("ListModels", credentials)
        validate.check_known(request, "request")
        await self._wait_for_models()
        return api.ListModelsResponse(models=await self._backend.catalog.listing(tenant))

    def watch_mesh(
        self, request: api.WatchMeshRequest, credentials: Credentials
    ) -> AsyncGenerator[api.MeshSnapshot, None]:
        """Snapshots of the mesh for an operator, about one per second. Raises WeftError at once."""
        self.admit("WatchMesh", credentials)
        validate.check_known(request, "request")
        return self._backend.view.watch()

    def admit(self, method: str, credentials: Credentials) -> Tenant:
        """Authorizes a request and counts it against its tenant's rate. Raises WeftError."""
        tenant = self._access.permit(method, credentials)
        self._access.count(tenant)
        return tenant

    async def _answer(self, call: Call, record: CallRecord) -> api.Receipt:
        """Delivers the whole answer and its receipt. Raises WeftError."""
        tenant = self.admit(call.method, call.credentials)
        with self._access.slot(tenant, lambda: record.tokens):
            admitted = await self._validate(record, tenant)
            subscriber = Subscriber(record.timeline, record.deadline, call)
            record.generation, record.joined = self._registry.enter(admitted, subscriber)
            try:
                await subscriber.follow(record.generation)
            finally:
                record.generation.advance()  # Tokens that arrived count, whether they are delivered or not.
                await self._registry.leave(record.generation, subscriber)
            receipt = record.receipt()
            record.timeline.enter(Phase.DELIVER)
            await call.deliver(receipt)
            return receipt

    async def _validate(self, record: CallRecord, tenant: Tenant) -> AdmittedRequest:
        request = record.request
        if request.ByteSize() > SMALL_BYTES:
            await self._check_size(request, tenant)
        validate.check_request(request)
        if request.priority > tenant.most_priority:
            raise denied("this key does not permit so high a priority", "PRIORITY_DENIED", "priority")
        if not self._models_known.is_set():
            record.timeline.enter(Phase.REMOTE)
            await self._wait_for_models()
            record.timeline.enter(Phase.OWN)
        served = self._backend.catalog.find(request.model, tenant)
        record.resolved(served)
        check_task(served.card, "generate")
        form = validate.check_sampling(request.sampling, served.card).get("structured")
        if form is not None:
            record.timeline.enter(Phase.TOKENIZE)
            await self._backend.forms.check(form)
            record.timeline.enter(Phase.OWN)
        return AdmittedRequest(request, record.request_id, tenant, served, record.traceparent)

    async def _check_size(self, request: api.GenerateRequest | api.TokenizeRequest, tenant: Tenant) -> None:
        """Refuses a large prompt that cannot fit its model before anything else is done with it. Raises WeftError."""
        served = await self.find(request.model, tenant)
        text = await self._backend.catalog.text(served)
        most = served.card.context_length
        await self._backend.encoder.check_size(text, request.prompt, tenant.name, most)

    async def find(self, name: str, tenant: Tenant) -> Served:
        """The model of a name, once the models are known. Raises WeftError."""
        await self._wait_for_models()
        return self._backend.catalog.find(name, tenant)

    async def _wait_for_models(self) -> None:
        """Waits for the scheduler's first list of models: until then no name can be resolved. Raises WeftError."""
        if not self._models_known.is_set():
            try:
                async with asyncio.timeout(self._backend.settings.gateway_scheduler_wait_s):
                    await self._models_known.wait()
            except TimeoutError:
                raise no_scheduler() from None
