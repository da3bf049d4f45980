"""Checks of the kernels of encoders against plain torch: embeddings, attention, norms of sums, pooling; whole batches.

Shapes are odd, data is fresh, outputs are poisoned.
"""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kernels import norm, texts
from kernels.attention import packed_texts
from kernels.attention.packed_texts import TilePlan, TileShape, attend_packed, shape_for, tiles_of
from kernels.linear import resident_hopper, resident_norm_hopper
from kernels.operands import Activation, Norm, NormKind, Pooling
from kernels.reference import texts as reference
from services.worker.kvcache.pages import make_layers
from services.worker.models.decoder import Decoder
from services.worker.models.encoders.config import EncoderConfig
from services.worker.models.encoders.encoder import Encoder
from services.worker.models.families import bert
from services.worker.runners.base import TextTokens
from services.worker.runners.cpu.decoder_texts import DecoderTextRunner
from services.worker.runners.cpu.encoder_ops import CpuEncoderOps
from services.worker.runners.cpu.encoder_runner import CpuEncoderRunner
from services.worker.runners.cpu.ops import ReferenceOps
from services.worker.runners.cpu.steps import StepBuilder
from services.worker.runners.cuda.encoders.decoder_network import DecoderNetwork
from services.worker.runners.cuda.encoders.encoder_network import EncoderNetwork
from services.worker.runners.cuda.encoders.ops import TritonEncoderOps
from services.worker.runners.cuda.encoders.runner import GpuTextRunner
from services.worker.runners.cuda.ops import TritonOps
from services.worker.runners.packed_ids import pack
from tests.kernels.cases import DEVICE, close, poison, rand
from tests.tiny_config import tiny_config


def starts_of(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=DEVICE)


def check_packed_attention(
    lengths: Sequence[int], heads: int, dim: int, dtype: torch.dtype, shape: TileShape | None = None
) -> None:
    """Attention of these texts. Behind the last one are rows and tiles of no text."""
    tokens, beyond = sum(lengths), 3
    qkv = rand(tokens + beyond, 3 * heads * dim, dtype=dtype)
    qkv[tokens:] = torch.nan
    shape = shape or shape_for(tokens, dim, dtype)
    made = torch.from_numpy(tiles_of(starts_of(lengths).cpu().numpy(), shape.queries))
    assert len(made) <= packed_texts.most_tiles(tokens, len(lengths), shape.queries)
    tiles = torch.cat([made, torch.zeros(2, packed_texts.TILE_WORDS, dtype=torch.int32)]).to(DEVICE)
    out = poison(tokens + beyond, heads * dim, dtype=dtype)
    attend_packed(qkv, TilePlan(tiles, shape), heads, out)
    close(out[:tokens], reference.attend_packed(qkv[:tokens].double(), reference.equal_texts(lengths), heads))
    assert out[tokens:].isnan().all()


def check_add_layer_norm(rows: int, n: int, dtype: torch.dtype) -> None:
    """The norm of a sum of rows far from zero, with and without what is added to each row; in place."""
    x, residual = rand(rows, n, dtype=dtype) * 3 + 20, rand(rows, n, dtype=dtype)
    added, its_norm = rand(n, dtype=dtype), Norm(rand(n, dtype=dtype), 1e-12, NormKind.LAYER, rand(n, dtype=dtype))
    for more in (None, added):
        total = x.double() + residual.double() + (0 if more is None else more.double())
        want = torch.nn.functional.layer_norm(total, (n,), its_norm.weight.double(), _double(its_norm.bias), 1e-12)
        out = poison(rows, n, dtype=dtype)
        close(norm.add_layer_norm(x, more, residual, its_norm, out), want)
        copy = x.clone()
        norm.add_layer_norm(copy, more, residual, its_norm, copy)
        assert torch.equal(copy, out)


def check_resident_product(rows: int, outputs: int) -> None:
    """Products of 384 inputs with bias, and their GELU. What follows the last row is not written."""
    x, bias = rand(rows, 384, dtype=torch.bfloat16), rand(outputs, dtype=torch.bfloat16)
    weight = rand(outputs, 384, dtype=torch.bfloat16) / 384**0.5
    product = x.double() @ weight.double().T + bias.double()
    for gelu in (False, True):
        out = poison(rows + 3, outputs, dtype=torch.bfloat16)
        resident_hopper.linear(x, weight, bias, gelu=gelu, out=out[:rows])
        close(out[:rows], torch.nn.functional.gelu(product, approximate="tanh") if gelu else product)
        assert out[rows:].isnan().all()


def check_resident_norm(rows: int) -> None:
    """The norm of a residual and a product of 384 inputs, with and without bias, also in place: rows far from zero.
    Needs a Hopper: Triton's interpreter does not run Gluon."""
    x, residual = rand(rows, 384, dtype=torch.bfloat16), rand(rows, 384, dtype=torch.bfloat16) * 3 + 20
    weight, bias = rand(384, 384, dtype=torch.bfloat16) / 384**0.5, rand(384, dtype=torch.bfloat16)
    its_norm = Norm(rand(384, dtype=torch.bfloat16), 1e-12, NormKind.LAYER, rand(384, dtype=torch.bfloat16))
    for more in (None, bias):
        total = residual.double() + x.double() @ weight.double().T + (0 if more is None else more.double())
        want = torch.nn.functional.layer_norm(total, (384,), its_norm.weight.double(), _double(its_norm.bias), 1e-12)
        out = poison(rows + 3, 384, dtype=torch.bfloat16)
        resident_norm_hopper.linear_add_norm(x, weight, more, residual, its_norm, out[:rows])
        close(out[:rows], want)
        assert out[rows:].isnan().all()
        copy = residual.clone()
        resident_norm_hopper.linear_add_norm(x, weight, more, copy, its_norm, copy)
        assert torch.equal(copy, out[:rows])


def check_embedded_texts(tokens: int, n: int, dtype: torch.dtype) -> None:
    """Rows of all tables, of two, and the first row of the third."""
    tables = [rand(rows, n, dtype=dtype) for rows in (50, 20, 2)]
    token, place, part = (torch.randint(len(table), (tokens,), dtype=torch.int32, device=DEVICE) for table in tables)
    its_norm = Norm(rand(n, dtype=dtype), 1e-5, NormKind.LAYER, rand(n, dtype=dtype))
    doubled = Norm(its_norm.weight.double(), 1e-5, NormKind.LAYER, _double(its_norm.bias))
    for segments, table in ((part, tables[2]), (None, tables[2]), (None, None)):
        wide = None if table is None else table.double()
        want = reference.embed_texts(token, place, segments, tables[0].double(), tables[1].double(), wide, doubled)
        close(texts.embed_texts(token, place, segments, tables[0], tables[1], table, its_norm), want)


def check_pooled_texts(lengths: Sequence[int], n: int, dtype: torch.dtype) -> None:
    """Each pooling; a text without tokens behind the others gets no vector."""
    x, starts = rand(sum(lengths), n, dtype=dtype), starts_of(lengths)
    padded = torch.cat([starts, starts[-1:]])
    for pooling in Pooling:
        out = poison(len(lengths) + 1, n, dtype=torch.float32)
        texts.pool_texts(x, padded, pooling, out)
        close(out[:-1], reference.pool_texts(x.cpu(), starts.cpu(), pooling).to(DEVICE))
        assert out[-1].isnan().all()


def _double(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.double()


def random_texts(lengths: Sequence[int], vocab: int) -> list[TextTokens]:
    """Texts, every other one a pair if it has more than one token."""
    ids = [[random.randrange(vocab) for _ in range(length)] for length in lengths]
    return [TextTokens(text, len(text) // 2 if place % 2 else 0) for place, text in enumerate(ids)]


def as_captured(runner: GpuTextRunner[Any], batch: Sequence[TextTokens], tokens: int) -> torch.Tensor:
    """The vectors of a batch with padding for this number of tokens, and for as many texts as there may be."""
    network = runner.network
    sizes = network.sizes(tokens, runner.most_texts)
    words = np.empty(sizes.words, np.int32)
    network.lay_out(pack(batch, 0), sizes, words)
    runner.words[: sizes.words] = torch.from_numpy(words).to(DEVICE)
    return network.forward(runner.words, sizes)


BATCHES = ([1], [90, 1, 64, 65, 7], [30, 30, 2, 1, 1, 5, 90, 3, 63])
"""Lengths of the texts."""


def check_runner(
    runner: GpuTextRunner[Any],
    expected: CpuEncoderRunner | DecoderTextRunner,
    vocab: int,
    tolerance: float,
    padded: Sequence[Sequence[int]] = BATCHES,
) -> None:
    """Batches in the GPU's runner and in the CPU's, some also padded as a captured one is, and two in flight."""
    launched = [runner.launch(random_texts([1, 80, 33], vocab)), runner.launch(random_texts([7] * 9, vocab))]
    assert all(np.isfinite(runner.collect(each)).all() for each in launched)
    for lengths in BATCHES:
        batch = random_texts(lengths, vocab)
        want = torch.from_numpy(expected.collect(expected.launch(batch)))
        got = torch.from_numpy(runner.collect(runner.launch(batch)).copy())
        assert got.shape == want.shape
        assert float((got - want).norm() / want.norm()) < tolerance
        if lengths in padded:
            got = as_captured(runner, batch, 300)[: len(batch)].float().cpu()
            assert float((got - want).norm() / want.norm()) < tolerance
    assert runner.computed_tokens == expected.computed_tokens + 114 + 63


def check_batches(dtype: torch.dtype, layers: int = 2, heads: int = 4, hidden: int = 96) -> None:
    """Batches of a small BERT in the GPU's runner and in the CPU's, also padded as a captured one is."""
    config = EncoderConfig(
        "BertModel", vocab_size=70, hidden_size=hidden, intermediate_size=2 * hidden + 8, layers=layers, heads=heads,
        norm_eps=1e-12, activation=Activation.GELU, positions=90, segments=2,
    )  # fmt: skip
    own = Encoder(config, bert.FAMILY, TritonEncoderOps(), dtype, Pooling.MEAN, DEVICE)
    its = Encoder(config, bert.FAMILY, CpuEncoderOps(), torch.float32, Pooling.MEAN)
    wanted = its.destinations()
    for name, views in own.destinations().items():
        for view, other in zip(views, wanted[name], strict=True):
            other.copy_(torch.randn(other.shape) * 0.15 + (name.endswith("weight") and other.ndim == 1))
            view.copy_(other)
    runner = GpuTextRunner(EncoderNetwork(own), 300, 9)
    check_runner(runner, CpuEncoderRunner(its, 300), 70, 1e-4 if dtype == torch.float32 else 2e-2)


POOLINGS = ((Pooling.LAST, 0), (Pooling.MEAN, 0), (Pooling.LAST, 64))
"""How a decoder's hidden states become a vector, and the labels whose scores it is; 0: it is an embedding."""


def check_decoder_texts(
    dtype: torch.dtype,
    padded: Sequence[Sequence[int]] = BATCHES,
    poolings: Sequence[tuple[Pooling, int]] = POOLINGS,
    **model: Any,
) -> None:
    """Texts in a decoder that embeds, by the GPU's network and by the CPU's, in blocks that texts before have left.
    `model` are fields of the model's configuration."""
    config = tiny_config(**{**model, "tied_embeddings": True})
    fast, exact = TritonOps(), ReferenceOps()
    own, its = Decoder(config, fast, dtype, 128, DEVICE), Decoder(config, exact, torch.float32, 128)
    wanted = its.destinations()
    for name, views in own.destinations().items():
        for view, other in zip(views, wanted[name], strict=True):
            other.copy_(torch.randn(other.shape) * 0.15 + (name.endswith("weight") and other.ndim == 1))
            view.copy_(other)
    # With few labels a text's scores may nearly cancel out: then rounding is large beside them.
    for pooling, count in poolings:
        labels = torch.randn(count, 48) if count else None
        network = DecoderNetwork(
            own, fast, make_layers(config, 28, 16, dtype, DEVICE), 90, 9, pooling,
            None if labels is None else labels.to(DEVICE, dtype),
        )  # fmt: skip
        pools = make_layers(config, 28, 16, torch.float32, "cpu")
        expected = DecoderTextRunner(StepBuilder(its, exact, 16), pools, 300, pooling, labels)
        tolerance = 1e-4 if dtype == torch.float32 else 3e-2
        check_runner(GpuTextRunner(network, 300, 9), expected, 50, tolerance, padded)
