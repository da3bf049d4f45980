"""The result cache seen from the gateway: keys, look-ups within a budget, stores in the background.

Whatever goes wrong is a miss. Knows nothing of where results are kept.
"""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property

import structlog
from grpc import aio

from protos import cache_pb2, mesh_pb2
from protos import cache_pb2_grpc as cache_grpc
from protos import inference_pb2 as api
from services import hashing, rpc
from services.gateway.text.journal import Detail, Ending, Journal, packed

log = structlog.get_logger("results")

_STORE_S = 1.0
_MAX_STORES = 256
_MAX_KNOWN = 4096


def result_key(
    salt: bytes, card: mesh_pb2.ModelCard, prompt: list[int], sampling: api.Sampling, sample_index: int
) -> bytes:
    """The key of the tokens that these determine. `sampling` is resolved: max_tokens and seed are set."""
    canonical = api.Sampling()
    canonical.CopyFrom(sampling)
    if canonical.temperature == 0 and canonical.HasField("temperature"):
        canonical.ClearField("seed")
    for name, default in (("temperature", 1.0), ("top_p", 1.0), ("repetition_penalty", 1.0)):
        if getattr(canonical, name) == default:
            canonical.ClearField(name)  # type: ignore[arg-type]
    return hashing.digest(
        b"weft/result/1",
        salt,
        card.fingerprint,
        packed(prompt),
        canonical.SerializeToString(deterministic=True),
        sample_index.to_bytes(4, "little"),
    )


@dataclass(frozen=True)
class ResultKey:
    """What determines the tokens of a continuation, and so under which key they are kept."""

    salt: bytes
    card: mesh_pb2.ModelCard
    prompt: list[int]
    asked: api.Sampling
    """As the client sent it."""
    resolved: api.Sampling
    index: int

    @cached_property
    def key(self) -> bytes:
        """The same at every gateway."""
        return result_key(self.salt, self.card, self.prompt, self.resolved, self.index)

    @cached_property
    def guess(self) -> int:
        """Made in a fraction of the key's time, and here the same when a client of this tenant asks the same again."""
        asked = self.asked.SerializeToString(deterministic=True)
        return hash((self.salt, self.card.fingerprint, packed(self.prompt), asked, self.index))


def deterministic(sampling: api.Sampling) -> bool:
    """Whether a request as the client sent it asks for the same tokens every time."""
    return sampling.HasField("seed") or (sampling.HasField("temperature") and sampling.temperature == 0)


class ResultCache:
    """The cache service, or none."""

    def __init__(self, address: str, budget_s: float) -> None:
        self._channel = rpc.link_channel(address) if address else None
        self._cache = cache_grpc.CacheStub(self._channel) if self._channel else None
        self._budget_s = budget_s
        self._found = False
        self._stored: OrderedDict[int, None] = OrderedDict()  # guesses, the latest last
        self._stores: set[asyncio.Task[None]] = set()

    @property
    def enabled(self) -> bool:
        """There is a cache service."""
        return self._cache is not None

    async def get(self, question: ResultKey, traceparent: str) -> cache_pb2.CachedResult | None:
        """The result, or None after at most the budget."""
        if self._cache is None:
            return None
        try:
            reply = await self._cache.GetResult(
                cache_pb2.GetResultRequest(key=question.key),
                timeout=self._budget_s,
                metadata=(("traceparent", traceparent),),
            )
        except aio.AioRpcError as error:
            log.debug("look-up failed", code=error.code().name)
            return None
        self._found = reply.HasField("result")
        if not self._found:
            self._stored.pop(question.guess, None)
        return reply.result if self._found else None

    def expects(self, question: ResultKey | None) -> bool:
        """Whether a look-up is likely to find something: the answer was stored from here and not missed since, or the
        last look-up found one."""
        return question is not None and (self._found or question.guess in self._stored)

    def put(self, question: ResultKey, result: cache_pb2.CachedResult) -> None:
        """Stores a result in the background; drops it if the cache service is far behind, or there is none."""
        if self._cache is None:
            return
        self._stored[question.guess] = None
        if len(self._stored) > _MAX_KNOWN:
            self._stored.popitem(last=False)
        if len(self._stores) < _MAX_STORES:
            task = asyncio.create_task(self._store(self._cache, question.key, result))
            self._stores.add(task)
            task.add_done_callback(self._stores.discard)

    async def close(self) -> None:
        """Waits for what is being stored, no longer than one store may take."""
        await asyncio.gather(*self._stores, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close()

    async def _store(self, cache: "cache_grpc.CacheAsyncStub", key: bytes, result: cache_pb2.CachedResult) -> None:
        try:
            await cache.PutResult(cache_pb2.PutResultRequest(key=key, result=result), timeout=_STORE_S)
        except aio.AioRpcError as error:
            log.debug("not stored", code=error.code().name)


def to_result(journal: Journal, ending: Ending) -> cache_pb2.CachedResult:
    """What is kept of a whole answer. Its text is made anew at each hit, and stop strings are found again."""
    result = cache_pb2.CachedResult(token_ids=journal.tokens, finish_reason=ending.reason)
    if ending.stop_token_id is not None:
        result.stop_token_id = ending.stop_token_id
    for token, detail in zip(journal.tokens, journal.details, strict=False):
        place = result.logprobs.add()
        place.chosen.token_id, place.chosen.logprob = token, detail.logprob
        for top_id, top_logprob in zip(detail.top_ids, detail.top_logprobs, strict=True):
            place.top.add(token_id=top_id, logprob=top_logprob)
    return result


def from_result(result: cache_pb2.CachedResult) -> tuple[list[int], list[Detail], Ending]:
    """Tokens, their details, and how the answer ended."""
    details = [
        Detail(place.chosen.logprob, [top.token_id for top in place.top], [top.logprob for top in place.top])
        for place in result.logprobs
    ]
    stop_token_id = result.stop_token_id if result.HasField("stop_token_id") else None
    return list(result.token_ids), details, Ending(result.finish_reason, stop_token_id=stop_token_id)
