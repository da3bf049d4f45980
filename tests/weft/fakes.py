"""A gateway without a mesh, which sends scripted answers over a real socket."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from grpc import aio

from protos import inference_pb2 as api
from protos import inference_pb2_grpc as stubs
from services import errors, rpc

WORDS = ["Once", "upon", "a", "time", "there", "was", "a", "fox", "who", "liked", "the", "rain", "."]
Context = aio.ServicerContext[Any, Any]
Fault = Callable[[Context, int], Any]
"""Called before message number i of an attempt is sent; may raise, abort or wait."""


class FakeMesh(stubs.InferenceServicer):
    """Answers every prompt with WORDS, `step` tokens per message. `faults` apply to the next attempts, in order."""

    def __init__(self) -> None:
        self.requests: list[api.GenerateRequest] = []
        self.metadata: list[dict[str, Any]] = []
        self.faults: list[Fault] = []
        self.stream_faults: list[Fault] = []
        """Of the next calls of EmbedStream."""
        self.embedded: list[str] = []
        """The ids of the requests that streams have answered."""
        self.step = 2
        self.model = "fox"
        self.words = list(WORDS)
        self.pause_s = 0.0
        self.snapshots = 1
        self.ended: asyncio.Event = asyncio.Event()

    def _begin(self, request: api.GenerateRequest, context: Context) -> Fault:
        self.requests.append(request)
        self.metadata.append({str(key): value for key, value in context.invocation_metadata() or ()})
        return self.faults.pop(0) if self.faults else _no_fault

    async def Generate(self, request: api.GenerateRequest, context: Context) -> AsyncIterator[api.GenerateResponse]:
        fault = self._begin(request, context)
        try:
            count = max(request.n, 1)
            for number, start in enumerate(range(0, len(self.words), self.step)):
                await asyncio.sleep(self.pause_s)
                await fault(context, number)
                for index in range(count):
                    yield api.GenerateResponse(delta=self._delta(index, start))
            await fault(context, -1)
            yield api.GenerateResponse(receipt=receipt(request, len(self.words) * count))
        finally:
            self.ended.set()

    async def Complete(self, request: api.GenerateRequest, context: Context) -> api.CompleteResponse:
        await self._begin(request, context)(context, 0)
        choice = api.Choice(text=" ".join(self.words), finish_reason=api.FINISH_REASON_STOP)
        return api.CompleteResponse(choices=[choice], receipt=receipt(request, len(self.words)))

    async def Tokenize(self, request: api.TokenizeRequest, context: Context) -> api.TokenizeResponse:
        words = request.prompt.text.split()
        return api.TokenizeResponse(token_ids=range(len(words)), pieces=words)

    async def ListModels(self, request: api.ListModelsRequest, context: Context) -> api.ListModelsResponse:
        return api.ListModelsResponse(
            models=[
                api.Model(
                    name=self.model,
                    context_length=512,
                    vocab_size=4096,
                    parameters=11_300_000,
                    architecture="Fox",
                    workers=1,
                )
            ]
        )

    async def WatchMesh(self, request: api.WatchMeshRequest, context: Context) -> AsyncIterator[api.MeshSnapshot]:
        for _ in range(self.snapshots):
            yield api.MeshSnapshot(scheduler_connected=True, models=[api.ModelState(name=self.model)])

    async def Embed(self, request: api.EmbedRequest, context: Context) -> api.EmbedResponse:
        """A vector of the text's length, or of the number of its tokens."""
        sizes = [len(each.text) or len(each.token_ids.ids) for each in request.inputs]
        model = api.Receipt(model=request.options.model, request_id=request.options.request_id)
        return api.EmbedResponse(embeddings=[api.Embedding(values=[size, 0.5]) for size in sizes], receipt=model)

    async def EmbedStream(
        self, requests: AsyncIterator[api.EmbedStreamRequest], context: Context
    ) -> AsyncIterator[api.EmbedStreamResponse]:
        """The same for each request, one after another."""
        fault, answered = self.stream_faults.pop(0) if self.stream_faults else _no_fault, 0
        await context.send_initial_metadata(())
        async for each in requests:
            await fault(context, answered)
            yield api.EmbedStreamResponse(number=each.number, response=await self.Embed(each.request, context))
            self.embedded.append(each.request.options.request_id)
            answered += 1

    async def Rank(self, request: api.RankRequest, context: Context) -> api.RankResponse:
        """The longest document first."""
        order = sorted(range(len(request.documents)), key=lambda place: -len(request.documents[place]))
        return api.RankResponse(results=[api.Ranked(index=place, score=0.5) for place in order])

    async def Classify(self, request: api.ClassifyRequest, context: Context) -> api.ClassifyResponse:
        """One label for every input."""
        label = api.LabelScore(label="fox", score=1.0)
        return api.ClassifyResponse(results=[api.Classification(labels=[label]) for _ in request.inputs])

    def _delta(self, index: int, start: int) -> api.Delta:
        words = self.words[start : start + self.step]
        last = start + self.step >= len(self.words)
        return api.Delta(
            index=index,
            text="".join(f" {word}" for word in words),
            token_ids=token_ids(words),
            position=start,
            attempt=1,
            finish_reason=api.FINISH_REASON_STOP if last else api.FINISH_REASON_UNSPECIFIED,
        )


def token_ids(words: list[str]) -> list[int]:
    """A token for each word."""
    return [int.from_bytes(word[:2].encode(), "big") for word in words]


def receipt(request: api.GenerateRequest, tokens: int) -> api.Receipt:
    """A receipt whose times add up."""
    timings = api.Timings(wall_s=0.1, queue_s=0.01, prefill_s=0.02, decode_s=0.06, network_s=0.01, first_token_s=0.03)
    return api.Receipt(
        request_id=request.request_id,
        model="fox",
        seed=request.sampling.seed,
        timings=timings,
        prompt_tokens=4,
        completion_tokens=tokens,
        prefill_tokens=4,
        attempts=1,
        workers=["worker-a"],
        finish_reason=api.FINISH_REASON_STOP,
    )


async def _no_fault(context: Context, number: int) -> None:
    return None


def fails(at: int, error: errors.WeftError) -> Fault:
    """An attempt that fails with `error` before message `at`, its receipt in the trailing metadata."""

    async def fault(context: Context, number: int) -> None:
        if number == at:
            spent = api.Receipt(model="fox", completion_tokens=max(at, 0))
            context.set_trailing_metadata((("weft-receipt-bin", spent.SerializeToString()),))
            raise error

    return fault


def cancels(at: int) -> Fault:
    """An attempt that ends with a bare CANCELLED, as from a server that shuts down."""

    async def fault(context: Context, number: int) -> None:
        if number == at:
            await context.abort(grpc.StatusCode.CANCELLED, "")

    return fault


@contextlib.asynccontextmanager
async def served(mesh: FakeMesh) -> AsyncIterator[str]:
    """The address at which `mesh` answers."""
    service = rpc.Service("weft.v1.Inference", stubs.add_InferenceServicer_to_server, mesh)
    server = await rpc.serve("127.0.0.1:0", [service])
    await server.ready()
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.stop(0)
