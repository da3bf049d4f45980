"""Vectors of texts: from the cache, from a request that computes them now, or by own jobs. Knows no protocol."""

from collections.abc import Iterator, Sequence

from protos import inference_pb2 as api
from services import hashing, telemetry
from services.gateway.answers.encoding.flights import Flight, Flights, landed
from services.gateway.answers.encoding.job import EncodeJob, EncodeRequestParts
from services.gateway.answers.encoding.record import EncodeRecord
from services.gateway.answers.together import run_together
from services.gateway.backend import Backend
from services.gateway.text.inputs import InputTokens
from services.gateway.text.journal import packed

_JOB_TEXTS = 32
_JOB_TOKENS = 4096
"""A job is one step of a worker or a few: workers share a large request, and other requests come in between."""
_READS = (api.CACHE_POLICY_UNSPECIFIED, api.CACHE_POLICY_READ_WRITE, api.CACHE_POLICY_READ_ONLY)
_WRITES = (api.CACHE_POLICY_UNSPECIFIED, api.CACHE_POLICY_READ_WRITE)


class Vectors:
    """The vectors of one request's texts."""

    def __init__(
        self,
        backend: Backend,
        flights: Flights,
        record: EncodeRecord,
        parts: EncodeRequestParts,
        cache: "api.CachePolicy.ValueType",
        fields: Sequence[str],
    ) -> None:
        """fields: what the texts are called in messages to the client."""
        self._backend, self._flights, self._record, self._parts = backend, flights, record, parts
        self._cache, self._fields = cache, fields
        self._found: dict[bytes, bytes] = {}
        self._jobs = 0

    async def of(self, texts: Sequence[InputTokens]) -> list[bytes]:
        """A vector for each text; equal texts are computed once. Raises WeftError."""
        keys = [self._key(text) for text in texts]
        first = {key: place for place, key in reversed(list(enumerate(keys)))}
        computed: set[bytes] = set()
        if self._cache in _READS:
            self._found.update(await self._look_up(list(first)))
        while missing := [key for key in first if key not in self._found]:
            own = missing
            if self._cache in _READS:
                own = [key for key in missing if self._flights.find(key) is None]
            computed.update(own)
            await self._compute(own, [(texts[first[key]], self._fields[first[key]]) for key in own])
            await self._wait_for(key for key in missing if key not in self._found)
        tokens = {key: len(text.token_ids) for key, text in zip(keys, texts, strict=True)}
        self._record.found_tokens = self._record.tokens - sum(tokens[key] for key in computed)
        return [self._found[key] for key in keys]

    def _key(self, text: InputTokens) -> bytes:
        parts = self._parts
        how = f"{text.second} {parts.dimensions} {parts.normalize}".encode()
        card = parts.served.card
        return hashing.digest(b"weft/vector/1", parts.tenant.salt, card.fingerprint, packed(text.token_ids), how)

    async def _look_up(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        with telemetry.start("cache", self._parts.traceparent, kind="client") as span:
            found = await self._backend.vectors.get(keys, self._parts.vector_bytes, span.traceparent)
            span.set({"weft.hits": len(found)})
        self._backend.metrics.looked_up_vectors(self._parts.served.card.name, len(found), len(keys))
        return found

    async def _compute(self, keys: Sequence[bytes], texts: Sequence[tuple[InputTokens, str]]) -> None:
        """Computes vectors in jobs, all at once. The first failure ends the others. Raises WeftError."""
        if not keys:
            return
        if self._cache not in _READS:
            await self._run_jobs(keys, texts, None)
            return
        with self._flights.begin(keys) as flight:
            await self._run_jobs(keys, texts, flight)

    async def _run_jobs(
        self, keys: Sequence[bytes], texts: Sequence[tuple[InputTokens, str]], flight: Flight | None
    ) -> None:
        running = []
        for part in _jobs([len(text.token_ids) for text, _ in texts]):
            chosen = texts[part]
            self._jobs += 1
            job = EncodeJob(
                self._backend, self._parts, self._jobs, [text for text, _ in chosen], [name for _, name in chosen]
            )
            running.append(self._run(job, keys[part], flight))
        await run_together(running)

    async def _run(self, job: EncodeJob, keys: Sequence[bytes], flight: Flight | None) -> None:
        try:
            vectors = dict(zip(keys, await job.run(), strict=True))
        finally:
            self._record.costs.append(job.costs)
        self._found.update(vectors)
        if flight is not None:
            flight.land(vectors)
        if self._cache in _WRITES:
            self._backend.vectors.put(vectors)

    async def _wait_for(self, keys: Iterator[bytes]) -> None:
        """Waits for what other requests compute. What they give up stays missing."""
        waiting = {key: future for key in keys if (future := self._flights.find(key)) is not None}
        for key, future in waiting.items():
            vector = await landed(future)
            if vector is not None:
                self._found[key] = vector
                self._record.joined = True


def _jobs(tokens: Sequence[int]) -> Iterator[slice]:
    """Cuts texts, given by their numbers of tokens, into jobs, none of which is empty."""
    begin, inside = 0, 0
    for place, count in enumerate(tokens):
        if place > begin and (place - begin == _JOB_TEXTS or inside + count > _JOB_TOKENS):
            yield slice(begin, place)
            begin, inside = place, 0
        inside += count
    yield slice(begin, len(tokens))
