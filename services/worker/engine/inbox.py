"""What every engine does around its steps: jobs come in from any thread, ends and state go out. Knows no model."""

import threading
import time
from collections import deque
from dataclasses import replace

from services.worker.engine.first_token import Rehearsal
from services.worker.engine.profiling import Profiler
from services.worker.engine.step_times import StepTimes
from services.worker.job import Ended, EndReason, Failure, Job, Stats, StepOutput
from services.worker.options import EngineOptions, MemoryPlan
from services.worker.planner.block_pool import BlockPool
from services.worker.planner.planner import Plan, Planner
from services.worker.planner.sequence import Sequence

IDLE_WAIT_S = 0.5
"""How long an engine sleeps at a time while there is nothing to do."""

_TOO_LONG = Failure("INVALID_ARGUMENT", "INVALID", "the prompt is empty or does not fit the model's context")
_NO_ROOM = Failure("RESOURCE_EXHAUSTED", "KV_EXHAUSTED", "the request needs more KV memory than this worker has")


class Inbox:
    """The jobs of an engine. `submit`, `cancel`, `wake`, `has_work`, `stats` and `take_block_events` may be called from
    any thread, the rest from the one that runs the steps."""

    def __init__(self, options: EngineOptions, memory: MemoryPlan, profiler: Profiler) -> None:
        self.options, self.memory, self.profiler = options, memory, profiler
        self.batch = Planner(
            BlockPool(memory.kv_blocks),
            options.block_size,
            options.max_batch_size,
            options.step_tokens,
            options.prefix_cache,
            options.chunk_tokens,
        )
        self._sequences: dict[int, Sequence] = {}
        self._inbox: deque[Sequence | tuple[int, int | None]] = deque()
        self._wake = threading.Condition()
        self._changes: dict[bytes, bool] = {}
        self._pace = StepTimes()
        self.rehearsal = Rehearsal()
        self._steps = self._arrivals = 0
        self._predicted_step_s = 0.0
        self._stats = self._measure()

    @property
    def max_seq_length(self) -> int:
        """Most tokens of prompt and answer."""
        return self.memory.max_seq_length

    def use_fingerprint(self, fingerprint: bytes) -> None:
        """Name blocks after this model. To be called before the engine runs."""
        self.options = replace(self.options, fingerprint=fingerprint)

    # ---- any thread ----

    def submit(self, job: Job) -> None:
        """Run this job. Its tokens and its end come out of `step`."""
        options, now = self.options, time.monotonic()
        with self._wake:
            self._arrivals += 1
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

    def check_integrity(self) -> None:
        """Assert that free + cached + active blocks are all blocks, and that tables and counts agree."""
        self.batch.check()

    def _plan(self) -> Plan:
        before = self.batch.preemptions
        with self.profiler.phase("planning"):
            plan = self.batch.plan()
        if self.batch.preemptions != before:
            for sequence in self.batch.waiting:
                sequence.note_pauses(time.monotonic())
        return plan

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

    def _accept(self, sequence: Sequence, output: StepOutput) -> bool:
        """Whether the sequence waits for its turn now; if not, its end is told."""
        job = sequence.job
        assert job.key not in self._sequences, f"key {job.key} is taken"
        self._sequences[job.key] = sequence
        self.batch.add(sequence)
        if not job.token_ids or job.boundary >= self.memory.max_seq_length:
            self._end(sequence, EndReason.ERROR, output, error=_TOO_LONG)
        elif sequence.total >= sequence.limit:
            self._end(sequence, EndReason.LENGTH, output)
        elif not self.batch.fits(sequence):
            self._end(sequence, EndReason.ERROR, output, error=_NO_ROOM)
        else:
            return True
        return False

    def _end_expired(self, output: StepOutput) -> None:
        now = time.monotonic()
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
        self._forget(sequence)
        self.batch.remove(sequence)
        del self._sequences[key]
        cost = sequence.cost(time.monotonic())
        output.ended.append(Ended(key, reason, sequence.position, cost, stop_token_id, error))

    def _forget(self, sequence: Sequence) -> None:
        """A sequence ends: what an engine keeps of it elsewhere goes, too."""

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
        backlog = sum(max(sequence.prefill_end - sequence.computed, 0) for sequence in batch.running)
        return Stats(
            steps=self._steps,
            running=len(batch.running),
            waiting=len(batch.waiting),
            prefill_backlog=backlog + sum(sequence.total for sequence in batch.waiting),
            free_blocks=pool.free,
            cached_blocks=pool.cached,
            active_blocks=pool.active,
            total_blocks=pool.total,
            prefill_rate=self._pace.prefill_rate,
            decode_s=self._pace.decode_s,
            preemptions=batch.preemptions,
            predicted_step_s=0.0,
        )
