"""The paced engine: the real planner, prefix cache and links with a model that costs a set time and no memory.

What it says is a function of (seed, sample index, position), so a moved or preempted answer goes on as it began. It
serves to measure and test all that surrounds a model. Knows no tensors and no network.
"""

import hashlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from services.worker.batching import Batch, Plan, Row
from services.worker.blocks import BlockPool
from services.worker.config import CheckpointError, load_config
from services.worker.job import Ended, EndReason, EngineOptions, Failure, Job, Stats, StepOutput, TokenOut
from services.worker.memory import MemoryPlan, available_memory
from services.worker.pace import Pace
from services.worker.profiling import Profiler
from services.worker.sequence import Sequence
from services.worker.tiers import BlockStore

MOST_CONTEXT = 128 * 1024
_POOL_TOKENS = 1 << 20  # of a pool whose size nobody set
_IDLE_WAIT_S = 0.5
_RUN = 8  # tokens drawn from one digest

_TOO_LONG = Failure("INVALID_ARGUMENT", "INVALID", "the prompt is empty or does not fit the model's context")
_NO_ROOM = Failure("RESOURCE_EXHAUSTED", "KV_EXHAUSTED", "the request needs more KV memory than this worker has")


@dataclass(frozen=True, slots=True)
class Tempo:
    """How long steps take. They end at multiples of `step_s` on the machine's monotonic clock, so that who receives a
    token in another process can tell how old it is."""

    step_s: float = 0.01
    """Seconds of a step that only decodes, whatever the batch; 0: as fast as it goes."""
    prefill_rate: float = 0.0
    """Prompt tokens computed per second, on top of the step; 0: any number."""

    def end(self, began: float, prefill_tokens: int) -> float:
        """When a step with so many prompt tokens ends."""
        computed = began + (prefill_tokens / self.prefill_rate if self.prefill_rate else 0.0)
        return (math.floor(computed / self.step_s) + 1) * self.step_s if self.step_s else computed


class PacedEngine:
    """Answers jobs at a set pace. The methods are those of `engine.Engine`, and so are their threads.

    Sampling is reduced to what lengths and ends need: a draw out of the vocabulary without its end tokens, each as
    likely as the other (so says logprobs). Temperature, penalties and biases change nothing.
    """

    def __init__(self, model_dir: Path, options: EngineOptions, tempo: Tempo) -> None:
        """Read the shape of a checkpoint, none of its weights. Raises CheckpointError."""
        self.options, self.tempo = options, tempo
        self.config = load_config(model_dir)
        self.parameters = 0
        self.block_layout, self.block_bytes = "", 0
        self.memory = _plan(options, self.config.context_length, self.config.kv_bytes_per_token(2))
        pool = BlockPool(self.memory.kv_blocks)
        self.batch = Batch(pool, options.block_size, options.max_batch_size, options.step_tokens, options.prefix_cache)
        self._vocabulary = [i for i in range(self.config.vocab_size) if i not in self.config.eos_token_ids]
        self._logprob = -math.log(len(self._vocabulary))
        self._draws: dict[int, tuple[int, list[int]]] = {}
        self._sequences: dict[int, Sequence] = {}
        self._inbox: deque[Sequence | tuple[int, int | None]] = deque()
        self._wake = threading.Condition()
        self._changes: dict[bytes, bool] = {}
        self._steps = self._arrivals = 0
        self._pace = Pace()
        self.profiler = Profiler(computes=False)
        self._predicted_step_s = 0.0
        self._on_launch: Callable[[float], None] = lambda predicted_step_s: None
        self._stats = self._measure()

    @property
    def max_seq_length(self) -> int:
        """Most tokens of prompt and answer."""
        return self.memory.max_seq_length

    def use_remote(self, store: BlockStore) -> None:
        """Nothing: its blocks have no contents to share."""

    # ---- any thread ----

    def submit(self, job: Job) -> None:
        """Run this job. Its tokens and its end come out of `step`."""
        options = self.options
        with self._wake:
            self._arrivals += 1
            now = time.monotonic()
            sequence = Sequence(
                job, self._arrivals, now, options.block_size, self.memory.max_seq_length, options.fingerprint
            )
            self._inbox.append(sequence)
            self._wake.notify()

    def cancel(self, key: int, position: int | None = None) -> None:
        """End a job of whose answer `position` tokens count (None: all). Nothing happens if it has ended already."""
        with self._wake:
            self._inbox.append((key, position))
            self._wake.notify()

    def wake(self) -> None:
        """Let `run_forever` look at its stop event now."""
        with self._wake:
            self._wake.notify()

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._inbox or self._sequences)

    def stats(self) -> Stats:
        """Counters and gauges as of the last step, and the prediction for the one under way."""
        return replace(self._stats, predicted_step_s=self._predicted_step_s)

    def take_block_events(self) -> tuple[list[bytes], list[bytes]]:
        """Keys that were stored, and keys that were evicted, since the last call; only their last state is told."""
        with self._wake:
            changes, self._changes = self._changes, {}
        return [k for k, stored in changes.items() if stored], [k for k, stored in changes.items() if not stored]

    # ---- the engine's thread ----

    def run_forever(
        self, on_output: Callable[[StepOutput], None], on_launch: Callable[[float], None], stop: threading.Event
    ) -> None:
        """Run steps until `stop` is set (then call `wake`), asleep while there is no work."""
        self._on_launch = on_launch
        while not stop.is_set():
            if self.has_work():
                on_output(self.step())
                continue
            with self._wake:
                while not (self._inbox or stop.is_set()):
                    self._wake.wait(_IDLE_WAIT_S)

    def step(self) -> StepOutput:
        """Take what has arrived, wait as long as a step takes, tell what it brought.

        Planning is part of the step's time, as it is where a GPU computes meanwhile.
        """
        began = time.monotonic()
        output = StepOutput([], [])
        self.profiler.step_begins()
        with self.profiler.phase("arrivals"):
            self._take_inbox(output)
            self._end_expired(began, output)
        with self.profiler.phase("planning"):
            plan = self._plan(began)
        if plan.rows:
            with self.profiler.phase("waiting"):
                self._launch(plan.rows, began)
            with self.profiler.phase("collecting"):
                self._collect(plan.rows, time.monotonic(), output)
        with self.profiler.phase("publishing"):
            self._publish_state()
        return output

    def check_integrity(self) -> None:
        """Assert that free + cached + active blocks are all blocks, and that tables and counts agree."""
        self.batch.check()

    # ---- one step ----

    def _plan(self, now: float) -> Plan:
        before, plan = self.batch.preemptions, self.batch.plan()
        if self.batch.preemptions != before:
            for sequence in self.batch.waiting:
                sequence.note_pauses(now)
        return plan

    def _launch(self, rows: list[Row], began: float) -> None:
        """Let the time of the step pass."""
        prefill = sum(row.tokens for row in rows if row.start < row.sequence.prefill_end)
        end = self.tempo.end(began, prefill)
        self._predicted_step_s = end - began
        self._on_launch(self._predicted_step_s)
        for row in rows:
            row.sequence.started_s = row.sequence.started_s or began
        if self.tempo.step_s:  # Even a step that is late lets the event loop's thread run.
            time.sleep(max(end - time.monotonic(), 0.0))
        self._steps += 1
        decodes = any(row.start >= row.sequence.prefill_end for row in rows)
        self._pace.observe(prefill, decodes, max(time.monotonic() - began, 1e-9))

    def _collect(self, rows: list[Row], now: float, output: StepOutput) -> None:
        for row in rows:
            sequence = row.sequence
            sequence.steps += 1
            if row.start < sequence.prefill_end:
                sequence.prefill_steps += 1
                sequence.prefill_tokens += row.tokens
            if row.samples:
                self._advance(row, now, output)
            else:
                self.batch.commit(row)

    def _advance(self, row: Row, now: float, output: StepOutput) -> None:
        """A sequence has a new token: tell it, or end at it."""
        sequence, params = row.sequence, row.sequence.job.params
        sequence.first_token_s = sequence.first_token_s or now
        sequence.last_token_s = now
        position = sequence.position
        token_id = self._draw(sequence, position)
        if token_id in params.stop_token_ids and position >= params.min_tokens:
            self.batch.commit(row)
            self._end(sequence, EndReason.STOP, output, stop_token_id=token_id)
            return
        logprob, top = None, None
        if params.logprobs is not None:
            logprob = self._logprob
            top = [(i, logprob) for i in self._vocabulary[: params.logprobs]]
        output.tokens.append(TokenOut(sequence.job.key, position, token_id, logprob, top))
        sequence.tokens.append(token_id)
        self.batch.commit(row)
        if len(sequence.tokens) >= sequence.limit:
            self._end(sequence, EndReason.LENGTH, output)

    def _draw(self, sequence: Sequence, position: int) -> int:
        """The token at a position; a run of them is drawn at once."""
        run = position // _RUN
        known = self._draws.get(sequence.job.key)
        if known is None or known[0] != run:
            job = sequence.job
            known = run, tokens_of(job.params.seed, job.sample_index, run, self._vocabulary)
            self._draws[job.key] = known
        return known[1][position % _RUN]

    # ---- arrivals and ends ----

    def _take_inbox(self, output: StepOutput) -> None:
        while self._inbox:
            message = self._inbox.popleft()
            if isinstance(message, Sequence):
                self._accept(message, output)
                continue
            key, position = message
            sequence = self._sequences.get(key)
            if sequence is not None:
                if position is not None:
                    self.batch.cut(sequence, sequence.job.boundary + position)
                self._end(sequence, EndReason.CANCELLED, output)

    def _accept(self, sequence: Sequence, output: StepOutput) -> None:
        job = sequence.job
        self._sequences[job.key] = sequence
        self.batch.add(sequence)
        if not job.token_ids or job.boundary >= self.memory.max_seq_length:
            self._end(sequence, EndReason.ERROR, output, error=_TOO_LONG)
        elif sequence.total >= sequence.limit:
            self._end(sequence, EndReason.LENGTH, output)
        elif not self.batch.fits(sequence):
            self._end(sequence, EndReason.ERROR, output, error=_NO_ROOM)

    def _end_expired(self, now: float, output: StepOutput) -> None:
        for sequence in list(self._sequences.values()):
            if sequence.job.deadline is not None and sequence.job.deadline <= now:
                self._end(sequence, EndReason.DEADLINE, output)

    def _end(
        self,
        sequence: Sequence,
        reason: EndReason,
        output: StepOutput,
        stop_token_id: int | None = None,
        error: Failure | None = None,
    ) -> None:
        key = sequence.job.key
        self.batch.remove(sequence)
        del self._sequences[key]
        self._draws.pop(key, None)
        cost = sequence.cost(time.monotonic())
        output.ended.append(Ended(key, reason, sequence.position, cost, stop_token_id, error))

    # ---- state for others ----

    def _publish_state(self) -> None:
        stored, evicted = self.batch.pool.take_changes()
        if stored or evicted:
            with self._wake:
                self._changes.update(dict.fromkeys(evicted, False))
                self._changes.update(dict.fromkeys(stored, True))
        self._stats = self._measure()
        if not self._sequences:
            self._predicted_step_s = 0.0

    def _measure(self) -> Stats:
        batch, pool = self.batch, self.batch.pool
        return Stats(
            steps=self._steps,
            running=len(batch.running),
            waiting=len(batch.waiting),
            prefill_backlog=sum(max(s.prefill_end - s.computed, 0) for s in batch.running)
            + sum(s.total for s in batch.waiting),
            free_blocks=pool.free,
            cached_blocks=pool.cached,
            active_blocks=pool.active,
            total_blocks=pool.total,
            prefill_rate=self._pace.prefill_rate,
            decode_s=self._pace.decode_s,
            preemptions=batch.preemptions,
            predicted_step_s=0.0,
        )


def tokens_of(seed: int, sample_index: int, run: int, vocabulary: list[int]) -> list[int]:
    """The tokens at positions `run * 8` to `run * 8 + 7` of the answer that these determine."""
    name = seed.to_bytes(8, "little") + sample_index.to_bytes(4, "little") + run.to_bytes(4, "little")
    digest = hashlib.blake2b(name, digest_size=4 * _RUN).digest()
    return [
        vocabulary[int.from_bytes(digest[place : place + 4], "little") % len(vocabulary)]
        for place in range(0, 4 * _RUN, 4)
    ]


def _plan(options: EngineOptions, context_length: int, kv_bytes_per_token: int) -> MemoryPlan:
    """A pool of the size asked for (bytes: as of the model in 16 bits), none of it taken. Raises CheckpointError."""
    max_length = options.max_seq_length or context_length
    if max_length > max(MOST_CONTEXT, context_length):
        raise CheckpointError(f"max_seq_length {max_length} exceeds the {MOST_CONTEXT} of the paced engine")
    blocks = options.kv_blocks
    if blocks is None and options.kv_bytes is not None:
        blocks = options.kv_bytes // (options.block_size * kv_bytes_per_token)
    if blocks is None:
        blocks = max(_POOL_TOKENS, max_length) // options.block_size
    return MemoryPlan(
        weights=0,
        kv=0,
        workspace=0,
        available=available_memory(),
        kv_blocks=blocks,
        kv_tokens=blocks * options.block_size,
        max_seq_length=max_length,
    )
