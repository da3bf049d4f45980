"""What a gateway answered in the last seconds, by model: requests, tokens, latencies. Knows counts, no requests."""

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from protos import inference_pb2 as api
from protos import mesh_pb2 as mesh

WINDOW_S = 10
"""Length of the window, and the number of times that it is divided."""
_PER_OCTAVE = 4
"""Buckets in which a duration doubles: neighbours differ by 19%."""
_COUNTS = ("requests", "failed", "result_hits", "prompt_tokens", "cached_tokens", "tokens")


class Durations:
    """A distribution of durations that only grows, in the buckets of `Latencies` in protos/mesh.proto."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: defaultdict[int, int] = defaultdict(int)

    def add(self, seconds: float, times: int = 1) -> None:
        """Counts a duration `times` times."""
        self.counts[int(math.log2(seconds * 1e6) * _PER_OCTAVE) if seconds > 1e-6 else 0] += times


@dataclass(slots=True)
class ModelCounts:
    """The counts of one model since the start of the gateway."""

    requests: int = 0
    failed: int = 0
    result_hits: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    first_token: Durations = field(default_factory=Durations)
    inter_token: Durations = field(default_factory=Durations)

    def ended(self, receipt: api.Receipt, failed: bool) -> None:
        """Counts a request that ended."""
        self.requests += 1
        self.failed += failed
        self.result_hits += receipt.result_hit
        self.prompt_tokens += receipt.prompt_tokens
        found = receipt.prompt_tokens if receipt.result_hit else receipt.cached_tokens + receipt.fetched_tokens
        self.cached_tokens += min(found, receipt.prompt_tokens)

    def copy(self) -> "ModelCounts":
        """The counts as they are now."""
        copied = ModelCounts(*(getattr(self, name) for name in _COUNTS))
        copied.first_token.counts.update(self.first_token.counts)
        copied.inter_token.counts.update(self.inter_token.counts)
        return copied


_NONE = ModelCounts()


class Traffic:
    """The counts of all models, and what they were in each of the last seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._models: dict[str, ModelCounts] = {}
        self._earlier: deque[tuple[float, dict[str, ModelCounts]]] = deque([(clock(), {})], maxlen=WINDOW_S)

    def model(self, name: str) -> ModelCounts:
        """The counts of a model."""
        counts = self._models.get(name)
        if counts is None:
            counts = self._models[name] = ModelCounts()
        return counts

    def roll(self, running: int) -> mesh.GatewayReport:
        """The counts of the last `WINDOW_S` calls; to be called once a second. `running` requests are under way."""
        now = self._clock()
        since, before = self._earlier[0]
        self._earlier.append((now, {name: counts.copy() for name, counts in self._models.items()}))
        traffic = (_difference(name, counts, before.get(name, _NONE)) for name, counts in sorted(self._models.items()))
        models = [each for each in traffic if each is not None]
        if not models:
            return mesh.GatewayReport(running=running)
        return mesh.GatewayReport(running=running, window_s=max(1, round(now - since)), models=models)


def _difference(name: str, now: ModelCounts, before: ModelCounts) -> mesh.ModelTraffic | None:
    """The traffic between two moments; None if there was none."""
    counts = {each: getattr(now, each) - getattr(before, each) for each in _COUNTS}
    first = _latencies(now.first_token.counts, before.first_token.counts)
    inter = _latencies(now.inter_token.counts, before.inter_token.counts)
    if not any(counts.values()) and not first.counts:
        return None
    return mesh.ModelTraffic(model=name, **counts, first_token=first, inter_token=inter)


def _latencies(now: Mapping[int, int], before: Mapping[int, int]) -> mesh.Latencies:
    counts = {bucket: more for bucket, count in now.items() if (more := count - before.get(bucket, 0))}
    if not counts:
        return mesh.Latencies()
    first, last = min(counts), max(counts)
    return mesh.Latencies(first=first, counts=[counts.get(bucket, 0) for bucket in range(first, last + 1)])


def percentiles(parts: Iterable[mesh.Latencies]) -> api.Percentiles:
    """The percentiles over several distributions. Each is the middle of its bucket."""
    counts: defaultdict[int, int] = defaultdict(int)
    for part in parts:
        for bucket, count in enumerate(part.counts, part.first):
            counts[bucket] += count
    total = sum(counts.values())
    if not total:
        return api.Percentiles()
    return api.Percentiles(
        count=total, p50_s=_quantile(counts, 0.5), p90_s=_quantile(counts, 0.9), p99_s=_quantile(counts, 0.99)
    )


def _quantile(counts: Mapping[int, int], share: float) -> float:
    """The duration below which this share of all is, in seconds."""
    rank, total = share * sum(counts.values()), 0
    for bucket, count in sorted(counts.items()):
        total += count
        if total >= rank:
            return float(2 ** ((bucket + 0.5) / _PER_OCTAVE) * 1e-6)
    raise AssertionError(counts)
