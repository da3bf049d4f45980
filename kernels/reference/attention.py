"""Ragged attention over paged keys and values in plain torch. Names as in `kernels.reference`; knows no weights."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import kv_pages
from kernels.operands import Scores
from kernels.reference.layers import ROW_TILE

IntArray = npt.NDArray[np.integer]

# Decode rows are computed in groups, padded to the longest context of the group; a group is split where it would have
# more padding tokens than this. One more group costs about the time of these tokens (measured at K = 2, D = 64).
PADDING_TOKENS = 512
# Keys of a tile of the invariant attention.
KEY_TILE = 128
_FLOOR = -1e30  # below every score, yet finite: exp(_FLOOR - _FLOOR) is 1 and not NaN


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Rows of a step that are computed together: any number of rows of one token, or one row of many tokens."""

    rows: int
    """Number of rows, R."""
    tokens: int
    """Tokens of each row, n."""
    places: Tensor | slice
    """Indices of these tokens in the step: int64 [R * n], or a slice."""
    blocks: Tensor
    """int64 [R * blocks per row], row by row, padded with block 0."""
    mask: Tensor
    """Added to the scores, 0 or -inf: [R, 1, n, L]."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Which keys the rows of one step attend to; made once, used by all layers with the same window."""

    groups: tuple[AttentionGroup, ...]


def plan_attention(
    lengths_R: IntArray,
    contexts_R: IntArray,
    tables: IntArray,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
    key_tile: int = 1,
) -> AttentionPlan:
    """Group the ragged rows of a step.

    lengths_R: tokens of each row in this step. contexts_R: context length of each row, these tokens included. tables
    [R, blocks]: block tables. window: a query attends to this many last tokens, itself included; None: to all. Contexts
    are padded to multiples of key_tile.
    """
    starts = np.cumsum(lengths_R) - lengths_R
    groups = []
    singles = np.flatnonzero(lengths_R == 1)
    for members in _group_by_context(singles, contexts_R):
        members.sort()
        groups.append(_group(members, 1, starts, contexts_R, tables, block_size, window, dtype, key_tile))
    for row in np.flatnonzero(lengths_R > 1):
        members = np.array([row])
        tokens = int(lengths_R[row])
        groups.append(_group(members, tokens, starts, contexts_R, tables, block_size, window, dtype, key_tile))
    return AttentionPlan(tuple(groups))


def plan_attention_invariant(
    lengths_R: IntArray,
    contexts_R: IntArray,
    tables: IntArray,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
    key_tile: int = KEY_TILE,
) -> AttentionPlan:
    """As `plan_attention`, for `attention_invariant`."""
    return plan_attention(lengths_R, contexts_R, tables, block_size, window, dtype, key_tile)


def _group_by_context(singles: IntArray, contexts_R: IntArray) -> list[IntArray]:
    """Group rows by context, longest first, so that no group has more than PADDING_TOKENS padding tokens."""
    if len(singles) < 2:
        return [singles] if len(singles) else []
    order = singles[np.argsort(-contexts_R[singles], kind="stable")]
    groups, begin, padding = [], 0, 0
    for i in range(1, len(order)):
        padding += int(contexts_R[order[begin]] - contexts_R[order[i]])
        if padding > PADDING_TOKENS:
            groups.append(order[begin:i])
            begin, padding = i, 0
    groups.append(order[begin:])
    return groups


def _group(
    members: IntArray,
    tokens: int,
    starts: IntArray,
    contexts_R: IntArray,
    tables: IntArray,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
    key_tile: int,
) -> AttentionGroup:
    contexts = contexts_R[members]
    first = _first_block(contexts, tokens, block_size, window, key_tile)
    span = int(contexts.max()) - first * block_size
    count = -(-(-(-span // key_tile) * key_tile) // block_size)
    blocks = np.zeros((len(members), count), np.int64)
    held = tables[members, first : first + count]
    blocks[:, : held.shape[1]] = held
    keys = first * block_size + np.arange(count * block_size)
    queries = contexts[:, None] - tokens + np.arange(tokens)  # [R, n]: position of each query
    seen = keys <= queries[..., None]
    if window is not None:
        seen &= keys > queries[..., None] - window
    first_place, last_place = int(starts[members[0]]), int(starts[members[-1]])
    if last_place - first_place == len(members) - 1:  # one row, or single tokens side by side
        places: Tensor | slice = slice(first_place, last_place + tokens)
    else:
        places = torch.from_numpy(starts[members].astype(np.int64))
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(torch.from_numpy(~seen), -torch.inf)
    # Padding blocks are block 0, but the tail of a row's last block may hold old values of another job, which the mask
    # multiplies by 0: they must be finite, so a block that may hold NaN is cleared before it is released.
    blocks[:, : held.shape[1]] *= (keys[::block_size][: held.shape[1]] < contexts[:, None]).astype(np.int64)
    return AttentionGroup(len(members), tokens, places, torch.from_numpy(blocks.reshape(-1)), mask[:, None])


def _first_block(contexts: IntArray, tokens: int, block_size: int, window: int | None, key_tile: int) -> int:
    """First block that any query of the group attends to, rounded down to a multiple of key_tile."""
    if window is None:
        return 0
    oldest = max(0, int(contexts.min()) - tokens + 1 - window)
    step = int(np.lcm(key_tile, block_size))
    return oldest // step * step // block_size


def attention(
    q_THD: Tensor, kv_NP2KD: Tensor, plan: AttentionPlan, scores: Scores, kv_scales: Tensor | None = None
) -> Tensor:
    """softmax(q k^T * scale) v for each row over its own blocks, causal, grouped heads. -> [T, H * D]."""
    if not scores.is_plain:
        return _attend_rows(q_THD, kv_NP2KD, plan, scores, kv_scales, 1, _attend_at_once)
    tokens, heads, dim = q_THD.shape
    out = q_THD.new_empty(tokens, heads * dim)
    for group in plan.groups:
        k, v = _gather(kv_NP2KD, group, kv_scales, q_THD.dtype)
        q = q_THD[group.places]
        if group.tokens == 1:  # the query heads of one KV head are the rows of one product
            q = q.reshape(group.rows, k.shape[1], -1, dim)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=scores.scale)
            out[group.places] = mixed.reshape(group.rows, heads * dim)
        else:
            q = q.transpose(0, 1)[None]
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=scores.scale, enable_gqa=True)
            out[group.places] = mixed[0].transpose(0, 1).reshape(group.tokens, heads * dim)
    return out


def attention_invariant(
    q_THD: Tensor, kv_NP2KD: Tensor, plan: AttentionPlan, scores: Scores, kv_scales: Tensor | None = None
) -> Tensor:
    """As `attention`; a query's result has the same bits in any chunk and any batch.

    Keys are processed in tiles that begin at multiples of KEY_TILE (plan with key_tile=KEY_TILE), with running maximum
    and sum (Milakov and Gimelshein 2018): a fully masked tile changes nothing, not even the last bit.
    """
    return _attend_rows(q_THD, kv_NP2KD, plan, scores, kv_scales, ROW_TILE, _attend_in_tiles)


Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Scores, Tensor | None], Tensor]


def _attend_rows(
    q_THD: Tensor,
    kv_NP2KD: Tensor,
    plan: AttentionPlan,
    scores: Scores,
    kv_scales: Tensor | None,
    row_tile: int,
    attend: Attend,
) -> Tensor:
    """`attend` each group, with the queries of all heads of a key/value head as rows, padded to full tiles."""
    tokens, heads, dim = q_THD.shape
    kv_heads = kv_NP2KD.shape[3]
    share = heads // kv_heads
    out = q_THD.new_empty(tokens, heads, dim)
    for group in plan.groups:
        k, v = _gather(kv_NP2KD, group, kv_scales, q_THD.dtype)
        rows = group.tokens * share
        q = q_THD[group.places].reshape(group.rows, group.tokens, kv_heads, share, dim)
        q = q.permute(0, 2, 1, 3, 4).reshape(group.rows, kv_heads, rows, dim)
        q = F.pad(q, (0, 0, 0, -rows % row_tile))
        mask = group.mask.repeat_interleave(share, dim=2)
        mask = F.pad(mask, (0, 0, 0, -rows % row_tile))
        sinks = None
        if scores.sinks is not None:
            sinks = scores.sinks.view(kv_heads, 1, share).expand(-1, group.tokens, -1).reshape(kv_heads, rows)
            sinks = F.pad(sinks, (0, -rows % row_tile))[:, :, None].to(q.dtype)
        mixed = attend(q, k, v, mask, scores, sinks)[:, :, :rows]
        mixed = mixed.reshape(group.rows, kv_heads, group.tokens, share, dim).permute(0, 2, 1, 3, 4)
        out[group.places] = mixed.reshape(-1, heads, dim)
    return out.view(tokens, heads * dim)


def _score(q: Tensor, k: Tensor, mask: Tensor, scores: Scores) -> Tensor:
    """q [R, K, M, D], k [R, K, L, D], mask [R, 1, M, L] -> [R, K, M, L]."""
    products = torch.matmul(q, k.transpose(2, 3)).mul_(scores.scale)
    if scores.soft_cap is not None:
        products.div_(scores.soft_cap).tanh_().mul_(scores.soft_cap)
    return products.add_(mask)


def _attend_at_once(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scores: Scores, sinks: Tensor | None) -> Tensor:
    """q [R, K, M, D], k and v [R, K, L, D], mask [R, 1, M, L], sinks [K, M, 1] -> [R, K, M, D]."""
    weights = _score(q, k, mask, scores)
    if sinks is not None:
        weights = torch.cat((weights, sinks.expand(len(q), -1, -1, -1)), dim=-1)
    return torch.matmul(weights.softmax(dim=-1)[..., : k.shape[2]], v)


def _attend_in_tiles(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scores: Scores, sinks: Tensor | None) -> Tensor:
    """As `_attend_at_once`, L a multiple of KEY_TILE."""
    top = q.new_full((*q.shape[:3], 1), _FLOOR)
    total = q.new_zeros(top.shape)
    mixed = torch.zeros_like(q)
    for start in range(0, k.shape[2] // KEY_TILE * KEY_TILE, KEY_TILE):
        tile = slice(start, start + KEY_TILE)
        weights = _score(q, k[:, :, tile], mask[..., tile], scores)
        new_top = torch.maximum(top, weights.amax(dim=-1, keepdim=True))
        weights.sub_(new_top).exp_()
        fade = top.sub_(new_top).exp_()
        total.mul_(fade).add_(weights.sum(dim=-1, keepdim=True))
        mixed.mul_(fade).add_(torch.matmul(weights, v[:, :, tile]))
        top = new_top
    if sinks is not None:
        total.add_((sinks - top).exp_())
    return mixed.div_(total)


def _gather(
    kv_NP2KD: Tensor, group: AttentionGroup, kv_scales: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values of a group's rows, both [R, K, L, D]."""
    kv_heads, dim = kv_NP2KD.shape[3:]
    pages = kv_pages.load(kv_NP2KD, group.blocks, kv_scales, dtype).view(group.rows, -1, 2, kv_heads, dim)
    k, v = pages.permute(2, 0, 3, 1, 4).unbind(0)
    return k, v
