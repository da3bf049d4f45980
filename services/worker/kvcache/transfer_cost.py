"""Predicts the time of a transfer from earlier ones, to choose between fetching and computing. Knows numbers alone."""

ADVANTAGE = 0.8
"""A fetch must be predicted to take at most this share of the time of computing, because it may also fail."""

_WEIGHT = 0.5  # of a new measurement in the running means


class TransferCost:
    """The measured speed of transfers from another tier: seconds until it answers, and seconds per byte after that.

    Means are over times, not rates, so that one slow transfer weighs more than many fast ones.
    """

    def __init__(self) -> None:
        self.latency_s: float | None = None
        self.byte_s: float | None = None

    @property
    def known(self) -> bool:
        """Whether a transfer was measured."""
        return self.byte_s is not None

    def predict(self, count: int) -> float | None:
        """Predicted seconds for `count` bytes; None before the first measurement."""
        if self.byte_s is None:
            return None
        return (self.latency_s or 0.0) + count * self.byte_s

    def answered(self, elapsed_s: float) -> None:
        """Record the seconds of a call without contents."""
        self.latency_s = _mean(self.latency_s, elapsed_s)

    def moved(self, count: int, elapsed_s: float) -> None:
        """Record the seconds of a transfer, its latency included. Of a broken one, count the bytes that arrived."""
        self.byte_s = _mean(self.byte_s, max(elapsed_s - (self.latency_s or 0.0), elapsed_s / 10) / max(count, 1))

    def is_faster(self, count: int, recompute_s: float) -> bool:
        """Whether moving `count` bytes is predicted to be faster than computing them in `recompute_s` seconds."""
        seconds = self.predict(count)
        return seconds is not None and seconds <= ADVANTAGE * recompute_s


def recompute_s(tokens: int, prefill_rate: float) -> float:
    """Seconds to compute `tokens` prompt tokens; 0 while the rate (tokens per second) is unknown."""
    return tokens / prefill_rate if prefill_rate > 0 else 0.0


def _mean(before: float | None, now: float) -> float:
    return now if before is None else before + _WEIGHT * (now - before)
