"""The kernels of a step on a GPU, from its words to its report, as a graph captures them. Knows slots, never jobs."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels import attention, sampling, step_io
from kernels.attention import AttentionPlan
from kernels.attention.short_prefill import ShortPrefillPlan
from kernels.drafts import guesses
from kernels.sampling.slot_settings import Samples, SlotSettings
from kernels.step_io import StepInputs
from services.worker.models.decoder import Decoder
from services.worker.models.layers import StepTensors
from services.worker.models.ops import RopeTables
from services.worker.runners.cuda.adapters import TiledAdapters
from services.worker.runners.cuda.kv_pool import GpuPool
from services.worker.runners.cuda.ops import TritonOps
from services.worker.runners.cuda.scores import PromptLines
from services.worker.runners.cuda.step_words import Kind, Sizes
from services.worker.runners.step import MOST_GUESSES

Features = Callable[[StepInputs], Tensor | None]
"""From the inputs of a step to what draft heads read beside its tokens, [T, width]; None: the tokens alone are read."""


@dataclass(frozen=True, slots=True)
class Computed:
    """The results of a step, on the device."""

    logits: Tensor
    samples: Samples
    report: Tensor
    """int32: the three lists of S that `step_io.store_sampled` writes; then, unless all rows are answers, for each
    token whether its line is finite, or in a step with guesses for each row how many draws are kept."""
    guessed: StepInputs | None = None
    """The inputs of a step with guesses."""


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
        self.last_token = torch.zeros(len(tables), dtype=torch.int64, device=tables.device)
        """int64 [slots + 1]: the token that each slot drew last."""
        self.own_guesses = torch.zeros(len(tables), MOST_GUESSES, dtype=torch.int32, device=tables.device)
        """int32 [slots + 1, MOST_GUESSES]: what a draft model guesses after the slots' last tokens."""
        self.drafts = False
        """Whether there is a draft model, so that ranks have to agree on its guesses."""
        self._row_tables = torch.zeros_like(tables[:-1])
        self._no_guesses = torch.zeros(len(tables) * MOST_GUESSES, dtype=torch.int32, device=tables.device)
        self.forced_acceptance: float | None = None
        """For measurements: guesses count as right with this chance, whatever is drawn."""

    @torch.inference_mode()
    def run(
        self,
        sizes: Sizes,
        kind: Kind,
        long_tokens: int,
        prompts: PromptLines | None = None,
        adapters: TiledAdapters | None = None,
    ) -> Computed | None:
        """Compute the step whose words are on the device -> its results; None from a part of a model without logits.
        `long_tokens` as in `attention.plan_attention`. `prompts`: lines whose log-probabilities are asked for, in a
        step that is not of answers alone. `adapters`: of its tokens; None: no token has one."""
        if kind is Kind.GUESSES:
            return self._run_guesses(sizes, long_tokens, adapters)
        model = self._model
        tokens, _, samples = sizes
        answers = kind is Kind.ANSWERS
        inputs = step_io.step_inputs(self._words, *sizes, self._row_tables)
        finite_at = step_io.aligned(3 * samples)
        size = finite_at + (0 if answers else tokens)
        report = torch.empty(size, dtype=torch.int32, device=self._words.device)
        step_io.unpack(
            self._words, self.last_token, self._settings.prompt_len, self._tables, inputs, self._pool.block_size
        )
        sampled = None if answers else inputs.sampled
        if prompts is not None:
            sampled = torch.cat([inputs.sampled, prompts.lines])
        step = replace(self.step_of(inputs, long_tokens, sampled, kind), adapters=adapters)
        x, seen = model.forward(step, self._pool.layers)
        if not model.draws:
            return None
        if prompts is not None:
            prompts.score(model, x[samples:])
            x = x[:samples]
        if not answers:
            step_io.finite_lines(seen, report[finite_at:])
        logits = model.logits(x)
        drawn = sampling.sample(logits, self._settings, inputs.sample_slots, inputs.sample_positions)
        lists = report[: 3 * samples].view(3, samples)
        step_io.store_sampled(drawn.tokens, drawn.logprobs, drawn.totals, inputs.sample_slots, self.last_token, lists)
        return Computed(logits, drawn, report)

    def _run_guesses(self, sizes: Sizes, longest: int, adapters: TiledAdapters | None) -> Computed:
        """A step with guesses, of rows of up to `longest` tokens."""
        tokens, rows, samples = sizes
        assert tokens == samples, sizes
        model, settings = self._model, self._settings
        inputs = step_io.step_inputs(self._words, *sizes, self._row_tables, guesses=True)
        counts_at = step_io.aligned(3 * samples)
        report = torch.empty(counts_at + rows, dtype=torch.int32, device=self._words.device)
        scratch = torch.empty_like(self.last_token)
        step_io.unpack(
            self._words, self.last_token, settings.prompt_len, self._tables, inputs, self._pool.block_size,
            model.agreed(self.own_guesses) if self.drafts else self.own_guesses,
        )  # fmt: skip
        step = replace(self.step_of(inputs, 0, None, Kind.GUESSES, longest), adapters=adapters)
        x, _ = model.forward(step, self._pool.layers)
        logits = model.logits(x)
        drawn = sampling.sample(
            logits, settings, inputs.sample_slots, inputs.sample_positions, guesses=inputs.token_ids,
            places=inputs.places,
        )  # fmt: skip
        guesses.accept(
            drawn.tokens, drawn.totals, inputs.token_ids, inputs.starts, inputs.sample_slots, inputs.sample_positions,
            settings, self.last_token, report[counts_at:], self.forced_acceptance,
        )  # fmt: skip
        lists = report[: 3 * samples].view(3, samples)
        step_io.store_sampled(drawn.tokens, drawn.logprobs, drawn.totals, inputs.sample_slots, scratch, lists)
        return Computed(logits, drawn, report, inputs)

    @torch.inference_mode()
    def guess(
        self, words: Tensor, rows: int, longest: int, features: Features, draws: int = 1
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw after each row of up to `longest` tokens, for a draft model, in a step with these words. draws: samples
        of each row; several are after its last tokens. -> S tokens and their slots, int64 [S], and the residual stream
        [S, width] that they are drawn from. The slots' last tokens and the histories of penalties stay as they are."""
        model, settings, samples = self._model, self._settings, rows * draws
        inputs = step_io.step_inputs(words, rows * longest, rows, samples, self._row_tables, guesses=draws > 1)
        step_io.unpack(
            words, self.last_token, settings.prompt_len, self._tables, inputs, self._pool.block_size,
            self.own_guesses if draws > 1 else None,
        )  # fmt: skip
        step = self.step_of(inputs, 0, inputs.sampled if longest > 1 else None, Kind.GUESSES, longest)
        x, _ = model.forward(replace(step, features=features(inputs)), self._pool.layers)
        drawn = sampling.sample(
            model.logits(x), settings, inputs.sample_slots, inputs.sample_positions, guesses=inputs.sample_slots,
            places=self._no_guesses[:samples],
        )  # fmt: skip
        return drawn.tokens, inputs.sample_slots, x

    @torch.inference_mode()
    def compute(self, sizes: Sizes, long_tokens: int, features: Features) -> None:
        """Compute a step from which nothing is sampled, for a draft model."""
        inputs = step_io.step_inputs(self._words, *sizes, self._row_tables)
        prompts = self._settings.prompt_len
        step_io.unpack(self._words, self.last_token, prompts, self._tables, inputs, self._pool.block_size)
        step = self.step_of(inputs, long_tokens, inputs.sampled)
        self._model.forward(replace(step, features=features(inputs)), self._pool.layers)

    def step_of(
        self, inputs: StepInputs, long_tokens: int, sampled: Tensor | None, kind: Kind = Kind.ANY, longest: int = 1
    ) -> StepTensors:
        """What the layers share of a step whose inputs are on the device. sampled as in `StepTensors`."""
        return StepTensors(
            token_ids=inputs.token_ids,
            positions=inputs.positions,
            ropes=self._model.ropes(lambda cos, sin: RopeTables(cos, sin, inputs.positions)),
            slot_mapping=inputs.slot_mapping,
            plans={window: self._plan(inputs, window, long_tokens, kind, longest) for window in self._windows},
            sampled=sampled,
        )

    def _plan(
        self, inputs: StepInputs, window: int | None, long_tokens: int, kind: Kind, longest: int
    ) -> AttentionPlan | ShortPrefillPlan:
        if kind is Kind.SHORT_CONTEXT:
            return ShortPrefillPlan(inputs.starts, inputs.contexts, inputs.tables)
        config, dtype, ops, pool = self._model.config, self._model.embedding.dtype, self._ops, self._pool
        short, rows = max(ops.short_tokens, longest), len(inputs.contexts)
        shapes = attention.config_for(config.head_dim, dtype, rows, ops.invariant, pool.stored, short, long_tokens)
        return attention.plan_attention(
            inputs.starts, inputs.contexts, inputs.tables, config.heads, config.kv_heads, config.head_dim,
            pool.block_size, dtype, window, short, long_tokens, shapes, config.has_plain_scores,
        )  # fmt: skip
