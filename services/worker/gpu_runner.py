"""Executes packed steps on a GPU: slots on the device, CUDA graphs for steps of answers, results that come later.

Knows slots and blocks, never jobs. The host plans ahead: `launch` puts a step into the stream and returns, `collect`
waits for what it brought. A token stays in its slot on the device, so the next step needs no round trip.
"""

import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels import attention, sampling, slots
from kernels.sampling import Samples
from kernels.slots import StepInputs
from services.worker.gpu_ops import TritonOps
from services.worker.gpu_sampler import GpuSampler
from services.worker.inputs import Edit, Rows, SlotState, Words, unpack
from services.worker.layers import StepTensors
from services.worker.model import Model
from services.worker.ops import Rotation
from services.worker.runner import StepResult
from services.worker.sampler import Sampled

Array = npt.NDArray[np.int64]

GRAPH_ROWS = (1, 2, 4, 8, *range(16, 257, 8))
"""Steps of so many answers are captured; a step is filled up to the next of them."""
_STAGES = 4
"""Host buffers: one for each step in flight, and for those whose copies may not be over yet."""


@dataclass(frozen=True, slots=True)
class Graph:
    """A captured step of a fixed number of answers, and what it reads and leaves."""

    replay: Callable[[], None]
    logits: Tensor
    samples: Samples
    report: Tensor


@dataclass(frozen=True, slots=True)
class GpuStep:
    """A step in the stream."""

    rows: int
    sampling: Array
    """Which rows sample."""
    lengths: Array
    logprobs: Array
    """How many likely tokens each row that samples asks for; -1: none, nor its own log-probability."""
    report: Tensor
    """int32 [3, S] in host memory, valid after `done`."""
    finite: Tensor | None
    """int32 [T] in host memory: whether each token's line is finite; None where the report says it all."""
    tops: tuple[Tensor, Tensor] | None
    done: torch.cuda.Event | None
    """None: it is over already (no GPU)."""
    began: torch.cuda.Event | None = None
    """When its first kernel could start, if that is measured."""


class GpuRunner:
    """The device side of the engine; it runs on a CPU too, without graphs, for tests of all that is not the device."""

    depth = 2
    """Steps in flight: the next one is planned and launched while one runs."""

    def __init__(
        self, model: Model, ops: TritonOps, block_size: int, slot_count: int, max_length: int, step_tokens: int
    ) -> None:
        config, device = model.config, model.embedding.device
        self.model, self.ops, self.block_size, self.device = model, ops, block_size, device
        self.slots, self.row_blocks = slot_count, -(-max_length // block_size)
        self.step_tokens = step_tokens
        self.make_pools(0)
        self.sampler = GpuSampler(slot_count, config.vocab_size, device)
        self.measure_gaps = False
        """Note when each step could begin: `gap_s` tells how long the device idled between two."""
        self._windows = set(config.windows)
        self._computed = np.zeros(slot_count + 1, np.int64)
        self._last_token = torch.zeros(slot_count + 1, dtype=torch.int64, device=device)
        self._tables = torch.zeros(slot_count + 1, self.row_blocks, dtype=torch.int32, device=device)
        most = slots.words_of(step_tokens, slot_count, slot_count)
        self._words = torch.zeros(most, dtype=torch.int32, device=device)
        self._row_tables = torch.zeros(slot_count, self.row_blocks, dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self._staged = [torch.zeros(most, dtype=torch.int32, pin_memory=pinned) for _ in range(_STAGES)]
        self._reports = [
            torch.zeros(3 * slot_count + 4 + step_tokens, dtype=torch.int32, pin_memory=pinned) for _ in range(_STAGES)
        ]
        self._launched = 0
        self._side = torch.cuda.Stream(device) if pinned else None  # type: ignore[no-untyped-call]
        self._graphs: dict[int, Graph] = {}

    # ---- start-up ----

    def make_pools(self, blocks: int) -> None:
        """Room for keys and values: blocks 1 to `blocks`; 0 is nobody's."""
        config, dtype = self.model.config, self.model.embedding.dtype
        shape = (blocks + 1, self.block_size, 2, config.kv_heads, config.head_dim)
        self.pools: list[Tensor] = []  # the old ones go first
        self.pools = [torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(config.layers)]

    @torch.inference_mode()
    def measure_workspace(self) -> int:
        """Bytes that the largest step takes for a moment and that graphs will keep: one of nobody's rows is run."""
        if self.device.type != "cuda":
            return 0
        tokens, rows = self.step_tokens, self.slots
        words = np.zeros(len(self._words), np.int32)
        parts = _parts(words, tokens, rows, rows)
        parts[1][:] = -1
        parts[3][1:] = tokens  # one row has all tokens, and sees them in the block of nobody
        parts[4][0], parts[5][:] = tokens, self.slots
        parts[7][:] = self.slots
        self._words.copy_(torch.from_numpy(words))
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        inputs = slots.step_inputs(self._words, tokens, rows, rows, self._row_tables)
        report = torch.empty(3, rows, dtype=torch.int32, device=self.device)
        finite = torch.empty(tokens, dtype=torch.int32, device=self.device)
        self._compute(inputs, report, tokens, finite)
        torch.cuda.synchronize()
        kept = self.model.config.vocab_size * self.model.embedding.dtype.itemsize * sum(self._graph_sizes())
        return int(torch.cuda.max_memory_allocated() - before) * 2 + kept

    def capture(self, progress: Callable[[int, int], None]) -> None:
        """Capture the graphs, the largest first: later ones live in its memory."""
        sizes = self._graph_sizes()
        pool = torch.cuda.graph_pool_handle()
        with torch.inference_mode():
            for done, rows in enumerate(reversed(sizes)):
                progress(done, len(sizes))
                self._graphs[rows] = self._capture(rows, pool)
        self._graphs = dict(sorted(self._graphs.items()))
        progress(len(sizes), len(sizes))

    def _graph_sizes(self) -> list[int]:
        sizes = [rows for rows in GRAPH_ROWS if rows <= self.slots]
        return sizes if self.slots in sizes or self.slots > GRAPH_ROWS[-1] else [*sizes, self.slots]

    def _capture(self, rows: int, pool: Any) -> Graph:
        self._words.copy_(torch.from_numpy(self._filler(rows)))
        inputs = slots.step_inputs(self._words, rows, rows, rows, self._row_tables)
        report = torch.empty(3, rows, dtype=torch.int32, device=self.device)
        long_tokens = rows if self.ops.short_tokens < 1 else 0
        self._compute(inputs, report, long_tokens)  # compiles, and lets libraries make what they need
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            logits, samples = self._compute(inputs, report, long_tokens)
        return Graph(graph.replay, logits, samples, report)

    def _filler(self, rows: int) -> Words:
        """Words of a step of nobody's rows."""
        words = np.zeros(len(self._words), np.int32)
        nobody = np.zeros(0, np.int64)
        self._lay_out(words, rows, nobody, nobody, nobody)
        return words

    # ---- steps ----

    def run(self, words: Words) -> StepResult:
        """Launch and collect."""
        return self.collect(self.launch(words))

    def launch(self, words: Words) -> GpuStep:
        """Put a step into the stream. After an exception no row has advanced, and the edits are applied."""
        with torch.inference_mode():
            edits, rows = unpack(words)
            self._apply(edits)
            slots_R, lengths = rows.slots.astype(np.int64), rows.lengths.astype(np.int64)
            contexts = self._computed[slots_R] + lengths
            chosen = np.flatnonzero(rows.samples)
            positions = contexts[chosen] - self.sampler.boundary[slots_R[chosen]]
            self.sampler.lift_bans(slots_R[chosen], positions)
            answers = len(chosen) == len(slots_R) == lengths.sum()
            graph = self.graph_for(len(slots_R)) if answers else None
            if graph is None:
                step = self._run_eagerly(rows, slots_R, lengths, contexts, chosen, positions)
            else:
                step = self._replay(*graph, rows, slots_R, contexts, positions)
            self._computed[slots_R] = contexts
            return step

    def collect(self, step: GpuStep) -> StepResult:
        """Wait for a step and tell what it brought."""
        if step.done is not None:
            step.done.synchronize()
        tokens, own, totals = step.report.numpy()[:, : len(step.sampling)]
        finite = np.ones(step.rows, np.bool_)
        if step.finite is not None:
            starts = np.cumsum(step.lengths) - step.lengths
            finite = np.minimum.reduceat(step.finite.numpy(), starts) > 0
        finite[step.sampling] &= np.isfinite(totals.view(np.float32))
        logprobs = own.view(np.float32).tolist() if step.logprobs.max(initial=-1) >= 0 else None
        return StepResult(finite.tolist(), Sampled(tokens.tolist(), logprobs, self._tops(step)))

    def scrub(self, blocks: list[int]) -> None:
        """Zero blocks that may hold NaN, behind all steps in the stream."""
        where = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        for pool in self.pools:
            pool.index_fill_(0, where, 0)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block's keys and values, all layers."""
        return sum(pool[0].numel() * pool.element_size() for pool in self.pools)

    def read_blocks(self, blocks: list[int]) -> list[bytes]:
        """The contents of blocks that are computed: keys and values, layer after layer. Steps in flight go on."""
        if self.device.type == "cuda":
            with torch.cuda.stream(self._side):
                contents = self._gather(blocks).cpu()
        else:
            contents = self._gather(blocks)
        lines = contents.view(len(blocks), -1).numpy()
        return [line.tobytes() for line in lines]

    def write_blocks(self, blocks: list[int], payloads: list[bytes]) -> None:
        """Fill blocks that no job uses with what `read_blocks` gave, after all launched steps."""
        assert all(len(payload) == self.block_bytes for payload in payloads), "contents of another layout"
        received = torch.frombuffer(bytearray(b"".join(payloads)), dtype=torch.uint8)
        where = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        contents = received.to(self.device).view(len(blocks), len(self.pools), -1)
        for layer, pool in enumerate(self.pools):
            _bytes_of(pool).index_copy_(0, where, contents[:, layer].contiguous())

    def _gather(self, blocks: list[int]) -> Tensor:
        where = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        return torch.stack([_bytes_of(pool).index_select(0, where) for pool in self.pools], 1)

    def graph_for(self, rows: int) -> tuple[int, Graph] | None:
        """The smallest graph that holds so many answers, and its size."""
        sizes = list(self._graphs)
        place = bisect.bisect_left(sizes, rows)
        return (sizes[place], self._graphs[sizes[place]]) if place < len(sizes) else None

    def gap_s(self, before: GpuStep, after: GpuStep) -> float:
        """Seconds that the device idled between two steps that are over; both must have been measured."""
        assert before.done is not None
        assert after.began is not None
        return max(0.0, float(before.done.elapsed_time(after.began)) / 1e3)

    # ---- edits ----

    def _apply(self, edits: Iterable[tuple[Edit, int, Words]]) -> None:
        admitted: list[tuple[int, SlotState]] = []
        later: list[tuple[Edit, int, Words]] = []
        places: list[Words] = []
        values: list[Words] = []
        for edit, slot, words in edits:
            if edit is Edit.BLOCKS:
                first = slot * self.row_blocks + int(words[0])
                places.append(np.arange(first, first + len(words) - 1, dtype=np.int32))
                values.append(words[1:])
            elif edit is Edit.ADMIT:
                state = SlotState.read(words)
                self._computed[slot] = state.computed
                admitted.append((slot, state))
            elif edit is Edit.RELEASE:
                self._computed[slot] = 0
            else:
                later.append((edit, slot, words))
        if places:
            self._write_tables(np.concatenate(places), np.concatenate(values))
        if admitted:
            self.sampler.admit(admitted)
        for edit, slot, words in later:
            if edit is Edit.HISTORY:
                self.sampler.remember(slot, int(words[0]), words[1:])
            elif edit is Edit.BIAS:
                ids, numbers = np.split(words, 2)
                self.sampler.bias(slot, ids, numbers.view(np.float32))
            else:
                self.sampler.ban(slot, int(words[0]), words[1:])

    def _write_tables(self, places: Words, blocks: Words) -> None:
        """New blocks of all slots: one copy, one write."""
        both = torch.from_numpy(np.stack((places, blocks)))
        if self.device.type == "cuda":
            both = both.pin_memory().to(self.device, non_blocking=True)
        self._tables.view(-1).index_copy_(0, both[0].long(), both[1])

    # ---- the words of a step ----

    def _lay_out(
        self, words: Words, rows: int, slots_R: Array, contexts: Array, positions: Array, rows_given: Rows | None = None
    ) -> None:
        """A step of `rows` answers, the first ones given, the others nobody's."""
        count = len(slots_R)
        words[: slots.words_of(rows, rows, rows)] = 0
        ids, places, owners, starts, row_contexts, row_slots, sampled, sample_slots, sample_positions = _parts(
            words, rows, rows, rows
        )
        ids[:count] = -1 - slots_R
        if rows_given is not None and len(rows_given.ids):
            ids[:count][rows_given.given > 0] = rows_given.ids
        places[count:] = -1
        places[:count] = contexts - 1
        owners[:count] = row_slots[:count] = sample_slots[:count] = slots_R
        # The rows that fill up the graph see one token in the block of nobody.
        row_contexts[count:], row_slots[count:], sample_slots[count:] = 1, self.slots, self.slots
        starts[:] = np.arange(rows + 1)
        row_contexts[:count] = contexts
        sampled[:] = np.arange(rows)
        sample_positions[:count] = positions

    def _lay_out_ragged(
        self, words: Words, rows: Rows, slots_R: Array, lengths: Array, contexts: Array, chosen: Array, positions: Array
    ) -> tuple[int, int, int]:
        """A step of any rows. -> T, R, S."""
        tokens, count, samples = int(lengths.sum()), len(slots_R), len(chosen)
        ends = np.cumsum(lengths)
        row_of = np.repeat(np.arange(count), lengths)
        ids, places, owners, starts, row_contexts, row_slots, sampled, sample_slots, sample_positions = _parts(
            words, tokens, count, samples
        )
        owners[:] = slots_R[row_of]
        ids[:] = -1 - owners
        ids[(rows.given > 0)[row_of]] = rows.ids
        places[:] = np.arange(tokens) + (contexts - ends)[row_of]
        starts[0], starts[1:] = 0, ends
        row_contexts[:], row_slots[:] = contexts, slots_R
        sampled[:], sample_slots[:], sample_positions[:] = ends[chosen] - 1, slots_R[chosen], positions
        return tokens, count, samples

    def _send(self, staged: Tensor, count: int) -> torch.cuda.Event | None:
        """One copy. -> when it is over, if that is measured."""
        self._words[:count].copy_(staged[:count], non_blocking=True)
        return self._event() if self.measure_gaps else None

    # ---- running ----

    def _replay(
        self, size: int, graph: Graph, rows: Rows, slots_R: Array, contexts: Array, positions: Array
    ) -> GpuStep:
        staged, report = self._buffers()
        self._lay_out(staged.numpy(), size, slots_R, contexts, positions, rows)
        began = self._send(staged, slots.words_of(size, size, size))
        graph.replay()
        kept = report[: 3 * size].view(3, size)
        kept.copy_(graph.report, non_blocking=True)
        count = len(slots_R)
        tops = self._send_tops(graph.logits, graph.samples, slots_R)
        return GpuStep(
            count, np.arange(count), np.ones(count, np.int64), self.sampler.logprobs[slots_R], kept, None, tops,
            self._event(), began,
        )  # fmt: skip

    def _run_eagerly(
        self, rows: Rows, slots_R: Array, lengths: Array, contexts: Array, chosen: Array, positions: Array
    ) -> GpuStep:
        staged, host = self._buffers()
        sizes = self._lay_out_ragged(staged.numpy(), rows, slots_R, lengths, contexts, chosen, positions)
        tokens, _, samples = sizes
        began = self._send(staged, slots.words_of(*sizes))
        inputs = slots.step_inputs(self._words, *sizes, self._row_tables)
        finite_at = -(-3 * samples // 4) * 4
        reports = torch.empty(finite_at + tokens, dtype=torch.int32, device=self.device)
        long_tokens = int(lengths[lengths > self.ops.short_tokens].sum())
        logits, drawn = self._compute(inputs, reports[: 3 * samples].view(3, samples), long_tokens, reports[finite_at:])
        kept = host[: len(reports)]
        kept.copy_(reports, non_blocking=True)
        tops = self._send_tops(logits, drawn, slots_R[chosen]) if samples else None
        return GpuStep(
            len(slots_R), chosen, lengths, self.sampler.logprobs[slots_R[chosen]], kept[: 3 * samples].view(3, samples),
            kept[finite_at:], tops, self._event(), began,
        )  # fmt: skip

    def _compute(
        self, inputs: StepInputs, report: Tensor, long_tokens: int = 0, finite: Tensor | None = None
    ) -> tuple[Tensor, Samples]:
        """From the words on the device to the report: all that a graph holds."""
        model = self.model
        slots.unpack(self._words, self._last_token, self._tables, inputs, self.block_size)
        step = StepTensors(
            token_ids=inputs.token_ids,
            rotation=Rotation(model.cos, model.sin, inputs.positions),
            places=inputs.places,
            plans={window: self._plan(inputs, window, long_tokens) for window in self._windows},
            sampled=inputs.sampled,
        )
        x = model.forward(step, self.pools)
        if finite is not None:
            slots.finite_lines(x, finite)
        logits = model.logits(x if len(inputs.sampled) == len(x) else x[inputs.sampled])
        settings = self.sampler.settings
        samples = sampling.sample(logits, settings, inputs.sample_slots, inputs.sample_positions)
        slots.keep(samples.tokens, samples.logprobs, samples.totals, inputs.sample_slots, self._last_token, report)
        return logits, samples

    def _plan(self, inputs: StepInputs, window: int | None, long_tokens: int) -> attention.AttentionPlan:
        config = self.model.config
        return attention.plan_attention(
            inputs.starts, inputs.contexts, inputs.tables, config.heads, config.kv_heads, config.head_dim,
            self.model.embedding.dtype, window, self.ops.short_tokens, long_tokens,
        )  # fmt: skip

    # ---- results ----

    def _buffers(self) -> tuple[Tensor, Tensor]:
        """Host memory for a step: `depth` later steps are launched before it is used again."""
        place = self._launched % _STAGES
        self._launched += 1
        return self._staged[place], self._reports[place]

    def _event(self) -> torch.cuda.Event | None:
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=self.measure_gaps)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _send_tops(self, logits: Tensor, samples: Samples, slots_S: Array) -> tuple[Tensor, Tensor] | None:
        tops = self.sampler.tops(logits, Samples(*(x[: len(slots_S)] for x in _columns(samples))), slots_S)
        if tops is None:
            return None
        pinned = self.device.type == "cuda"
        ids, values = (torch.empty(x.shape, dtype=x.dtype, pin_memory=pinned) for x in tops)
        return ids.copy_(tops[0], non_blocking=True), values.copy_(tops[1], non_blocking=True)

    def _tops(self, step: GpuStep) -> list[list[tuple[int, float]]] | None:
        if step.tops is None:
            return None if step.logprobs.max(initial=-1) < 0 else [[] for _ in step.sampling]
        ids, values = (x.tolist() for x in step.tops)
        return [
            list(zip(row_ids[:count], row_values[:count], strict=True)) if count > 0 else []
            for row_ids, row_values, count in zip(ids, values, step.logprobs.tolist(), strict=True)
        ]


def _parts(words: Words, tokens: int, rows: int, samples: int) -> list[Words]:
    """The lists of a step's words, as `kernels.slots` names them."""
    counts = [tokens] * 3 + [rows + 1, rows, rows] + [samples] * 3
    places = slots.places_of(tokens, rows, samples)
    return [words[place : place + count] for place, count in zip(places, counts, strict=False)]


def _bytes_of(pool: Tensor) -> Tensor:
    """A layer's pool as uint8 [blocks, bytes]."""
    return pool.view(len(pool), -1).view(torch.uint8)


def _columns(samples: Samples) -> tuple[Tensor, Tensor, Tensor]:
    return samples.tokens, samples.logprobs, samples.totals
