"""Draft models that guess several tokens in one pass (PARD, An et al., arXiv:2504.18583): what such a student reads.

Behind the last known token come copies of one mask token. The logits at the last known token are the first guess, those
at the i-th mask are guess i + 1. In training the masks follow tokens at random places of a window, the anchors, and all
of them are read at once: a mask sees the tokens up to its anchor and the masks between.

Legend: B windows, T tokens of a window, A anchors, K guesses, S = T + A M places: the tokens, then the masks,
M = K - 1 of each anchor.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compress import text
from compress.errors import CompressError

CONFIG_KEY = "pard_token"
"""What vLLM calls the mask token in config.json."""


@dataclass(frozen=True, slots=True)
class Parallel:
    """How many tokens are guessed in one pass, and the token that stands for those that are not known yet."""

    guesses: int
    mask_token: int


@dataclass(frozen=True, slots=True)
class Places:
    """What the student reads of a window, the same in all windows of a batch."""

    position_S: Tensor
    anchor_S: Tensor
    """The position of the last token that a place knows: a token's own, a mask's anchor."""
    tokens: int

    def filled(self, ids_BT: Tensor, mask_token: int) -> Tensor:
        """The tokens and the masks behind them [B, S]."""
        return F.pad(ids_BT, (0, len(self.position_S) - self.tokens), value=mask_token)

    def where(self, config: Any) -> dict[str, Any]:
        """The position of each place and the places that it attends to, as transformers' networks take them."""
        ahead_SS = self.position_S[:, None] - self.position_S
        is_token_S = torch.arange(len(self.position_S), device=self.position_S.device) < self.tokens
        known_SS = self.position_S <= self.anchor_S[:, None]
        between_SS = (self.anchor_S[:, None] == self.anchor_S) & (ahead_SS >= 0)
        seen = torch.where(is_token_S, known_SS, between_SS)[None, None]
        masks: Any = seen
        if window := getattr(config, "sliding_window", None):
            near = seen & (ahead_SS < window)
            masks = {"full_attention": seen, "sliding_attention": near} if hasattr(config, "layer_types") else near
        return {"attention_mask": masks, "position_ids": self.position_S[None]}


def random_places(tokens: int, guesses: int, device: torch.device) -> Places:
    """About as many masks as tokens, behind anchors that torch's generator draws. After each mask a token follows."""
    return places(torch.randperm(tokens - guesses, device=device)[: tokens // (guesses - 1)], tokens, guesses)


def places(anchor_A: Tensor, tokens: int, guesses: int) -> Places:
    """The tokens, and the masks behind each anchor; no anchor may be given twice."""
    ahead_M = torch.arange(1, guesses, device=anchor_A.device)
    position_T = torch.arange(tokens, device=anchor_A.device)
    position_AM = anchor_A[:, None] + ahead_M
    return Places(
        torch.cat((position_T, position_AM.flatten())),
        torch.cat((position_T, anchor_A.repeat_interleave(guesses - 1))),
        tokens,
    )


def parallel_aim(
    student: Path, config: Any, windows_WT: Tensor, guesses: int, mask_token: int | None = None
) -> Parallel:
    """What the student learns; without a `mask_token` it is the student's own, else one that its tokenizer lacks, else
    one that pads or ends texts.

    Raises CompressError for a token outside the vocabulary, and if no token of a window has so many tokens behind it.
    """
    if (tokens := windows_WT.shape[1]) <= guesses:
        raise CompressError(f"{guesses} guesses need windows of {guesses + 1} tokens or more, these have {tokens}")
    chosen = next(_mask_tokens(student, config), None) if mask_token is None else mask_token
    if chosen is None:
        raise CompressError(f"{student} has no spare token to mask others with: name one with --mask-token")
    if not 0 <= chosen < config.vocab_size:
        raise CompressError(f"mask token {chosen}: the student has {config.vocab_size} tokens")
    return Parallel(guesses, chosen)


def _mask_tokens(student: Path, config: Any) -> Iterator[int]:
    """Tokens of the vocabulary that may stand for unknown ones, best first."""
    spoken = set(text.tokenizer(student).get_vocab().values())
    spare = (token for token in range(config.vocab_size) if token not in spoken)
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    for token in (getattr(config, CONFIG_KEY, None), next(spare, None), config.pad_token_id, *ends):
        if type(token) is int and 0 <= token < config.vocab_size:  # config.json may say anything
            yield token
