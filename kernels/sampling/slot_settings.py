"""Sampling settings of all slots, and the results of sampled rows: tensors on the device. Knows no kernel."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SlotSettings:
    """Sampling settings by slot, on the device; `slot_edits` changes single slots in place."""

    temperature: Tensor
    """float32 [slots]; 0 is greedy."""
    top_k: Tensor
    """int64 [slots]; 0 keeps all."""
    top_p: Tensor
    """float32 [slots]; 1 keeps all."""
    min_p: Tensor
    """float32 [slots]; 0 keeps all."""
    seed: Tensor
    """int64 [slots], the bits of an unsigned 64-bit seed."""
    sample: Tensor
    """int64 [slots]: sample index."""
    prompt_len: Tensor
    """int64 [slots]: tokens of the prompt; noise is keyed by the position after the prompt."""
    repetition: Tensor
    """float32 [slots]; 1 is off."""
    presence: Tensor
    """float32 [slots]; 0 is off."""
    frequency: Tensor
    """float32 [slots]; 0 is off."""
    edited: Tensor
    """int8 [slots]: whether the slot has a logit bias."""
    history: Tensor | None = None
    """int32 [slots, V]: bit 0: the token occurs in prompt or answer; higher bits: how often it was generated. `sample`
    updates it in slots with penalties. None: no slot has penalties."""
    edits: Tensor | None = None
    """float32 [slots, V]: bias that is added to the logits; -inf bans. None: no slot has a bias."""


def slot_settings(slots: int, device: torch.device | str, vocab: int | None = None) -> SlotSettings:
    """Default settings: greedy, no cut, no penalties; with `vocab` also the tables of history and bias."""

    def full(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((slots,), value, dtype=dtype, device=device)

    def table(dtype: torch.dtype) -> Tensor | None:
        return None if vocab is None else torch.zeros(slots, vocab, dtype=dtype, device=device)

    return SlotSettings(
        temperature=full(0), top_k=full(0, torch.int64), top_p=full(1), min_p=full(0), seed=full(0, torch.int64),
        sample=full(0, torch.int64), prompt_len=full(0, torch.int64), repetition=full(1), presence=full(0),
        frequency=full(0), edited=full(0, torch.int8), history=table(torch.int32), edits=table(torch.float32),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Samples:
    """What S rows sampled."""

    tokens: Tensor
    """int64 [S]."""
    logprobs: Tensor
    """float32 [S]: natural log-probability of the token, of the raw logits."""
    totals: Tensor
    """float32 [S]: logsumexp of the raw logits."""
