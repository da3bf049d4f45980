"""Measured times of an engine's steps, to predict the next one. Knows durations, not what took them."""

_WEIGHT = 0.2  # of a new measurement in the running means
_MOST = 2.0
"""How many times the mean a step counts at most. A process that the machine stops for a moment has one step of a
hundred times the mean, by which no forecast could go. A pace that stays slower is known after a few steps."""
_UNKNOWN_S = 1.0


class StepTimes:
    """Running means of the seconds of a step that only decodes, and of the prompt tokens computed per second."""

    def __init__(self, decode_s: float = 0.0, prefill_rate: float = 0.0) -> None:
        """0: unknown until it is measured."""
        self.decode_s, self.prefill_rate = decode_s, prefill_rate

    def predict(self, prefill_tokens: int) -> float:
        """Predicted seconds of a step with `prefill_tokens` prompt tokens."""
        if not self.decode_s:
            return _UNKNOWN_S
        prefill_s = prefill_tokens / self.prefill_rate if self.prefill_rate else _UNKNOWN_S
        return self.decode_s + (prefill_s if prefill_tokens else 0.0)

    def observe(self, prefill_tokens: int, decodes: bool, elapsed_s: float) -> None:
        """Record a step's prompt tokens, whether it also decoded, and its seconds."""
        if prefill_tokens == 0:
            self.decode_s = _mean(self.decode_s, min(elapsed_s, _MOST * self.decode_s or elapsed_s))
            return
        own_s = max(elapsed_s - self.decode_s if decodes else elapsed_s, elapsed_s / 10, 1e-9)
        self.prefill_rate = _mean(self.prefill_rate, prefill_tokens / own_s)


def _mean(before: float, now: float) -> float:
    return before + _WEIGHT * (now - before) if before else now
