"""Makes the speculation that the options ask for. Knows the proposers by name, no device."""

from collections.abc import Callable

from services.worker.options import EngineOptions
from services.worker.runners.step import CATCH_UP_TOKENS, DEVICE_CATCH_UP_TOKENS
from services.worker.speculative.draft_model import DraftProgress
from services.worker.speculative.ngram import NgramProposer
from services.worker.speculative.proposer import Proposer
from services.worker.speculative.speculation import Speculation
from services.worker.speculative.suffix import SuffixProposer


def make_speculation(
    options: EngineOptions,
    draft_context: int,
    overlaps: bool = False,
    limit: Callable[[int], int] | None = None,
    redo_guesses: bool = False,
) -> Speculation | None:
    """None without a proposer of guesses. overlaps and limit as in `Speculation`; steps overlap on devices alone.
    draft_context: tokens of the context of the runner's draft model or heads, if any; redo_guesses as in
    `DraftProgress`."""
    if not options.speculate:
        return None
    proposer: Proposer | DraftProgress = NgramProposer()
    if options.draft or options.heads:
        most = min(DEVICE_CATCH_UP_TOKENS, options.step_tokens) if overlaps else CATCH_UP_TOKENS
        proposer = DraftProgress(options.block_size, draft_context, redo_guesses, most)
    elif options.speculate == "suffix":
        proposer = SuffixProposer()
    return Speculation(proposer, options.speculate_depth, overlaps=overlaps, limit=limit)
