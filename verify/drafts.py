"""Measures how often a base accepts what a draft model or draft heads guess, by depth. Knows engines, no weights.

The base's worker guesses while it answers the beginnings of held-out windows: what is accepted is what its users would
see, and not what a comparison of two distributions promises.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from compress.progress import Progress
from services.worker.build.choose import build_engine
from services.worker.errors import CheckpointError
from services.worker.job import Job, SamplingParams
from services.worker.options import EngineOptions

TEMPERATURES = (0.0, 1.0)
PROMPT_TOKENS, ANSWER_TOKENS = 24, 64


def measure_drafts(
    base: Path, drafts: Sequence[str], depth: int, windows_WT: Tensor, progress: Progress, device: str = "cpu"
) -> list[dict[str, Any]]:
    """For each draft (draft:MODEL or heads:PATH) and temperature: the tokens that a step of guesses draws, and by
    depth the share of guesses that are kept. Raises CheckpointError."""
    found = []
    for done, draft in enumerate(drafts):
        progress("drafts", done, len(drafts))
        for temperature in TEMPERATURES:
            found.append(
                {
                    "name": draft,
                    "temperature": temperature,
                    **_accepted(base, draft, depth, temperature, windows_WT, device),
                }
            )
    progress("drafts", len(drafts), len(drafts))
    return found


def _accepted(
    base: Path, draft: str, depth: int, temperature: float, windows_WT: Tensor, device: str
) -> dict[str, Any]:
    options = EngineOptions(
        engine="torch" if device == "cpu" else "gpu",
        dtype="float32" if device == "cpu" else "bfloat16",
        max_batch_size=len(windows_WT),
        kv_blocks=len(windows_WT) * (-(-(PROMPT_TOKENS + ANSWER_TOKENS) // 16) + 1),
        max_seq_length=PROMPT_TOKENS + ANSWER_TOKENS,
        speculate=draft,
        speculate_depth=depth,
    )
    try:
        engine = build_engine(base, options, lambda *_: None).engine
    except CheckpointError as error:
        raise CheckpointError(f"{draft}: {error}") from None
    for key, ids_T in enumerate(windows_WT):
        prompt = ids_T[:PROMPT_TOKENS].tolist()
        params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=temperature, seed=key, ignore_eos=True)
        engine.submit(Job(key, prompt, len(prompt), params))
    while engine.has_work():
        engine.step()
    counts = engine.stats().guesses
    shares = [a / max(d, 1) for a, d in zip(counts.accepted_at, counts.drafted_at, strict=True)]
    return {"accepted_length": 1 + counts.accepted / max(counts.rows, 1), "by_depth": shares}
