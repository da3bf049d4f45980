"""The reference against literal definitions, published test vectors, and transformers."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.generation import logits_process

from kernels.operands import Activation, Norm, NormKind, Scores
from kernels.reference import attention, layers, sampling

BLOCK = 4


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


# ---- attention ----


class Paged:
    """Ragged rows with keys and values scattered over a pool, and the plain attention of each row."""

    def __init__(self, rows: list[tuple[int, int]], heads: int, kv_heads: int, dim: int) -> None:
        """rows: (tokens, context) of each."""
        self.rows = rows
        self.lengths = np.array([tokens for tokens, _ in rows])
        self.contexts = np.array([context for _, context in rows])
        per_row = -(-self.contexts // BLOCK)
        self.tables = np.zeros((len(rows), int(per_row.max())), np.int64)
        ids = np.random.default_rng(0).permutation(int(per_row.sum())) + 1
        self.pool = torch.zeros(len(ids) + 1, BLOCK, 2, kv_heads, dim)
        self.q = torch.randn(int(self.lengths.sum()), heads, dim)
        self.kv = [torch.randn(context, 2, kv_heads, dim) for context in self.contexts]
        for row, (count, kv) in enumerate(zip(per_row, self.kv, strict=True)):
            blocks, ids = ids[:count], ids[count:]
            self.tables[row, :count] = blocks
            flat = torch.full((count * BLOCK, 2, kv_heads, dim), 7.5)  # values of a previous owner
            flat[: len(kv)] = kv
            self.pool[torch.from_numpy(blocks)] = flat.view(count, BLOCK, 2, kv_heads, dim)

    def plain(self, rule: Scores, window: int | None) -> Tensor:
        outs, start = [], 0
        for (tokens, context), kv in zip(self.rows, self.kv, strict=True):
            q = self.q[start : start + tokens]
            start += tokens
            share = q.shape[1] // kv.shape[2]
            k, v = kv.repeat_interleave(share, dim=2).unbind(1)
            scores = torch.einsum("thd,lhd->htl", q, k) * rule.scale
            if rule.soft_cap is not None:
                scores = rule.soft_cap * torch.tanh(scores / rule.soft_cap)
            queries = torch.arange(context - tokens, context)[:, None]
            keys = torch.arange(context)[None]
            seen = (keys <= queries) & (keys > queries - (window or context))
            scores = scores.masked_fill(~seen, -torch.inf)
            if rule.sinks is not None:
                scores = torch.cat([scores, rule.sinks[:, None, None].expand(-1, tokens, -1)], -1)
            weights = torch.softmax(scores, -1)[..., :context]
            outs.append(torch.einsum("htl,lhd->thd", weights, v).flatten(1))
        return torch.cat(outs)

    def run(self, scores: Scores | float, window: int | None, invariant: bool = False) -> Tensor:
        make = attention.plan_attention_invariant if invariant else attention.plan_attention
        attend = attention.attention_invariant if invariant else attention.attention
        plan = make(self.lengths, self.contexts, self.tables, BLOCK, window, torch.float32)
        scores = scores if isinstance(scores, Scores) else Scores(scores)
        return attend(self.q, self.pool, plan, scores)


RAGGED = [(1, 1), (5, 5), (1, 130), (7, 300), (1, 9), (1, 2000), (33, 33), (1, 131), (2, 50)]


@pytest.mark.parametrize("invariant", [False, True], ids=["fast", "invariant"])
@pytest.mark.parametrize("window", [None, 1, 17, 200])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (6, 6, 8), (3, 1, 24)])
def test_ragged_attention_is_plain_attention_row_by_row(
    heads: int, kv_heads: int, dim: int, window: int | None, invariant: bool
) -> None:
    paged = Paged(RAGGED, heads, kv_heads, dim)
    for scores in (Scores(0.3), Scores(0.3, soft_cap=1.5), Scores(0.3, sinks=torch.linspace(-1, 3, heads))):
        run, plain = paged.run(scores, window, invariant), paged.plain(scores, window)
        torch.testing.assert_close(run, plain, atol=2e-6, rtol=1e-5)


def test_rows_of_one_token_are_grouped_with_little_padding() -> None:
    paged = Paged([(1, context) for context in (10, 12, 2000, 1999, 11, 13)], 2, 1, 8)
    plan = attention.plan_attention(paged.lengths, paged.contexts, paged.tables, BLOCK, None, torch.float32)
    assert sorted(group.rows for group in plan.groups) == [2, 4]
    assert sum(len(group.blocks) * BLOCK for group in plan.groups) - int(paged.contexts.sum()) <= 3 * BLOCK * 4


def test_invariant_attention_does_not_depend_on_other_rows_or_chunks() -> None:
    """A single query has the same bits in any chunk, beside any rows and in any order of blocks."""
    whole = Paged([(300, 300)], 6, 2, 16)
    expected = whole.run(0.25, None, invariant=True)
    for tokens, context in ((1, 300), (1, 17), (7, 250), (64, 64), (129, 299)):
        crowd = Paged([(1, 900), (tokens, context), (5, 40)], 6, 2, 16)
        part = slice(context - tokens, context)
        crowd.q[1 : 1 + tokens] = whole.q[part]
        blocks = torch.from_numpy(crowd.tables[1, : -(-context // BLOCK)])
        room = torch.full((len(blocks) * BLOCK, 2, 2, 16), 7.5)
        room[:context] = whole.kv[0][:context]
        crowd.pool[blocks] = room.view(len(blocks), BLOCK, 2, 2, 16)
        got = crowd.run(0.25, None, invariant=True)[1 : 1 + tokens]
        assert torch.equal(got, expected[part]), (tokens, context)


# ---- matrix products, norms, rope ----


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 192), (384, 768), (896, 384), (2048, 512), (96, 160)])
def test_the_invariant_product_of_a_row_has_the_same_bits_in_any_batch(inputs: int, outputs: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, weight, bias = torch.randn(200, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
        alone = torch.cat([layers.matmul_invariant(x[i : i + 1], weight, bias) for i in range(200)])
        for rows in (2, 5, 15, 16, 17, 64, 200):
            assert torch.equal(layers.matmul_invariant(x[:rows], weight, bias), alone[:rows]), rows
        shuffled = torch.randperm(200)
        assert torch.equal(layers.matmul_invariant(x[shuffled], weight, bias), alone[shuffled])
    finally:
        torch.set_num_threads(before)


def test_the_plain_product_depends_on_the_batch() -> None:
    x, weight = torch.randn(64, 384), torch.randn(768, 384)
    assert not torch.equal(F.linear(x[:1], weight), F.linear(x, weight)[:1])


def test_norms_and_gates_follow_their_definitions() -> None:
    x, weight = torch.randn(5, 24), torch.rand(24)

    def norm(y: Tensor) -> Tensor:
        return y / (y.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    torch.testing.assert_close(layers.rms_norm(x, weight, 1e-5), norm(x))
    per_head = torch.rand(3, 8)
    heads = torch.randn(5, 3, 8)
    torch.testing.assert_close(layers.rms_norm(heads, per_head, 1e-5), F.rms_norm(heads, (8,), None, 1e-5) * per_head)
    torch.testing.assert_close(layers.silu_and_mul(x), F.silu(x[:, :12]) * x[:, 12:])


def test_layer_norm_and_gelu_follow_their_definitions() -> None:
    x, weight, bias = torch.randn(5, 24) * 3 + 9, torch.rand(24), torch.randn(24)
    centered = x - x.mean(-1, keepdim=True)
    normed = centered / (centered.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    layer = NormKind.LAYER
    torch.testing.assert_close(layers.normalize(x, Norm(weight, 1e-5, layer)), normed)
    torch.testing.assert_close(layers.normalize(x, Norm(weight, 1e-5, layer, bias)), normed + bias)
    exact = x / 2 * (1 + torch.erf(x / 2**0.5))
    torch.testing.assert_close(layers.activate(x, Activation.GELU), exact)
    tanh = x / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    torch.testing.assert_close(layers.activate(x, Activation.GELU_TANH), tanh)


@pytest.mark.parametrize("activation", Activation)
def test_an_invariant_activation_has_the_same_bits_in_any_batch(activation: Activation) -> None:
    for width in (66, 96, 100, 3072):
        x = torch.randn(9, width)
        whole = layers.activate_invariant(x, activation)
        torch.testing.assert_close(whole, layers.activate(x, activation))
        for first, last in ((0, 1), (3, 4), (2, 7), (8, 9)):
            assert torch.equal(layers.activate_invariant(x[first:last], activation), whole[first:last])


def test_rope_rotates_pairs_and_stores_keys_and_values() -> None:
    heads, kv_heads, dim = 4, 2, 8
    qkv = torch.randn(3, heads + 2 * kv_heads, dim)
    angles = torch.rand(3, dim // 2) * 6
    cos = torch.cat((angles.cos(), angles.cos()), -1)[:, None]
    sin = torch.cat((-angles.sin(), angles.sin()), -1)[:, None]
    pairs = torch.complex(qkv[..., : dim // 2], qkv[..., dim // 2 :]) * torch.polar(
        torch.ones(3, 1, 4), angles[:, None]
    )
    rotated = torch.cat((pairs.real, pairs.imag), -1)
    values = qkv[:, heads + kv_heads :].clone()
    pool = torch.zeros(5, BLOCK, 2, kv_heads, dim)
    q = layers.rope_and_store(qkv, cos, sin, pool, torch.tensor([6, 17, 4]), heads, kv_heads)
    torch.testing.assert_close(q, rotated[:, :heads])
    written = pool.view(-1, 2, kv_heads, dim)[[6, 17, 4]]
    torch.testing.assert_close(written[:, 0], rotated[:, heads : heads + kv_heads])
    assert torch.equal(written[:, 1], values)
    assert int((pool.view(20, -1).abs().sum(-1) > 0).sum()) == 3


# ---- random numbers ----


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_words(counter: list[int], key: list[int], words: list[int]) -> None:
    c0, c1, c2, c3, k0, k1 = (np.array([word], np.uint64) for word in counter + key)
    assert [int(word[0]) for word in sampling.philox4x32((c0, c1, c2, c3), (k0, k1))] == words


def noise(seed: int, position: int = 0, sample: int = 0, vocab: int = 4096) -> Tensor:
    seeds = torch.tensor([seed - (1 << 64) if seed >= 1 << 63 else seed])
    return sampling.gumbel_noise(seeds, torch.tensor([position]), torch.tensor([sample]), vocab)[0]


def test_noise_is_built_from_the_words_as_defined() -> None:
    seed, position, sample, token = 0xFEDCBA9876543210, 77, 3, 1022
    numbers = (token // 4, position, sample, 0, seed & 0xFFFFFFFF, seed >> 32)
    c0, c1, c2, c3, k0, k1 = (np.array([number], np.uint64) for number in numbers)
    word = int(sampling.philox4x32((c0, c1, c2, c3), (k0, k1))[token % 4][0])
    u = ((word >> 9) + 0.5) * 2.0**-23
    assert float(noise(seed, position, sample)[token]) == pytest.approx(-math.log(-math.log(u)), rel=1e-6)


def test_noise_depends_on_its_key_alone() -> None:
    seeds = torch.tensor([5, -9, 1 << 40, 5])
    positions, samples = torch.tensor([0, 7, 7, 1]), torch.tensor([0, 0, 2, 0])
    batch = sampling.gumbel_noise(seeds, positions, samples, 1001)
    for row in range(4):
        alone = sampling.gumbel_noise(seeds[row : row + 1], positions[row : row + 1], samples[row : row + 1], 333)
        assert torch.equal(batch[row, :333], alone[0]), "noise does not depend on batch or vocabulary size"
    assert len({tuple(row.tolist()) for row in batch}) == 4


def test_noise_is_gumbel_and_always_finite() -> None:
    drawn = torch.cat([noise(seed, position=seed % 3) for seed in range(60)]).double()
    assert bool(torch.isfinite(drawn).all())
    assert float(drawn.mean()) == pytest.approx(0.5772, abs=0.01)
    assert float(drawn.var()) == pytest.approx(math.pi**2 / 6, abs=0.03)
    edges = (torch.tensor([0, (1 << 32) - 1]) >> 9).double().add(0.5).mul(2.0**-23)
    assert bool(torch.isfinite(edges.log().neg().log()).all()), "the extreme words give finite noise"


# ---- cuts and penalties ----


def warped(warper: Any, logits: Tensor, ids: Tensor | None = None) -> Tensor:
    return torch.cat([warper(ids, row[None].clone()) for row in logits])


@pytest.fixture
def logits() -> Tensor:
    return torch.randn(6, 321) * 3


@pytest.mark.parametrize("k", [1, 5, 320, 1000])
def test_top_k_is_transformers(logits: Tensor, k: int) -> None:
    expected = warped(logits_process.TopKLogitsWarper(min(k, 321)), logits)
    assert torch.equal(sampling.keep_top_k(logits.clone(), torch.full((6,), k)), expected)


def test_each_row_has_its_own_k(logits: Tensor) -> None:
    kept = sampling.keep_top_k(logits.clone(), torch.tensor([0, 1, 2, 3, 321, 400])).isfinite().sum(-1)
    assert kept.tolist() == [321, 1, 2, 3, 321, 321]


@pytest.mark.parametrize("p", [0.001, 0.3, 0.9, 0.999])
def test_top_p_is_transformers(logits: Tensor, p: float) -> None:
    expected = warped(logits_process.TopPLogitsWarper(p), logits)
    assert torch.equal(sampling.keep_top_p(logits.clone(), torch.full((6,), p)), expected)


@pytest.mark.parametrize("p", [0.01, 0.5, 1.0])
def test_min_p_is_transformers(logits: Tensor, p: float) -> None:
    expected = warped(logits_process.MinPLogitsWarper(p), logits)
    assert torch.equal(sampling.keep_min_p(logits.clone(), torch.full((6,), p)), expected)
    assert torch.equal(sampling.keep_min_p(logits.clone(), torch.zeros(6)), logits)


def test_equal_logits_are_kept_or_cut_together() -> None:
    flat = torch.zeros(1, 10)
    flat[0, 3] = 1.0
    assert int(sampling.keep_top_k(flat.clone(), torch.tensor([2])).isfinite().sum()) == 10
    assert int(sampling.keep_top_p(flat.clone(), torch.tensor([1e-4])).isfinite().sum()) == 1
    assert int(sampling.choose(torch.zeros(1, 10))[0]) == 0, "of equal logits the lowest id is best"


def test_repetition_penalty_is_transformers(logits: Tensor) -> None:
    ids = torch.randint(0, 321, (6, 40))
    expected = logits_process.RepetitionPenaltyLogitsProcessor(1.7)(ids, logits.clone())
    seen = torch.zeros(6, 321, dtype=torch.bool).scatter_(1, ids, True)
    torch.testing.assert_close(sampling.repeat_penalty(logits.clone(), seen, torch.full((6,), 1.7)), expected)


def test_presence_and_frequency_penalties_follow_their_definitions(logits: Tensor) -> None:
    counts = torch.randint(0, 4, (6, 321)).float()
    presence, frequency = torch.randn(6), torch.randn(6)
    expected = logits - presence[:, None] * (counts > 0) - frequency[:, None] * counts
    torch.testing.assert_close(sampling.count_penalties(logits.clone(), counts, presence, frequency), expected)


def test_log_probs_are_the_log_softmax(logits: Tensor) -> None:
    chosen = torch.tensor([0, 5, 7, 320, 9, 1])
    own, ids, best = sampling.log_probs(logits, chosen, 4)
    table = torch.log_softmax(logits, -1)
    torch.testing.assert_close(own, table.gather(1, chosen[:, None])[:, 0])
    torch.testing.assert_close(best, table.topk(4).values)
    assert torch.equal(ids, table.topk(4).indices)
    assert sampling.log_probs(logits, chosen, 0)[1].shape == (6, 0)


def test_rows_with_non_finite_values_are_reported() -> None:
    x = torch.zeros(6, 3)
    assert layers.finite_rows(x, [1, 2, 3]) == [True, True, True]
    x[2, 1] = torch.nan
    x[5, 0] = -torch.inf
    assert layers.finite_rows(x, [1, 2, 3]) == [True, False, False]
    x[5, 0], x[4, 0] = torch.inf, 0.0
    assert layers.finite_rows(x[3:], [2, 1]) == [True, False]
