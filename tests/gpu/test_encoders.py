"""Encoders on the GPU: each kernel against plain torch, and vectors of every family against transformers on the CPU."""

import random
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from transformers.models.auto.modeling_auto import AutoModel, AutoModelForSequenceClassification
from typer.testing import CliRunner

from kernels import linear
from kernels.activation import gelu
from kernels.operands import Activation
from kernels.reference import layers
from services.worker.job import EncodeTask, Job, SamplingParams, StepOutput
from services.worker.runners.base import TextTokens
from services.worker.runners.cuda.encoders import runner as encoder_runner
from tests.checkpoints import make_checkpoint
from tests.encoders import CONTEXT, FAMILIES, TEXTS, add_modules, make_encoder
from tests.kernels.cases import DTYPES, close, rand
from tests.kernels.texts import (
    check_add_layer_norm,
    check_batches,
    check_decoder_texts,
    check_embedded_texts,
    check_packed_attention,
    check_pooled_texts,
    check_resident_norm,
    check_resident_product,
)
from tests.tiny_config import gpt2_settings
from tests.worker import test_text_decoders as text_decoders
from tests.worker.test_encoders import ENCODED, POOLINGS, TOKENIZER, Floats, build, cosines, vectors
from verify.cli import app

GATES = {"float32": 0.99999, "bfloat16": 0.999, "float16": 0.9999}
DECODER_GATES = {"float32": 0.99999, "bfloat16": 0.99}
"""These random weights amplify rounding: in bfloat16 transformers itself keeps 0.9975, the CPU's runner 0.9955."""


@pytest.fixture(autouse=True)
def _exact_reference() -> Iterator[None]:
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.cuda.synchronize()


# ---- kernels ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "dim"), [(12, 32), (12, 64), (16, 64), (8, 128), (4, 8), (3, 80), (2, 256)])
def test_attention_of_packed_texts(heads: int, dim: int, dtype: torch.dtype) -> None:
    for lengths in ([1], [8], [random.randint(1, 600) for _ in range(9)], [256] * 5, [64, 128, 65, 129, 1, 2, 512],
                    [random.randint(1, 30) for _ in range(150)]):  # fmt: skip
        check_packed_attention(lengths, heads, dim, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_ends_of_an_encoder_and_norms_of_sums(dtype: torch.dtype) -> None:
    for n in (70, 384, 768, 1000, 1024, 4096):
        check_embedded_texts(random.randint(1, 300), n, dtype)
        check_pooled_texts([random.randint(1, 300) for _ in range(7)], n, dtype)
        for rows in (1, random.randint(2, 1000)):
            check_add_layer_norm(rows, n, dtype)


@pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper")
def test_products_with_weights_that_stay_in_shared_memory() -> None:
    for rows in (1, 63, 64, 65, 127, 300, 5000, random.randint(1, 40_000)):
        for outputs in (128, 1152, 1536):
            check_resident_product(rows, outputs)


@pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper")
def test_norms_whose_rows_three_programs_share() -> None:
    for rows in (1, 63, 64, 65, 127, 300, 5000, random.randint(1, 40_000), 32_768, 16_384):
        check_resident_norm(rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gelu_of_a_product_in_its_epilogue(dtype: torch.dtype) -> None:
    for rows, n, k in ((16, 1536, 384), (777, 3072, 768), (2, 72, 40)):
        x, weight, bias = rand(rows, k, dtype=dtype), rand(n, k, dtype=dtype) / k**0.5, rand(n, dtype=dtype)
        want = torch.nn.functional.gelu(x.double() @ weight.double().T + bias.double(), approximate="tanh")
        assert linear.fuses_gelu(x, Activation.GELU)
        close(linear.gelu(x, weight, bias), want)
        apart = gelu(linear.linear(x, weight, bias), tanh=True)
        close(apart, want)
        exact = layers.activate(x.double() @ weight.double().T + bias.double(), Activation.GELU)
        assert float((linear.gelu(x, weight, bias).double() - exact).abs().max()) < 5e-4 + 2**-7 * float(exact.max())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batches_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    check_batches(dtype)
    check_batches(dtype, heads=2, hidden=256)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("model", [{}, {"windows": (24, None), "qk_norm": True}, gpt2_settings(128)])
def test_texts_in_a_decoder_are_those_of_the_cpu(dtype: torch.dtype, model: dict[str, Any]) -> None:
    check_decoder_texts(dtype, **model)


# ---- vectors of every family ----


@torch.inference_mode()
def alone(folder: Path, texts: list[list[int]], pooling: str = "mean") -> Floats:
    """What transformers makes of each text by itself, in float32 on the CPU."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    states = [model(input_ids=torch.tensor([text])).last_hidden_state[0] for text in texts]
    return np.stack([POOLINGS[pooling](state).numpy() for state in states])


def encode(built: Any, texts: list[list[int]]) -> Floats:
    """Vectors of one job with these texts."""
    tokens = [token for text in texts for token in text]
    task = EncodeTask(tuple(map(len, texts)))
    built.engine.submit(Job(1, tokens, len(tokens), SamplingParams(1), encode=task))
    output = StepOutput([], [])
    while built.engine.has_work():
        built.engine._take_messages(output)
        if len(built.engine.batch):
            built.engine.step(output)
    (ended,) = output.ended
    assert ended.vectors is not None, ended
    return np.frombuffer(ended.vectors.data, "<f4").reshape(-1, ended.vectors.width)


def random_ids(lengths: list[int]) -> list[list[int]]:
    return [[random.randrange(5, 30) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("dtype", GATES)
@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_are_those_of_transformers(tmp_path: Path, family: str, dtype: str) -> None:
    folder = make_encoder(tmp_path, family)
    built = build(folder, engine="gpu", dtype=dtype, step_tokens=256)
    assert cosines(vectors(built, ENCODED), alone(folder, [text.ids for text in ENCODED])).min() >= GATES[dtype]
    # One token, the longest text, mixed lengths; a batch with exactly as many tokens as there may be; several batches.
    for lengths in ([1], [CONTEXT], [1, 64, 3, 2, 17, 40, 1], [64] * 4, [random.randint(1, 64) for _ in range(40)]):
        texts = random_ids(lengths)
        own, reference_ = encode(built, texts), alone(folder, texts)
        assert cosines(own, reference_).min() >= GATES[dtype], lengths
        if dtype == "float32":
            np.testing.assert_allclose(own, reference_, atol=5e-4)
    runner: Any = built.engine.runner
    assert runner.network.model.embedding.is_cuda


@pytest.mark.parametrize("dtype", DECODER_GATES)
@pytest.mark.parametrize("family", text_decoders.FAMILIES)
def test_vectors_of_a_decoder_are_those_of_transformers(tmp_path: Path, family: str, dtype: str) -> None:
    folder = add_modules(make_checkpoint(tmp_path, family), text_decoders.LAST)
    built = text_decoders.build(folder, engine="gpu", dtype=dtype)
    runner: Any = built.engine.runner
    assert runner._graphs
    for texts in (text_decoders.TEXTS, text_decoders.TEXTS[:1], text_decoders.TEXTS[4:5]):
        want = text_decoders.expected(folder, texts=texts)
        assert cosines(encode(built, texts), want).min() >= DECODER_GATES[dtype]
        graphs, runner._graphs = runner._graphs, []
        assert cosines(encode(built, texts), want).min() >= DECODER_GATES[dtype], "launched kernel by kernel"
        runner._graphs = graphs


@pytest.mark.parametrize("pooling", POOLINGS)
def test_each_pooling(tmp_path: Path, pooling: str) -> None:
    folder = add_modules(make_encoder(tmp_path), {"pooling_mode": pooling})
    built = build(folder, engine="gpu", dtype="float32")
    texts = random_ids([1, 30, 64, 5])
    assert cosines(encode(built, texts), alone(folder, texts, pooling)).min() >= GATES["float32"]


def test_vectors_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    from transformers import PreTrainedTokenizerFast

    folder = add_modules(make_encoder(tmp_path), {"pooling_mode_mean_tokens": True, "word_embedding_dimension": 32})
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=TOKENIZER, **special).save_pretrained(folder)
    expected = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    built = build(folder, engine="gpu", dtype="float32")
    assert cosines(vectors(built, ENCODED, normalize=True), np.asarray(expected)).min() >= GATES["float32"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("labels", [1, 3])
def test_scores_of_pairs_are_those_of_transformers(tmp_path: Path, family: str, labels: int) -> None:
    folder = make_encoder(tmp_path, family, labels)
    pairs = [TOKENIZER.encode(text, other) for text, other in pairwise(TEXTS)]
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    scores = []
    with torch.inference_mode():
        for pair in pairs:
            parts = {"token_type_ids": torch.tensor([pair.type_ids])} if family in ("bert", "albert") else {}
            scores.append(model(input_ids=torch.tensor([pair.ids]), **parts).logits[0])
    shares = torch.stack(scores)
    shares = shares.sigmoid() if labels == 1 else shares.softmax(1)
    for dtype, tolerance in (("float32", 2e-5), ("bfloat16", 0.1)):
        built = build(folder, engine="gpu", dtype=dtype)
        np.testing.assert_allclose(vectors(built, pairs, pairs=True), shares.numpy(), atol=tolerance)


def test_captured_batches_are_those_launched_kernel_by_kernel(tmp_path: Path) -> None:
    built = build(make_encoder(tmp_path), engine="gpu", dtype="float32", step_tokens=1024)
    runner: Any = built.engine.runner
    graphs = runner._graphs
    assert [graph.sizes.tokens for graph in graphs][:3] == [16, 32, 64]
    for lengths in ([1], [16], [1] * 16, [17, 3], [64] * 8 + [7] * 8):
        batch = [TextTokens(text) for text in random_ids(lengths)]
        replayed = runner.collect(runner.launch(batch)).copy()
        runner._graphs = []
        np.testing.assert_allclose(replayed, runner.collect(runner.launch(batch)), atol=1e-5)
        runner._graphs = graphs


def test_a_full_batch_has_the_vectors_of_small_ones(tmp_path: Path) -> None:
    folder = make_encoder(
        tmp_path, hidden_size=384, num_attention_heads=12, intermediate_size=1536, initializer_range=0.05
    )
    built = build(folder, engine="gpu", dtype="bfloat16", step_tokens=16384)
    runner: Any = built.engine.runner
    graphs = runner._graphs
    texts = random_ids([64] * 255 + [40])
    full = encode(built, texts)  # As a graph, padded.
    runner._graphs = []
    launched = encode(built, texts)
    runner._graphs = graphs
    few = np.concatenate([encode(built, texts[begin : begin + 16]) for begin in range(0, 256, 16)])
    assert cosines(full, few).min() >= 0.9999
    assert cosines(launched, few).min() >= 0.9999


@pytest.mark.parametrize("form", ["fp8", "int8", "int4", "nf4"])
def test_rounded_weights_stay_close(tmp_path: Path, form: str) -> None:
    if form == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs tensor cores for fp8")
    folder = make_encoder(tmp_path, hidden_size=128, intermediate_size=256, initializer_range=0.05)
    built = build(folder, engine="gpu", quantize=form)
    least = 0.99 if form in ("fp8", "int8") else 0.95
    for lengths in ([3], [64] * 6, [random.randint(1, 64) for _ in range(20)]):
        texts = random_ids(lengths)
        assert cosines(encode(built, texts), alone(folder, texts)).min() >= least


@pytest.mark.parametrize("staged_words", [1, encoder_runner.STAGED_WORDS], ids=["staged", "copied"])
def test_two_batches_are_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staged_words: int) -> None:
    monkeypatch.setattr(encoder_runner, "STAGED_WORDS", staged_words)
    built = build(make_encoder(tmp_path), engine="gpu", dtype="float32", step_tokens=128)
    served: Any = built.engine.runner
    launch: Callable[..., Any] = served.launch
    collect: Callable[..., Any] = served.collect
    flying, most = 0, 0

    def counted(batch: Any) -> Any:
        nonlocal flying, most
        flying += 1
        most = max(most, flying)
        return launch(batch)

    def landed(launched: Any) -> Any:
        nonlocal flying
        flying -= 1
        return collect(launched)

    monkeypatch.setattr(served, "launch", counted)
    monkeypatch.setattr(served, "collect", landed)
    stop, results = threading.Event(), list[Any]()

    class Events:
        def launched(self, _: float) -> None:
            """Nothing is to be done."""

        def begun(self, output: StepOutput) -> None:
            """Texts have no first tokens."""

        def stepped(self, output: StepOutput) -> None:
            results.extend(output.ended)
            stop.set()

    texts = random_ids([40] * 30)
    tokens = [token for text in texts for token in text]
    task = EncodeTask(tuple(map(len, texts)))
    built.engine.submit(Job(1, tokens, len(tokens), SamplingParams(1), encode=task))
    built.engine.run(Events(), stop)
    assert most == served.depth
    own = np.frombuffer(results[0].vectors.data, "<f4").reshape(30, -1)
    assert cosines(own, alone(tmp_path, texts)).min() >= GATES["float32"]


def test_verify_holds_fp8_vectors_to_a_cosine(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path, hidden_size=128, intermediate_size=256, initializer_range=0.05)
    ran = CliRunner().invoke(app, [str(folder), "--quantize", "fp8", "--device", "cuda"])
    assert ran.exit_code == 0, ran.output
