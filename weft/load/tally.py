"""The counts of one client process in bounded memory: sums, distributions, counts by second. They can be merged."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from protos import inference_pb2 as api
from weft.load.distribution import Distribution

LATENCIES = ("ttft", "tpot", "itl", "e2el")
HOPS = ("tokenize", "cache", "queue", "prefill", "decode", "detokenize", "network", "unaccounted")
_COUNTS = (
    "prompt_tokens", "completion_tokens", "prefill_tokens", "cached_tokens", "preemptions", "drafted_tokens",
    "accepted_tokens",
)  # fmt: skip
_SINGLE = ("lag", "refusals", "refusals_inside")
SECOND = ("started", "ended", "tokens", "answered")


@dataclass(slots=True)
class Outcome:
    """One answered request. Times are seconds of the monotonic clock."""

    began: float
    first: float | None
    """Arrival of the first token; None without tokens."""
    last: float
    """Arrival of the last token."""
    ended: float
    """End of the stream."""
    tokens: int
    receipt: api.Receipt
    gaps: Sequence[float] = ()
    """Milliseconds between messages with tokens."""

    def is_within(self, name: str, limit: float) -> bool:
        """Whether a latency is at most so many milliseconds; ITL: 99 of 100 gaps are. One that is missing (TPOT of a
        single token) exceeds no bound."""
        if name == "itl":
            return sum(gap > limit for gap in self.gaps) <= len(self.gaps) // 100
        return self.milliseconds().get(name, 0.0) <= limit

    def milliseconds(self) -> dict[str, float]:
        """TTFT, TPOT (mean between the first and the last token) and E2EL; without tokens E2EL alone."""
        times = {"e2el": (self.ended - self.began) * 1e3}
        if self.first is not None:
            times["ttft"] = (self.first - self.began) * 1e3
            if self.tokens > 1:
                times["tpot"] = (self.last - self.first) / (self.tokens - 1) * 1e3
        return times


@dataclass(slots=True)
class Tally:
    """Sums over requests."""

    completed: int = 0
    good: int = 0
    within: Counter[str] = field(default_factory=Counter)
    """Answers within each bound of goodput."""
    input_tokens: int = 0
    output_tokens: int = 0
    messages: int = 0
    """Messages with tokens."""
    last_ended: float = 0.0
    """End of the last request, in seconds after the start."""
    errors: Counter[str] = field(default_factory=Counter)
    latencies: dict[str, Distribution] = field(default_factory=lambda: {name: Distribution() for name in LATENCIES})
    hops: dict[str, Distribution] = field(default_factory=lambda: {name: Distribution() for name in HOPS})
    refusals: Distribution = field(default_factory=Distribution)
    """Time until a request was refused for the load or for its deadline, in ms."""
    refusals_inside: Distribution = field(default_factory=Distribution)
    """The part of it within the gateway, of refusals with a receipt."""
    lag: Distribution = field(default_factory=Distribution)
    """Delay of sending in an open loop, in ms."""
    receipts: Counter[str] = field(default_factory=Counter)
    attempts: Counter[str] = field(default_factory=Counter)
    """Requests by their number of attempts."""
    seconds: dict[int, list[int]] = field(default_factory=dict)
    """By second after the start: requests started, requests ended, tokens received, answers ended."""
    processor_s: float = 0.0
    """Processor time of the client process in its measured part."""

    @property
    def failed(self) -> int:
        """Number of requests that ended with an error."""
        return self.errors.total()

    def count(self, at_s: float, what: str, number: int = 1) -> None:
        """Counts an event of SECOND that happened `at_s` seconds after the start."""
        self.seconds.setdefault(int(at_s), [0] * len(SECOND))[SECOND.index(what)] += number

    def add(self, outcome: Outcome, start: float, bounds: dict[str, float]) -> None:
        """Adds an answered request."""
        self.completed += 1
        times = outcome.milliseconds()
        for name, value in times.items():
            self.latencies[name].add(value)
        within = [name for name, limit in bounds.items() if outcome.is_within(name, limit)]
        self.within.update(within)
        self.good += len(within) == len(bounds)
        self.input_tokens += outcome.receipt.prompt_tokens
        self.output_tokens += outcome.tokens
        self.last_ended = max(self.last_ended, outcome.ended - start)
        self.count(outcome.ended - start, "ended")
        self.count(outcome.ended - start, "answered")
        self._add_receipt(outcome.receipt)

    def _add_receipt(self, receipt: api.Receipt) -> None:
        for name in _COUNTS:
            self.receipts[name] += getattr(receipt, name)
        self.receipts["result_hits"] += receipt.result_hit
        self.receipts["joined"] += receipt.joined
        self.attempts[str(receipt.attempts)] += 1
        for hop in HOPS:
            self.hops[hop].add(getattr(receipt.timings, f"{hop}_s") * 1e3)

    def merge(self, other: "Tally") -> None:
        """Adds the counts of another process."""
        for name in ("completed", "good", "input_tokens", "output_tokens", "messages", "processor_s"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.last_ended = max(self.last_ended, other.last_ended)
        self.errors.update(other.errors)
        self.within.update(other.within)
        self.receipts.update(other.receipts)
        self.attempts.update(other.attempts)
        self.lag.merge(other.lag)
        self.refusals.merge(other.refusals)
        self.refusals_inside.merge(other.refusals_inside)
        for mine, theirs in ((self.latencies, other.latencies), (self.hops, other.hops)):
            for name, distribution in theirs.items():
                mine[name].merge(distribution)
        for second, counts in other.seconds.items():
            line = self.seconds.setdefault(second, [0] * len(SECOND))
            for place, number in enumerate(counts):
                line[place] += number

    def to_json(self) -> dict[str, Any]:
        """The counts as values for JSON, for the parent process."""
        data = {name: getattr(self, name) for name in self.__slots__}
        for name in ("latencies", "hops"):
            data[name] = {key: value.to_json() for key, value in data[name].items()}
        data.update({name: getattr(self, name).to_json() for name in _SINGLE})
        return {**data, "seconds": list(self.seconds.items())}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Tally":
        """The counts that `to_json` wrote."""
        counters = {name: Counter(data[name]) for name in ("errors", "receipts", "attempts", "within")}
        single = {name: Distribution.from_json(data[name]) for name in _SINGLE}
        distributions = {
            name: {key: Distribution.from_json(value) for key, value in data[name].items()}
            for name in ("latencies", "hops")
        }
        seconds = {int(second): counts for second, counts in data["seconds"]}
        return cls(**{**data, **counters, **distributions, **single, "seconds": seconds})
