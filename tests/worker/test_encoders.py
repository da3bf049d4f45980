"""Every family of encoders against transformers: pooled vectors, scores of heads, pairs, int8."""

import json
import shutil
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Encoding
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification
from typer.testing import CliRunner

from services.worker.build.encoders import assemble
from services.worker.build.encoders.assemble import BuiltEncoder, build_encoder
from services.worker.build.export import export
from services.worker.job import EncodeTask, Ended, Job, SamplingParams, StepOutput
from services.worker.options import EngineOptions
from tests.encoders import CONTEXT, FAMILIES, TEXTS, add_modules, make_encoder, make_tokenizer
from verify.cli import app

Floats = npt.NDArray[np.float32]
TOKENIZER = make_tokenizer()
ENCODED = [TOKENIZER.encode(text) for text in TEXTS]
POOLINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda x: x.mean(0),
    "cls": lambda x: x[0],
    "max": lambda x: x.amax(0),
    "lasttoken": lambda x: x[-1],
}


def build(folder: Path, **options: object) -> BuiltEncoder:
    return build_encoder(folder, EngineOptions.model_validate({"engine": "torch", **options}), lambda *_: None)


def drain(built: BuiltEncoder) -> list[Ended]:
    """Compute until no job is left."""
    output = StepOutput([], [])
    while built.engine.has_work():
        built.engine._take_messages(output)
        if len(built.engine.batch):
            built.engine.step(output)
    return output.ended


def job(texts: Sequence[Encoding], key: int = 1, pairs: bool = False, **task: Any) -> Job:
    token_ids = [token for text in texts for token in text.ids]
    seconds = tuple(text.type_ids.index(1) for text in texts) if pairs else ()
    lengths = tuple(len(text.ids) for text in texts)
    encode = EncodeTask(lengths, seconds, **task)
    return Job(key, token_ids, len(token_ids), SamplingParams(1), encode=encode)


def vectors(built: BuiltEncoder, texts: Sequence[Encoding], pairs: bool = False, **task: Any) -> Floats:
    built.engine.submit(job(texts, pairs=pairs, **task))
    (ended,) = drain(built)
    assert ended.vectors is not None, ended
    assert ended.cost.prefill_tokens == sum(len(text.ids) for text in texts)
    return np.frombuffer(ended.vectors.data, "<f4").reshape(-1, ended.vectors.width)


@torch.inference_mode()
def expected(folder: Path, pooling: str = "mean") -> Floats:
    """What transformers and the pooling make of each text alone: no padding that could hide anything."""
    model = AutoModel.from_pretrained(folder).eval()
    states = [model(input_ids=torch.tensor([text.ids])).last_hidden_state[0] for text in ENCODED]
    return np.stack([POOLINGS[pooling](state).numpy() for state in states])


def cosines(a: Floats, b: Floats) -> Floats:
    found: Floats = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    folder = make_encoder(tmp_path, family)
    built = build(folder)
    own, reference = vectors(built, ENCODED), expected(folder)
    assert cosines(own, reference).min() >= 0.99999
    np.testing.assert_allclose(own, reference, atol=2e-4)
    np.testing.assert_allclose(vectors(built, ENCODED[2:3]), reference[2:3], atol=2e-4)  # alone as in a batch
    assert built.most_length == CONTEXT


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_over_the_vocabulary_is_not_read(tmp_path: Path, family: str) -> None:
    config = AutoConfig.from_pretrained(make_encoder(tmp_path, family))
    make: Any = AutoModelForMaskedLM
    make.from_config(config).save_pretrained(tmp_path)
    np.testing.assert_allclose(vectors(build(tmp_path), ENCODED), expected(tmp_path), atol=2e-4)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_each_pooling_of_a_sentence_transformers_folder(tmp_path: Path, pooling: str) -> None:
    folder = add_modules(make_encoder(tmp_path), {"pooling_mode": pooling}, normalize=True, max_seq_length=50)
    built = build(folder)
    reference = expected(folder, pooling)
    own = vectors(built, ENCODED, normalize=True)
    np.testing.assert_allclose(own, reference / np.linalg.norm(reference, axis=1, keepdims=True), atol=2e-5)
    cut = vectors(built, ENCODED, normalize=True, dimensions=8)
    shorter = reference[:, :8]
    np.testing.assert_allclose(cut, shorter / np.linalg.norm(shorter, axis=1, keepdims=True), atol=2e-5)
    assert (built.most_length, built.settings.normalizes) == (50, True)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("labels", [1, 3])
def test_scores_of_heads_are_those_of_transformers(tmp_path: Path, family: str, labels: int) -> None:
    folder = make_encoder(tmp_path, family, labels)
    pairs = [TOKENIZER.encode(text, other) for text, other in pairwise(TEXTS)]
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    two = family in ("bert", "albert")  # The others have one segment, or none.
    reference = []
    with torch.inference_mode():
        for pair in pairs:
            segments = {"token_type_ids": torch.tensor([pair.type_ids])} if two else {}
            reference.append(model(input_ids=torch.tensor([pair.ids]), **segments).logits[0])
    shares = torch.stack(reference)
    shares = shares.sigmoid() if labels == 1 else shares.softmax(1)
    built = build(folder)
    np.testing.assert_allclose(vectors(built, pairs, pairs=True), shares.numpy(), atol=2e-5)
    assert built.engine.capabilities == ({"rank"} if labels == 1 else {"classify"})


@pytest.mark.parametrize(
    ("cores", "threads", "setting", "taken", "lanes"),
    [
        (1, 1, {}, 1, 1),
        (2, 2, {}, 1, 2),
        (8, 8, {}, 4, 2),
        (16, 16, {}, 4, 4),
        (32, 32, {}, 8, 4),
        (32, 4, {}, 4, 4),
        (2, 2, {"threads": 2}, 2, 1),
        (16, 16, {"threads": 6}, 6, 2),
    ],
)
def test_an_encoder_shares_the_cores_out_to_its_lanes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    threads: int,
    setting: dict[str, int],
    taken: int,
    lanes: int,
) -> None:
    found = [threads]
    monkeypatch.setattr(assemble, "available_cores", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: found[-1])
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    engine = build(make_encoder(tmp_path), **setting).engine
    assert found == [threads, taken]
    assert (engine._lanes.count if engine._lanes else 1) == lanes


def test_an_encoder_in_another_engine_has_one_lane_and_leaves_a_core_to_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    folder, found = make_encoder(tmp_path), list[int]()
    export(folder, folder / "onnx", "onnx", lambda *_: None)
    monkeypatch.setattr(assemble, "available_cores", lambda: 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    assert build(folder, engine="onnxruntime").engine._lanes is None
    assert found == [15]


def test_int8_weights_stay_close(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path)
    assert cosines(vectors(build(folder, quantize="int8"), ENCODED), expected(folder)).min() >= 0.99


def test_verify_holds_rounded_vectors_to_a_cosine(tmp_path: Path) -> None:
    folder, result = make_encoder(tmp_path / "tiny"), tmp_path / "result.json"
    arguments = [str(folder), "--quantize", "int8", "--json", str(result)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    (candidate,) = json.loads(result.read_text())["candidates"]
    assert 0.99 <= candidate["cosine"] <= candidate["cosine_mean"] < 1
    assert CliRunner().invoke(app, [*arguments, "--min-cosine", "0.999999"]).exit_code == 1
    refused = CliRunner().invoke(app, [*arguments, "--html", str(tmp_path / "report.html")])
    assert refused.exit_code == 2


def test_verify_compares_the_scores_of_one_label_over_all_texts(tmp_path: Path) -> None:
    """The scores of a reranker may all be below zero: that they still are shows nothing of a damage."""
    folder, result = make_encoder(tmp_path / "tiny", labels=1), tmp_path / "result.json"
    tensors = load_file(folder / "model.safetensors")
    tensors["classifier.bias"] -= 9
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    damaged = Path(shutil.copytree(folder, tmp_path / "damaged"))
    for name in [name for name in tensors if name.endswith("query.weight")]:
        tensors[name] = tensors[name].flip(0)
    save_file(tensors, damaged / "model.safetensors", {"format": "pt"})
    arguments = [str(folder), str(damaged), "--quantize", "int8", "--json", str(result)]
    assert CliRunner().invoke(app, arguments).exit_code == 1
    broken, rounded = (each["cosine"] for each in json.loads(result.read_text())["candidates"])
    assert broken < 0.99 < rounded < 1
    alone = CliRunner().invoke(app, [*arguments, "--windows", "1"])
    assert (alone.exit_code, "set --windows to 2 or more" in alone.output) == (2, True)
