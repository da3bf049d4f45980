"""The metadata of a folder of draft heads: shared by the code that trains heads and the code that serves them.

Heads are trained on the hidden states of one base and guess badly for another. They name their base by the digest of
its embedding, which rounding and pruning leave as it is.
"""

import hashlib

import torch
from torch import Tensor

ARCHITECTURE = "WeftDraftHeads"
"""In `architectures` of config.json."""
_ROWS = 1024


def base_digest(embedding: Tensor) -> str:
    """A digest of at most 1,024 rows of an embedding [V, W], evenly spread, each number in bfloat16: of any dtype of
    the same numbers it is the same."""
    rows = torch.linspace(0, len(embedding) - 1, min(len(embedding), _ROWS)).round().long()
    picked = embedding.detach()[rows.to(embedding.device)].to(torch.bfloat16).cpu().contiguous()
    return hashlib.sha256(picked.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
