"""A histogram of durations in buckets 1% wide, for millions of values in little memory. Knows numbers only."""

import math
from collections import Counter
from typing import Any

_STEP = math.log(1.01)
_LEAST = 1e-6


class Distribution:
    """Counts values. Count, mean, minimum and maximum are exact, percentiles within half a percent."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.least = math.inf
        self.greatest = 0.0
        self._buckets: Counter[int] = Counter()

    def add(self, value: float, times: int = 1) -> None:
        """Adds a value of 0 or more, `times` times."""
        self.count += times
        self.total += value * times
        self.least = min(self.least, value)
        self.greatest = max(self.greatest, value)
        self._buckets[math.floor(math.log(max(value, _LEAST)) / _STEP)] += times

    def merge(self, other: "Distribution") -> None:
        """Adds all values of another distribution."""
        self.count += other.count
        self.total += other.total
        self.least = min(self.least, other.least)
        self.greatest = max(self.greatest, other.greatest)
        self._buckets.update(other._buckets)

    @property
    def mean(self) -> float:
        """The mean; 0 without values."""
        return self.total / self.count if self.count else 0.0

    def percentile(self, percent: float) -> float:
        """The value that `percent` of all values do not exceed; 0 without values."""
        rank = max(1, math.ceil(self.count * percent / 100))
        counted = 0
        for bucket in sorted(self._buckets):
            counted += self._buckets[bucket]
            if counted >= rank:
                return min(max(math.exp((bucket + 0.5) * _STEP), self.least), self.greatest)
        return 0.0

    def steps(self, most: int = 200) -> list[tuple[float, float]]:
        """The cumulative curve: (value, share of values up to it), at most about `most` points."""
        points, counted, last_share = [], 0, -1.0
        for bucket in sorted(self._buckets):
            counted += self._buckets[bucket]
            share = counted / self.count
            if share - last_share >= 1 / most or counted == self.count:
                points.append((min(math.exp((bucket + 1) * _STEP), self.greatest), share))
                last_share = share
        return points

    def to_json(self) -> dict[str, Any]:
        """The distribution as values for JSON."""
        least = self.least if self.count else 0.0
        return {"total": self.total, "least": least, "greatest": self.greatest, "buckets": list(self._buckets.items())}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Distribution":
        """The distribution that `to_json` wrote."""
        result = cls()
        result._buckets = Counter({int(bucket): int(count) for bucket, count in data["buckets"]})
        result.count = sum(result._buckets.values())
        result.total, result.greatest = float(data["total"]), float(data["greatest"])
        result.least = float(data["least"]) if result.count else math.inf
        return result
