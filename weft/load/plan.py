"""The plan of a load: how many requests, how fast, of which lengths. Plain values, which client processes are sent."""

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any


class PlanError(ValueError):
    """A plan cannot be run; the message is one line."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a run. With a rate or a trace the loop is open: requests do not wait for others to end."""

    address: str
    """host:port of the gateway; several, separated by commas, are divided among the client processes."""
    model: str = ""
    """Name of the model."""
    vocab_size: int = 0
    context_length: int = 0
    requests: int = 100
    """Number of measured requests."""
    duration_s: float | None = None
    """No request is sent later than this."""
    delay_s: float = 0.0
    """Seconds from the start to the first request; for a load beside another one."""
    concurrency: int | None = 8
    """Most requests at a time; None: no bound (with a rate)."""
    rate: float | None = None
    """Requests per second."""
    constant: bool = False
    """Requests arrive evenly instead of as a Poisson process."""
    input_tokens: int = 128
    output_tokens: int = 128
    prefix_tokens: int = 0
    """Tokens at the start of the input that requests of one prefix share."""
    prefixes: int = 1
    """Number of different prefixes."""
    trace: str = ""
    """A trace file, which replaces rate and lengths."""
    time_scale: float = 1.0
    """The factor by which the trace is replayed faster."""
    temperature: float = 0.0
    ignore_eos: bool = True
    """Answers do not end at the model's end tokens."""
    cache: str = "read_write"
    """Use of the caches."""
    deadline_s: float = 600.0
    """Deadline of each request."""
    warmup: int = 8
    """Number of requests before the measurement, not counted."""
    processes: int = 1
    """Number of client processes."""
    connections: int = 1
    """Connections of each client process; its requests take turns on them. HTTP opens more where all are busy."""
    stream: bool = True
    """Answers are streamed; else each is one message."""
    http: str = ""
    """host:port of the gateway's HTTP server: requests are completions there, not streamed. Empty: gRPC."""
    seed: int = 0
    """Seed of prompts and arrivals."""
    goodput: dict[str, float] = field(default_factory=dict)
    """Milliseconds that a good request does not exceed, by latency (ttft, tpot, itl, e2el)."""

    @property
    def open_loop(self) -> bool:
        """Whether requests are sent without waiting for answers."""
        return self.rate is not None or bool(self.trace)

    def to_json(self) -> dict[str, Any]:
        """The plan as values for JSON, for client processes and reports."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Plan":
        """The plan that `to_json` wrote."""
        return cls(**data)

    def checked(self) -> "Plan":
        """The plan, with no more processes than requests at a time. Raises PlanError if its model cannot run it."""
        amounts = {
            "request rate": self.rate,
            "time scale": self.time_scale,
            "duration": self.duration_s,
            "deadline": self.deadline_s,
        }
        for name, amount in amounts.items():
            if amount is not None and not 0 < amount < math.inf:
                raise PlanError(f"the {name} must be above 0")
        if not 0 <= self.temperature <= 100:
            raise PlanError("the temperature must be from 0 to 100")
        if self.concurrency is None and not self.open_loop:
            raise PlanError("without a request rate the concurrency must be bounded")
        if not self.trace and self.prefix_tokens >= self.input_tokens:
            raise PlanError(f"a shared prefix of {self.prefix_tokens} leaves nothing of {self.input_tokens} tokens")
        if not self.trace and self.input_tokens + self.output_tokens > self.context_length:
            lengths = f"{self.input_tokens} tokens in and {self.output_tokens} out"
            raise PlanError(f"{lengths} exceed the model's context of {self.context_length}")
        # A process without requests would only cost its start.
        bound = self.requests if self.open_loop else min(self.requests, self.concurrency or 1)
        return replace(self, processes=max(1, min(self.processes, bound)))


def goodput_from(words: list[str]) -> dict[str, float]:
    """The bounds that `ttft:200 tpot:50` gives, as one or several arguments. Raises PlanError."""
    bounds = {}
    for word in " ".join(words).split():
        name, _, limit = word.partition(":")
        try:
            bounds[name] = float(limit)
        except ValueError:
            raise PlanError(f"goodput: {word!r} is not NAME:MILLISECONDS") from None
        if name not in ("ttft", "tpot", "itl", "e2el"):
            raise PlanError(f"goodput: {name!r} is not ttft, tpot, itl or e2el")
        if not 0 < bounds[name] < math.inf:
            raise PlanError(f"goodput: {word!r}: the bound must be above 0")
    return bounds
