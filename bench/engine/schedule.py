"""Simulates the planner without a GPU: the closed loop of `bench.mesh.gpu`, the real planner, modelled step times.

    python -m bench.engine.schedule [--chunk 200] [--step-tokens 8192]

The model of step times is that of Llama-3.1-8B in bf16 on one H200: linear layers as measured, keys read at memory
bandwidth, prefill attention by operations. It reproduced measurements through the mesh within 3%. Policies are tried
here before they are measured there.
"""

import argparse
import bisect
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from services.worker.job import Job, SamplingParams
from services.worker.planner.block_pool import BlockPool
from services.worker.planner.planner import Planner, Row
from services.worker.planner.sequence import Sequence
from weft.load.distribution import Distribution

# Rows of a step, milliseconds of all but its attention.
PRODUCTS = (
    (1, 4.05), (8, 4.4), (32, 4.45), (64, 4.8), (128, 5.6), (256, 7.9), (384, 10.5), (512, 13.0), (1024, 24.0),
    (2048, 46.2), (4096, 91.4), (8192, 181.5),
)  # fmt: skip
KEYS_MS = 131072 / 4.15e9
"""A context token of an answer."""
ATTENDED = 4 * 32 * 4096
"""Operations of a token of a prompt for each token that it attends to."""
LARGE, FAST, SLOW = 1024, 450e9, 220e9
"""Attention over prompts runs at FAST operations per ms from LARGE rows on, and at SLOW below that."""
LIMIT_MS = 40_000.0
POOL_BLOCKS = 60_000


def step_ms(rows: list[Row]) -> float:
    """Milliseconds of a step on the device."""
    count = sum(row.tokens for row in rows)
    keys = sum(row.start for row in rows if row.tokens == 1)
    attended = sum(row.tokens * (row.start + row.tokens / 2) for row in rows if row.tokens > 1)
    rate = FAST if count >= LARGE else SLOW
    return _products_ms(count) + keys * KEYS_MS + attended * ATTENDED / rate


def _products_ms(rows: int) -> float:
    place = min(bisect.bisect_left(PRODUCTS, (rows,)), len(PRODUCTS) - 1)
    if place == 0:
        return PRODUCTS[0][1]
    (low, less), (high, more) = PRODUCTS[place - 1 : place + 1]
    return less + (more - less) * (rows - low) / (high - low)


@dataclass
class Outcome:
    """Client-side figures, in milliseconds."""

    tokens: int = 0
    ended_ms: float = 0.0
    first: Distribution = field(default_factory=Distribution)
    between: Distribution = field(default_factory=Distribution)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second, from the first request to the last completion."""
        return self.tokens / self.ended_ms * 1e3


class Loop:
    """`width` requests at a time, each finished one replaced until 3 * width (at least 16) are sent or 40 s have
    passed.

    Two steps are in flight; a request reaches the worker in 2.5 to 4 ms, a token its client in 1.2 ms; a client sends
    the next request 3 to 6 ms after the last token.
    """

    def __init__(
        self, batch: Planner, width: int, prompt: int, answer: int, cost: Callable[[list[Row]], float]
    ) -> None:
        self.outcome = Outcome()
        self._batch, self._prompt, self._answer, self._cost = batch, prompt, answer, cost
        self._left = max(3 * width, 16)
        self._chance = random.Random(width)
        self._numbers = itertools.count()
        self._coming: list[tuple[float, int, float]] = []
        self._seen: dict[Sequence, float | None] = {}
        self._sent: dict[Sequence, float] = {}
        self._flights: deque[tuple[float, list[Row]]] = deque()
        self._free_ms = 0.0
        for _ in range(width):
            self._send(self._chance.uniform(0, 2))

    def run(self) -> Outcome:
        """Simulate until all requests have ended."""
        now = 0.0
        while True:
            self._arrive(now)
            while len(self._flights) < 2 and self._launch(now):
                pass
            if self._flights:
                end, rows = self._flights.popleft()
                now = max(now, end) + 0.15
                self._land(rows, now)
            elif self._coming:
                now = max(now, self._coming[0][0])
            else:
                return self.outcome

    def _send(self, at_ms: float) -> None:
        if self._left and at_ms < LIMIT_MS:
            self._left -= 1
            arrival = at_ms + self._chance.uniform(2.5, 4.0)
            heapq.heappush(self._coming, (arrival, next(self._numbers), at_ms))

    def _arrive(self, now: float) -> None:
        while self._coming and self._coming[0][0] <= now:
            _, number, sent = heapq.heappop(self._coming)
            job = Job(number, [number] * self._prompt, self._prompt, SamplingParams(max_tokens=self._answer))
            sequence = Sequence(job, number, 16, 1 << 20, b"")
            self._sent[sequence], self._seen[sequence] = sent, None
            self._batch.add(sequence)

    def _launch(self, now: float) -> bool:
        rows = self._batch.plan().rows
        if rows:
            self._batch.launched(rows)
            self._free_ms = max(now + 0.3, self._free_ms + 0.02) + self._cost(rows)
            self._flights.append((self._free_ms, rows))
        return bool(rows)

    def _land(self, rows: list[Row], now: float) -> None:
        for row in rows:
            sequence = row.sequence
            if row.samples and sequence in self._seen:
                self._batch.commit(row, [0])
                self._deliver(sequence, now + 1.2)
        self._batch.landed()

    def _deliver(self, sequence: Sequence, at_ms: float) -> None:
        before, outcome = self._seen[sequence], self.outcome
        if before is None:
            outcome.first.add(at_ms - self._sent[sequence])
        else:
            outcome.between.add(at_ms - before)
        self._seen[sequence] = at_ms
        outcome.tokens += 1
        if len(sequence.tokens) >= sequence.limit:
            self._batch.remove(sequence)
            del self._seen[sequence], self._sent[sequence]
            outcome.ended_ms = at_ms
            self._send(at_ms + self._chance.uniform(3.0, 6.0))


def closed(
    width: int,
    prompt: int = 1950,
    answer: int = 200,
    *,
    chunk_tokens: int | None = 200,
    step_tokens: int = 8192,
    cost: Callable[[list[Row]], float] = step_ms,
) -> Outcome:
    """Simulate a closed loop of `width` requests."""
    batch = Planner(BlockPool(POOL_BLOCKS), 16, 256, step_tokens, False, chunk_tokens)
    return Loop(batch, width, prompt, answer, cost).run()


def main() -> None:
    """Print a table by number of concurrent requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunk", type=int, default=200, help="as WEFT_CHUNK_TOKENS")
    parser.add_argument("--step-tokens", type=int, default=8192, help="as WEFT_STEP_TOKENS")
    wanted = parser.parse_args()
    table = Table("1950/200, at a time", "tok/s", "ttft p50", "ttft p99", "itl p50", "itl p99")
    for width in (1, 8, 32, 128, 256):
        seen = closed(width, chunk_tokens=wanted.chunk, step_tokens=wanted.step_tokens)
        times = [each.percentile(percent) for each in (seen.first, seen.between) for percent in (50, 99)]
        table.add_row(str(width), f"{seen.tokens_per_s:,.0f}", *(f"{value:,.1f}" for value in times))
    Console().print(table)


if __name__ == "__main__":
    main()
