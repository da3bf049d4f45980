"""Measures the small kernels: norms, gate and rotation, sampling, copies of blocks to the host."""

from functools import partial

import torch
import torch.nn.functional as F

from bench.kernels.cells import SHAPES, Row, Shape
from bench.kernels.timing import DTYPE, copies, rand, timed
from kernels import activation, block_copy, norm, rope_kv, sampling
from kernels.sampling.slot_settings import slot_settings


def layer_rows(shape: Shape, tokens: int) -> list[Row]:
    """Norms, gate, rope."""
    found = []
    hidden, dim, kv_heads = shape.hidden, shape.dim, shape.kv_heads
    weight = rand(hidden)
    compiled_norm = torch.compile(lambda x, w: F.rms_norm(x, (hidden,), w, 1e-5))
    compiled_gate = torch.compile(lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1])
    residuals = copies(lambda: rand(tokens, hidden))
    ours = timed([partial(norm.rms_norm, r, weight, 1e-5) for r in residuals])
    theirs = timed([partial(compiled_norm, r, weight) for r in residuals])
    moved = 4.0 * tokens * hidden
    found.append(Row(f"{shape.name} norm T={tokens}", ours * 1e6, moved, 0, {"torch.compile": theirs * 1e6}))
    wide = copies(lambda: rand(tokens, 2 * shape.ffn))
    ours = timed([partial(activation.silu_and_mul, g) for g in wide])
    theirs = timed([partial(compiled_gate, g) for g in wide])
    moved = 6.0 * tokens * shape.ffn
    found.append(Row(f"{shape.name} silu*up T={tokens}", ours * 1e6, moved, 0, {"torch.compile": theirs * 1e6}))
    heads = shape.heads + 2 * kv_heads
    qkvs, pool = copies(lambda: rand(tokens, heads, dim)), rand(8192 // 16 * 2, 16, 2, kv_heads, dim)
    cos, sin = rand(8192, 1, dim), rand(8192, 1, dim)
    places = torch.randperm(8192, device="cuda")[:tokens]
    positions = torch.arange(tokens, device="cuda")
    ours = timed(
        [partial(rope_kv.rope_and_store, q, cos, sin, pool, places, shape.heads, kv_heads, positions) for q in qkvs]
    )
    found.append(
        Row(f"{shape.name} rope+store T={tokens}", ours * 1e6, 4.0 * tokens * heads * dim + 4.0 * tokens * dim, 0)
    )
    return found


def sampling_row(rows: int, name: str, temperature: float, top_k: int, top_p: float, min_p: float) -> Row:
    """One step's sampling at a vocabulary of 128,256."""
    vocab = SHAPES[0].vocab
    state = slot_settings(rows, "cuda", vocab)
    state.temperature.fill_(temperature)
    state.top_k.fill_(top_k)
    state.top_p.fill_(top_p)
    state.min_p.fill_(min_p)
    state.seed.random_()
    logits = copies(lambda: rand(rows, vocab, dtype=torch.float32) * 3)
    where, positions = torch.arange(rows, device="cuda"), torch.zeros(rows, dtype=torch.int64, device="cuda")
    ours = timed([partial(sampling.sample, x, state, where, positions) for x in logits])
    theirs = timed([partial(torch.argmax, x, -1) for x in logits])
    return Row(f"sample {name} S={rows}", ours * 1e6, 4.0 * rows * vocab, 0, {"torch.argmax": theirs * 1e6})


def blocks_row(shape: Shape, count: int) -> Row:
    layers = 32 if shape.name == "8B" else 16
    pools = [rand(512, 16, 2, shape.kv_heads, shape.dim) for _ in range(layers)]
    addresses = block_copy.pool_addresses(pools)
    ids = torch.randperm(512, device="cuda")[:count]
    staging = torch.empty(count, layers, 16, 2, shape.kv_heads, shape.dim, dtype=DTYPE, device="cuda")
    seconds = timed([lambda: block_copy.gather_blocks(addresses, pools[0], ids, staging)])
    return Row(f"{shape.name} gather {count} blocks", seconds * 1e6, 2.0 * staging.numel() * 2, 0)
