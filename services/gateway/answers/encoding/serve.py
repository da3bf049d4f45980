"""Serves requests to encoders, from validation to receipt. Knows no protocol."""

import os
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from protos import inference_pb2 as api
from services import telemetry
from services.errors import invalid
from services.gateway.access.authorizer import Authorizer
from services.gateway.access.errors import denied
from services.gateway.access.tenants import Tenant
from services.gateway.answers.deadline import Deadline
from services.gateway.answers.encoding.call import AnyEncodeCall, EncodeCall
from services.gateway.answers.encoding.compute import Vectors
from services.gateway.answers.encoding.flights import Flights
from services.gateway.answers.encoding.job import EncodeRequestParts
from services.gateway.answers.encoding.record import EncodeRecord
from services.gateway.answers.encoding.vector_bytes import embedding_of
from services.gateway.answers.finish import FinishOnce
from services.gateway.answers.receipt import Phase
from services.gateway.answers.serve import AnswerService
from services.gateway.backend import Backend
from services.gateway.links.adapters import Served
from services.gateway.text.inputs import InputText, InputTokens
from services.gateway.text.tokenizer import TextModel
from services.validate_encode import EncodeRequest, check_embed, check_encode_request, check_input, check_task

Reply = TypeVar("Reply", api.EmbedResponse, api.RankResponse, api.ClassifyResponse)


class EncodeService:
    """Serves Embed, Rank and Classify of all doors."""

    def __init__(self, answers: AnswerService, backend: Backend, access: Authorizer) -> None:
        self._answers, self._backend, self._access = answers, backend, access
        self._flights = Flights()

    async def embed(self, call: EncodeCall[api.EmbedRequest]) -> api.EmbedResponse:
        """A vector for each input. Raises WeftError."""

        async def answer(record: EncodeRecord, tenant: Tenant) -> api.EmbedResponse:
            request = call.request
            served = await self._find(record, tenant, request, "embed")
            check_embed(request, served.card)
            encoder = served.card.encoder
            prompt = encoder.prompts.get(request.prompt_name or encoder.default_prompt, "")
            texts = await self._tokens(record, tenant, served, request, prompt)
            cut = request.dimensions if request.dimensions != encoder.width else 0
            normalize = request.normalize if request.HasField("normalize") else encoder.normalizes
            parts = self._parts(record, tenant, served, request, dimensions=cut, normalize=normalize)
            vectors = await self._vectors(record, parts, request, texts, "inputs")
            return api.EmbedResponse(embeddings=[embedding_of(each) for each in vectors])

        return await self._serve(call, answer)

    async def rank(self, call: EncodeCall[api.RankRequest]) -> api.RankResponse:
        """The documents in the order of their scores. Raises WeftError."""

        async def answer(record: EncodeRecord, tenant: Tenant) -> api.RankResponse:
            request = call.request
            served = await self._find(record, tenant, request, "rank")
            texts = {
                f"documents[{place}]": InputText(_case(request.query, served), _case(each, served))
                for place, each in enumerate(request.documents)
            }
            tokens = await self._tokenize(record, tenant, served, request, texts)
            parts = self._parts(record, tenant, served, request)
            scores = [array("f", each)[0] for each in await self._vectors(record, parts, request, tokens, "documents")]
            best = sorted(range(len(scores)), key=lambda place: -scores[place])
            chosen = best[: request.top_n] if request.top_n else best
            return api.RankResponse(results=[api.Ranked(index=place, score=scores[place]) for place in chosen])

        return await self._serve(call, answer)

    async def classify(self, call: EncodeCall[api.ClassifyRequest]) -> api.ClassifyResponse:
        """The scores of each input's labels. Raises WeftError."""

        async def answer(record: EncodeRecord, tenant: Tenant) -> api.ClassifyResponse:
            request = call.request
            served = await self._find(record, tenant, request, "classify")
            texts = await self._tokens(record, tenant, served, request, "")
            parts = self._parts(record, tenant, served, request)
            vectors = await self._vectors(record, parts, request, texts, "inputs")
            labels = list(served.card.encoder.labels)
            return api.ClassifyResponse(results=[_classification(labels, each) for each in vectors])

        return await self._serve(call, answer)

    async def _serve(
        self,
        call: AnyEncodeCall,
        answer: Callable[[EncodeRecord, Tenant], Awaitable[Reply]],
    ) -> Reply:
        """The reply with its receipt. Calls `finish` with the receipt however the call ends. Raises WeftError."""
        record = EncodeRecord(call, self._backend.metrics)
        with FinishOnce(record, call.finish) as ending:
            with Deadline(record.timeline, call.remaining_s, self._backend.settings.gateway_stall_s):
                tenant = self._answers.admit(call.method, call.credentials)
                with self._access.slot(tenant, lambda: record.tokens):
                    reply = await answer(record, tenant)
            ending.receipt = record.receipt()
            reply.receipt.CopyFrom(ending.receipt)
        return reply

    async def _find(self, record: EncodeRecord, tenant: Tenant, request: EncodeRequest, task: str) -> Served:
        """The model of a request, which is validated here. Raises WeftError."""
        check_encode_request(request)
        if request.options.priority > tenant.most_priority:
            raise denied("this key does not permit so high a priority", "PRIORITY_DENIED", "options.priority")
        record.timeline.enter(Phase.REMOTE)
        served = await self._answers.find(request.options.model, tenant)
        record.timeline.enter(Phase.OWN)
        record.resolved(served)
        check_task(served.card, task)
        return served

    async def _tokens(
        self,
        record: EncodeRecord,
        tenant: Tenant,
        served: Served,
        request: api.EmbedRequest | api.ClassifyRequest,
        prompt: str,
    ) -> list[InputTokens]:
        """The tokens of each input. Raises WeftError."""
        inputs = request.inputs
        texts = {
            f"inputs[{place}]": InputText(_case(prompt + each.text, served))
            for place, each in enumerate(inputs)
            if each.WhichOneof("form") == "text"
        }
        tokenized = iter(await self._tokenize(record, tenant, served, request, texts) if texts else ())
        most, found = served.card.context_length, []
        for place, each in enumerate(inputs):
            if each.WhichOneof("form") == "text":
                found.append(next(tokenized))
                continue
            token_ids = list(each.token_ids.ids)
            found.append(InputTokens(token_ids[:most] if request.options.truncate else token_ids))
            check_input(f"inputs[{place}]", found[-1].token_ids, served.card)
        return found

    async def _tokenize(
        self,
        record: EncodeRecord,
        tenant: Tenant,
        served: Served,
        request: EncodeRequest,
        texts: Mapping[str, InputText],
    ) -> list[InputTokens]:
        """The tokens of texts by the names of their fields. Raises WeftError."""
        record.timeline.enter(Phase.TOKENIZE)
        model = await self._backend.catalog.text(served)
        with telemetry.start("tokenize", record.traceparent):
            cut = served.card.context_length if request.options.truncate else None
            for field, text in texts.items() if cut is None else ():
                check_characters(field, model, text, served.card.context_length)
            tokens = await self._backend.encoder.encode_inputs(model, list(texts.values()), tenant.name, cut)
        record.timeline.enter(Phase.OWN)
        for field, each in zip(texts, tokens, strict=True):
            check_input(field, each.token_ids, served.card)
        return tokens

    def _parts(
        self, record: EncodeRecord, tenant: Tenant, served: Served, request: EncodeRequest, **how: int
    ) -> EncodeRequestParts:
        # No other request has the name: a client's retry finds what is computed by its text.
        name = f"{tenant.hash}/{record.request_id}/{os.urandom(4).hex()}"
        return EncodeRequestParts(
            tenant,
            served,
            name,
            record.traceparent,
            record.deadline,
            request.options.priority,
            how.get("dimensions", 0),
            bool(how.get("normalize", False)),
        )

    async def _vectors(
        self,
        record: EncodeRecord,
        parts: EncodeRequestParts,
        request: EncodeRequest,
        texts: Sequence[InputTokens],
        field: str,
    ) -> list[bytes]:
        record.tokens = sum(len(text.token_ids) for text in texts)
        names = [f"{field}[{place}]" for place in range(len(texts))]
        record.timeline.enter(Phase.REMOTE)
        vectors = Vectors(self._backend, self._flights, record, parts, request.options.cache, names)
        found = await vectors.of(texts)
        record.timeline.enter(Phase.OWN)
        return found


def check_characters(field: str, model: TextModel, text: InputText, most: int) -> None:
    """Raises WeftError for a text that has too many tokens for sure, before it is tokenized."""
    if model.surely_exceeds(len(text.text) + len(text.second or ""), most):
        raise invalid(field, f"more than the {most} tokens of the context", "CONTEXT_EXCEEDED")


def _case(text: str, served: Served) -> str:
    return text.lower() if served.card.encoder.lowercase else text


def _classification(labels: Sequence[str], vector: bytes) -> api.Classification:
    scored = sorted(zip(labels, array("f", vector), strict=True), key=lambda each: -each[1])
    return api.Classification(labels=[api.LabelScore(label=label, score=score) for label, score in scored])
