"""Continuous batching: jobs in, tokens out. One thread plans, launches and collects steps.

Knows the planner and a runner that it is handed, no device, no checkpoint and no network.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from services.worker.engine import packing
from services.worker.engine.active_job import ActiveJob
from services.worker.engine.base import GENERATE, EngineEvents
from services.worker.engine.inbox import Arrival, Inbox
from services.worker.engine.packing import SlotEdits
from services.worker.engine.prefixes import Prefixes
from services.worker.engine.profiling import PhaseRecorder, Profiler, Recorder
from services.worker.engine.step_times import StepTimes
from services.worker.errors import CheckpointError
from services.worker.job import Ended, EndReason, Failure, Job, SamplingParams, Stats, StepOutput, TokenOut
from services.worker.kvcache.tiers import BlockStore, HostStore
from services.worker.options import EngineOptions, MemoryPlan, Progress
from services.worker.planner.block_pool import BlockPool
from services.worker.planner.planner import Plan, Planner, Row
from services.worker.planner.sequence import Sequence
from services.worker.runners.base import Runner, Sampled, StepResult

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.5
"""How long an engine sleeps at a time while there is nothing to do."""
_FETCH_WAIT_S = 0.01  # at most, until a deadline or a late fetch is noticed while all jobs wait for blocks
_WARM_UP_KEY = -1

_TOO_LONG = Failure("INVALID_ARGUMENT", "INVALID", "the prompt is empty or does not fit the model's context")
_NO_ROOM = Failure("RESOURCE_EXHAUSTED", "KV_EXHAUSTED", "the request needs more KV memory than this worker has")
_NUMERIC = Failure("INTERNAL", "NUMERIC", "the model computed numbers that are not finite for this request")
_INTERNAL = Failure("INTERNAL", "INTERNAL", "the engine failed to compute this request", retryable=True)


@dataclass(frozen=True, slots=True)
class _StepPart:
    """Rows that were launched together."""

    rows: list[Row]
    preemptions: list[int]
    """For each row, how often its sequence had been paused: a later pause makes the row void."""
    handle: Any
    """The runner's own."""


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    """A step that has been launched and not yet collected."""

    parts: list[_StepPart]
    """More than one if a launch failed and the rows were split."""
    prefill: int
    """Prompt tokens."""
    decodes: bool
    launched_s: float


class GenerationEngine:
    """An `Engine` that generates tokens.

    `submit`, `cancel`, `wake`, `has_work`, `stats` and `take_block_events` may be called from any thread; the other
    methods from one thread at a time.
    """

    capabilities = frozenset({GENERATE})

    def __init__(
        self,
        options: EngineOptions,
        memory: MemoryPlan,
        runner: Runner[Any],
        eos_token_ids: Collection[int],
        *,
        block_layout: str = "",
        step_times: StepTimes | None = None,
        recorder: Callable[[], Recorder] = PhaseRecorder,
    ) -> None:
        """block_layout: of the runner's blocks. step_times: what is known of the runner's pace. recorder: makes what
        profiles record with.
        """
        self.options, self.memory, self.runner = options, memory, runner
        self.block_layout = block_layout
        self.step_times = step_times or StepTimes()
        self.profiler = Profiler(recorder)
        self.planner = Planner(
            BlockPool(memory.kv_blocks),
            options.block_size,
            options.max_batch_size,
            options.step_tokens,
            options.prefix_cache,
            options.chunk_tokens,
        )
        self._eos_token_ids, self._fingerprint = frozenset(eos_token_ids), b""
        self._jobs: dict[int, ActiveJob] = {}
        self._in_flight: deque[_StepInFlight] = deque()
        self._last_end_s = 0.0
        self._steps = 0
        self._events: EngineEvents | None = None
        self.inbox = Inbox(self._measure())
        self.prefixes = Prefixes(self.planner, runner.kv, lambda: self.step_times.prefill_rate, self.inbox.wake)
        if options.host_kv_bytes and runner.kv is not None:
            self.prefixes.use_host(HostStore(options.host_kv_bytes, runner.kv.host_block_s))

    @property
    def block_bytes(self) -> int:
        """Bytes of the contents of a block."""
        return self.prefixes.block_bytes

    def use_fingerprint(self, fingerprint: bytes) -> None:
        """Key blocks by this model: keys begin at `hashing.chain_root(job.salt, fingerprint)`. To be called before the
        engine runs."""
        self._fingerprint = fingerprint

    def use_remote(self, store: BlockStore) -> None:
        """Share blocks of prompts through this tier. To be called before the engine runs."""
        self.prefixes.use_remote(store)

    # ---- any thread ----

    def submit(self, job: Job) -> None:
        """Run this job. Its tokens and its end are in the outputs of steps."""
        self.inbox.submit(job)

    def cancel(self, key: int, position: int | None = None) -> None:
        """End a job. Only the first `position` tokens of its answer stay in the prefix cache; None: all. Does nothing
        if the job has ended."""
        self.inbox.cancel(key, position)

    def wake(self) -> None:
        """Make `run` look at its stop event now."""
        self.inbox.wake()

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._in_flight or self.inbox.pending or self._jobs)

    def stats(self) -> Stats:
        """Counters and gauges as of the last step, and the prediction for the step in flight."""
        return self.inbox.stats()

    def take_block_events(self) -> tuple[list[bytes], list[bytes]]:
        """Keys of blocks that were stored, and of blocks that were evicted, since the last call."""
        return self.inbox.take_block_events()

    # ---- the engine's thread ----

    def run(self, events: EngineEvents, stop: threading.Event) -> None:
        """Run steps until `stop` is set and `wake` is called; sleep while there is no work."""
        self._events = events
        prefixes = self.prefixes
        while not stop.is_set():
            if self._jobs and prefixes.waiting == len(self._jobs) and not self._in_flight:
                self.inbox.sleep(_FETCH_WAIT_S, lambda: prefixes.answered or stop.is_set())
            if self.has_work():
                events.stepped(self.step())
            elif not prefixes.offer_some():
                self.inbox.sleep(IDLE_WAIT_S, stop.is_set)

    def step(self) -> StepOutput:
        """Take messages, launch steps until as many are in flight as the runner allows, collect the oldest.

        On a CPU that is one step from its plan to its tokens. On a GPU the next step is planned and launched while one
        runs, and the output is that of the oldest.
        """
        output = StepOutput([], [])
        self.profiler.step_begins()
        with self.profiler.phase("arrivals"):
            self._take_messages(output)
            self.prefixes.settle()
            self._end_expired(output)
        while len(self._in_flight) < self.runner.depth and self._launch_next(output):
            self._take_messages(output)  # A launch may take some time: jobs that arrived meanwhile join the next step.
        if self._in_flight:
            self._collect_oldest(output)
        with self.profiler.phase("publishing"):
            self.prefixes.offer_some()
            self._publish()
        return output

    def check_integrity(self) -> None:
        """Assert that free + cached + active blocks are all blocks, and that tables and counts agree."""
        self.planner.check()

    def warm_up(self, progress: Progress) -> None:
        """Run one job twice, so that the first real one finds warm code and known step times. Raises CheckpointError
        if the model cannot compute."""
        tokens = max(min(64, self.memory.max_seq_length - 4, self.memory.kv_tokens - 4), 1)
        for round_ in range(2):
            progress("warm-up", round_, 2)
            self.step_times = StepTimes()
            params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
            self.submit(Job(_WARM_UP_KEY, [0] * tokens, tokens, params, bypass_cache=True))
            while self.has_work():
                failures = [ended.error for ended in self.step().ended if ended.error]
                if failures:
                    raise CheckpointError(f"the model cannot compute: {failures[0].message}")
        self._steps = 0
        self._publish()
        progress("warm-up", 2, 2)

    # ---- one step ----

    def _launch_next(self, output: StepOutput) -> bool:
        """Plan the next step and launch it. False if there is nothing to launch before a step in flight is over."""
        plan = self._plan()
        self.prefixes.keep_evicted()
        edits = [packing.release(slot) for slot in plan.released]
        for sequence in plan.admitted:
            try:
                edits.append(packing.admit(sequence, self._eos_token_ids))
            except Exception as error:
                plan.drop(sequence)
                self._fail(self._jobs[sequence.job.key], error, output)
        edits += [packing.new_blocks(row.sequence) for row in plan.rows if row.sequence.has_new_blocks]
        if plan.rows:
            self._launch(plan, edits, output)
        return bool(plan.rows)

    def _plan(self) -> Plan:
        with self.profiler.phase("planning"):
            plan = self.planner.plan()
        if plan.paused:
            now = time.monotonic()
            for sequence in plan.paused:
                self._jobs[sequence.job.key].paused_s.append(now)
        return plan

    def _launch(self, plan: Plan, edits: list[SlotEdits], output: StepOutput) -> None:
        rows = plan.rows
        prefill = sum(row.tokens for row in rows if row.start < row.sequence.prefill_end)
        predicted_s = self.step_times.predict(prefill)
        self.inbox.predict(predicted_s)
        if self._events is not None:
            self._events.launched(predicted_s)
        began = time.monotonic()
        for sequence in plan.admitted:
            job = self._jobs.get(sequence.job.key)
            if job is not None and not job.started_s:
                job.started_s = began
        decodes = any(row.start >= row.sequence.prefill_end for row in rows)
        parts = self._launch_rows(rows, edits, output)
        self._in_flight.append(_StepInFlight(parts, prefill, decodes, began))

    def _launch_rows(self, rows: list[Row], edits: list[SlotEdits], output: StepOutput) -> list[_StepPart]:
        """Launch the rows; if that fails, each half of them with its slots' edits, so that one bad job fails alone."""
        try:
            with self.profiler.phase("packing"):
                words = packing.pack(edits, rows)
            with self.profiler.phase("launch"):
                handle = self.runner.launch(words)
        except Exception as error:
            if len(rows) == 1:
                self._fail(self._jobs[rows[0].sequence.job.key], error, output)
                return []
        else:
            return [_StepPart(rows, self.planner.launched(rows), handle)]
        half = len(rows) // 2
        late = {row.sequence.slot for row in rows[half:]}
        first = self._launch_rows(rows[:half], [edit for edit in edits if edit.slot not in late], output)
        return first + self._launch_rows(rows[half:], [edit for edit in edits if edit.slot in late], output)

    def _collect_oldest(self, output: StepOutput) -> None:
        step = self._in_flight.popleft()
        began = max(step.launched_s, self._last_end_s)
        for part in step.parts:
            with self.profiler.phase("waiting"):
                result = self.runner.collect(part.handle)
            with self.profiler.phase("collecting"):
                self._collect(part, result, output)
                self.planner.landed(part.rows)
        now = time.monotonic()
        self._steps += 1
        self.step_times.observe(step.prefill, step.decodes, now - began)
        self._last_end_s = now

    def _collect(self, part: _StepPart, result: StepResult, output: StepOutput) -> None:
        now, jobs, sampled, index = time.monotonic(), self._jobs, result.sampled, -1
        for row, preemptions, finite in zip(part.rows, part.preemptions, result.finite, strict=True):
            sequence, start, tokens, samples = row
            index += samples
            job = jobs.get(sequence.job.key)
            if job is None or job.sequence is not sequence or sequence.preemptions != preemptions:
                continue  # The job ended or was paused meanwhile: these tokens are dropped.
            job.steps += 1
            if start < sequence.prefill_end:
                job.prefill_steps += 1
                job.prefill_tokens += tokens
            if not finite:
                self._fail(job, None, output)
            elif samples:
                self._advance(job, row, sampled, index, now, output)
            else:
                self.planner.commit(row)

    def _advance(self, job: ActiveJob, row: Row, sampled: Sampled, index: int, now: float, output: StepOutput) -> None:
        """A row has drawn tokens: report them up to the answer's end. Tokens behind an end are dropped."""
        drawn, sequence = sampled.tokens[index], row.sequence
        params, asked = job.job.params, job.job.params.logprobs
        if drawn:
            if not job.first_token_s:
                job.first_token_s = now
                self.prefixes.computed(sequence)
            job.last_token_s = now
        logprobs = sampled.logprobs[index] if asked is not None and sampled.logprobs else None
        tops = sampled.tops[index] if asked and sampled.tops else None
        position, most, kept = sequence.position, sequence.limit - job.job.prompt_len, 0
        for token_id in drawn:
            ends = token_id in params.stop_token_ids or (not params.ignore_eos and token_id in self._eos_token_ids)
            if ends and position >= params.min_tokens:
                self.planner.commit(row, drawn[:kept])
                self._end(job, EndReason.STOP, output, stop_token_id=token_id)
                return
            logprob, top = logprobs[kept] if logprobs else None, tops[kept] if tops else None
            output.tokens.append(TokenOut(job.job.key, position, token_id, logprob, top))
            position += 1
            kept += 1
            if position == most:
                break
        self.planner.commit(row, drawn if kept == len(drawn) else drawn[:kept])
        if position == most:
            self._end(job, EndReason.LENGTH, output)

    # ---- arrivals and ends ----

    def _take_messages(self, output: StepOutput) -> None:
        for message in self.inbox.take():
            if isinstance(message, Arrival):
                self._accept(message, output)
                continue
            job = self._jobs.get(message.key)
            if job is not None:
                if message.position is not None:
                    self.planner.cut(job.sequence, job.job.prompt_len + message.position)
                self._end(job, EndReason.CANCELLED, output)

    def _accept(self, arrival: Arrival, output: StepOutput) -> None:
        """Put a job into the waiting queue, or end it if it cannot run."""
        job, longest = arrival.job, self.memory.max_seq_length
        assert job.key not in self._jobs, f"a job with key {job.key} is running"
        sequence = Sequence(job, arrival.number, self.options.block_size, longest, self._fingerprint)
        active = self._jobs[job.key] = ActiveJob(sequence, arrival.at)
        self.planner.add(sequence)
        if not job.token_ids or job.prompt_len >= longest:
            self._end(active, EndReason.ERROR, output, error=_TOO_LONG)
        elif sequence.total >= sequence.limit:
            self._end(active, EndReason.LENGTH, output)
        elif not self.planner.fits(sequence):
            self._end(active, EndReason.ERROR, output, error=_NO_ROOM)
        else:
            self.prefixes.consider(sequence)

    def _end_expired(self, output: StepOutput) -> None:
        now = time.monotonic()
        for job in list(self._jobs.values()):
            if job.job.deadline is not None and job.job.deadline <= now:
                self._end(job, EndReason.DEADLINE, output)

    def _fail(self, job: ActiveJob, error: Exception | None, output: StepOutput) -> None:
        """End one job with an error. Blocks that it alone has are zeroed: no other job may find or reuse them as they
        are. error: what its launch raised; None: its numbers are not finite."""
        if error is not None:  # The text of an exception may quote the request.
            log.error("job %d failed: %s", job.job.key, type(error).__name__)
        own = job.sequence.blocks[job.sequence.published :]
        if own and self.runner.kv is not None:
            self.runner.kv.scrub(own)
        self._end(job, EndReason.ERROR, output, error=_NUMERIC if error is None else _INTERNAL)

    def _end(
        self,
        job: ActiveJob,
        reason: EndReason,
        output: StepOutput,
        stop_token_id: int | None = None,
        error: Failure | None = None,
    ) -> None:
        key, sequence = job.job.key, job.sequence
        self.prefixes.forget(sequence)
        self.planner.remove(sequence)
        del self._jobs[key]
        output.ended.append(Ended(key, reason, sequence.position, job.cost(time.monotonic()), stop_token_id, error))

    # ---- state for others ----

    def _publish(self) -> None:
        self.inbox.publish(self._measure(), *self.planner.pool.take_changes())
        if not self._jobs:
            self.inbox.predict(0.0)

    def _measure(self) -> Stats:
        planner, pool = self.planner, self.planner.pool
        backlog = sum(s.prefill_end - s.computed for s in planner.running if s.computed < s.prefill_end)
        return Stats(
            steps=self._steps,
            running=len(planner.running),
            waiting=len(planner.waiting),
            prefill_backlog=backlog + sum(sequence.total for sequence in planner.waiting),
            free_blocks=pool.free,
            cached_blocks=pool.cached,
            active_blocks=pool.active,
            total_blocks=pool.total,
            prefill_rate=self.step_times.prefill_rate,
            decode_s=self.step_times.decode_s,
            preemptions=planner.preemptions,
            predicted_step_s=0.0,
        )
