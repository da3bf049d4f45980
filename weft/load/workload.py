"""The requests of a run: their times, prompts and lengths, equal for equal seeds. Knows nothing of sending."""

import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from protos import inference_pb2 as api
from weft.load import traces
from weft.load.plan import Plan
from weft.load.traces import HASH_BLOCK, Arrival

_KEPT_BLOCKS = 4096


@dataclass(frozen=True, slots=True)
class Due:
    """A request and the time at which it is sent."""

    index: int
    at_s: float
    """Seconds after the start; 0 in a closed loop, which sends when another request has ended."""
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


class Workload:
    """All requests of a plan. Each prompt is built when it is needed."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.clipped = 0
        """Requests of the trace that were shortened to the model's context."""
        self._arrivals = self._read_trace() if plan.trace else []
        self._block = lru_cache(_KEPT_BLOCKS)(self._make_block)

    def __len__(self) -> int:
        return len(self._arrivals) if self.plan.trace else self.plan.requests

    def share(self, process: int) -> Iterator[Due]:
        """The requests that this client process sends, in order."""
        for due in self._all():
            if due.index % self.plan.processes == process:
                yield due

    def warmup(self, process: int) -> Iterator[Due]:
        """Requests of the same kind that are not counted and share no prompt with counted ones."""
        plan = self.plan
        output = min(plan.output_tokens, 8)
        tokens = min(plan.input_tokens, plan.context_length - output)
        for index in range(process, plan.warmup, plan.processes):
            yield Due(-1 - index, 0.0, tokens, output)

    def prompt(self, due: Due) -> list[int]:
        """The token ids of a request's prompt."""
        if due.hash_ids:
            tokens: list[int] = []
            for hash_id in due.hash_ids[: -(-due.input_tokens // HASH_BLOCK)]:
                tokens.extend(self._block(f"block/{hash_id}"))
            return tokens[: due.input_tokens]
        plan = self.plan
        shared = min(plan.prefix_tokens, due.input_tokens - 1) if due.index >= 0 and not plan.trace else 0
        prefix = self._tokens(f"prefix/{due.index % max(1, plan.prefixes)}", shared) if shared else []
        return prefix + self._tokens(f"prompt/{due.index}", due.input_tokens - shared)

    def request(self, due: Due) -> api.GenerateRequest:
        """The request as a message."""
        plan = self.plan
        sampling = api.Sampling(max_tokens=due.output_tokens, temperature=plan.temperature, ignore_eos=plan.ignore_eos)
        return api.GenerateRequest(
            model=plan.model,
            prompt=api.Prompt(token_ids=api.TokenIds(ids=self.prompt(due))),
            sampling=sampling,
            cache=api.CachePolicy.Value(f"CACHE_POLICY_{plan.cache.upper()}"),
        )

    def _all(self) -> Iterator[Due]:
        plan = self.plan
        if plan.trace:
            for index, arrival in enumerate(self._arrivals):
                at_s = arrival.at_s / plan.time_scale
                yield Due(index, at_s, arrival.input_tokens, arrival.output_tokens, arrival.hash_ids)
            return
        chance = random.Random(f"{plan.seed}/arrivals")
        at_s = 0.0
        for index in range(plan.requests):
            yield Due(index, at_s, plan.input_tokens, plan.output_tokens)
            if plan.rate is not None:
                at_s += 1 / plan.rate if plan.constant else chance.expovariate(plan.rate)

    def _read_trace(self) -> list[Arrival]:
        plan = self.plan
        whole = traces.read(Path(plan.trace), plan.requests)
        fitting = [arrival.clipped(plan.context_length) for arrival in whole]
        self.clipped = sum(a != b for a, b in zip(whole, fitting, strict=True))
        return fitting

    def _make_block(self, name: str) -> "array[int]":
        return array("I", self._tokens(name, HASH_BLOCK))

    def _tokens(self, name: str, count: int) -> list[int]:
        return random.Random(f"{self.plan.seed}/{name}").choices(range(self.plan.vocab_size), k=count)
