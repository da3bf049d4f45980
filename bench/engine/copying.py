"""Random weights whose greedy answers copy their prompts, and such prompts. Knows tensors, no engine.

The vocabulary is cut into cycles of ids, and after each token the next one of its cycle is the likeliest by far: what
attention and MLP add to the residual stream is scaled down until the stream stays the token's embedding, and the
head's row of a token is the embedding of the one before it. All weights keep their shapes and random bits, so a step
costs what it costs with any others (zeros can run faster).
"""

import torch

from services.worker.loader.plain import RANDOM_STD
from services.worker.models.decoder import Decoder

TOP_LOGIT = 12.0
"""The logit of the next token of a cycle. The others' are about 0: with 128,256 of them its chance at a temperature of
1 is about a half, so sampled answers leave their cycle now and then."""
_DAMPING = 2.0**-14
_DAMPED = ("o_proj.weight", "down_proj.weight")
"""Tensors of the products that add to the residual stream."""


@torch.inference_mode()
def make_copying(model: Decoder, cycle: int, top_logit: float = TOP_LOGIT) -> None:
    """Let a model with plain random weights follow cycles of this many tokens.

    Raises ValueError if its weights are packed or quantized, or if its head is its embedding: then it could only repeat
    a token.
    """
    weights, hidden = model.destinations(), model.config.hidden_size
    head = model.head.weight
    if model.config.tied_embeddings or not isinstance(head, torch.Tensor):
        raise ValueError("only a model with plain weights and a head of its own can follow cycles")
    for name, views in weights.items():
        if name.endswith(_DAMPED):
            for view in views:
                view.mul_(_DAMPING)
    for first in range(0, len(head), cycle):
        rows = model.embedding[first : first + cycle]
        head[first : first + len(rows)] = rows.roll(1, 0)
    model.norm.weight.fill_(top_logit / (RANDOM_STD * hidden))


def walk(first: int, tokens: int, cycle: int, vocabulary: int) -> list[int]:
    """The tokens that follow one another in a cycle, `first` included."""
    begin = first - first % cycle
    length = min(cycle, vocabulary - begin)
    return [begin + (first - begin + step) % length for step in range(tokens)]
