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
    """A distribution of durations, in the buckets of `Latencies` in protos/mesh.proto."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: defaultdict[int, int] = defaultdict(int)

    def add(self, seconds: float, times: int = 1) -> None:
        """Counts a duration `times` times."""
        self.counts[int(math.log2(seconds * 1e6) * _PER_OCTAVE) if seconds > 1e-6 else 0] += times

    def add_all(self, other: "Durations") -> None:
        """Adds another distribution."""
        for bucket, count in other.counts.items():
            self.counts[bucket] += count

    def message(self) -> mesh.Latencies:
        """As a message."""
        if not self.counts:
            return mesh.Latencies()
        first, last = min(self.counts), max(self.counts)
        return mesh.Latencies(first=first, counts=[self.counts.get(bucket, 0) for bucket in range(first, last + 1)])


@dataclass(slots=True)
class ModelCounts:
    """The counts of one model in a period of time."""

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

    def add_all(self, other: "ModelCounts") -> None:
        """Adds the counts of another period."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.first_token.add_all(other.first_token)
        self.inter_token.add_all(other.inter_token)

    def message(self, model: str) -> mesh.ModelTraffic:
        """As a message."""
        counts = {name: getattr(self, name) for name in _COUNTS}
        first, inter = self.first_token.message(), self.inter_token.message()
        return mesh.ModelTraffic(model=model, **counts, first_token=first, inter_token=inter)


class Traffic:
    """The counts of each of the last seconds, by model. A model without any for that long takes no memory and no
    time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._now: dict[str, ModelCounts] = {}
        """The counts since the last call of `roll`."""
        self._seconds = deque([(clock(), self._now)], maxlen=WINDOW_S)
        """Each second's start and counts; the last one is now."""

    def model(self, name: str) -> ModelCounts:
        """The counts of a model in this second: not to be kept."""
        counts = self._now.get(name)
        if counts is None:
            counts = self._now[name] = ModelCounts()
        return counts

    def roll(self, running: int) -> mesh.GatewayReport:
        """The counts of the last `WINDOW_S` calls; to be called once a second. `running` requests are under way."""
        now = self._clock()
        began, _ = self._seconds[0]
        models: defaultdict[str, ModelCounts] = defaultdict(ModelCounts)
        for _, second in self._seconds:
            for name, counts in second.items():
                models[name].add_all(counts)
        self._now = {}
        self._seconds.append((now, self._now))
        if not models:
            return mesh.GatewayReport(running=running)
        traffic = [counts.message(name) for name, counts in sorted(models.items())]
        return mesh.GatewayReport(running=running, window_s=max(1, round(now - began)), models=traffic)


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
