"""What a run of load shall be: how much, how fast, of what. Values only, so that client processes can be told them."""

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any


class PlanError(ValueError):
    """A run cannot be what was asked for; the message is one line."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A run. With a rate (or a trace) requests arrive when they arrive, else each ended one makes room for the next."""

    address: str
    """host:port of the public door; several, separated by commas, are shared out over the client processes."""
    model: str = ""
    """Its name."""
    vocab_size: int = 0
    context_length: int = 0
    requests: int = 100
    """How many are measured."""
    duration_s: float | None = None
    """No request begins later than this."""
    concurrency: int | None = 8
    """Most requests at a time; None: no bound (with a rate)."""
    rate: float | None = None
    """Requests per second."""
    constant: bool = False
    """They arrive evenly rather than by chance (Poisson)."""
    input_tokens: int = 128
    output_tokens: int = 128
    prefix_tokens: int = 0
    """Of the input, how many are shared by requests of the same prefix."""
    prefixes: int = 1
    """How many different prefixes there are."""
    trace: str = ""
    """A trace file, which sets arrivals and lengths instead."""
    time_scale: float = 1.0
    """A trace's clock runs so many times faster."""
    temperature: float = 0.0
    ignore_eos: bool = True
    """Answers are as long as asked for."""
    cache: str = "read_write"
    """What the caches may do."""
    deadline_s: float = 600.0
    """Of each request."""
    warmup: int = 8
    """Requests before the measurement, not counted."""
    processes: int = 1
    """Client processes."""
    seed: int = 0
    """Of prompts and arrivals."""
    goodput: dict[str, float] = field(default_factory=dict)
    """A request is good if each of these (ttft, tpot, e2el) stays within so many milliseconds."""

    @property
    def open_loop(self) -> bool:
        """Arrivals do not wait for answers."""
        return self.rate is not None or bool(self.trace)

    def to_json(self) -> dict[str, Any]:
        """For another process, and for reports."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Plan":
        """What `to_json` told."""
        return cls(**data)

    def checked(self) -> "Plan":
        """The same plan, if it can be run against its model. Raises PlanError."""
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
            wanted = f"{self.input_tokens} tokens in and {self.output_tokens} out"
            raise PlanError(f"{wanted} exceed the model's context of {self.context_length}")
        # Never more processes than there is something to do for.
        bound = self.requests if self.open_loop else min(self.requests, self.concurrency or 1)
        return replace(self, processes=max(1, min(self.processes, bound)))


def goodput_from(words: list[str]) -> dict[str, float]:
    """The bounds of `ttft:200 tpot:50`, given as one or several arguments. Raises PlanError."""
    bounds = {}
    for word in " ".join(words).split():
        name, _, limit = word.partition(":")
        try:
            bounds[name] = float(limit)
        except ValueError:
            raise PlanError(f"goodput: {word!r} is not NAME:MILLISECONDS") from None
        if name not in ("ttft", "tpot", "e2el"):
            raise PlanError(f"goodput: {name!r} is not ttft, tpot or e2el")
    return bounds
