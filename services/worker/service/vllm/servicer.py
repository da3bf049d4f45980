"""Serves vllm.grpc.engine.VllmEngine, by which other gateways (smg) drive this worker. Knows jobs, never engines."""

import asyncio
import hashlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from grpc import StatusCode, aio

from protos import mesh_pb2 as mesh
from protos import smg_common_pb2 as smg
from protos import vllm_engine_pb2 as vllm
from services import validate
from services.errors import WeftError, unavailable
from services.forms.checks import FormChecks
from services.worker.service.job_record import Subscriber
from services.worker.service.jobs import Jobs
from services.worker.service.startup import READY, Startup
from services.worker.service.vllm import messages
from services.worker.service.vllm.messages import Continuation, StopWatch

NAME = "vllm.grpc.engine.VllmEngine"
PIECE_BYTES = 1 << 20
_NOT_HERE = "not served here: see weft.v1.Worker"


@dataclass(frozen=True, slots=True)
class EngineModel:
    """What calls need, available once the model is loaded."""

    jobs: Jobs
    card: mesh.ModelCard
    bundle: bytes
    report: Callable[[], mesh.WorkerReport]
    watch: Callable[[Sequence[str], int], StopWatch]
    """Makes a StopWatch of stop strings and the least number of tokens. The first call takes up to about a second."""
    credits: int


class VllmEngineService:
    """vllm.grpc.engine.VllmEngine."""

    def __init__(self, startup: Startup) -> None:
        self._startup = startup
        self._loaded: EngineModel | None = None
        self._began = time.monotonic()
        self._forms = FormChecks()
        self._links: defaultdict[str, set[Subscriber]] = defaultdict(set)

    def loaded(self, model: EngineModel) -> None:
        """Begins to accept calls: the model is loaded."""
        self._loaded = model

    def _model(self) -> EngineModel:
        if self._loaded is None:
            raise unavailable("LOADING", "the model is still loading")
        return self._loaded

    async def Generate(self, request: vllm.GenerateRequest, context: aio.ServicerContext[Any, Any]) -> None:
        """Runs one job for each continuation, and streams their tokens. A caller that cancels ends them."""
        model = self._model()
        metadata = dict(context.invocation_metadata() or ())
        deadline_s = max(1e-3, context.time_remaining() or 0.0) if context.time_remaining() is not None else 0.0
        jobs = messages.jobs_of(request, model.card, deadline_s, str(metadata.get("traceparent", "")))
        try:
            form = validate.check_sampling(jobs[0].sampling, model.card).get("structured")
        except WeftError as error:
            raise messages.renamed(error) from error
        if form is not None:
            await self._forms.check(form)
        stops, least = list(request.sampling_params.stop), request.sampling_params.min_tokens
        _check_stops(stops)
        watches: list[StopWatch | None] = [None] * len(jobs)
        if stops:
            watches = await asyncio.to_thread(lambda: [model.watch(stops, least) for _ in jobs])
        answer = [Continuation(request, index, watch) for index, watch in enumerate(watches)]
        link = Subscriber(f"vllm/{request.request_id}")
        self._links[request.request_id].add(link)
        try:
            for job in jobs:
                model.jobs.start(link, job)
            await _relay(link, model.jobs, answer, context)
        finally:
            self._links[request.request_id].discard(link)
            if not self._links[request.request_id]:
                del self._links[request.request_id]
            model.jobs.leave(link)

    async def Abort(self, request: vllm.AbortRequest, context: object) -> vllm.AbortResponse:
        """Ends requests by their ids; ids that do not run are no error."""
        jobs = self._model().jobs
        for link in [link for each in request.request_ids for link in self._links.get(each, ())]:
            for stream_id in list(link.streams):
                jobs.cancel(link, mesh.CancelJob(stream_id=stream_id))
        return vllm.AbortResponse()

    async def HealthCheck(self, request: vllm.HealthCheckRequest, context: object) -> vllm.HealthCheckResponse:
        """Whether the worker takes requests, and its phase."""
        phase = self._startup.phase
        return vllm.HealthCheckResponse(healthy=phase == READY, message=phase)

    async def GetModelInfo(self, request: vllm.GetModelInfoRequest, context: object) -> vllm.GetModelInfoResponse:
        """The model."""
        return messages.model_info(self._model().card)

    async def GetServerInfo(self, request: vllm.GetServerInfoRequest, context: object) -> vllm.GetServerInfoResponse:
        """The worker."""
        model = self._model()
        report = model.report()
        return vllm.GetServerInfoResponse(
            active_requests=report.running + report.waiting,
            uptime_seconds=time.monotonic() - self._began,
            server_type="weft",
            data_parallel_size=1,
            block_size=model.card.block_size,
            max_num_seqs=model.credits,
        )

    async def GetLoads(self, request: vllm.GetLoadsRequest, context: object) -> vllm.GetLoadsResponse:
        """The worker's load."""
        model = self._model()
        load = messages.load_of(model.report(), model.card.block_size, model.credits)
        return vllm.GetLoadsResponse(timestamp=datetime.now(UTC).isoformat(), dp_rank_count=1, loads=[load])

    async def GetTokenizer(
        self, request: smg.GetTokenizerRequest, context: object
    ) -> AsyncIterator[smg.GetTokenizerChunk]:
        """Sends the tokenizer as a zip archive in pieces; the last one has the archive's SHA-256."""
        bundle = mesh.Bundle.FromString(self._model().bundle)
        archive = await asyncio.to_thread(messages.tokenizer_archive, bundle)
        digest = hashlib.sha256(archive).hexdigest()
        for start in range(0, len(archive), PIECE_BYTES):
            is_last = start + PIECE_BYTES >= len(archive)
            yield smg.GetTokenizerChunk(data=archive[start : start + PIECE_BYTES], sha256=digest if is_last else "")

    async def Embed(self, request: vllm.EmbedRequest, context: object) -> vllm.EmbedResponse:
        """Refused."""
        embeds = "embed" in self._model().card.encoder.tasks
        text = "not served here: see Embed of weft.v1.Inference, at a gateway" if embeds else "the model does not embed"
        raise WeftError(StatusCode.UNIMPLEMENTED, "EMBEDDINGS_UNSUPPORTED", text)

    async def SubscribeKvEvents(self, request: smg.SubscribeKvEventsRequest, context: object) -> smg.KvEventBatch:
        """Refused."""
        raise WeftError(StatusCode.UNIMPLEMENTED, "KV_EVENTS_UNSUPPORTED", "changes of the prefix cache are not sent")

    async def FlushCache(self, request: smg.FlushCacheRequest, context: object) -> smg.FlushCacheResponse:
        """Refused in the answer."""
        return smg.FlushCacheResponse(success=False, message="the prefix cache is not emptied on request")

    async def StartProfile(self, request: smg.StartProfileRequest, context: object) -> smg.ProfileResponse:
        """Refused in the answer."""
        return smg.ProfileResponse(success=False, message=_NOT_HERE)

    async def StopProfile(self, request: smg.StopProfileRequest, context: object) -> smg.ProfileResponse:
        """Refused in the answer."""
        return smg.ProfileResponse(success=False, message=_NOT_HERE)


def _check_stops(stops: Sequence[str]) -> None:
    try:
        messages.check_stops(stops)
    except WeftError as error:
        raise messages.renamed(error) from None


async def _relay(
    link: Subscriber, jobs: Jobs, answer: Sequence[Continuation], context: aio.ServicerContext[Any, Any]
) -> None:
    """Sends the tokens and ends of all continuations. Raises WeftError if one of them failed."""
    running = len(answer)
    async for message in link:
        touched = {}
        for stream_id, token_id, logprob, top in messages.tokens_of(message):
            each = answer[stream_id]
            was_running = each.stopped is None
            each.add(token_id, logprob, top)
            touched[stream_id] = each
            if was_running and each.stopped is not None:
                jobs.cancel(link, mesh.CancelJob(stream_id=stream_id, position=each.count))
        for each in touched.values():
            if (chunk := each.chunk()) is not None:
                await context.write(chunk)
        for end in message.ends:
            if end.HasField("failure"):
                raise messages.renamed(WeftError.from_failure(end.failure))
            await context.write(answer[end.stream_id].complete(end))
            running -= 1
        if not running:
            return
    raise unavailable("GATEWAY_TOO_SLOW", "the caller reads too slowly")
