"""Times every kernel on one GPU beside the ceilings of the same run and beside torch where it does the same job.

    python -m bench.kernels [--only WORD] [--fresh] [--out bench/results]

A cell is a CUDA graph of many launches over buffers that rotate past the L2 cache, filled with random data; the median
replay counts. Its floor is max(bytes / read bandwidth, FLOP / matrix rate), both measured at the start. Cells already
in the results are not measured again unless --fresh is given.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels import activation, attention, blocks, kv, norm, rope_kv, sampling
from kernels.products import fp8, linear, matmul, qkv
from kernels.products.words import Words
from kernels.sampling.slot_settings import slot_settings

DTYPE = torch.bfloat16
ROTATED_BYTES = 300 << 20
ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 1024, 2048)
Launch = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Shape:
    """One model's layer."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    ffn: int
    vocab: int = 128256


SHAPES = (Shape("8B", 4096, 32, 8, 128, 14336), Shape("1B", 2048, 32, 8, 64, 8192))


@dataclass(slots=True)
class Row:
    """One measured cell."""

    name: str
    microseconds: float
    bytes: float
    flop: float
    against: dict[str, float] = field(default_factory=dict)
    """Microseconds of others that do the same job."""
    note: str = ""
    rate: str = "matmul"
    """The ceiling of its FLOP: matmul or fp8."""

    def share(self, ceilings: dict[str, float]) -> float:
        """Floor over time."""
        return max(self.bytes / ceilings["read"], self.flop / ceilings[self.rate]) * 1e6 / self.microseconds


def timed(launches: Sequence[Launch], target_ms: float = 4.0, tries: int = 7) -> float:
    """Seconds for each launch: the median replay of a graph that holds all of them, several times over."""
    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    repeats = max(1, 24 // len(launches))
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for launch in launches:
                launch()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def replay(times: int) -> float:
        begin.record()
        for _ in range(times):
            graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / times

    times = max(1, int(target_ms / 1e3 / replay(1)))
    median = statistics.median(replay(times) for _ in range(tries))
    return median / (repeats * len(launches))


def rand(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    """Random numbers of the scale of activations."""
    return torch.randn(shape, device="cuda", dtype=dtype)


def copies(make: Callable[[], Tensor]) -> list[Tensor]:
    """As many tensors as it takes to pass the L2 cache."""
    first = make()
    count = max(1, -(-ROTATED_BYTES // (first.numel() * first.element_size())))
    return [first, *(make() for _ in range(min(count, 64) - 1))]


def ceilings() -> dict[str, float]:
    """Bytes per second copied (read + written) and read, bf16 and fp8 FLOP per second."""
    source = torch.empty(1 << 30, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    copy = timed([lambda: target.copy_(source)], 30)
    big, vector = source.view(torch.bfloat16).view(-1, 8192), rand(8192)
    read = min(timed([lambda: source.sum()], 30), timed([lambda: torch.mv(big, vector)], 30))
    x, w = rand(8192, 8192), rand(8192, 8192)
    product = timed([lambda: x @ w], 60)
    small, other = x[:4096, :4096].contiguous(), w[:4096, :4096].contiguous()
    product_small = timed([lambda: small @ other], 60)
    octets, scale = (x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)), torch.ones((), device="cuda")
    scaled = partial(torch._scaled_mm, scale_a=scale, scale_b=scale, out_dtype=DTYPE, use_fast_accum=True)
    product_fp8 = timed([lambda: scaled(octets[0], octets[1].t())], 60)
    size = source.numel() * 4
    return {
        "copy": 2 * size / copy,
        "read": size / read,
        "matmul": max(2 * 8192**3 / product, 2 * 4096**3 / product_small),
        "fp8": 2 * 8192**3 / product_fp8,
    }


def sustained(seconds: float = 1.0) -> float:
    """bf16 FLOP per second of a product that goes on, once the power limit has lowered the clocks."""
    x, w = rand(8192, 8192), rand(8192, 8192)
    out = torch.empty_like(x)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    count = int(seconds / timed([partial(torch.mm, x, w, out=out)], 20))
    for launch in range(2 * count):
        if launch == count:
            begin.record()
        torch.mm(x, w, out=out)
    end.record()
    end.synchronize()
    return 2 * 8192**3 * count / float(begin.elapsed_time(end)) * 1e3


# ---- cells ----


def products(shape: Shape) -> Iterator[tuple[str, int, int, bool, bool]]:
    """(name, outputs, inputs, whether gated, whether the residual is added) of one layer and the head."""
    width = (shape.heads + 2 * shape.kv_heads) * shape.dim
    yield "qkv", width, shape.hidden, False, False
    yield "o", shape.hidden, shape.heads * shape.dim, False, True
    yield "gate-up", shape.ffn, shape.hidden, True, False
    yield "down", shape.hidden, shape.ffn, False, True
    yield "head", shape.vocab, shape.hidden, False, False


def product_row(shape: Shape, name: str, n: int, k: int, gated: bool, added: bool, rows: int) -> Row:
    """A product with what is fused into it, against cuBLAS for the product alone."""
    outputs = 2 * n if gated else n
    weights = copies(lambda: rand(outputs, k))
    x = rand(rows, k)
    residual = rand(rows, n) if added else None
    out = torch.empty(rows, n, dtype=DTYPE, device="cuda")
    plain = torch.empty(rows, outputs, dtype=DTYPE, device="cuda")
    seconds = timed([partial(matmul.linear, x, w, residual=residual, gated=gated, out=out) for w in weights])
    vendor = timed([partial(torch.mm, x, w.t(), out=plain) for w in weights])
    moved = 2.0 * (outputs * k + rows * k + rows * n)
    return Row(
        f"{shape.name} {name} M={rows}", seconds * 1e6, moved, 2.0 * rows * outputs * k, {"cublas": vendor * 1e6}
    )


def rotated_row(shape: Shape, rows: int) -> Row:
    """Queries, keys and values, rotated and written to the pool, against product and rotation in two kernels."""
    width, dim = (shape.heads + 2 * shape.kv_heads) * shape.dim, shape.dim
    weights, x, pool = copies(lambda: rand(width, shape.hidden)), rand(rows, shape.hidden), rand(64, 16, 2, 8, dim)
    cos, sin, at = rand(1024, 1, dim), rand(1024, 1, dim), torch.arange(rows, device="cuda")
    tile = qkv.tile_for(x, dim)
    assert tile is not None

    def apart(w: Tensor) -> Tensor:
        product = matmul.linear(x, w).view(rows, -1, dim)
        return rope_kv.rope_and_store(product, cos, sin, pool, at, shape.heads, shape.kv_heads, at)

    seconds = timed([partial(qkv.rotated_qkv, x, w, None, cos, sin, at, pool, at, shape.heads, tile) for w in weights])
    two = timed([partial(apart, w) for w in weights])
    moved = 2.0 * (width * shape.hidden + rows * (shape.hidden + width))
    name, flop = f"{shape.name} qkv+rope M={rows}", 2.0 * rows * width * shape.hidden
    return Row(name, seconds * 1e6, moved, flop, {"two kernels": two * 1e6})


def random_words(kind: str, n: int, k: int) -> Words:
    """A weight of random bits (no NaN) with a scale for each output, or for 128 inputs of it in int4."""
    scale = torch.rand(n // 64, k // 128 if kind == "int4" else 1, 64, device="cuda") / 64 + 1e-3
    shape = (n // 64, k // 128, 64, 16) if kind == "int4" else (n, k // 4)
    words = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device="cuda")
    if kind == "int4":
        return Words(kind, words, scale.to(DTYPE), None, 128, None, torch.Size((n, k)))
    return Words(kind, words & ~0x40404040, scale, None, 0, None, torch.Size((n, k)))


def quantized_row(shape: Shape, kind: str, name: str, n: int, k: int, gated: bool, added: bool, rows: int) -> Row:
    """A product with quantized weights and all that belongs to it, against cuBLAS for the 16-bit product alone and the
    libraries' products of this kind."""
    outputs = 2 * n if gated else n
    first = random_words(kind, outputs, k)
    weights = [first, *(random_words(kind, outputs, k) for _ in range(min(63, ROTATED_BYTES // first.nbytes)))]
    x, residual = rand(rows, k), rand(rows, n) if added else None
    out = torch.empty(rows, n, dtype=DTYPE, device="cuda")
    seconds = timed([partial(linear, x, w, residual=residual, gated=gated, out=out) for w in weights])
    plain = torch.empty(rows, outputs, dtype=DTYPE, device="cuda")
    against = {"cublas bf16": timed([partial(torch.mm, x, w.t(), out=plain) for w in copies(lambda: rand(outputs, k))])}
    if kind == "fp8":
        rounded = fp8.round_rows(x)
        against["scaled_mm"] = timed([partial(fp8.multiply, rounded, w, DTYPE) for w in weights])
    elif rows <= 64:
        packed = [torch._convert_weight_to_int4pack(w.words.view(torch.uint8).view(outputs, -1), 8) for w in weights]
        scales = rand(k // 128, outputs, 2)
        against["torch int4"] = timed([partial(torch._weight_int4pack_mm, x, w, 128, scales) for w in packed])
    moved = first.nbytes + 2.0 * rows * (k + n)
    micro = {peer: peer_s * 1e6 for peer, peer_s in against.items()}
    rate = "fp8" if kind == "fp8" else "matmul"
    flop = 2.0 * rows * outputs * k
    return Row(f"{shape.name} {kind} {name} M={rows}", seconds * 1e6, moved, flop, micro, rate=rate)


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
        pool = kv.make_pool(self.count, self.block, shape.kv_heads, shape.dim, self.stored, "cuda")
        if self.stored == kv.INT8:
            pool.random_(-127, 128)
            kv.scales_of(pool).uniform_(0.005, 0.01)
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
        """Of all keys and values, and their scales."""
        scale = 4 if self.stored == kv.INT8 else 0
        keys = sum(self.contexts) - self.shared * (len(self.contexts) - 1)
        return 2.0 * keys * self.shape.kv_heads * (self.shape.dim * self.stored.itemsize + scale)


def decode_seconds(pages: Pages, tokens: int = 1, config: attention.Config | None = None) -> float:
    """One layer's attention of rows with `tokens` new tokens each."""
    shape = pages.shape
    plan = pages.plan([tokens] * len(pages.contexts), tokens, config)
    q = rand(tokens * len(pages.contexts), shape.heads, shape.dim)
    out = torch.empty(q.shape[0], shape.heads * shape.dim, dtype=DTYPE, device="cuda")
    return timed([partial(attention.attention, q, p, plan, shape.dim**-0.5, out=out) for p in pages.pools])


def decode_row(
    shape: Shape, name: str, contexts: list[int], tokens: int = 1, stored: torch.dtype = DTYPE, shared: int = 0
) -> Row:
    """Paged decode, or verification of several tokens a row."""
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
    """One layer's attention of chunks of prompts, and of answers where a length is 1."""
    pages = Pages(shape, contexts, block, stored)
    plan = pages.plan(lengths, 1, config)
    tokens = sum(lengths)
    q = rand(tokens, shape.heads, shape.dim)
    out = torch.empty(tokens, shape.heads * shape.dim, dtype=DTYPE, device="cuda")
    return timed([partial(attention.attention, q, p, plan, shape.dim**-0.5, out=out) for p in pages.pools[:4]])


def sdpa_seconds(shape: Shape, tokens: int, backend: SDPBackend) -> float:
    q = rand(1, shape.heads, tokens, shape.dim)
    k, v = (rand(1, shape.kv_heads, tokens, shape.dim) for _ in range(2))
    with sdpa_kernel(backend):
        return timed([lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)])


def prefill_row(shape: Shape, tokens: int, block: int) -> Row:
    """A whole prompt in one chunk, beside torch's attention over contiguous keys."""
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
    """A chunk of a prompt, beside rows of one token at contexts of 2,100, over pages of this dtype."""
    lengths, contexts = [tokens] + [1] * answers, [context] + [2100] * answers
    seconds = prefill_seconds(shape, lengths, contexts, 16, stored)
    numbers = sum(contexts) * 2 * shape.kv_heads * shape.dim
    moved = 4.0 * sum(lengths) * shape.heads * shape.dim + numbers * stored.itemsize
    flop = prefill_flop(shape, tokens, context) + 4.0 * answers * 2100 * shape.heads * shape.dim
    title = f"{shape.name}{' fp8' if stored == kv.FP8 else ''} chunk {tokens} of {context}"
    return Row(title + (f" + {answers} x 2100" if answers else ""), seconds * 1e6, moved, flop)


def layer_rows(shape: Shape, tokens: int) -> list[Row]:
    """Norms, gate, rope."""
    found = []
    hidden, dim, kv_heads = shape.hidden, shape.dim, shape.kv_heads
    weight = rand(hidden)
    compiled_norm = torch.compile(lambda x, d, w: F.rms_norm(x.add_(d), (hidden,), w, 1e-5))
    compiled_gate = torch.compile(lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1])
    residuals, delta = copies(lambda: rand(tokens, hidden)), rand(tokens, hidden)
    ours = timed([partial(norm.add_rms_norm, r, delta, weight, 1e-5) for r in residuals])
    theirs = timed([partial(compiled_norm, r, delta, weight) for r in residuals])
    moved = 8.0 * tokens * hidden
    found.append(Row(f"{shape.name} add+norm T={tokens}", ours * 1e6, moved, 0, {"torch.compile": theirs * 1e6}))
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
    state = slot_settings(rows, "cuda")
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
    addresses = blocks.pool_addresses(pools)
    ids = torch.randperm(512, device="cuda")[:count]
    staging = torch.empty(count, layers, 16, 2, shape.kv_heads, shape.dim, dtype=DTYPE, device="cuda")
    seconds = timed([lambda: blocks.gather_blocks(addresses, pools[0], ids, staging)])
    return Row(f"{shape.name} gather {count} blocks", seconds * 1e6, 2.0 * staging.numel() * 2, 0)


def invariant_row(shape: Shape, rows: int) -> Row:
    n, k = 2 * shape.ffn, shape.hidden
    weights, x = copies(lambda: rand(n, k)), rand(rows, k)
    ours = timed([partial(matmul.matmul_invariant, x, w) for w in weights])
    vendor = timed([partial(F.linear, x, w) for w in weights])
    moved = 2.0 * (n * k + rows * (n + k))
    return Row(
        f"{shape.name} invariant gate-up M={rows}", ours * 1e6, moved, 2.0 * rows * n * k, {"cublas": vendor * 1e6}
    )


def cells() -> Iterator[tuple[str, Callable[[], list[Row]]]]:
    """Every cell: its key and what measures it."""
    for shape in SHAPES:
        name = shape.name
        for rows in ROWS if name == "8B" else ROWS[:6]:
            for product, *rest in products(shape):
                yield f"product {name} {product} {rows}", partial(one, product_row, shape, product, *rest, rows)
                for kind in ("int4", "fp8") if product != "head" else ():
                    cell = partial(one, quantized_row, shape, kind, product, *rest, rows)
                    yield f"product {name} {kind} {product} {rows}", cell
        for rows in (1, 8, 16):
            yield f"rotated {name} {rows}", partial(one, rotated_row, shape, rows)
        for batch in (1, 8, 32, 128, 256):
            yield f"decode {name} {batch}", partial(one, decode_row, shape, f"{batch} x 2100", [2100] * batch)
        for stored, batches in ((kv.FP8, (1, 8, 32, 128)), (kv.INT8, (32,))):
            kind = "fp8" if stored == kv.FP8 else "int8"
            for batch in batches:
                contexts, title = [2100] * batch, f"{kind} {batch} x 2100"
                yield f"decode {kind} {name} {batch}", partial(one, decode_row, shape, title, contexts, 1, stored)
        for batch in (32, 256):
            title, contexts = f"{batch} x 2000, 1792 shared", [2000] * batch
            yield f"decode {name} shared {batch}", partial(one, decode_row, shape, title, contexts, 1, DTYPE, 1792)
        skewed = [31 * 512] + [2048] * 31 + [512] * 32
        even = [sum(skewed) // 64] * 64
        for kind, contexts in (("1 x 32768", [32768]), ("skewed 64", skewed), ("even 64", even)):
            yield f"decode {name} {kind}", partial(one, decode_row, shape, kind, contexts)
        yield f"verify {name}", partial(one, decode_row, shape, "32 x 2100, 5 tokens", [2100] * 32, 5)
        for tokens in (1950, 2048, 8192):
            yield f"prefill {name} {tokens}", partial(one, prefill_row, shape, tokens, 16)
        yield f"prefill {name} 2048 P=128", partial(one, prefill_row, shape, 2048, 128)
        yield f"chunk {name}", partial(one, chunk_row, shape, 512, 8192)
        for stored in (DTYPE, kv.FP8):
            kind = "fp8 " if stored == kv.FP8 else ""
            yield f"mixed {kind}{name}", partial(one, chunk_row, shape, 512, 8192, 32, stored)
        for tokens, context in ((2048, 2048), (8192, 8192), (512, 8192)):
            yield f"prefill fp8 {name} {tokens} {context}", partial(one, chunk_row, shape, tokens, context, 0, kv.FP8)
        for tokens in (1, 64, 2048):
            yield f"layer {name} {tokens}", partial(layer_rows, shape, tokens)
        yield f"blocks {name}", partial(one, blocks_row, shape, 128)
        for rows in (1, 64, 2048):
            yield f"invariant {name} {rows}", partial(one, invariant_row, shape, rows)
    kinds: dict[str, tuple[float, int, float, float]] = {
        "greedy": (0, 0, 1, 0), "temperature": (0.8, 0, 1, 0), "min-p": (0.8, 0, 1, 0.05), "top-p": (0.8, 0, 0.9, 0),
        "top-k": (0.8, 50, 1, 0),
    }  # fmt: skip
    for batch in (1, 32, 256):
        for kind, settings in kinds.items():
            yield f"sample {kind} {batch}", partial(one, sampling_row, batch, kind, *settings)


def one(measure: Callable[..., Row], *arguments: Any) -> list[Row]:
    """A cell of one row."""
    return [measure(*arguments)]


# ---- report ----


def table(rows: list[Row], roof: dict[str, float]) -> str:
    """Markdown: a line for each row."""
    lines = [
        "| kernel | us | GB/s | TFLOP/s | share of floor | others |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        others = ", ".join(f"{name} {us:.1f} us ({us / row.microseconds:.2f}x)" for name, us in row.against.items())
        speed = row.bytes / row.microseconds / 1e3
        lines.append(
            f"| {row.name} | {row.microseconds:.1f} | {speed:,.0f} | {row.flop / row.microseconds / 1e6:.1f} "
            f"| {row.share(roof):.0%} | {row.note or others} |"
        )
    return "\n".join(lines)


def machine() -> str:
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, bf16, random data"


def main() -> None:
    """Measure what is missing, then print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="cells whose key contains this")
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    arguments = parser.parse_args()
    path = arguments.out / "kernels.json"
    saved = json.loads(path.read_text()) if path.exists() and not arguments.fresh else {}
    begin = time.monotonic()
    roof = ceilings()  # always of this run
    print(machine(), {name: f"{value / 1e12:.2f} T/s" for name, value in roof.items()}, flush=True)
    done: dict[str, list[Row]] = {key: [Row(**row) for row in rows] for key, rows in saved.get("cells", {}).items()}
    arguments.out.mkdir(parents=True, exist_ok=True)
    for key, measure in cells():
        if arguments.only not in key or key in done:
            continue
        try:
            done[key] = measure()
        except (RuntimeError, ValueError, triton.runtime.errors.OutOfResources) as bad:  # A bad row is a row, too.
            done[key] = [Row(key, float("inf"), 0, 0, note=str(bad).splitlines()[0][:120])]
        torch.cuda.empty_cache()
        print("\n".join(table(done[key], roof).splitlines()[2:]), flush=True)
        state = {"machine": machine(), "ceilings": roof, "cells": {k: [asdict(r) for r in v] for k, v in done.items()}}
        path.write_text(json.dumps(state, indent=1))
    head = ", ".join(f"{name} {value / 1e12:.2f} T/s" for name, value in roof.items())
    text = f"# Kernels\n\n{machine()}. Ceilings of this run: {head}.\n\n"
    rows = [row for key, _ in cells() if key in done for row in done[key]]
    (arguments.out / "kernels.md").write_text(text + table(rows, roof) + "\n")
    print(f"{len(rows)} rows, {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
