"""Loads a draft model for a runner, and computes the bytes and the context that it has there."""

from typing import TYPE_CHECKING

from services.worker.build.drafting.draft import draft_options
from services.worker.build.weights import WeightSource, bytes_of_block, stored_dtype
from services.worker.models.draft_heads import HeadsConfig
from services.worker.options import EngineOptions, Progress
from services.worker.runners.cpu.drafts.draft_model import CpuDraftModel
from services.worker.runners.cpu.drafts.parallel_draft import CpuParallelDraft
from services.worker.runners.cpu.ops import ReferenceOps

if TYPE_CHECKING:
    from services.worker.runners.cuda.drafts.draft_model import GpuDraftModel
    from services.worker.runners.cuda.ops import TritonOps
    from services.worker.runners.cuda.runner import GpuRunner

DRAFT_WORKSPACE = 512 << 20
"""Bytes of the steps of a draft model or heads on a GPU: 640 tokens and 320 lines of logits in graphs, and 2,048 tokens
that are caught up."""


def draft_context(draft: WeightSource, max_length: int) -> int:
    """Tokens of the context of a draft model beside a model of this length."""
    return min(max_length, draft.config.context_length)


def redoes_guesses(draft: WeightSource | None, heads: HeadsConfig | None) -> bool:
    """Whether right guesses are computed once more, as in `DraftProgress`: by heads and a parallel draft model."""
    return heads is not None or (draft is not None and draft.config.mask_token is not None)


def draft_bytes_of_block(draft: WeightSource, options: EngineOptions) -> int:
    """Bytes of one block's keys and values of the draft model."""
    return bytes_of_block(draft.config, options, stored_dtype(draft.config, draft_options(options)))


def load_cpu_draft(
    draft: WeightSource, options: EngineOptions, ops: ReferenceOps, context: int, blocks: int, progress: Progress
) -> CpuDraftModel:
    """The draft model of a CPU's runner. Raises CheckpointError."""
    own = draft_options(options)
    model = draft.load(ops, context, own, progress)
    made = CpuParallelDraft if draft.config.mask_token is not None else CpuDraftModel
    return made(model, ops, blocks, options.block_size, stored_dtype(draft.config, own))


def load_gpu_draft(
    draft: WeightSource,
    options: EngineOptions,
    runner: "GpuRunner",
    ops: "TritonOps",
    context: int,
    progress: Progress,
) -> "GpuDraftModel":
    """The draft model of a GPU's runner, which is to allocate its pool. Raises CheckpointError."""
    own = draft_options(options)
    return runner.use_draft(draft.load(ops, context, own, progress), stored_dtype(draft.config, own))
