"""The paced engine: the real planner, prefix cache and links with a model that costs a set time and no memory.

What it says is a function of (seed, sample index, position), so a moved or preempted answer goes on as it began. It
serves to measure and test all that surrounds a model. Knows no tensors and no network.
"""

import hashlib
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from services.host import available_memory
from services.worker.engine.inbox import IDLE_WAIT_S, Inbox
from services.worker.engine.profiling import Profiler
from services.worker.errors import CheckpointError
from services.worker.job import EndReason, StepOutput, TokenOut
from services.worker.kvcache.tiers import BlockStore
from services.worker.loader.config import load_config
from services.worker.options import EngineOptions, MemoryPlan
from services.worker.planner.planner import Row
from services.worker.planner.sequence import Sequence

MOST_CONTEXT = 128 * 1024
_POOL_TOKENS = 1 << 20  # of a pool whose size nobody set
_RUN = 8  # tokens drawn from one digest


@dataclass(frozen=True, slots=True)
class PacedTiming:
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


class PacedEngine(Inbox):
    """Answers jobs at a set pace. The methods are those of `engine.Engine`, and so are their threads.

    Sampling is reduced to what lengths and ends need: a draw out of the vocabulary without its end tokens, each as
    likely as the other (so says logprobs). Temperature, penalties and biases change nothing.
    """

    def __init__(self, model_dir: Path, options: EngineOptions, tempo: PacedTiming) -> None:
        """Read the shape of a checkpoint, none of its weights. Raises CheckpointError."""
        self.config, self.tempo = load_config(model_dir), tempo
        memory = _memory(options, self.config.context_length, self.config.kv_bytes_per_token(2))
        super().__init__(options, memory, Profiler(computes=False))
        self.parameters = 0
        self.block_layout, self.block_bytes = "", 0
        self._vocabulary = [i for i in range(self.config.vocab_size) if i not in self.config.eos_token_ids]
        self._logprob = -math.log(len(self._vocabulary))
        self._draws: dict[int, tuple[int, list[int]]] = {}
        self._on_launch: Callable[[float], None] = lambda predicted_step_s: None

    def use_remote(self, store: BlockStore) -> None:
        """Nothing: its blocks have no contents to share."""

    # ---- the engine's thread ----

    def run_forever(
        self,
        on_output: Callable[[StepOutput], None],
        on_launch: Callable[[float], None],
        on_soon: Callable[[list[int]], None],
        stop: threading.Event,
    ) -> None:
        """Run steps until `stop` is set (then call `wake`), asleep while there is no work."""
        self._on_launch, self.rehearsal.tell = on_launch, on_soon
        while not stop.is_set():
            if self.has_work():
                on_output(self.step())
                continue
            with self._wake:
                while not (self._inbox or stop.is_set()):
                    self._wake.wait(IDLE_WAIT_S)

    def step(self) -> StepOutput:
        """Take what has arrived, wait as long as a step takes, tell what it brought.

        Planning is part of the step's time, as it is where a GPU computes meanwhile.
        """
        began = time.monotonic()
        output = StepOutput([], [])
        self.profiler.step_begins()
        with self.profiler.phase("arrivals"):
            self._take_inbox(output)
            self._end_expired(output)
        plan = self._plan()
        if plan.rows:
            with self.profiler.phase("waiting"):
                self._launch(plan.rows, began)
            with self.profiler.phase("collecting"):
                self._collect(plan.rows, time.monotonic(), output)
        with self.profiler.phase("publishing"):
            self._publish_state()
        return output

    # ---- one step ----

    def _launch(self, rows: list[Row], began: float) -> None:
        """Let the time of the step pass."""
        prefill = sum(row.tokens for row in rows if row.start < row.sequence.prefill_end)
        end = self.tempo.end(began, prefill)
        self._predicted_step_s = end - began
        self._on_launch(self._predicted_step_s)
        for row in rows:
            row.sequence.started_s = row.sequence.started_s or began
        if self.tempo.step_s:  # Even a step that is late lets the event loop's thread run.
            self.rehearsal.before(rows, len(self._sequences), began, lambda: time.monotonic() >= end)
            time.sleep(max(end - time.monotonic(), 0.0))
        self._steps += 1
        decodes = any(row.start >= row.sequence.prefill_end for row in rows)
        took_s = max(time.monotonic() - began, 1e-9)
        self._pace.observe(prefill, decodes, took_s)
        self.rehearsal.after(rows, took_s)

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

    def _forget(self, sequence: Sequence) -> None:
        self._draws.pop(sequence.job.key, None)


def tokens_of(seed: int, sample_index: int, run: int, vocabulary: list[int]) -> list[int]:
    """The tokens at positions `run * 8` to `run * 8 + 7` of the answer that these determine."""
    name = seed.to_bytes(8, "little") + sample_index.to_bytes(4, "little") + run.to_bytes(4, "little")
    digest = hashlib.blake2b(name, digest_size=4 * _RUN).digest()
    return [
        vocabulary[int.from_bytes(digest[place : place + 4], "little") % len(vocabulary)]
        for place in range(0, 4 * _RUN, 4)
    ]


def _memory(options: EngineOptions, context_length: int, kv_bytes_per_token: int) -> MemoryPlan:
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
