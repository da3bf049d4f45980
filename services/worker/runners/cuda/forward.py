"""The kernels of a step on a GPU, from its words to its report, as a graph captures them. Knows slots, never jobs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import attention, sampling, step_io
from kernels.attention import AttentionPlan
from kernels.attention.short_prefill import ShortPrefillPlan
from kernels.sampling.slot_settings import Samples, SlotSettings
from kernels.step_io import StepInputs
from services.worker.models.decoder import Decoder
from services.worker.models.layers import StepTensors
from services.worker.models.ops import RopeTables
from services.worker.runners.cuda.kv_pool import GpuPool
from services.worker.runners.cuda.ops import TritonOps
from services.worker.runners.cuda.step_words import Kind, Sizes


@dataclass(frozen=True, slots=True)
class Computed:
    """The results of a step, on the device."""

    logits: Tensor
    samples: Samples
    report: Tensor
    """int32: the three lists of S that `step_io.store_sampled` writes; then, unless all rows are answers, for each
    token whether its line is finite."""


class GpuForward:
    """The kernels of a step, in their order. The last slot is for padding."""

    def __init__(
        self, model: Decoder, ops: TritonOps, pool: GpuPool, words: Tensor, tables: Tensor, settings: SlotSettings
    ) -> None:
        """words int32: the words of each step, as `kernels.step_io` defines them; tables int32 [slots + 1, B]: the
        blocks of each slot; settings: how its tokens are drawn. Edits change both before the step."""
        self._model, self._ops, self._pool = model, ops, pool
        self._words, self._tables, self._settings = words, tables, settings
        self._windows = set(model.config.windows)
        self._last_token = torch.zeros(len(tables), dtype=torch.int64, device=tables.device)
        self._row_tables = torch.zeros_like(tables[:-1])

    @torch.inference_mode()
    def run(self, sizes: Sizes, kind: Kind, long_tokens: int) -> Computed:
        """Compute the step whose words are on the device. `long_tokens` as in `attention.plan_attention`."""
        model = self._model
        tokens, _, samples = sizes
        answers = kind is Kind.ANSWERS
        inputs = step_io.step_inputs(self._words, *sizes, self._row_tables)
        finite_at = step_io.aligned(3 * samples)
        size = finite_at + (0 if answers else tokens)
        report = torch.empty(size, dtype=torch.int32, device=self._words.device)
        step_io.unpack(
            self._words, self._last_token, self._settings.prompt_len, self._tables, inputs, self._pool.block_size
        )
        step = self.step_of(inputs, long_tokens, None if answers else inputs.sampled, kind)
        x, seen = model.forward(step, self._pool.layers)
        if not answers:
            step_io.finite_lines(seen, report[finite_at:])
        logits = model.logits(x)
        drawn = sampling.sample(logits, self._settings, inputs.sample_slots, inputs.sample_positions)
        lists = report[: 3 * samples].view(3, samples)
        step_io.store_sampled(drawn.tokens, drawn.logprobs, drawn.totals, inputs.sample_slots, self._last_token, lists)
        return Computed(logits, drawn, report)

    def step_of(
        self, inputs: StepInputs, long_tokens: int, sampled: Tensor | None, kind: Kind = Kind.ANY
    ) -> StepTensors:
        """What the layers share of a step whose inputs are on the device. sampled as in `StepTensors`."""
        return StepTensors(
            token_ids=inputs.token_ids,
            positions=inputs.positions,
            rope=RopeTables(self._model.cos, self._model.sin, inputs.positions),
            slot_mapping=inputs.slot_mapping,
            plans={window: self._plan(inputs, window, long_tokens, kind) for window in self._windows},
            sampled=sampled,
        )

    def _plan(
        self, inputs: StepInputs, window: int | None, long_tokens: int, kind: Kind
    ) -> AttentionPlan | ShortPrefillPlan:
        if kind is Kind.BRIEF:
            return ShortPrefillPlan(inputs.starts, inputs.contexts, inputs.tables)
        config, dtype, ops, pool = self._model.config, self._model.embedding.dtype, self._ops, self._pool
        shapes = attention.config_for(config.head_dim, dtype, len(inputs.contexts), ops.invariant, pool.stored)
        return attention.plan_attention(
            inputs.starts, inputs.contexts, inputs.tables, config.heads, config.kv_heads, config.head_dim,
            pool.block_size, dtype, window, ops.short_tokens, long_tokens, shapes,
        )  # fmt: skip
