"""Embeddings, attention and pooling of an encoder's packed texts in plain torch. Names as in `kernels.texts`."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.operands import Norm, Pooling
from kernels.reference.layers import normalize


def embed_texts(
    token_ids: Tensor,
    positions: Tensor,
    segment_ids: Tensor | None,
    tokens: Tensor,
    places: Tensor,
    segments: Tensor | None,
    norm: Norm,
) -> Tensor:
    """norm(tokens[token_ids] + places[positions] + segments[segment_ids]) -> [T, n]. ids [T], segment_ids None: all 0;
    tables [V, n], [P, n], [S, n] or None."""
    x = tokens[token_ids].add_(places[positions])
    if segments is not None:
        x.add_(segments[0] if segment_ids is None else segments[segment_ids])
    return normalize(x, norm)


class EqualTexts(NamedTuple):
    """Neighbouring texts of equal lengths, which one call of attention computes."""

    begin: int
    """Their first token."""
    texts: int
    length: int


def equal_texts(lengths: Sequence[int]) -> list[EqualTexts]:
    """The texts of a batch in groups of equal lengths."""
    groups, begin = [], 0
    for length, same in groupby(lengths):
        count = len(list(same))
        groups.append(EqualTexts(begin, count, length))
        begin += count * length
    return groups


def attend_packed(qkv: Tensor, groups: Sequence[EqualTexts], heads: int) -> Tensor:
    """softmax(q k^T / sqrt(D)) v of each text, not causal: qkv [T, 3 * H * D] -> [T, H * D]."""
    parts = []
    for begin, count, length in groups:
        rows = slice(begin, begin + count * length)
        q, k, v = qkv[rows].view(count, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v)
        parts.append(attended.transpose(1, 2).reshape(count * length, -1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def pool_texts(x: Tensor, starts: Tensor, pooling: Pooling) -> Tensor:
    """The rows of each text in x [T, n] become one -> float32 [B, n]. starts [B + 1]: where each text begins, and T."""
    if pooling is Pooling.CLS:
        return x[starts[:-1]].float()
    if pooling is Pooling.LAST:
        return x[starts[1:] - 1].float()
    return torch.segment_reduce(x.float(), pooling.value, lengths=starts.diff(), axis=0)
