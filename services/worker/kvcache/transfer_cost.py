"""Fetch or recompute: what a transfer is predicted to take, from what earlier ones took. Knows numbers alone."""

ADVANTAGE = 0.8
"""A fetch must be predicted to take at most this share of the time of recomputing: it may also fail."""

_WEIGHT = 0.5  # of a new measurement in the running means


class TransferCost:
    """The measured speed of a way to another tier: seconds until it answers, and seconds per byte from there.

    Means are over times, not rates: one slow transfer tells more than many fast ones.
    """

    def __init__(self) -> None:
        self.latency_s: float | None = None
        self.byte_s: float | None = None

    @property
    def known(self) -> bool:
        """Whether it was measured."""
        return self.byte_s is not None

    def predict(self, count: int) -> float | None:
        """Seconds that so many bytes will take; None when not yet known."""
        if self.byte_s is None:
            return None
        return (self.latency_s or 0.0) + count * self.byte_s

    def answered(self, elapsed_s: float) -> None:
        """A question without bulk took this long."""
        self.latency_s = _mean(self.latency_s, elapsed_s)

    def moved(self, count: int, elapsed_s: float) -> None:
        """So many bytes took this long, the latency included; a transfer that was cut off counts as far as it came."""
        self.byte_s = _mean(self.byte_s, max(elapsed_s - (self.latency_s or 0.0), elapsed_s / 10) / max(count, 1))

    def pays(self, count: int, recompute_s: float) -> bool:
        """Whether moving so many bytes is predicted to be cheaper than to compute them in `recompute_s`."""
        seconds = self.predict(count)
        return seconds is not None and seconds <= ADVANTAGE * recompute_s


def recompute_s(tokens: int, prefill_rate: float) -> float:
    """Seconds to compute so many prompt tokens; 0 when the rate (tokens per second) is not yet known."""
    return tokens / prefill_rate if prefill_rate > 0 else 0.0


def _mean(before: float | None, now: float) -> float:
    return now if before is None else before + _WEIGHT * (now - before)
