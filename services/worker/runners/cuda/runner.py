"""Executes packed steps on a GPU: slots on the device, graphs replayed where they serve, results that come later.

Knows slots and blocks, never jobs. The host plans ahead: `launch` puts a step into the stream and returns, `collect`
waits for its results. A token stays in its slot on the device, so the next step needs no round trip.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from kernels import kv_pages, step_io
from kernels.slot_edits import HEADER
from kernels.step_io import StepInputs
from services.worker.models.decoder import Decoder
from services.worker.models.draft_heads import DraftHeads
from services.worker.runners.base import NO_SCORES, Masks, Sampled, StepResult
from services.worker.runners.cuda import step_words
from services.worker.runners.cuda.adapters import GpuAdapters
from services.worker.runners.cuda.drafts.draft_model import CheckedStep, GpuDraftModel, Pending
from services.worker.runners.cuda.drafts.heads import GpuHeads
from services.worker.runners.cuda.drafts.parallel_draft import GpuParallelDraft
from services.worker.runners.cuda.forward import Computed, GpuForward
from services.worker.runners.cuda.gpu_step import GpuStep, Report
from services.worker.runners.cuda.graphs import Graphs, long_tokens, nothing_collected
from services.worker.runners.cuda.kv_pool import GpuPool
from services.worker.runners.cuda.layer_events import LayerEvents, Mark
from services.worker.runners.cuda.logprobs import TopLogprobs
from services.worker.runners.cuda.masked_draws import MaskedDraws, MaskedRows, merged
from services.worker.runners.cuda.ops import TritonOps
from services.worker.runners.cuda.sampler import GpuSampler
from services.worker.runners.cuda.scores import PromptLines
from services.worker.runners.cuda.step_words import Kind, Sizes, StepRows
from services.worker.runners.cuda.upload import NO_EDITS, STAGING_BUFFERS, DeviceEdits, StepUpload
from services.worker.runners.inspection import DecoderInspection, first_blocks
from services.worker.runners.scored_rows import ScoredRows
from services.worker.runners.step import EDIT_WORDS, HEADER_WORDS, LAST_TOKEN, OWN_GUESS, Edit, SlotState, Words, unpack

_EAGER_TOKENS, _SIZES_APART = 320, 128
"""Least tokens of the steps, and distance between the sizes of products, that are run at the start."""
_SlotEdit = tuple[Edit, int, Words]
"""The operation, its slot, its words."""


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
        guesses: int = 0,
        adapters: GpuAdapters | None = None,
    ) -> None:
        """For steps of up to `slot_count` rows and `step_tokens` tokens, of sequences of up to `max_length` tokens.
        Keys and values are stored as `stored`. The caller allocates the pool, `kv`. guesses: most of a row; 0: no row
        has any. adapters: of the model; None: it serves none."""
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
        self._most_samples = min(slot_count * (1 + guesses), step_tokens) if guesses else slot_count
        most_words = step_io.words_of(step_tokens, slot_count, self._most_samples)
        self._upload = StepUpload(most_words, tables, self.sampler.settings)
        self._tables = tables
        self._layer_events = LayerEvents(model, self.kv)
        self.forward = GpuForward(model, ops, self.kv, self._upload.words, tables, self.sampler.settings)
        self._masked = MaskedDraws(
            self._most_samples, model.config.vocab_size, self.sampler.settings, self.forward.last_token
        )
        self.graphs = Graphs(model, ops, stored, slot_count, step_tokens, guesses)
        self.adapters = adapters
        self.adapted_graphs = Graphs(model, ops, stored, slot_count, step_tokens, guesses)
        """Of steps with adapters."""
        self._adapter_slots = [0] * slot_count
        """Where the adapter of each slot is; 0: it has none."""
        self.draft: GpuDraftModel | None = None
        """Guesses tokens where a row has OWN_GUESS."""
        self._pending: dict[int, Pending] = {}
        """What the draft model is to compute before the next step, by slot."""
        self._guessed, self._followed = False, dict[int, int]()
        """Whether the last step had guesses; the guesses of each slot that were launched behind it."""
        self._covered = [0] * slot_count
        """Tokens for which each slot has blocks."""
        self._reports = [self._report() for _ in range(STAGING_BUFFERS)]
        """Host memory for the reports of later steps."""

    # ---- start-up ----

    def use_draft(self, model: Decoder, stored: torch.dtype) -> GpuDraftModel:
        """Let this model, or these draft heads, guess where a row has OWN_GUESS. To be called before anything is
        captured. The caller allocates its pool."""
        guesses, settings, self.forward.drafts = self.forward.own_guesses, self.sampler.settings, True
        shared = self.ops, self.block_size, self.slots, self.step_tokens, stored, self._tables, settings, guesses
        if isinstance(model, DraftHeads):
            self.draft = heads = GpuHeads(model, *shared)
            self.model.hidden = self.kv.hidden = heads.hidden
        else:
            parallel = model.config.mask_token is not None
            self.draft = GpuParallelDraft(model, *shared) if parallel else GpuDraftModel(model, *shared)
        return self.draft

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
        adapters = self.adapters.step(self.step_tokens) if self.adapters else None
        self.forward.run(sizes, Kind.ANY, self.step_tokens, adapters=adapters)
        torch.cuda.synchronize()
        logits = self.model.config.vocab_size * self.model.embedding.dtype.itemsize
        graphs = [*self.graphs.wanted(), *self.graphs.wanted_guesses()]
        kept = logits * sum(samples for (_, _, samples), _ in graphs) * (2 if self.adapters else 1)
        return int(torch.cuda.max_memory_allocated() - before) * 2 + kept

    @torch.inference_mode()
    def capture(self, progress: Callable[[int, int], None]) -> None:
        """Capture the graphs, the largest first: the others share its memory. Steps with adapters have graphs of their
        own, so that steps without any pay nothing."""
        kinds = [(self.graphs, False), *([(self.adapted_graphs, True)] if self.adapters else [])]
        wanted = [(graphs, adapted, *each) for graphs, adapted in kinds for each in graphs.wanted()]
        guesses = [(graphs, adapted, *each) for graphs, adapted in kinds for each in graphs.wanted_guesses()]
        total, pool = len(wanted) + len(guesses), torch.cuda.graph_pool_handle()
        with nothing_collected():
            self._upload.capture(pool)
            for done, (graphs, adapted, sizes, kind) in enumerate(wanted):
                progress(done, total)
                self._send_alone(step_words.empty_step(), sizes)
                computed = graphs.capture(sizes, kind, self._compute(sizes, adapted), pool)
                if computed is not None and kind is Kind.ANSWERS:
                    self._masked.capture(computed.logits, pool)
            for done, (graphs, adapted, sizes, longest) in enumerate(guesses, len(wanted)):
                progress(done, total)
                self._capture_guesses(graphs, adapted, sizes, longest, pool)
            if self.draft is not None:
                self.draft.capture()
            progress(total, total)

    def _compute(self, sizes: Sizes, adapted: bool) -> Callable[[Sizes, Kind, int], Computed | None]:
        """What a graph of these sizes captures."""
        adapters = self.adapters.step(sizes[0]) if self.adapters and adapted else None
        return partial(self.forward.run, adapters=adapters)

    @torch.inference_mode()
    def force_acceptance(self, chance: float | None) -> None:
        """For measurements: let guesses count as right with this chance, whatever is drawn; None: as they are. Captures
        the steps with guesses anew."""
        self.forward.forced_acceptance = chance
        self.graphs.captured[Kind.GUESSES].clear()
        pool = torch.cuda.graph_pool_handle()
        with nothing_collected():
            for sizes, longest in self.graphs.wanted_guesses():
                self._capture_guesses(self.graphs, False, sizes, longest, pool)

    def _capture_guesses(self, graphs: Graphs, adapted: bool, sizes: Sizes, longest: int, pool: Any) -> None:
        self._send_alone(step_words.empty_step(), sizes)
        graphs.capture(sizes, Kind.GUESSES, self._compute(sizes, adapted), pool, longest)

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
            computed = self.forward.run(sizes, Kind.ANY, sizes[0] - 1)
            if computed is not None:
                self._masked.warm_up(computed.logits)
        model, layer = self.model, self.model.layers[0]
        for tokens in range(_SIZES_APART, self.step_tokens + 1, _SIZES_APART):
            x = model.embedding.new_zeros(tokens, model.config.hidden_size)
            layer.attention.qkv.norm_matmul(x, layer.attention.norm)
            layer.attention.output.add_matmul(x, x.new_zeros(tokens, layer.attention.output.inputs))
            layer.mlp(x)
        for samples in range(8, self.slots + 1, 8) if model.draws else ():
            model.logits(model.embedding.new_zeros(samples, model.config.hidden_size))
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    @torch.inference_mode()
    def launch_all(self) -> None:
        """Launch each kernel of a start, in its order and without capturing anything, so that all can be compiled."""
        self.measure_workspace()
        self._upload.launch_edits()
        steps = [(*each, long_tokens(*each)) for each in self.graphs.wanted()]
        guesses = [(sizes, Kind.GUESSES, longest) for sizes, longest in self.graphs.wanted_guesses()]
        kinds = (False, True) if self.adapters else (False,)
        for adapted, sizes, kind, most in ((x, *each) for some in (steps, guesses) for x in kinds for each in some):
            self._send_alone(step_words.empty_step(), sizes)
            computed = self._compute(sizes, adapted)(sizes, kind, most)
            if computed is not None and kind is Kind.ANSWERS:
                self._masked.warm_up(computed.logits)
        if self.draft is not None:
            self.draft.launch_all()
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
        self._pending.clear()
        here, later = self._read(edits, words[HEADER_WORDS:])
        contexts = [self._computed[slot] + length for slot, length in zip(rows.slots, rows.lengths, strict=True)]
        step = self._begin(StepRows(rows, contexts, self.sampler.masked), here, later)
        for slot, context in zip(rows.slots, contexts, strict=True):
            self._computed[slot] = context
        return step

    def draw(self, step: GpuStep, masks: Masks) -> None:
        """Put the draws of the rows with masks into the stream."""
        assert step.masked is not None, "the step has no rows with masks"
        self._masked.draw(step.masked, masks)
        step.done = self._event()

    def done(self, step: GpuStep) -> bool:
        """Whether the device has finished a step."""
        done: Any = step.done
        return done is None or bool(done.query())

    def collect(self, step: GpuStep) -> StepResult:
        """Wait for a step and return its results."""
        if step.done is not None:
            self._layer_events.follow(step.layers, step.done)
            step.done.synchronize()
        drawn, own = step.drawn(), step.logprobs()
        if step.rows.guesses:
            return self._collect_guesses(step, drawn, own)
        finite = step.finite()
        sampled = Sampled([[token] for token in drawn], [[x] for x in own] if own else None, step.tops.lists())
        if step.masked is not None:
            self._masked.collect(step.masked)
            sampled = merged(sampled, step.masked)
        scores = step.prompts.results() if step.prompts is not None else NO_SCORES
        self._upload.landed(step.number)
        self._reports.append(step.report)
        return StepResult(finite, sampled, scores)

    def _collect_guesses(self, step: GpuStep, drawn: list[int], own: list[float]) -> StepResult:
        """The results of a step with guesses: of each row the draws that are kept. It is the only one in flight."""
        rows, logprobs, tops, counts = step.rows, None, step.tops.lists(), step.kept()
        if step.masked is not None:
            self._masked.collect(step.masked)
            for row in {rows.sampling[line] for line in step.masked.lines}:
                counts[row] = step.masked.kept[row]
            lines = Sampled([[token] for token in drawn], [[x] for x in own] if own else None, tops)
            lines = merged(lines, step.masked)
            drawn, tops = [token for (token,) in lines.tokens], lines.tops
            own = [x for (x,) in lines.logprobs] if lines.logprobs else []
        starts = [end - length for end, length in zip(rows.ends, rows.rows.lengths, strict=True)]
        finite = []
        for slot, context, length, count in zip(rows.rows.slots, rows.contexts, rows.rows.lengths, counts, strict=True):
            self._computed[slot] = context - length + count
            finite.append(count > 0 or length > 1)
            if not count:
                self._clear(slot, context - length, context)
        pieces = [slice(start, start + count) for start, count in zip(starts, counts, strict=True)]
        if own:
            logprobs = [own[piece] for piece in pieces]
        tokens = [drawn[piece] for piece in pieces]
        likely = None if tops is None else [[top for (top,) in tops[piece]] for piece in pieces]
        self._upload.landed(step.number)
        self._reports.append(step.report)
        return StepResult(finite, Sampled(tokens, logprobs, likely))

    def _clear(self, slot: int, first: int, end: int) -> None:
        """Zero keys and values of a slot's tokens: some are not finite."""
        positions = torch.arange(first, end, device=self.device)
        blocks = self._tables[slot].long()[positions // self.block_size]
        slot_mapping = blocks * self.block_size + positions % self.block_size
        for layer in self.kv.layers:
            zeros = self.model.embedding.new_zeros(end - first, 2 * layer.shape[3], layer.shape[4])
            kv_pages.store(layer, slot_mapping, zeros, None)

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
        long_tokens = count if count > self.ops.short_tokens else 0
        return DecoderInspection(self.model, self.forward.step_of(inputs, long_tokens, None), self.kv.layers)

    def gap_s(self, before: GpuStep, after: GpuStep) -> float:
        """Seconds that the device idled between two steps that are over, both launched with `measure_gaps`."""
        assert before.done is not None
        assert after.began is not None
        return max(0.0, float(before.done.elapsed_time(after.began)) / 1e3)

    def _begin(self, rows: StepRows, edits: DeviceEdits, later: list[_SlotEdit]) -> GpuStep:
        scored = {slot: data.tolist() for edit, slot, data in later if edit is Edit.SCORE}
        began, wanted = None, self._wanted(rows)
        if self.draft is not None and self._pending:
            began = self._guess(self.draft, rows, wanted, edits, later)
            edits, later = NO_EDITS, []
        prompts = PromptLines(ScoredRows.of(scored, rows.rows), self.device) if scored else None
        owners = [self._adapter_slots[slot] for slot in rows.rows.slots] if self.adapters else []
        graphs = self.adapted_graphs if any(owners) else self.graphs
        if rows.guesses:
            graph = graphs.find_guesses(rows.sizes[1], rows.guesses)
        else:
            graph = graphs.find(*rows.sizes[:2], rows.kind) if prompts is None else None
        sizes = graph.sizes if graph else self._eager_sizes(rows)
        # All memory is allocated before the step is launched: had the draws run, slots would have advanced.
        slots = [rows.rows.slots[row] for row in rows.sampling]
        self._masked.begin()
        masked = self._begin_masked(rows, slots) if rows.masked and self.model.draws else None
        asked = [self.sampler.logprobs[slot] if masked is None or slot not in rows.masked else -1 for slot in slots]
        tops = TopLogprobs(asked, self.model.config.vocab_size, self.device)
        report = self._reports.pop() if self._reports else self._report()
        number, buffer = self._upload.begin()
        end = rows.lay_out(self._upload.staging_buffers[buffer], HEADER, sizes)
        self._upload.send(buffer, end, edits)
        adapters = None
        if self.adapters is not None and any(owners):
            adapters = self.adapters.send(np.repeat(owners, rows.rows.lengths), sizes[0], buffer)
        self._edit_logits(later)
        self.sampler.lift_bans(rows.rows.slots, rows.contexts)
        if self.sampler.has_bad_words:
            self._mark_bad_words(rows)
        began, marks = began or self._began(), list[Mark]()
        if graph:
            graph.replay()
            computed = graph.computed
        elif rows.guesses:
            computed = self.forward.run(sizes, Kind.GUESSES, rows.guesses + 1, adapters=adapters)
        else:
            long_tokens = sum(length for length in rows.rows.lengths if length > self.ops.short_tokens)
            kind = Kind.ANSWERS if rows.answers else Kind.ANY
            with self._layer_events.recorded() as marks:
                computed = self.forward.run(sizes, kind, long_tokens, prompts, adapters)
        if computed is not None:
            report.tensor[: len(computed.report)].copy_(computed.report, non_blocking=True)
            tops.send(computed.logits, computed.samples.totals)
            if masked is not None:
                self._masked.launched(masked, computed.logits, computed.guessed)
        step = GpuStep(number, rows, sizes[2], report, tops, self._event(), began, masked, prompts, marks)
        self._follow(rows, sizes, computed)
        return step

    def _wanted(self, rows: StepRows) -> dict[int, int]:
        """Guesses that the draft model is to make for each slot. Those that follow the last step need nothing."""
        if self.draft is None or not rows.guesses:
            return {}
        wanted = {}
        for slot, length, end in zip(rows.rows.slots, rows.rows.lengths, rows.ends, strict=True):
            if length > 1 and rows.rows.ids[end - 1] == OWN_GUESS:
                if length - 1 <= self._followed.get(slot, 0):
                    self._pending.pop(slot, None)
                else:
                    wanted[slot] = length - 1
        return wanted

    def _follow(self, rows: StepRows, sizes: Sizes, computed: Computed | None) -> None:
        """Let the draft model guess behind the second step with guesses and later ones, so that the device has work
        while the host reads and plans. Guesses that the next step does not need are dropped."""
        follows, self._guessed = self._guessed and rows.guesses > 0, rows.guesses > 0
        self._followed = {}
        if follows and computed is not None and self.draft is not None:
            kept = computed.report[step_io.aligned(3 * sizes[2]) :]
            checked = CheckedStep(self._upload.words, sizes, kept, self.forward.last_token)
            self._followed = self.draft.follow(rows, checked, self._covered)

    def _guess(
        self,
        draft: GpuDraftModel,
        rows: StepRows,
        wanted: dict[int, int],
        edits: DeviceEdits,
        later: list[_SlotEdit],
    ) -> Any:
        """Apply the edits and launch the draft model, before the host lays out the step that reads its guesses: the
        device is idle until then. -> as `_began`."""
        if edits:
            _, buffer = self._upload.begin()
            self._upload.send(buffer, HEADER, edits)
        self._edit_logits(later)
        self.sampler.lift_bans(rows.rows.slots, rows.contexts)
        began = self._began()
        draft.launch(self._pending, wanted)
        return began

    def _begin_masked(self, rows: StepRows, slots: list[int]) -> MaskedRows | None:
        """The rows of a step with masks; None if there are none. slots [S]: those of the rows that sample."""
        lines = [line for line, slot in enumerate(slots) if slot in rows.masked]
        if not lines:
            return None
        later = [slot in rows.masked for slot in slots]
        asked = [self.sampler.logprobs[slot] if mask else -1 for slot, mask in zip(slots, later, strict=True)]
        return MaskedRows(
            lines=lines,
            slots=[slot if mask else self.slots for slot, mask in zip(slots, later, strict=True)],
            positions=[
                self.sampler.position(slot, rows.contexts[row] - after)
                for slot, row, after in zip(slots, rows.sampling, rows.afters, strict=True)
            ],
            tops=TopLogprobs(asked, self.model.config.vocab_size, self.device),
            rows=len(rows.contexts) if rows.guesses else 0,
        )

    def _mark_bad_words(self, rows: StepRows) -> None:
        for row in rows.sampling:
            slot = rows.rows.slots[row]
            drawn = rows.rows.ids[rows.ends[row] - 1] == LAST_TOKEN
            last_token = self.forward.last_token[slot : slot + 1] if drawn else None
            self.sampler.mark_bad_words(slot, rows.contexts[row], last_token)

    def _eager_sizes(self, rows: StepRows) -> Sizes:
        """Sizes of a step without a graph. Rows that sample are padded to a multiple of 8, like graphs of answers: for
        other sizes of the last products the vendor's library may have to load kernels."""
        tokens, count, samples = rows.sizes
        return rows.sizes if rows.answers or rows.guesses else (tokens, count, min(-(-samples // 8) * 8, self.slots))

    def _report(self) -> Report:
        """Host memory for the report of any step."""
        most = step_io.aligned(3 * self._most_samples) + max(self.step_tokens, self.slots)
        return Report(most, self.device.type == "cuda")

    def _began(self) -> Any:
        """Marks when the device can start a step's first kernel, if gaps are measured."""
        return self._event() if self.measure_gaps else None

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
                self._covered[slot] = (int(data[0]) + len(data) - 1) * self.block_size
            elif edit is Edit.ADMIT:
                admitted.append(at)
                state = SlotState.read(data)
                self._computed[slot] = state.computed
                self._adapter_slots[slot] = self._covered[slot] = 0
                self._followed.pop(slot, None)
                self.sampler.admit(slot, state)
            elif edit is Edit.DRAFT:
                self._pending[slot] = int(data[0]), data[1:].tolist()
            elif edit is Edit.MASK:
                self.sampler.mask(slot)
            elif edit is Edit.ADAPTER:
                self._adapter_slots[slot] = int(data[0])
                if self.adapters is not None:
                    self.adapters.await_copy(int(data[0]))
            elif edit is Edit.RELEASE:
                self.sampler.release(slot)
            else:
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
            elif edit is Edit.FORBID:
                self.sampler.forbid(slot, data)
            elif edit is not Edit.SCORE:
                self.sampler.ban(slot, int(data[0]), data[1:])
