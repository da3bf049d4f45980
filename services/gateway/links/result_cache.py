"""The gateway's client of the result cache: keys of answers, and their stored form."""

from dataclasses import dataclass
from functools import cached_property

from protos import cache_pb2, mesh_pb2
from protos import inference_pb2 as api
from services import hashing
from services.gateway.links.cache_link import CacheLink
from services.gateway.text.journal import Detail, Ending, Journal, packed

_MOST_STORES = 256
"""Stores in flight; further results are dropped."""


def result_key(
    salt: bytes,
    card: mesh_pb2.ModelCard,
    prompt: list[int],
    sampling: api.Sampling,
    sample_index: int,
    calls_once: bool = False,
) -> bytes:
    """The key of the answer to these inputs. `sampling` is resolved: max_tokens and seed are set. `calls_once`: the
    answer ends after its first tool call."""
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
        *([b"one call"] if calls_once else []),
    )


@dataclass(frozen=True)
class ResultKey:
    """The inputs that determine the tokens of one continuation, and the key made of them."""

    salt: bytes
    card: mesh_pb2.ModelCard
    prompt: list[int]
    sampling: api.Sampling
    """Resolved: max_tokens and seed are set."""
    index: int
    calls_once: bool = False
    """The answer ends after its first tool call."""

    @cached_property
    def digest(self) -> bytes:
        """32 bytes, equal at every gateway. Hashes the whole prompt, so it is made on first use."""
        return result_key(self.salt, self.card, self.prompt, self.sampling, self.index, self.calls_once)


def deterministic(sampling: api.Sampling) -> bool:
    """Whether a request with this sampling, as the client sent it, always has the same answer."""
    return sampling.HasField("seed") or (sampling.HasField("temperature") and sampling.temperature == 0)


class ResultCache:
    """Looks answers up and stores them. Every failure is a miss."""

    def __init__(self, link: CacheLink) -> None:
        self._link = link

    @property
    def enabled(self) -> bool:
        """A cache service is configured."""
        return self._link.enabled

    async def get(self, key: ResultKey, traceparent: str) -> cache_pb2.CachedResult | None:
        """The result, or None after at most the link's budget."""
        request = cache_pb2.GetResultRequest(key=key.digest)
        reply = await self._link.look_up(lambda stub: stub.GetResult, request, traceparent)
        return reply.result if reply is not None and reply.HasField("result") else None

    def put(self, key: ResultKey, result: cache_pb2.CachedResult) -> None:
        """Stores a result in the background; drops it if too many stores are in flight."""
        if self._link.enabled:
            request = cache_pb2.PutResultRequest(key=key.digest, result=result)
            self._link.store(lambda stub: stub.PutResult, request, _MOST_STORES)


def to_result(journal: Journal, ending: Ending) -> cache_pb2.CachedResult:
    """The stored form of a whole answer: tokens without text. Each hit detokenizes and matches stop strings again."""
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
    """-> tokens, their details, and how the answer ended."""
    details = [
        Detail(place.chosen.logprob, [top.token_id for top in place.top], [top.logprob for top in place.top])
        for place in result.logprobs
    ]
    stop_token_id = result.stop_token_id if result.HasField("stop_token_id") else None
    return list(result.token_ids), details, Ending(result.finish_reason, stop_token_id=stop_token_id)
