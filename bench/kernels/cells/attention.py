"""Cells of attention over paged keys and values: answers, prompts and chunks of them."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.kernels.cells import Row, Shape
from bench.kernels.timing import DTYPE, copies, rand, timed
from kernels import attention, kv_pages
from kernels.operands import Scores


class Pages:
    """A scattered pool for rows of given contexts, and its tables. All rows share their first `shared` tokens."""

    def __init__(
        self, shape: Shape, contexts: list[int], block: int, stored: torch.dtype = DTYPE, shared: int = 0
    ) -> None:
        self.shape, self.contexts, self.block, self.stored, self.shared = shape, contexts, block, stored, shared
        needed = [-(-context // block) for context in contexts]
        ids = torch.randperm(sum(needed), dtype=torch.int32) + 1
        tables = torch.zeros(len(contexts), max(needed), dtype=torch.int32)
        for row, part in enumerate(torch.split(ids, needed)):
            tables[row, : len(part)] = part
        tables[:, : shared // block] = tables[0, : shared // block]
        self.tables = tables.cuda()
        self.count = sum(needed) + 1
        self.pools = copies(self.pool)

    def pool(self) -> Tensor:
        shape = self.shape
        pool = kv_pages.make_pool(self.count, self.block, shape.kv_heads, shape.dim, self.stored, "cuda")
        if self.stored == kv_pages.INT8:
            pool.random_(-127, 128)
            kv_pages.scales_of(pool).uniform_(0.005, 0.01)
            return pool
        return pool.copy_(rand(*pool.shape))

    def plan(
        self, lengths: list[int], short: int = 1, config: attention.Config | None = None
    ) -> attention.AttentionPlan:
        shape = self.shape
        starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
        contexts = torch.tensor(self.contexts, dtype=torch.int32, device="cuda")
        longer = sum(length for length in lengths if length > short)
        config = config or attention.config_for(shape.dim, DTYPE, len(lengths), stored=self.stored)
        return attention.plan_attention(
            starts,
            contexts,
            self.tables,
            shape.heads,
            shape.kv_heads,
            shape.dim,
            self.block,
            DTYPE,
            None,
            short,
            longer,
            config,
        )

    def bytes(self) -> float:
        """Bytes of all keys and values, and their scales."""
        scale = 4 if self.stored == kv_pages.INT8 else 0
        keys = sum(self.contexts) - self.shared * (len(self.contexts) - 1)
        return 2.0 * keys * self.shape.kv_heads * (self.shape.dim * self.stored.itemsize + scale)


def decode_seconds(pages: Pages, tokens: int = 1, config: attention.Config | None = None) -> float:
    """Seconds of one layer's attention, for rows with `tokens` new tokens each."""
    shape = pages.shape
    plan = pages.plan([tokens] * len(pages.contexts), tokens, config)
    q = rand(tokens * len(pages.contexts), shape.heads, shape.dim)
    out = torch.empty(q.shape[0], shape.heads * shape.dim, dtype=DTYPE, device="cuda")
    return timed([partial(attention.attention, q, p, plan, Scores(shape.dim**-0.5), out=out) for p in pages.pools])


def decode_row(
    shape: Shape, name: str, contexts: list[int], tokens: int = 1, stored: torch.dtype = DTYPE, shared: int = 0
) -> Row:
    """Paged decode, or verification of several tokens per row."""
    pages = Pages(shape, contexts, 16, stored, shared)
    seconds = decode_seconds(pages, tokens)
    moved = pages.bytes() + 4.0 * tokens * len(contexts) * shape.heads * shape.dim
    return Row(
        f"{shape.name} decode {name}", seconds * 1e6, moved, 4.0 * tokens * sum(contexts) * shape.heads * shape.dim
    )


def prefill_flop(shape: Shape, tokens: int, context: int) -> float:
    pairs = tokens * (context - tokens) + tokens * (tokens + 1) / 2
    return 4.0 * pairs * shape.heads * shape.dim


def prefill_seconds(
    shape: Shape,
    lengths: list[int],
    contexts: list[int],
    block: int,
    stored: torch.dtype = DTYPE,
    config: attention.Config | None = None,
) -> float:
    """Seconds of one layer's attention, for chunks of prompts and, where a length is 1, decode rows."""
    pages = Pages(shape, contexts, block, stored)
    plan = pages.plan(lengths, 1, config)
    tokens = sum(lengths)
    q = rand(tokens, shape.heads, shape.dim)
    out = torch.empty(tokens, shape.heads * shape.dim, dtype=DTYPE, device="cuda")
    return timed([partial(attention.attention, q, p, plan, Scores(shape.dim**-0.5), out=out) for p in pages.pools[:4]])


def sdpa_seconds(shape: Shape, tokens: int, backend: SDPBackend) -> float:
    q = rand(1, shape.heads, tokens, shape.dim)
    k, v = (rand(1, shape.kv_heads, tokens, shape.dim) for _ in range(2))
    with sdpa_kernel(backend):
        return timed([lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)])


def prefill_row(shape: Shape, tokens: int, block: int) -> Row:
    """A whole prompt in one chunk, against torch's attention over contiguous keys."""
    seconds = prefill_seconds(shape, [tokens], [tokens], block)
    against = {
        "cudnn": sdpa_seconds(shape, tokens, SDPBackend.CUDNN_ATTENTION) * 1e6,
        "flash": sdpa_seconds(shape, tokens, SDPBackend.FLASH_ATTENTION) * 1e6,
    }
    moved = 2.0 * tokens * (2 * shape.heads + 2 * shape.kv_heads) * shape.dim
    return Row(
        f"{shape.name} prefill {tokens} P={block}", seconds * 1e6, moved, prefill_flop(shape, tokens, tokens), against
    )


def chunk_row(shape: Shape, tokens: int, context: int, answers: int = 0, stored: torch.dtype = DTYPE) -> Row:
    """A chunk of a prompt and `answers` decode rows with contexts of 2,100, over pages of this dtype."""
    lengths, contexts = [tokens] + [1] * answers, [context] + [2100] * answers
    seconds = prefill_seconds(shape, lengths, contexts, 16, stored)
    numbers = sum(contexts) * 2 * shape.kv_heads * shape.dim
    moved = 4.0 * sum(lengths) * shape.heads * shape.dim + numbers * stored.itemsize
    flop = prefill_flop(shape, tokens, context) + 4.0 * answers * 2100 * shape.heads * shape.dim
    title = f"{shape.name}{' fp8' if stored == kv_pages.FP8 else ''} chunk {tokens} of {context}"
    return Row(title + (f" + {answers} x 2100" if answers else ""), seconds * 1e6, moved, flop)
