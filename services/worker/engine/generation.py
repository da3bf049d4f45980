"""Tokens in, tokens out: takes jobs, runs steps, tells tokens and ends. Knows no network; one thread runs the steps."""

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from services.worker.build.assemble import assemble
from services.worker.engine import packing
from services.worker.engine.inbox import IDLE_WAIT_S, Inbox
from services.worker.engine.packing import SlotEdits
from services.worker.engine.prefixes import Prefixes
from services.worker.engine.profiling import Profiler
from services.worker.engine.step_times import StepTimes
from services.worker.errors import CheckpointError
from services.worker.job import EndReason, Failure, Job, SamplingParams, StepOutput, TokenOut
from services.worker.kvcache.tiers import BlockStore, HostStore
from services.worker.options import EngineOptions, Progress
from services.worker.planner.planner import Row
from services.worker.planner.sequence import Sequence
from services.worker.runners.base import StepResult

log = logging.getLogger(__name__)

_PARKED_WAIT_S = 0.01  # at most, until a deadline or a late fetch is noticed when nothing else is to be done
_WARM_UP_KEY = -1

_NUMERIC = Failure("INTERNAL", "NUMERIC", "the model computed numbers that are not finite for this request")
_INTERNAL = Failure("INTERNAL", "INTERNAL", "the engine failed to compute this request", retryable=True)


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that has been launched and not yet collected."""

    parts: list[tuple[list[Row], Any]]
    """Its rows and the runner's handle; more than one if rows had to be told apart."""
    epochs: dict[int, int]
    """For each job, how often it had been paused: a later pause makes its row void."""
    prefill: int
    """Prompt tokens."""
    decodes: bool
    launched_s: float


class GenerationEngine(Inbox):
    """A loaded model and the jobs it runs.

    `submit`, `cancel`, `has_work`, `stats` and `take_block_events` may be called from any thread; `step`, `run_forever`
    and `check_integrity` from one thread at a time.
    """

    def __init__(self, model_dir: Path, options: EngineOptions, progress: Progress) -> None:
        """Load a checkpoint. progress(phase, done, total) is called along the way. Raises CheckpointError."""
        parts = assemble(model_dir, options, progress)
        super().__init__(options, parts.memory, Profiler(computes=True))
        self.config, self.runner = parts.config, parts.runner
        self.parameters = parts.parameters
        """Numbers in the checkpoint."""
        log.info("memory: %s", self.memory)
        self._flights: deque[_Flight] = deque()
        self._landed_s = 0.0
        self._on_launch: Callable[[float], None] = lambda predicted_step_s: None
        self.prefixes = Prefixes(self.batch, self.runner.pool, lambda: self._pace.prefill_rate, self.wake)
        if options.host_kv_bytes:
            self.prefixes.use_host(HostStore(options.host_kv_bytes, self.runner.pool.host_block_s))
        self._warm_up(progress)
        self._stats = self._measure()

    @property
    def block_layout(self) -> str:
        """What contents of blocks look like; with device or threads where bits depend on them."""
        config, options = self.config, self.options
        shape = f"{config.layers}x{config.kv_heads}x{config.head_dim}"
        stored = str(self.runner.pool.layers[0].dtype).removeprefix("torch.")
        dtype = options.dtype if stored == options.dtype else f"{options.dtype}+{stored}"
        kind = "gpu" if options.device == "cuda" else options.threads or 1
        bits = f"/{kind}" if options.deterministic else ""
        weights = f"/{options.quantize}" if options.quantize else ""
        scales = f"/{self._scales_digest()}" if options.kv_scales == "dynamic" else ""
        return f"{dtype}/{options.block_size}/{shape}/0of1{bits}{weights}{scales}"

    def _scales_digest(self) -> str:
        """Of what stored keys and values count: measured ones may differ between machines."""
        scales = [layer.attention.kv_scales for layer in self.runner.model.layers]
        return hashlib.sha256(repr([None if x is None else x.tolist() for x in scales]).encode()).hexdigest()[:8]

    @property
    def block_bytes(self) -> int:
        """Bytes of the contents of a block."""
        return self.runner.pool.block_bytes

    def use_remote(self, store: BlockStore) -> None:
        """Share blocks of prompts through this tier. To be called before the engine runs."""
        self.prefixes.use_remote(store)

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._flights) or super().has_work()

    # ---- the engine's thread ----

    def run_forever(
        self,
        on_output: Callable[[StepOutput], None],
        on_launch: Callable[[float], None],
        on_soon: Callable[[list[int]], None],
        stop: threading.Event,
    ) -> None:
        """Run steps until `stop` is set (then call `wake`), asleep while there is no work.

        on_launch gets the predicted seconds of each step before it begins, on_output what it brought; on_soon, before
        that, the keys of jobs whose first tokens come soon, where that is worth telling.
        """
        self._on_launch, self.rehearsal.tell = on_launch, on_soon
        while not stop.is_set():
            if self._sequences and self.prefixes.parked == len(self._sequences) and not self._flights:
                with self._wake:
                    if not (self._inbox or self.prefixes.answered or stop.is_set()):
                        self._wake.wait(_PARKED_WAIT_S)
            if self.has_work():
                on_output(self.step())
            elif not self.prefixes.offer_some():
                with self._wake:
                    if not (self._inbox or stop.is_set()):
                        self._wake.wait(IDLE_WAIT_S)

    def step(self) -> StepOutput:
        """Take what has arrived, launch steps until as many are in flight as the device may have, collect the oldest.

        On a CPU that is one step from its plan to its tokens. On a GPU the next step is planned and launched while one
        runs, and what is told here is what the oldest brought.
        """
        output = StepOutput([], [])
        self.profiler.step_begins()
        with self.profiler.phase("arrivals"):
            self._take_inbox(output)
            self.prefixes.settle()
            self._end_expired(output)
        while len(self._flights) < self.runner.depth and self._launch_next(output):
            self._take_inbox(output)  # a launch may take some time: who came meanwhile is planned for
        if self._flights:
            self._collect_oldest(output)
        with self.profiler.phase("publishing"):
            self.prefixes.offer_some()
            self._publish_state()
        return output

    # ---- one step ----

    def _launch_next(self, output: StepOutput) -> bool:
        """Plan the next step and launch it. False if there is nothing to do before something has landed."""
        plan = self._plan()
        self.prefixes.keep_evicted()
        edits = [packing.release(slot) for slot in plan.released]
        for sequence in plan.admitted:
            try:
                edits.append(packing.admit(sequence, self.config.eos_token_ids))
            except Exception as error:
                plan.drop(sequence)
                self._fail(sequence, error, output)
        edits += [packing.new_blocks(row.sequence) for row in plan.rows if row.sequence.has_new_blocks]
        if plan.rows:
            self._launch(plan.rows, edits, output)
        return bool(plan.rows)

    def _launch(self, rows: list[Row], edits: list[SlotEdits], output: StepOutput) -> None:
        prefill = sum(row.tokens for row in rows if row.start < row.sequence.prefill_end)
        self._predicted_step_s = self._pace.predict(prefill)
        self._on_launch(self._predicted_step_s)
        began = time.monotonic()
        for row in rows:
            row.sequence.started_s = row.sequence.started_s or began
        decodes = any(row.start >= row.sequence.prefill_end for row in rows)
        parts = self._run(rows, edits, output)
        epochs = {}
        for row in (row for part, _ in parts for row in part):
            row.sequence.flying += 1
            epochs[row.sequence.job.key] = row.sequence.preemptions
        self._flights.append(_Flight(parts, epochs, prefill, decodes, began))

    def _collect_oldest(self, output: StepOutput) -> None:
        flight = self._flights.popleft()
        began = max(flight.launched_s, self._landed_s)
        for rows, step in flight.parts:
            with self.profiler.phase("waiting"):
                self.rehearsal.before(rows, len(self._sequences), began, partial(self.runner.over, step))
                result = self.runner.collect(step)
            now = time.monotonic()
            with self.profiler.phase("collecting"):
                self._collect(rows, result, flight.epochs, now, output)
                for row in rows:
                    self.batch.land(row.sequence)
            self.rehearsal.after(rows, now - began)
        now = time.monotonic()
        self._steps += 1
        self._pace.observe(flight.prefill, flight.decodes, now - began)
        self._landed_s = now

    def _run(self, rows: list[Row], edits: list[SlotEdits], output: StepOutput) -> list[tuple[list[Row], Any]]:
        """Launch the rows; if that fails, each half of them with its slots' edits, so one bad job fails alone."""
        try:
            with self.profiler.phase("packing"):
                words = packing.pack(edits, rows)
            with self.profiler.phase("launch"):
                return [(rows, self.runner.launch(words))]
        except Exception as error:
            if len(rows) == 1:
                self._fail(rows[0].sequence, error, output)
                return []
        half = len(rows) // 2
        late = {row.sequence.slot for row in rows[half:]}
        first = self._run(rows[:half], [edit for edit in edits if edit.slot not in late], output)
        return first + self._run(rows[half:], [edit for edit in edits if edit.slot in late], output)

    def _collect(
        self, rows: list[Row], result: StepResult, epochs: dict[int, int], now: float, output: StepOutput
    ) -> None:
        sampled = result.sampled
        place = 0
        for row, finite in zip(rows, result.finite, strict=True):
            sequence, at = row.sequence, place
            place += row.samples
            key = sequence.job.key
            if self._sequences.get(key) is not sequence or sequence.preemptions != epochs[key]:
                continue  # It ended or was paused meanwhile: nobody waits for this token.
            sequence.steps += 1
            if row.start < sequence.prefill_end:
                sequence.prefill_steps += 1
                sequence.prefill_tokens += row.tokens
            if not finite:
                self._fail(sequence, None, output)
                continue
            if not row.samples:
                self.batch.commit(row)
                continue
            asked = sequence.job.params.logprobs
            logprob = sampled.logprobs[at] if asked is not None and sampled.logprobs else None
            top = sampled.tops[at] if asked and sampled.tops else None
            self._advance(row, sampled.tokens[at], logprob, top, now, output)

    def _advance(
        self,
        row: Row,
        token_id: int,
        logprob: float | None,
        top: list[tuple[int, float]] | None,
        now: float,
        output: StepOutput,
    ) -> None:
        """A sequence has a new token: tell it, or end at it."""
        sequence, params = row.sequence, row.sequence.job.params
        if not sequence.first_token_s:
            self.prefixes.computed(sequence)
        sequence.first_token_s = sequence.first_token_s or now
        sequence.last_token_s = now
        ends = token_id in params.stop_token_ids or (not params.ignore_eos and token_id in self.config.eos_token_ids)
        if ends and sequence.position >= params.min_tokens:
            self.batch.commit(row)
            self._end(sequence, EndReason.STOP, output, stop_token_id=token_id)
            return
        output.tokens.append(TokenOut(sequence.job.key, sequence.position, token_id, logprob, top))
        sequence.tokens.append(token_id)
        self.batch.commit(row)
        if len(sequence.tokens) >= sequence.limit:
            self._end(sequence, EndReason.LENGTH, output)

    # ---- arrivals and ends ----

    def _accept(self, sequence: Sequence, output: StepOutput) -> bool:
        waits = super()._accept(sequence, output)
        if waits:
            self.prefixes.consider(sequence)
        return waits

    def _forget(self, sequence: Sequence) -> None:
        self.prefixes.forget(sequence)

    def _fail(self, sequence: Sequence, error: Exception | None, output: StepOutput) -> None:
        """A job failed alone: what it computed is neither found nor met by anyone."""
        if error is not None:  # The text of an exception may quote the request.
            log.error("job %d failed: %s", sequence.job.key, type(error).__name__)
        own = sequence.blocks[sequence.published :]
        if own:
            self.runner.pool.scrub(own)
        self._end(sequence, EndReason.ERROR, output, error=_NUMERIC if error is None else _INTERNAL)

    def _warm_up(self, progress: Progress) -> None:
        """Run one job twice, so that the first real one meets warm code and a known pace."""
        tokens = max(min(64, self.memory.max_seq_length - 4, self.memory.kv_tokens - 4), 1)
        for round_ in range(2):
            progress("warm-up", round_, 2)
            self._pace = StepTimes()
            params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
            self.submit(Job(_WARM_UP_KEY, [0] * tokens, tokens, params, bypass_cache=True))
            while self.has_work():
                failures = [ended.error for ended in self.step().ended if ended.error]
                if failures:
                    raise CheckpointError(f"the model cannot compute: {failures[0].message}")
        self._steps = 0
        progress("warm-up", 2, 2)
