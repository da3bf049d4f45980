"""The reference for decoders: what transformers answers on the same checkpoint."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class Greedy(NamedTuple):
    """A greedy answer."""

    tokens: list[int]
    logprobs: list[float]
    """Of each token, natural logarithms."""
    margins: torch.Tensor
    """Float32 [tokens]: by how much each token's logit exceeds the second."""


def greedy(model: Any, prompt: Sequence[int], tokens: int) -> Greedy:
    """What a causal language model of transformers, float32, continues `prompt` with, whatever its end token."""
    made = model.generate(
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits = torch.stack(made.logits)[:, 0]
    best = logits.topk(2).values
    logprobs = torch.log_softmax(logits, -1).max(-1).values
    return Greedy(made.sequences[0, len(prompt) :].tolist(), logprobs.tolist(), best[:, 0] - best[:, 1])
