"""Continuous batching: jobs in, tokens out. One thread plans, launches and collects steps.

Knows the planner and a runner that it is handed, no device, no checkpoint and no network.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from collections.abc import Sequence as Many
from functools import partial
from typing import Any

from services import failpoints
from services.worker.engine import packing
from services.worker.engine.active_job import ActiveJob
from services.worker.engine.adapters import AdapterLoads
from services.worker.engine.answers import advance
from services.worker.engine.base import GENERATE, BlockLoan, BlockRead, EngineEvents
from services.worker.engine.inbox import Arrival, Inbox, Prefetch
from services.worker.engine.job_table import JobTable
from services.worker.engine.packing import SlotEdits
from services.worker.engine.prefixes import Prefixes
from services.worker.engine.profiling import PhaseRecorder, Profiler, Recorder
from services.worker.engine.scored_prompts import ScoredPrompts
from services.worker.engine.sharing.block_sharing import BlockSharing
from services.worker.engine.step_times import StepTimes
from services.worker.engine.steps_in_flight import StepInFlight, StepPart
from services.worker.engine.structured import FormedRow, StructuredJobs, likely, refused
from services.worker.errors import CheckpointError
from services.worker.job import EndReason, GuessCounts, Job, SamplingParams, Stats, StepOutput
from services.worker.kvcache.tiers import BlockStore, HostStore, Peers
from services.worker.options import EngineOptions, MemoryPlan, Progress
from services.worker.planner.block_pool import BlockPool
from services.worker.planner.planner import Plan, Planner, Row
from services.worker.planner.sequence import Sequence
from services.worker.runners.base import AdapterPages, Runner, Sampled, StepResult
from services.worker.runners.step import MOST_GUESSES
from services.worker.speculative.speculation import Speculation
from services.worker.structured.base import Forms

IDLE_WAIT_S = 0.5
"""How long an engine sleeps at a time while there is nothing to do."""
_FETCH_WAIT_S = 0.01  # at most, until a deadline or a late fetch is noticed while all jobs wait for blocks
_LOAD_WAIT_S = 0.001  # between two looks at an adapter for which all jobs wait
_WARM_UP_KEY = -1
_LARGE_STEP = 512
"""In a step of this many rows or more the engine delivers the first tokens of answers before it looks at the other
rows, which takes some milliseconds. In a smaller step clients would gain less, for one more message to each gateway."""
_NO_GUESSES = GuessCounts()


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
        block_dtype: str = "",
        step_times: StepTimes | None = None,
        recorder: Callable[[], Recorder] = PhaseRecorder,
        speculation: Speculation | None = None,
        adapter_pages: AdapterPages | None = None,
    ) -> None:
        """block_layout, block_dtype: of the runner's blocks. step_times: what is known of the runner's pace. recorder:
        makes what profiles record with. speculation: guesses tokens; None: every row of an answer has one token.
        adapter_pages: the runner's; None: jobs with an adapter are refused.
        """
        self.options, self.memory, self.runner = options, memory, runner
        self.block_layout, self.block_dtype = block_layout, block_dtype
        self.step_times = step_times or StepTimes()
        self.speculation = speculation
        self.profiler = Profiler(recorder)
        self.planner = Planner(
            BlockPool(memory.kv_blocks),
            options.block_size,
            options.max_batch_size,
            options.step_tokens,
            options.prefix_cache,
            options.chunk_tokens,
            guesses_behind=MOST_GUESSES if runner.depth > 1 else 0,
            adapter_slots=adapter_pages.slots if adapter_pages is not None else 0,
            stages=options.pipeline_parallel,
        )
        self._adapters = AdapterLoads(self.planner.adapters, adapter_pages)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._scored = ScoredPrompts()
        self._computed: list[Sequence] = []
        """Those whose prompts were computed in this step."""
        self._in_flight: deque[StepInFlight] = deque()
        self._last_end_s = 0.0
        self._steps = 0
        self._events: EngineEvents | None = None
        self._undrawn = False
        """The last step in flight has rows whose tokens are not drawn yet: their masks follow from the steps before."""
        self.inbox = Inbox()
        self._structured = StructuredJobs(self.inbox)
        self.prefixes = Prefixes(
            self.planner, runner.kv, lambda: self.step_times.prefill_rate, self.inbox.wake,
            lambda blocks: self.speculation.overwritten(blocks) if self.speculation else None,
        )  # fmt: skip
        self._jobs = JobTable(
            self.planner, self.prefixes, self._scored, self._structured, runner.kv,
            lambda sequence: self.speculation.ended(sequence) if self.speculation else None,
            memory.max_seq_length, self._eos_token_ids,
        )  # fmt: skip
        self._sharing = BlockSharing(self.planner, runner.kv, self.inbox.wake)
        if options.host_kv_bytes and runner.kv is not None:
            self.prefixes.use_host(HostStore(options.host_kv_bytes, runner.kv.host_block_s))

    @property
    def block_bytes(self) -> int:
        """Bytes of the contents of a block."""
        return self.prefixes.block_bytes

    def use_fingerprint(self, fingerprint: bytes) -> None:
        """Key blocks by this model: keys begin at `hashing.chain_root(job.salt, fingerprint)`. To be called before the
        engine runs."""
        self._jobs.fingerprint = fingerprint

    def use_remote(self, store: BlockStore) -> None:
        """Share blocks of prompts through this tier. To be called before the engine runs."""
        self.prefixes.use_remote(store)

    def use_peers(self, peers: Peers) -> None:
        """Fetch blocks of prompts from other workers. To be called before the engine runs."""
        self.prefixes.use_peers(peers)

    def use_forms(self, forms: Forms) -> None:
        """Serve answers that have a form. To be called before the engine runs; without it they are refused."""
        self._structured.forms = forms

    # ---- any thread ----

    def submit(self, job: Job) -> None:
        """Run this job. Its tokens and its end are in the outputs of steps."""
        if job.params.structured is None:
            self.inbox.submit(job)
        else:
            self._structured.submit(job)

    def cancel(self, key: int, position: int | None = None) -> None:
        """End a job. Only the first `position` tokens of its answer stay in the prefix cache; None: all. Does nothing
        if the job has ended."""
        self.inbox.cancel(key, position)

    def prefetch(self, source: str, keys: Many[bytes]) -> None:
        """Fetch blocks that the worker at `source` computes for a job that will come here."""
        self.inbox.prefetch(source, keys)

    def read_blocks(self, read: BlockRead) -> None:
        """Answer another worker's request for contents of blocks."""
        self._sharing.reads.add(read)

    def lend_blocks(self, loan: BlockLoan) -> None:
        """Lend blocks to another worker, which copies them itself."""
        self._sharing.loans.add(loan)

    def wake(self) -> None:
        """Make `run` look at its stop event now."""
        self.inbox.wake()

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._in_flight or self.inbox.messages or self._jobs or self._structured)

    def stats(self) -> Stats:
        """Counters and gauges of this moment: a step may be changing them. The prediction is of the step in flight."""
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
            predicted_step_s=self.inbox.predicted_step_s,
            guesses=self.speculation.counts.copy() if self.speculation else _NO_GUESSES,
            resident=planner.adapters.resident,
        )

    def take_block_events(self) -> tuple[list[bytes], list[bytes]]:
        """Keys of blocks that were stored, and of blocks that were evicted, since the last call."""
        return self.inbox.take_block_events()

    # ---- the engine's thread ----

    def run(self, events: EngineEvents, stop: threading.Event) -> None:
        """Run steps until `stop` is set and `wake` is called; sleep while there is no work."""
        self._events = events
        prefixes = self.prefixes
        while not stop.is_set():
            if (self._jobs or self._structured) and prefixes.waiting == len(self._jobs) and not self._in_flight:
                self.inbox.sleep(_FETCH_WAIT_S, lambda: prefixes.answered or stop.is_set())
            elif not self.planner.running and self.planner.adapters.loading:
                self.inbox.sleep(_LOAD_WAIT_S, lambda: self._adapters.arrived or stop.is_set())
            if self.has_work():
                events.stepped(self._step())
                self._end_step()
            elif not self._move_blocks():
                self.inbox.sleep(IDLE_WAIT_S, lambda: prefixes.answered or self._sharing.asked or stop.is_set())

    def step(self) -> StepOutput:
        """Take messages, launch steps until as many are in flight as the runner allows, collect the oldest.

        On a CPU that is one step from its plan to its tokens. On a GPU the next step is planned and launched while one
        runs, and the output is that of the oldest.
        """
        output = self._step()
        self._end_step()
        return output

    def _step(self) -> StepOutput:
        """A step up to its tokens, which nothing in `_end_step` delays."""
        output = StepOutput([], [])
        self.profiler.step_begins()
        self.profiler.enter("arrivals")
        self._take_messages(output)
        self.prefixes.settle()
        self._adapters.settle()
        self._jobs.end_expired(output)
        while self._may_launch() and self._launch_next(output):
            self._take_messages(output)  # A launch may take some time: jobs that arrived meanwhile join the next step.
        if self._in_flight:
            self._collect_oldest(output)
        self.profiler.step_ends()
        return output

    def _end_step(self) -> None:
        """Publish the blocks that a step has computed, and exchange some with other tiers."""
        self.profiler.enter("publishing")
        self.planner.publish()
        self._sharing.step_ends()  # Before all else: another worker's answer waits for these blocks.
        if self._computed:
            for sequence in self._computed:
                self.prefixes.computed(sequence)
            self._computed.clear()
        self.prefixes.offer_some()
        self._publish()
        self.profiler.step_ends()

    def _move_blocks(self) -> bool:
        """Exchange blocks with other tiers while there are no jobs. -> whether there are more to move at once."""
        self.prefixes.settle()
        reads, offers = self._sharing.serve(), self.prefixes.offer_some()
        self._publish()
        return offers or reads

    def check_integrity(self) -> None:
        """Assert that free + cached + active blocks are all blocks, and that tables and counts agree."""
        self.planner.check(self._sharing.loans.blocks)

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

    def _may_launch(self) -> bool:
        """Whether a step can be planned now. Beside a step with guesses none is in flight, and none is launched before
        the last one has drawn."""
        if not self._in_flight:
            return True
        if len(self._in_flight) >= self.runner.depth or self._undrawn or self._in_flight[-1].guesses:
            return False
        if self.speculation is None or not self.planner.may_guess():
            return True
        return not self.speculation.waits(self.planner.running, self._in_form)

    def _launch_next(self, output: StepOutput) -> bool:
        """Plan the next step and launch it. False if there is nothing to launch before a step in flight is over."""
        plan = self._plan()
        self.prefixes.keep_evicted()
        edits = list(map(packing.release, plan.released))
        for sequence in plan.admitted:
            try:
                edits.append(packing.admit(sequence, self._eos_token_ids))
            except Exception as error:
                plan.drop(sequence)
                self._jobs.fail(self._jobs[sequence.job.key], error, output)
        for row in plan.rows:
            if row.sequence.sent_blocks < len(row.sequence.blocks):
                if self.speculation is not None:
                    self.speculation.new_blocks(row.sequence)
                edits.append(packing.new_blocks(row.sequence))
        if self.speculation is not None:
            edits += [packing.draft(*catch_up) for catch_up in self.speculation.catch_ups(plan.rows)]
        edits += self._scored.edits(plan.rows)
        if plan.rows:
            self._launch(plan, edits, output)
        return bool(plan.rows)

    def _plan(self) -> Plan:
        speculation = self.speculation
        self.profiler.enter("planning")
        asks = speculation is not None and speculation.begins_step() and not self._in_flight
        plan = self.planner.plan(partial(speculation.guess, in_form=self._in_form) if speculation and asks else None)
        if plan.loads:
            self._adapters.begin(plan.loads)
        if plan.paused:
            now = time.monotonic()
            for sequence in plan.paused:
                self._jobs[sequence.job.key].paused_s.append(now)
        return plan

    def _in_form(self, sequence: Sequence, guesses: Many[int]) -> Many[int]:
        """Guesses for an answer with a form."""
        return likely(self._jobs.get(sequence.job.key), guesses)

    def _launch(self, plan: Plan, edits: list[SlotEdits], output: StepOutput) -> None:
        rows = plan.rows
        if failpoints.ARMED:
            for row in rows:
                failpoints.hit("engine.step", row.sequence.job.token_ids)
        prefill, prompts, undrawn = 0, 0, False
        for row in rows:
            if row.start < row.sequence.prefill_end:
                prefill += row.tokens
                prompts += 1
            if row.sequence.job.params.structured and row.samples:
                undrawn = True
        predicted_s = self.step_times.predict(prefill)
        self.inbox.predicted_step_s = predicted_s
        if self._events is not None:
            self._events.launched(predicted_s)
        began = time.monotonic()
        for sequence in plan.admitted:
            job = self._jobs.get(sequence.job.key)
            if job is not None and not job.started_s:
                job.started_s = began
        guesses = any(row.guesses for row in rows) if self.speculation else False
        parts = self._launch_rows(rows, edits, output)
        self._in_flight.append(StepInFlight(parts, prefill, len(rows) > prompts, guesses, began))
        self._undrawn = undrawn
        self._draw_alone(output)

    def _launch_rows(self, rows: list[Row], edits: list[SlotEdits], output: StepOutput) -> list[StepPart]:
        """Launch the rows; if that fails, each half of them with its slots' edits, so that one bad job fails alone."""
        try:
            self.profiler.enter("packing")
            words = packing.pack(edits, rows)
            self.profiler.enter("launch")
            self._sharing.step_begins(rows)
            handle = self.runner.launch(words)
        except Exception as error:
            if len(rows) == 1:
                self._jobs.fail(self._jobs[rows[0].sequence.job.key], error, output)
                return []
        else:
            self.planner.launched(rows)
            return [StepPart(rows, [row.sequence.preemptions for row in rows], handle)]
        half = len(rows) // 2
        late = {row.sequence.slot for row in rows[half:]}
        first = self._launch_rows(rows[:half], [edit for edit in edits if edit.slot not in late], output)
        return first + self._launch_rows(rows[half:], [edit for edit in edits if edit.slot in late], output)

    def _collect_oldest(self, output: StepOutput) -> None:
        step = self._in_flight.popleft()
        began = max(step.launched_s, self._last_end_s)
        for part in step.parts:
            self.profiler.enter("waiting")
            prompts = range(part.answers(), len(part.rows))
            self._sharing.awaits(
                [part.rows[at] for at in prompts if self._jobs.of(part.rows[at], part.preemptions[at])]
            )
            result = self.runner.collect(part.handle)
            self.profiler.enter("collecting")
            self._collect(part, result, output)
            self.planner.landed()
        now = time.monotonic()
        self._steps += 1
        self.step_times.observe(step.prefill, step.decodes, now - began)
        if self.speculation is not None and not step.prefill:
            idle_s = step.launched_s - self._last_end_s  # The host's part of a step that was not planned ahead.
            began -= idle_s if 0 < idle_s < now - began else 0.0
            rows = [row for part in step.parts for row in part.rows]
            self.speculation.stepped(rows, now - began, overlapped=idle_s <= 0)
        self._last_end_s = now
        self._draw_alone(output)

    def _draw_alone(self, output: StepOutput) -> None:
        """Draw the tokens of the rows that wait for masks once their step alone is in flight: all tokens before them
        are known then. The device computes the step meanwhile."""
        if not self._undrawn or len(self._in_flight) > 1:
            return
        self._undrawn = False
        for part in self._in_flight[0].parts:
            waiting = [
                FormedRow(self._jobs.of(row, preemptions), row.guesses)
                for row, preemptions in zip(part.rows, part.preemptions, strict=True)
                if row.samples and row.sequence.job.params.structured
            ]
            if waiting:
                self.profiler.enter("packing")
                masks, failed = self._structured.masks_of(waiting, self._eos_token_ids)
                self.profiler.enter("launch")
                self.runner.draw(part.handle, masks)
                for job, error in failed:
                    self._jobs.end(job, EndReason.ERROR, output, error=refused(error))

    def _collect(self, part: StepPart, result: StepResult, output: StepOutput) -> None:
        """Look at what the rows have drawn. In a large step the prompts' rows, which are its last, come first, and what
        they have drawn is delivered before the others are looked at: clients wait for the beginnings of answers."""
        for place, scores in result.scores.items():
            if self._jobs.of(part.rows[place], part.preemptions[place]) is not None:
                output.scores += self._scored.report(part.rows[place], scores)
        answers = len(part.rows)
        if answers >= _LARGE_STEP:
            answers = part.answers()
            self._collect_rows(part, result, answers, len(part.rows), output)
            if output.tokens and self._events is not None:
                self._events.begun(output.take())
        self._collect_rows(part, result, 0, answers, output)

    def _collect_rows(self, part: StepPart, result: StepResult, begin: int, end: int, output: StepOutput) -> None:
        now, sampled = time.monotonic(), result.sampled
        index = sum(row.samples > 0 for row in part.rows[:begin]) - 1
        for place in range(begin, end):
            row = part.rows[place]
            index += row.samples > 0
            job = self._jobs.of(row, part.preemptions[place])
            if job is None:
                continue  # These tokens are dropped.
            job.steps += 1
            if row.start < row.sequence.prefill_end:
                job.prefill_steps += 1
                job.prefill_tokens += row.tokens
            if not result.finite[place]:
                self._jobs.fail(job, None, output)
            elif row.samples:
                self._advance(job, row, sampled, index, now, output)
            else:
                self.planner.commit(row)

    def _advance(self, job: ActiveJob, row: Row, sampled: Sampled, index: int, now: float, output: StepOutput) -> None:
        """A row has drawn tokens: report them up to the answer's end."""
        drawn, sequence = sampled.tokens[index], row.sequence
        if row.guesses:
            self._count_guesses(job, row, len(drawn), output)
        if drawn:
            if not job.first_token_s:
                job.first_token_s = now
                self._computed.append(sequence)
            job.last_token_s = now
        logprobs, tops = None, None
        asked = job.job.params.logprobs
        if asked is not None:
            logprobs = sampled.logprobs[index] if sampled.logprobs else None
            tops = sampled.tops[index] if sampled.tops and asked else None
        ending = advance(job, drawn, logprobs, tops, output.tokens)
        if ending is None:
            self.planner.commit(row, drawn)
        else:
            self.planner.commit(row, drawn[: ending.kept])
            self._jobs.end(job, ending.reason, output, ending.stop_token_id, ending.error)

    def _count_guesses(self, job: ActiveJob, row: Row, drawn: int, output: StepOutput) -> None:
        assert self.speculation is not None
        drafted, accepted = self.speculation.drawn(row, drawn)
        job.drafted_tokens += drafted
        job.accepted_tokens += accepted
        if accepted:
            output.extra.append(accepted)

    # ---- messages ----

    def _take_messages(self, output: StepOutput) -> None:
        while self.inbox.messages:
            message = self.inbox.messages.popleft()
            if isinstance(message, Arrival):
                self._jobs.accept(message, output)
            elif isinstance(message, Prefetch):
                self.prefixes.prefetch(message.source, message.keys)
            else:
                self._jobs.cancel(message, output)

    # ---- state for others ----

    def _publish(self) -> None:
        if self.planner.pool.changed:
            self.inbox.publish(*self.planner.pool.take_changes())
        if not self._jobs:
            self.inbox.predicted_step_s = 0.0
