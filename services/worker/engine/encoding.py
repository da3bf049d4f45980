"""Dynamic batching of an encoder: jobs with texts in, vectors out. One thread launches batches and collects them; on
a CPU lanes compute them.

Knows the batch's policy and a runner that it is handed, no device, no checkpoint and no network.
"""

import heapq
import logging
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from services import failpoints
from services.worker.engine.base import BlockLoan, BlockRead, EngineEvents
from services.worker.engine.finish_vectors import ScoreKind, finished
from services.worker.engine.inbox import Arrival, Cancel, Inbox
from services.worker.engine.lanes import Lanes
from services.worker.engine.profiling import PhaseRecorder, Profiler, Recorder
from services.worker.engine.step_times import StepTimes
from services.worker.errors import CheckpointError
from services.worker.job import (
    Cost,
    EncodeTask,
    Ended,
    EndReason,
    Failure,
    Job,
    SamplingParams,
    Stats,
    StepOutput,
)
from services.worker.kvcache.tiers import BlockStore, Peers
from services.worker.planner.dynamic_batch import DynamicBatch, WaitingText
from services.worker.runners.base import EncoderRunner, TextTokens, Vectors

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.5
_NUMERIC = Failure("INTERNAL", "NUMERIC", "the model computed numbers that are not finite for this text")
_INTERNAL = Failure("INTERNAL", "INTERNAL", "the engine failed to compute this text", retryable=True)
_WRONG = Failure("INVALID_ARGUMENT", "INVALID", "the job has no texts for this encoder")
_WARM_UP_KEY = -1
_NO_DECODING_S = 1e-9
_WORTH_A_BATCH = 256
"""Tokens of a batch from which on more of them hardly lessen the time of each."""
_FEW_DEADLINES = 1024
"""Deadlines of ended jobs that are kept beside those of as many as there are."""


@dataclass(slots=True, eq=False)
class _Texts:
    """A job that runs."""

    job: Job
    task: EncodeTask
    arrived: float
    token_ids: "array[int]"
    """Of all texts; a part of an array is copied many times faster than one of a list."""
    begins: list[int]
    """Where each text begins in the job's tokens, and where the last one ends."""
    vectors: npt.NDArray[np.float32]
    left: int
    """Texts that are not computed yet."""
    started: float = 0.0
    steps: int = 0

    def tokens_of(self, index: int) -> TextTokens:
        """The tokens of a text."""
        second = self.task.seconds[index] if self.task.seconds else 0
        return TextTokens(self.token_ids[self.begins[index] : self.begins[index + 1]], second)


@dataclass(slots=True, eq=False)
class _Batch:
    """A batch in flight."""

    texts: Sequence[WaitingText]
    tokens: int
    launched: Any
    """The handle of the runner or of its lane; None: it could not be launched."""
    began: float


class EncodingEngine:
    """An `Engine` that encodes texts.

    `submit`, `cancel`, `wake`, `stats` and `take_block_events` may be called from any thread; the other methods from
    one thread at a time.
    """

    block_layout = block_dtype = ""
    block_bytes = 0

    def __init__(
        self,
        runner: EncoderRunner[Any],
        capabilities: frozenset[str],
        most_length: int,
        batch: DynamicBatch,
        scores: ScoreKind | None = None,
        recorder: Callable[[], Recorder] = PhaseRecorder,
        lanes: int = 1,
    ) -> None:
        """most_length: tokens of a text. scores: how the runner's scores of labels become shares; None: it embeds.
        lanes: batches that are computed at the same time; several threads call the runner if there is more than one."""
        self.runner, self.capabilities, self.most_length = runner, capabilities, most_length
        self.batch, self.scores = batch, scores
        self.profiler = Profiler(recorder)
        self.step_times = StepTimes(_NO_DECODING_S)
        self._jobs: dict[int, _Texts] = {}
        self._deadlines: list[tuple[float, int]] = []
        """A heap of moments and keys of jobs, also of some that have ended."""
        self._in_flight: deque[_Batch] = deque()
        self._collected_at = 0.0
        self._steps = 0
        self._events: EngineEvents | None = None
        self.inbox = Inbox()
        self._lanes = Lanes(runner, lanes, self.inbox.wake) if lanes > 1 else None

    def use_peers(self, peers: Peers) -> None:
        """An encoder has no blocks to fetch."""

    def prefetch(self, source: str, keys: Sequence[bytes]) -> None:
        """An encoder has no blocks to fetch."""

    def read_blocks(self, read: BlockRead) -> None:
        """An encoder has no blocks to read."""
        read.answer(None)

    def lend_blocks(self, loan: BlockLoan) -> None:
        """An encoder has no blocks to lend."""
        loan.answer(None)

    def use_remote(self, store: BlockStore) -> None:
        """There are no blocks to share."""

    # ---- any thread ----

    def submit(self, job: Job) -> None:
        """Encode the texts of this job. Its vectors are in its end."""
        self.inbox.submit(job)

    def cancel(self, key: int, position: int | None = None) -> None:
        """End a job. Does nothing if the job has ended."""
        self.inbox.cancel(key, position)

    def wake(self) -> None:
        """Make `run` look at its stop event now."""
        self.inbox.wake()

    def stats(self) -> Stats:
        """Counters and gauges as of now, and the prediction for the batch that is computed."""
        return self._measure()

    def take_block_events(self) -> tuple[list[bytes], list[bytes]]:
        """There are no blocks."""
        return [], []

    # ---- the engine's thread ----

    def run(self, events: EngineEvents, stop: threading.Event) -> None:
        """Compute batches until `stop` is set and `wake` is called; sleep while no text waits or more are expected.

        A batch is launched behind another one only if it is full: until that one is over, more texts may come. A free
        lane begins with a batch as soon as enough texts wait.
        """
        self._events = events
        while not stop.is_set():
            output = StepOutput([], [])
            self._take_messages(output)
            wait_s = self.batch.wait_s(time.monotonic())
            if self._may_launch(wait_s):
                self._launch()
            elif (batch := self._to_collect()) is not None:
                self._collect(batch, output)
            elif not output.ended:
                most_s = IDLE_WAIT_S if self._in_flight else min(wait_s, IDLE_WAIT_S)
                self.inbox.sleep(most_s, lambda: stop.is_set() or self._to_collect() is not None)
            if output.ended:
                events.stepped(output)

    def step(self, output: StepOutput) -> None:
        """Compute the next batch."""
        self._launch()
        while self._in_flight:
            self._collect(self._in_flight[0], output)

    def _may_launch(self, wait_s: float) -> bool:
        """Whether a batch is to be launched now. wait_s: how long it may wait for more texts."""
        if not self._in_flight:
            return wait_s == 0.0
        if self._lanes is None:
            return self.batch.is_full and len(self._in_flight) < self.runner.depth
        # Half of what is computed, so that the batches of all lanes stay alike: small ones take more time for a token.
        enough = min(_WORTH_A_BATCH, sum(batch.tokens for batch in self._in_flight) / 2)
        return self.batch.tokens >= enough and len(self._in_flight) < self._lanes.count

    def _to_collect(self) -> _Batch | None:
        """The batch in flight to collect next: the oldest, which is waited for; of those in lanes one that is over."""
        if self._lanes is None:
            return self._in_flight[0] if self._in_flight else None
        return next((batch for batch in self._in_flight if batch.launched is None or batch.launched.done()), None)

    def _launch(self) -> None:
        """Launch the next batch."""
        self.profiler.step_begins()
        self.profiler.enter("planning")
        texts = self.batch.take()
        tokens, began = sum(text.tokens for text in texts), time.monotonic()
        predicted_s = self.step_times.predict(tokens)
        self.inbox.predicted_step_s = predicted_s
        if self._events is not None:
            self._events.launched(predicted_s)
        for text in texts:
            job = self._jobs[text.key]
            job.started = job.started or began
        self.profiler.enter("launch")
        try:
            launched = self._launch_texts(texts)
        except Exception:  # Its parts are launched again, one after the other, when it is collected.
            launched = None
        self._in_flight.append(_Batch(texts, tokens, launched, began))
        self.profiler.step_ends()

    def _collect(self, batch: _Batch, output: StepOutput) -> None:
        """Collect this batch in flight. Where the runner computes meanwhile, the next one is launched before the ends
        of this one are written."""
        self._in_flight.remove(batch)
        self.profiler.enter("waiting")
        vectors = self._wait(batch)
        self.profiler.step_ends()
        now = time.monotonic()
        began = batch.began if self._lanes else max(batch.began, self._collected_at)
        self.step_times.observe(batch.tokens, False, now - began)
        self._collected_at = now
        self._steps += 1
        if not self._in_flight:
            self.inbox.predicted_step_s = 0.0
            if self.runner.depth > 1:
                self._take_messages(output)
                if self.batch.wait_s(now) == 0.0:
                    self._launch()
        self.profiler.enter("collecting")
        if vectors is None:
            self._compute_halves(batch.texts, output)
        else:
            self._finish(batch.texts, vectors, output)
        self.profiler.step_ends()

    def has_work(self) -> bool:
        """Whether there are jobs, or messages that were not taken."""
        return bool(self._jobs or self.inbox.messages)

    def warm_up(self) -> None:
        """Compute a text twice, so that the first real one finds warm code and a known rate. Raises CheckpointError if
        the model cannot compute."""
        length = min(self.most_length, 64)
        task = EncodeTask((length,))
        for _ in range(2):
            self.step_times = StepTimes(_NO_DECODING_S)
            output = StepOutput([], [])
            self.submit(Job(_WARM_UP_KEY, [0] * length, length, SamplingParams(1), encode=task))
            self._take_messages(output)
            self.step(output)
            failures = [ended.error for ended in output.ended if ended.error]
            if failures:
                raise CheckpointError(f"the model cannot compute: {failures[0].message}")
        self._steps = 0

    def _launch_texts(self, batch: Sequence[WaitingText]) -> Any:
        """The handle of the runner or of a lane."""
        texts = [self._jobs[each.key].tokens_of(each.place) for each in batch]
        for text in texts if failpoints.ARMED else ():
            failpoints.hit("engine.step", text.token_ids)
        return self._lanes.launch(texts) if self._lanes else self.runner.launch(texts)

    def _wait(self, batch: _Batch) -> Vectors | None:
        """The vectors of a batch; None: it failed."""
        if batch.launched is None:
            return None
        try:
            return self._collected(batch.launched)
        except Exception:
            return None

    def _collected(self, launched: Any) -> Vectors:
        """Waits for the vectors of a launched batch."""
        vectors: Vectors = launched.result() if self._lanes else self.runner.collect(launched)
        return vectors

    def _compute(self, batch: Sequence[WaitingText], output: StepOutput) -> None:
        """Compute these texts; if that fails, each half of them, so that one bad text fails alone."""
        try:
            vectors = self._collected(self._launch_texts(batch))
        except Exception as error:
            if len(batch) == 1:
                log.error("a text of job %d failed: %s", batch[0].key, type(error).__name__)
                self._fail(batch[0], _INTERNAL, output)
            else:
                self._compute_halves(batch, output)
            return
        self._finish(batch, vectors, output)

    def _compute_halves(self, batch: Sequence[WaitingText], output: StepOutput) -> None:
        half = len(batch) // 2
        for part in (batch[:half], batch[half:]):
            alive = [each for each in part if each.key in self._jobs]
            if alive:
                self._compute(alive, output)

    def _finish(self, batch: Sequence[WaitingText], vectors: Vectors, output: StepOutput) -> None:
        """Give the texts their vectors, neighbours of one job together."""
        finite = np.asarray(np.isfinite(vectors).all(axis=1))
        for begin, end in _runs(batch):
            job = self._jobs.get(batch[begin].key)
            if job is not None:
                if finite[begin:end].all():
                    self._computed(job, batch[begin].place, vectors[begin:end], output)
                else:
                    self._fail(batch[begin + int(np.argmin(finite[begin:end]))], _NUMERIC, output)

    def _computed(self, job: _Texts, place: int, vectors: Vectors, output: StepOutput) -> None:
        """Texts of a job from this place on are computed."""
        job.vectors[place : place + len(vectors)] = vectors
        job.left -= len(vectors)
        if not job.left:
            its = finished(job.vectors, job.task, self.scores)
            self._end(job, Ended(job.job.key, EndReason.STOP, 0, self._cost(job), vectors=its), output)

    def _fail(self, text: WaitingText, failure: Failure, output: StepOutput) -> None:
        """End the job of a text that cannot be computed; its other texts are not computed."""
        job = self._jobs.get(text.key)
        if job is not None:
            ended = Ended(text.key, EndReason.ERROR, 0, self._cost(job), error=failure, failed_text=text.place)
            self._end(job, ended, output)

    # ---- arrivals and ends ----

    def _take_messages(self, output: StepOutput) -> None:
        now = time.monotonic()
        while self.inbox.messages:
            message = self.inbox.messages.popleft()
            if isinstance(message, Arrival):
                self._accept(message, now, output)
            elif isinstance(message, Cancel) and message.key in self._jobs:
                job = self._jobs[message.key]
                self._end(job, Ended(message.key, EndReason.CANCELLED, 0, self._cost(job)), output)
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, key = heapq.heappop(self._deadlines)
            late = self._jobs.get(key)
            if late is not None and late.job.deadline == deadline:
                self._end(late, Ended(key, EndReason.DEADLINE, 0, self._cost(late)), output)

    def _accept(self, arrival: Arrival, now: float, output: StepOutput) -> None:
        job, task = arrival.job, arrival.job.encode
        if task is None or not task.lengths or max(task.lengths) > self.most_length:
            output.ended.append(Ended(job.key, EndReason.ERROR, 0, Cost(), error=_WRONG))
            return
        begins = list(accumulate(task.lengths, initial=0))
        count = len(task.lengths)
        vectors = np.empty((count, self.runner.width), np.float32)
        token_ids = job.token_ids if isinstance(job.token_ids, array) else array("i", job.token_ids)
        self._jobs[job.key] = _Texts(job, task, arrival.at, token_ids, begins, vectors, count)
        texts = [WaitingText(job.key, place, tokens, arrival.at) for place, tokens in enumerate(task.lengths)]
        self.batch.add(job.key, texts, now, job.priority)
        if job.deadline is not None:
            self._note_deadline(job.deadline, job.key)

    def _note_deadline(self, deadline: float, key: int) -> None:
        heapq.heappush(self._deadlines, (deadline, key))
        if len(self._deadlines) > _FEW_DEADLINES + 2 * len(self._jobs):  # Most of these jobs have ended.
            self._deadlines = [(at, its) for at, its in self._deadlines if its in self._jobs]
            heapq.heapify(self._deadlines)

    def _end(self, job: _Texts, ended: Ended, output: StepOutput) -> None:
        del self._jobs[ended.key]
        if job.left:
            self.batch.drop(ended.key)
        output.ended.append(ended)

    def _cost(self, job: _Texts) -> Cost:
        now = time.monotonic()
        if not job.started:
            return Cost(queue_s=now - job.arrived)
        done = len(job.task.lengths) - job.left
        tokens = sum(job.task.lengths) if not job.left else 0
        return Cost(
            queue_s=job.started - job.arrived, prefill_s=now - job.started, prefill_tokens=tokens, steps=done > 0
        )

    def _measure(self) -> Stats:
        """No blocks, no decoding: texts are computed once."""
        return Stats(
            steps=self._steps,
            running=len(self._jobs),
            waiting=len(self.batch),
            prefill_backlog=self.batch.tokens,
            free_blocks=0,
            cached_blocks=0,
            active_blocks=0,
            total_blocks=0,
            prefill_rate=self.step_times.prefill_rate,
            decode_s=0.0,
            preemptions=0,
            predicted_step_s=self.inbox.predicted_step_s,
        )


def _runs(batch: Sequence[WaitingText]) -> Iterator[tuple[int, int]]:
    """Where texts that are neighbours in their job begin and end in the batch."""
    begin = 0
    for end, (text, behind) in enumerate(pairwise(batch), 1):
        if text.key != behind.key or text.place + 1 != behind.place:
            yield begin, end
            begin = end
    if batch:
        yield begin, len(batch)
