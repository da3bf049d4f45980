"""Calls to a mesh: streams that survive broken connections, deadlines over all attempts, receipts.

Knows the public API, nothing of what serves it.
"""

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Self, TypeVar, Unpack

import grpc
from grpc import aio

from protos import inference_pb2 as api
from protos import inference_pb2_grpc as stubs
from weft.client import requests
from weft.client.channel import open_channel
from weft.client.embed_stream import EmbedStream
from weft.client.embeddings import (
    EmbedSettings,
    EncodeSettings,
    Input,
    classify_request,
    embed_request,
    rank_request,
)
from weft.client.errors import HeaderError, WeftError, from_rpc
from weft.client.requests import Options, Prompt
from weft.client.retry import RetryState
from weft.client.stream_resumer import StreamResumer

DEFAULT_ADDRESS = "127.0.0.1:50051"
_LONGEST_DEADLINE_S = 1e8
"""Three years; gRPC takes far longer deadlines for deadlines that have passed."""
Reply = TypeVar("Reply")

_CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    # A gateway that hangs or disappears is detected within 15 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", 16 << 20),
    # An address that resolves to several gateways uses all of them, and those that remain if some fail.
    ("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}'),
    # Each client has a connection of its own: the processes of a gateway share connections, not calls.
    ("grpc.use_local_subchannel_pool", 1),
    # This client retries by itself: it can resume a broken stream.
    ("grpc.enable_retries", 0),
]


class Answer:
    """A streamed answer: iterate over its deltas. `receipt` is set when the iteration has ended."""

    def __init__(self, deltas: Callable[["Answer"], AsyncGenerator[api.Delta, None]], request_id: str) -> None:
        self.request_id = request_id
        self.receipt: api.Receipt | None = None
        self.cancelled = False
        self.call: aio.UnaryStreamCall[api.GenerateRequest, api.GenerateResponse] | None = None
        self.prompt: api.PromptEcho | None = None
        """The prompt, if it was asked for by `echo` or `prompt_logprobs`. It comes before the first delta."""
        self._deltas = deltas(self)

    def __aiter__(self) -> AsyncIterator[api.Delta]:
        return self._deltas

    def add_prompt(self, part: api.PromptEcho) -> None:
        """Takes the next part of the prompt, which a resumed stream repeats."""
        if self.prompt is None or part.position == 0:
            self.prompt = api.PromptEcho()
        self.prompt.MergeFrom(part)
        self.prompt.position = 0

    async def text(self) -> str:
        """The rest of the text of the first continuation."""
        return "".join([delta.text async for delta in self._deltas if delta.index == 0])

    async def cancel(self) -> None:
        """Cancels the answer in the mesh and ends an iteration over it."""
        self.cancelled = True
        if self.call is not None:
            self.call.cancel()
        with contextlib.suppress(RuntimeError):  # Another task iterates now; its iteration ends.
            await self._deltas.aclose()


class Client:
    """A connection to a mesh, for one event loop.

    `api_key` is sent with every call. `deadline_s` bounds each call with all its attempts, None leaves it unbounded;
    `retries` is the number of consecutive failures after which a call to an unavailable mesh is given up. Every call
    raises WeftError when it finally fails.

    The address is host:port, or https://host:port for TLS. Then `ca_file`, or WEFT_CA_FILE, may name a PEM file of
    authorities to use instead of the system's.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        api_key: str = "",
        deadline_s: float | None = None,
        retries: int = 6,
        ca_file: str = "",
    ) -> None:
        self.address = address
        self._ca_file = ca_file
        self._api_key = api_key
        self._deadline_s = deadline_s
        self._retries = retries
        self._channel: aio.Channel | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection; unfinished answers end."""
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    def generate(
        self,
        prompt: Prompt | api.GenerateRequest,
        *,
        deadline_s: float | None = None,
        traceparent: str | None = None,
        **options: Unpack[Options],
    ) -> Answer:
        """Streams the answer to `prompt`. A broken stream is resumed: each token is delivered once.

        Raises TypeError or ValueError at once for options that no request can hold.
        """
        request = self._request(prompt, options)
        retry = self._retry_state(deadline_s)
        metadata = self._metadata(traceparent)
        return Answer(lambda answer: self._stream(answer, request, retry, metadata), request.request_id)

    async def complete(
        self,
        prompt: Prompt | api.GenerateRequest,
        *,
        deadline_s: float | None = None,
        traceparent: str | None = None,
        **options: Unpack[Options],
    ) -> api.CompleteResponse:
        """The whole answer to `prompt` in one reply."""
        request = self._request(prompt, options)
        metadata = self._metadata(traceparent)
        return await self._call(
            lambda stub, timeout: stub.Complete(request, timeout=timeout, metadata=metadata), deadline_s
        )

    async def tokenize(
        self, prompt: Prompt, *, model: str = "", deadline_s: float | None = None
    ) -> api.TokenizeResponse:
        """The tokens of `prompt`, as `generate` would send them to the model."""
        request = api.TokenizeRequest(model=model, prompt=requests.build_prompt(prompt))
        metadata = self._metadata()
        return await self._call(
            lambda stub, timeout: stub.Tokenize(request, timeout=timeout, metadata=metadata), deadline_s
        )

    async def embed(
        self, texts: Sequence[Input], *, deadline_s: float | None = None, **settings: Unpack[EmbedSettings]
    ) -> api.EmbedResponse:
        """A vector for each text (or list of token ids), in `embeddings`, and the receipt."""
        request, metadata = embed_request(texts, settings), self._metadata()
        return await self._call(
            lambda stub, timeout: stub.Embed(request, timeout=timeout, metadata=metadata), deadline_s
        )

    def embed_stream(self) -> EmbedStream:
        """A stream for requests of `embed`: a message on it takes less time than a call.

        `async with client.embed_stream() as stream: reply = await stream.embed(["a text"])`
        """
        metadata = self._metadata()
        return EmbedStream(lambda: self._stub().EmbedStream(metadata=metadata), self._retry_state)

    async def rank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int = 0,
        deadline_s: float | None = None,
        **settings: Unpack[EncodeSettings],
    ) -> api.RankResponse:
        """The documents by how well they belong to the query, the best first, in `results`, and the receipt."""
        request, metadata = rank_request(query, documents, top_n, settings), self._metadata()
        return await self._call(
            lambda stub, timeout: stub.Rank(request, timeout=timeout, metadata=metadata), deadline_s
        )

    async def classify(
        self, texts: Sequence[Input], *, deadline_s: float | None = None, **settings: Unpack[EncodeSettings]
    ) -> api.ClassifyResponse:
        """The labels of each text, the most likely first, in `results`, and the receipt."""
        request, metadata = classify_request(texts, settings), self._metadata()
        return await self._call(
            lambda stub, timeout: stub.Classify(request, timeout=timeout, metadata=metadata), deadline_s
        )

    async def models(self, *, deadline_s: float | None = None) -> list[api.Model]:
        """The models that the mesh serves, and those that it is loading."""
        request = api.ListModelsRequest()
        metadata = self._metadata()
        reply = await self._call(
            lambda stub, timeout: stub.ListModels(request, timeout=timeout, metadata=metadata), deadline_s
        )
        return list(reply.models)

    async def watch_mesh(self, *, deadline_s: float | None = None) -> AsyncGenerator[api.MeshSnapshot, None]:
        """Snapshots of the whole mesh, about one per second, until the gateway stops or the deadline. Not retried."""
        call = self._stub().WatchMesh(api.WatchMeshRequest(), timeout=deadline_s, metadata=self._metadata())
        try:
            async for snapshot in call:
                yield snapshot
        except aio.AioRpcError as error:
            raise from_rpc(error) from None
        finally:
            call.cancel()

    def _request(self, prompt: Prompt | api.GenerateRequest, options: Options) -> api.GenerateRequest:
        """The request in a form that can be sent again: with an id, so that a second attempt joins the generation of
        the first, and with a seed, so that it gives the same answer if that generation has ended."""
        request = api.GenerateRequest()
        if not isinstance(prompt, api.GenerateRequest):
            request.CopyFrom(requests.build(prompt, options))
        elif options:
            raise TypeError(f"a whole request takes no options beside it: {', '.join(sorted(options))}")
        else:
            request.CopyFrom(prompt)
        request.request_id = request.request_id or secrets.token_hex(16)
        sampling = request.sampling
        greedy = sampling.HasField("temperature") and sampling.temperature == 0
        if not sampling.HasField("seed") and not greedy:
            sampling.seed = secrets.randbits(64)
            if request.cache in (api.CACHE_POLICY_UNSPECIFIED, api.CACHE_POLICY_READ_WRITE):
                # A random seed does not occur again: its result would only displace useful ones.
                request.cache = api.CACHE_POLICY_READ_ONLY
        return request

    def _retry_state(self, deadline_s: float | None) -> RetryState:
        budget_s = self._deadline_s if deadline_s is None else deadline_s
        if budget_s is not None and math.isnan(budget_s):
            raise ValueError("deadline_s: not a number")
        bounded = budget_s is not None and budget_s < _LONGEST_DEADLINE_S
        return RetryState(self._retries, time.monotonic() + budget_s if budget_s is not None and bounded else None)

    async def _call(
        self, call: Callable[["stubs.InferenceAsyncStub", float | None], Awaitable[Reply]], deadline_s: float | None
    ) -> Reply:
        retry = self._retry_state(deadline_s)
        while True:
            try:
                return await call(self._stub(), retry.remaining_s(time.monotonic()))
            except aio.AioRpcError as error:
                await asyncio.sleep(retry.pause_s(from_rpc(error), time.monotonic()))

    async def _stream(
        self, answer: Answer, request: api.GenerateRequest, retry: RetryState, metadata: aio.Metadata
    ) -> AsyncGenerator[api.Delta, None]:
        resumer = StreamResumer()
        while answer.receipt is None and not answer.cancelled:
            resumer.begin_attempt()
            timeout_s = retry.remaining_s(time.monotonic())
            answer.call = call = self._stub().Generate(request, timeout=timeout_s, metadata=metadata)
            try:
                async for response in call:
                    if response.HasField("receipt"):
                        answer.receipt = response.receipt
                    elif response.HasField("prompt"):
                        answer.add_prompt(response.prompt)
                    elif (delta := resumer.unseen(response.delta)) is not None:
                        retry.progressed()
                        yield delta
                if answer.receipt is None:
                    raise WeftError(grpc.StatusCode.DATA_LOSS, "the stream ended without a receipt")
            except aio.AioRpcError as error:
                await asyncio.sleep(retry.pause_s(from_rpc(error), time.monotonic()))
            except asyncio.CancelledError:
                if not answer.cancelled:
                    raise
            finally:
                call.cancel()

    def _stub(self) -> "stubs.InferenceAsyncStub":
        if self._channel is None:
            self._channel = open_channel(self.address, _CHANNEL_OPTIONS, self._ca_file)
        return stubs.InferenceStub(self._channel)

    def _metadata(self, traceparent: str | None = None) -> aio.Metadata:
        metadata = aio.Metadata()
        if self._api_key:
            metadata.add("authorization", f"Bearer {_header('api_key', self._api_key)}")
        if traceparent:
            metadata.add("traceparent", _header("traceparent", traceparent))
        return metadata


def _header(name: str, value: str) -> str:
    """The value if metadata can carry it. Raises HeaderError for others, such as a key that ends in a line break."""
    if not (value.isascii() and value.isprintable()):
        raise HeaderError(f"{name}: printable ASCII characters alone")
    return value
