"""Executes packed steps on a GPU: slots on the device, graphs replayed where they serve, results that come later.

Knows slots and blocks, never jobs. The host plans ahead: `launch` puts a step into the stream and returns, `collect`
waits for its results. A token stays in its slot on the device, so the next step needs no round trip.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels import step_io
from kernels.slot_edits import HEADER
from kernels.step_io import StepInputs
from services.worker.models.decoder import Decoder
from services.worker.runners.base import Sampled, StepResult
from services.worker.runners.cuda import step_words
from services.worker.runners.cuda.forward import GpuForward
from services.worker.runners.cuda.graphs import Graphs, long_tokens, nothing_collected
from services.worker.runners.cuda.kv_pool import GpuPool
from services.worker.runners.cuda.logprobs import TopLogprobs
from services.worker.runners.cuda.ops import TritonOps
from services.worker.runners.cuda.sampler import GpuSampler
from services.worker.runners.cuda.step_words import Kind, Sizes, StepRows
from services.worker.runners.cuda.upload import NO_EDITS, STAGING_BUFFERS, DeviceEdits, StepUpload
from services.worker.runners.inspection import DecoderInspection, first_blocks
from services.worker.runners.step import EDIT_WORDS, HEADER_WORDS, Edit, SlotState, Words, unpack

_EAGER_TOKENS, _SIZES_APART = 320, 128
"""Least tokens of the steps, and distance between the sizes of products, that are run at the start."""
_SlotEdit = tuple[Edit, int, Words]
"""The operation, its slot, its words."""


@dataclass(frozen=True, slots=True)
class GpuStep:
    """A launched step."""

    number: int
    """As counted by `StepUpload`."""
    rows: StepRows
    samples: int
    """Length S of the report's lists."""
    report: Tensor
    """Host memory that begins with `Computed.report`, valid after `done`."""
    tops: TopLogprobs
    done: torch.cuda.Event | None
    """None: the step is over already (no GPU)."""
    began: torch.cuda.Event | None
    """When its first kernel could start, if gaps are measured."""


class GpuRunner:
    """A `Runner` on a GPU. It also runs on a CPU, without graphs, for tests of all that is not the device."""

    depth = 2
    """Steps in flight: the next one is planned and launched while one runs."""

    def __init__(
        self,
        model: Decoder,
        ops: TritonOps,
        block_size: int,
        slot_count: int,
        max_length: int,
        step_tokens: int,
        stored: torch.dtype,
    ) -> None:
        """For steps of up to `slot_count` rows and `step_tokens` tokens, of sequences of up to `max_length` tokens.
        Keys and values are stored as `stored`. The caller allocates the pool, `kv`."""
        device = model.embedding.device
        self.model, self.ops, self.block_size, self.device = model, ops, block_size, device
        self.slots, self.step_tokens = slot_count, step_tokens
        self._row_blocks = -(-max_length // block_size)
        self.kv = GpuPool(model.config, block_size, stored, device)
        self.sampler = GpuSampler(slot_count, model.config.vocab_size, device)
        self.measure_gaps = False
        """Record when each step could begin, for `gap_s`."""
        self._computed = [0] * slot_count
        lines = slot_count + 1  # the last one is for padding
        tables = torch.zeros(lines, self._row_blocks, dtype=torch.int32, device=device)
        self._upload = StepUpload(step_io.words_of(step_tokens, slot_count, slot_count), tables, self.sampler.settings)
        self.forward = GpuForward(model, ops, self.kv, self._upload.words, tables, self.sampler.settings)
        self.graphs = Graphs(model, ops, stored, slot_count, step_tokens)
        self._reports = [self._report() for _ in range(STAGING_BUFFERS)]
        """Host memory for the reports of later steps."""

    # ---- start-up ----

    @torch.inference_mode()
    def measure_workspace(self) -> int:
        """Bytes that the largest step takes at its peak, and that graphs will keep. A step of padding is run."""
        if self.device.type != "cuda":
            return 0
        sizes = self.step_tokens, self.slots, self.slots
        seen = min(self.step_tokens, self.slots * self._row_blocks * self.block_size)  # a table has no more blocks
        self._send_alone(step_words.padding_step(seen), sizes)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.forward.run(sizes, Kind.ANY, self.step_tokens)
        torch.cuda.synchronize()
        logits = self.model.config.vocab_size * self.model.embedding.dtype.itemsize
        kept = logits * sum(samples for (_, _, samples), _ in self.graphs.wanted())
        return int(torch.cuda.max_memory_allocated() - before) * 2 + kept

    @torch.inference_mode()
    def capture(self, progress: Callable[[int, int], None]) -> None:
        """Capture the graphs, the largest first: the others share its memory."""
        wanted = self.graphs.wanted()
        pool = torch.cuda.graph_pool_handle()
        with nothing_collected():
            self._upload.capture(pool)
            for done, (sizes, kind) in enumerate(wanted):
                progress(done, len(wanted))
                self._send_alone(step_words.empty_step(), sizes)
                self.graphs.capture(sizes, kind, self.forward.run, pool)
            progress(len(wanted), len(wanted))

    @torch.inference_mode()
    def warm_up_eager_kernels(self) -> None:
        """Run what no graph holds, so that nothing is compiled or loaded while requests wait.

        A step of each power of two of rows, for which attention is compiled; and the products of one layer and of the
        head in all sizes: for some of them the vendor's library stops the device to load further kernels.
        """
        for power in range((self.slots - 1).bit_length()):
            rows = 1 << power
            sizes = min(max(2 * rows, _EAGER_TOKENS), self.step_tokens), rows, rows
            self._send_alone(step_words.empty_step(), sizes)
            self.forward.run(sizes, Kind.ANY, sizes[0] - 1)
        model, layer = self.model, self.model.layers[0]
        for tokens in range(_SIZES_APART, self.step_tokens + 1, _SIZES_APART):
            x = model.embedding.new_zeros(tokens, model.config.hidden_size)
            layer.attention.qkv.norm_matmul(x, layer.attention.norm)
            layer.attention.output.add_matmul(x, x.new_zeros(tokens, layer.attention.output.inputs))
            layer.mlp(x)
        for samples in range(8, self.slots + 1, 8):
            model.logits(model.embedding.new_zeros(samples, model.config.hidden_size))
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    @torch.inference_mode()
    def launch_all(self) -> None:
        """Launch each kernel that `measure_workspace`, `capture` and `warm_up_eager_kernels` launch, without capturing
        anything, so that all are compiled before the model is loaded."""
        self.measure_workspace()
        self._upload.launch_edits()
        for sizes, kind in self.graphs.wanted():
            self._send_alone(step_words.empty_step(), sizes)
            self.forward.run(sizes, kind, long_tokens(sizes, kind))
        self.warm_up_eager_kernels()

    def _send_alone(self, rows: StepRows, sizes: Sizes) -> None:
        """Send the words of a step while no other one is in flight."""
        end = rows.lay_out(self._upload.staging_buffers[0], HEADER, sizes)
        self._upload.send(0, end, NO_EDITS)
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    # ---- steps ----

    def run(self, words: Words) -> StepResult:
        """Launch a step and collect it."""
        return self.collect(self.launch(words))

    def launch(self, words: Words) -> GpuStep:
        """Put a step into the stream. After an exception no row has advanced, and the edits may be sent again."""
        edits, rows = unpack(words)
        here, later = self._read(edits, words[HEADER_WORDS:])
        contexts = [self._computed[slot] + length for slot, length in zip(rows.slots, rows.lengths, strict=True)]
        step = self._begin(StepRows(rows, contexts), here, later)
        for slot, context in zip(rows.slots, contexts, strict=True):
            self._computed[slot] = context
        return step

    def done(self, step: GpuStep) -> bool:
        """Whether the device has finished a step."""
        done: Any = step.done
        return done is None or bool(done.query())

    def collect(self, step: GpuStep) -> StepResult:
        """Wait for a step and return its results."""
        if step.done is not None:
            step.done.synchronize()
        tokens, rows, samples = step.rows.sizes
        report = step.report.numpy()
        drawn, own, totals = report[: 3 * step.samples].reshape(3, step.samples)[:, :samples]
        finite = np.ones(rows, np.bool_)
        if not step.rows.answers:
            lines = report[step_io.aligned(3 * step.samples) :][:tokens]
            finite = np.minimum.reduceat(lines, [0, *step.rows.ends[:-1]]) > 0
        finite[step.rows.sampling] &= np.isfinite(totals.view(np.float32))
        logprobs = own.view(np.float32)[:, None].tolist() if step.tops.wanted else None
        result = StepResult(finite.tolist(), Sampled(drawn[:, None].tolist(), logprobs, step.tops.lists()))
        self._upload.landed(step.number)
        self._reports.append(step.report)
        return result

    def inspect(self, token_ids: Sequence[int]) -> DecoderInspection:
        """Open up the model for one sequence, in the first blocks of the pool."""
        count, device = len(token_ids), self.device
        blocks, slot_mapping = first_blocks(count, self.block_size)
        none = torch.zeros(0, dtype=torch.int64, device=device)
        inputs = StepInputs(
            token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
            positions=torch.arange(count, device=device),
            slot_mapping=slot_mapping.to(device),
            starts=torch.tensor([0, count], dtype=torch.int32, device=device),
            contexts=torch.tensor([count], dtype=torch.int32, device=device),
            tables=blocks[None].to(device, torch.int32),
            sampled=none,
            sample_slots=none,
            sample_positions=none,
        )
        return DecoderInspection(self.model, self.forward.step_of(inputs, count, None), self.kv.layers)

    def gap_s(self, before: GpuStep, after: GpuStep) -> float:
        """Seconds that the device idled between two steps that are over, both launched with `measure_gaps`."""
        assert before.done is not None
        assert after.began is not None
        return max(0.0, float(before.done.elapsed_time(after.began)) / 1e3)

    def _begin(self, rows: StepRows, edits: DeviceEdits, later: list[_SlotEdit]) -> GpuStep:
        graph = self.graphs.find(*rows.sizes[:2], rows.kind)
        sizes = graph.sizes if graph else self._eager_sizes(rows)
        # All memory is allocated before the step is launched: had the draws run, slots would have advanced.
        asked = [self.sampler.logprobs[rows.rows.slots[row]] for row in rows.sampling]
        tops = TopLogprobs(asked, self.model.config.vocab_size, self.device)
        report = self._reports.pop() if self._reports else self._report()
        number, buffer = self._upload.begin()
        end = rows.lay_out(self._upload.staging_buffers[buffer], HEADER, sizes)
        self._upload.send(buffer, end, edits)
        self._edit_logits(later)
        self.sampler.lift_bans(rows.rows.slots, rows.contexts)
        began = self._event() if self.measure_gaps else None
        if graph:
            graph.replay()
            computed = graph.computed
        else:
            long_tokens = sum(length for length in rows.rows.lengths if length > self.ops.short_tokens)
            computed = self.forward.run(sizes, Kind.ANSWERS if rows.answers else Kind.ANY, long_tokens)
        report[: len(computed.report)].copy_(computed.report, non_blocking=True)
        tops.send(computed.logits, computed.samples.totals)
        return GpuStep(number, rows, sizes[2], report, tops, self._event(), began)

    def _eager_sizes(self, rows: StepRows) -> Sizes:
        """Sizes of a step without a graph. Rows that sample are padded to a multiple of 8, like graphs of answers: for
        other sizes of the last products the vendor's library may have to load kernels."""
        tokens, count, samples = rows.sizes
        return rows.sizes if rows.answers else (tokens, count, min(-(-samples // 8) * 8, self.slots))

    def _report(self) -> Tensor:
        """Host memory for the report of any step."""
        most = step_io.aligned(3 * self.slots) + self.step_tokens
        return torch.zeros(most, dtype=torch.int32, pin_memory=self.device.type == "cuda")

    def _event(self) -> Any:
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=self.measure_gaps)  # type: ignore[no-untyped-call]
        event.record()
        return event

    # ---- edits ----

    def _read(self, edits: Iterable[_SlotEdit], words: Words) -> tuple[DeviceEdits, list[_SlotEdit]]:
        """Record what the host keeps of the edits, with which these words begin. -> the edits that the device reads,
        and those to apply after them."""
        blocks: list[int] = []
        admitted: list[int] = []
        later: list[_SlotEdit] = []
        at = 0
        for edit, slot, data in edits:
            if edit is Edit.BLOCKS:
                blocks.append(at)
            elif edit is Edit.ADMIT:
                admitted.append(at)
                state = SlotState.read(data)
                self._computed[slot] = state.computed
                self.sampler.admit(slot, state)
            elif edit is not Edit.RELEASE:
                later.append((edit, slot, data))
            at += EDIT_WORDS + len(data)
        return DeviceEdits(words[:at], blocks, admitted), later

    def _edit_logits(self, edits: list[_SlotEdit]) -> None:
        """Apply the edits that come after the device's own ones in the stream."""
        for edit, slot, data in edits:
            if edit is Edit.HISTORY:
                self.sampler.remember(slot, int(data[0]), data[1:])
            elif edit is Edit.BIAS:
                ids, numbers = np.split(data, 2)
                self.sampler.bias(slot, ids, numbers.view(np.float32))
            else:
                self.sampler.ban(slot, int(data[0]), data[1:])
