"""How long answers are and how long they take, learned from those that ended. Pure; knows no jobs."""

SMOOTHING = 0.1
"""Weight of the newest answer in a moving average."""
_MOST_TENANTS = 4096
_MOST_FACTOR = 4.0


class AnswerLengths:
    """Moving averages of the lengths of answers, in tokens."""

    def __init__(self) -> None:
        self.mean = 0.0
        """Over all tenants; 0 until an answer has ended."""
        self._of_tenant: dict[str, float] = {}

    def add(self, tenant: str, tokens: int) -> None:
        """Counts an answer that ended."""
        self.mean = _moved(self.mean, tokens)
        # The tenant that answered last is at the end, so that the first one is forgotten first.
        self._of_tenant[tenant] = _moved(self._of_tenant.pop(tenant, 0.0), tokens)
        if len(self._of_tenant) > _MOST_TENANTS:
            del self._of_tenant[next(iter(self._of_tenant))]

    def expected(self, tenant: str, max_tokens: int) -> float:
        """The likely length of an answer to this tenant, at most `max_tokens`; 0 while nothing is learned."""
        return min(float(max_tokens), self._of_tenant.get(tenant, self.mean))


def _moved(mean: float, tokens: int) -> float:
    return mean + SMOOTHING * (tokens - mean) if mean else float(tokens)


class Pace:
    """How much longer jobs hold their credits than the workers' rates say, as a factor from 1 to 4."""

    def __init__(self) -> None:
        self.factor = 1.0

    def add(self, forecast_s: float, actual_s: float) -> None:
        """Counts a job that ended: the time that its rates forecast, and the time that it took."""
        if forecast_s > 0:
            measured = min(_MOST_FACTOR, max(1.0, actual_s / forecast_s))
            self.factor += SMOOTHING * (measured - self.factor)
