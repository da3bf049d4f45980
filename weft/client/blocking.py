"""The client for scripts and notebooks: the same calls, blocking. Owns one thread that runs the event loop."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, Self, TypeVar, Unpack

from protos import inference_pb2 as api
from weft.client.api import DEFAULT_ADDRESS, Answer, Client
from weft.client.embed_stream import EmbedStream
from weft.client.embeddings import EmbedSettings, EncodeSettings, Input
from weft.client.requests import Options, Prompt

Result = TypeVar("Result")


class SyncClient:
    """Client with blocking calls; `generate` returns an iterator of deltas whose `receipt` is set at its end."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        api_key: str = "",
        deadline_s: float | None = None,
        retries: int = 6,
        ca_file: str = "",
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weft-client", daemon=True)
        self._thread.start()
        self._client = Client(address, api_key=api_key, deadline_s=deadline_s, retries=retries, ca_file=ca_file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection and ends the thread."""
        if self._loop.is_closed():
            return
        self._wait(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def generate(self, prompt: Prompt, *, deadline_s: float | None = None, **options: Unpack[Options]) -> "SyncAnswer":
        """Streams the answer to `prompt`."""
        answer = self._client.generate(prompt, deadline_s=deadline_s, **options)
        return SyncAnswer(answer, self._wait)

    def complete(
        self, prompt: Prompt, *, deadline_s: float | None = None, **options: Unpack[Options]
    ) -> api.CompleteResponse:
        """The whole answer to `prompt` in one reply."""
        return self._wait(self._client.complete(prompt, deadline_s=deadline_s, **options))

    def embed(
        self, texts: Sequence[Input], *, deadline_s: float | None = None, **settings: Unpack[EmbedSettings]
    ) -> api.EmbedResponse:
        """A vector for each text (or list of token ids), in `embeddings`, and the receipt."""
        return self._wait(self._client.embed(texts, deadline_s=deadline_s, **settings))

    def embed_stream(self) -> "SyncEmbedStream":
        """A stream for requests of `embed`: a message on it takes less time than a call."""
        return SyncEmbedStream(self._client.embed_stream(), self._wait)

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int = 0,
        deadline_s: float | None = None,
        **settings: Unpack[EncodeSettings],
    ) -> api.RankResponse:
        """The documents by how well they belong to the query, the best first, in `results`, and the receipt."""
        return self._wait(self._client.rank(query, documents, top_n=top_n, deadline_s=deadline_s, **settings))

    def classify(
        self, texts: Sequence[Input], *, deadline_s: float | None = None, **settings: Unpack[EncodeSettings]
    ) -> api.ClassifyResponse:
        """The labels of each text, the most likely first, in `results`, and the receipt."""
        return self._wait(self._client.classify(texts, deadline_s=deadline_s, **settings))

    def tokenize(self, prompt: Prompt, *, model: str = "", deadline_s: float | None = None) -> api.TokenizeResponse:
        """The tokens of `prompt`, as `generate` would send them to the model."""
        return self._wait(self._client.tokenize(prompt, model=model, deadline_s=deadline_s))

    def models(self, *, deadline_s: float | None = None) -> list[api.Model]:
        """The models that the mesh serves, and those that it is loading."""
        return self._wait(self._client.models(deadline_s=deadline_s))

    def _wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        if self._loop.is_closed():
            work.close()
            raise RuntimeError("the client is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


class SyncAnswer:
    """A streamed answer, for a plain `for` loop."""

    def __init__(self, answer: Answer, wait: Any) -> None:
        self._answer = answer
        self._wait = wait
        self.request_id = answer.request_id

    @property
    def receipt(self) -> api.Receipt | None:
        """The cost of the answer; None until the iteration has ended."""
        return self._answer.receipt

    @property
    def prompt(self) -> api.PromptEcho | None:
        """The prompt, if it was asked for; None before the first delta."""
        return self._answer.prompt

    def __iter__(self) -> Iterator[api.Delta]:
        deltas = aiter(self._answer)
        try:
            while (delta := self._wait(_next(deltas))) is not None:
                yield delta
        finally:
            self._wait(self._answer.cancel())

    def text(self) -> str:
        """The rest of the text of the first continuation."""
        return str(self._wait(self._answer.text()))


class SyncEmbedStream:
    """Requests for vectors on an open stream. Many threads may use it at the same time.

    Leaving the block waits for the requests under way. If an exception leaves it, these fail with RuntimeError instead.
    """

    def __init__(self, stream: EmbedStream, wait: Any) -> None:
        self._stream = stream
        self._wait = wait

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._wait(self._stream.__aexit__(*raised))

    def embed(
        self, texts: Sequence[Input], *, deadline_s: float | None = None, **settings: Unpack[EmbedSettings]
    ) -> api.EmbedResponse:
        """A vector for each text (or list of token ids), in `embeddings`, and the receipt."""
        response: api.EmbedResponse = self._wait(self._stream.embed(texts, deadline_s=deadline_s, **settings))
        return response

    def close(self) -> None:
        """Waits for the requests under way, and ends the stream. Takes no further ones meanwhile."""
        self._wait(self._stream.close())


async def _next(deltas: Any) -> Any:
    return await anext(deltas, None)
