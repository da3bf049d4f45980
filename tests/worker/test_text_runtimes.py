"""Encoders that another runtime computes: vectors as by the torch engine, and refusals by name."""

import io
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from services.worker.build.encoders import lone_texts
from services.worker.build.encoders.assemble import BuiltEncoder, build_encoder
from services.worker.build.encoders.export import load_network
from services.worker.build.encoders.source import read_raw, read_source
from services.worker.build.export import export
from services.worker.errors import CheckpointError
from services.worker.options import EngineOptions
from services.worker.runners.base import TextTokens, Vectors
from services.worker.runners.lone_texts import SHORT, LoneTextRunner
from tests.encoders import FAMILIES, TEXTS, add_modules, make_encoder, make_tokenizer

pytestmark = pytest.mark.xdist_group("exports")

TOKENIZER = make_tokenizer()
PAIRS = [TOKENIZER.encode(text, TEXTS[0]) for text in TEXTS]
TOLERANCE = 2e-5


def texts(pairs: bool = False) -> list[TextTokens]:
    """The texts, two of them of equal lengths; pairs: their second parts are in the second segment."""
    encoded = PAIRS if pairs else [TOKENIZER.encode(text) for text in TEXTS]
    return [TextTokens(array("i", each.ids), each.type_ids.index(1) if pairs else 0) for each in encoded]


def build(folder: Path, engine: str, **options: Any) -> BuiltEncoder:
    return build_encoder(folder, EngineOptions.model_validate({"engine": engine, **options}), lambda *_: None)


def vectors(folder: Path, engine: str, batch: Sequence[TextTokens]) -> Vectors:
    """Of all texts at once, computed without padding."""
    runner: Any = build(folder, engine).engine.runner
    before = runner.computed_tokens
    found: Vectors = runner.collect(runner.launch(batch))
    assert runner.computed_tokens - before == sum(len(text.token_ids) for text in batch)
    return found


def written(folder: Path, form: str, out: Path) -> Path:
    """What `weft export` writes of a folder."""
    export(folder, out, form, lambda *_: None)
    return out


@pytest.mark.parametrize("labels", [0, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_programs_of_each_family_compute_as_torch_does(tmp_path: Path, family: str, labels: int) -> None:
    folder = make_encoder(tmp_path / "model", family, labels)
    batch = texts(pairs=family in ("bert", "albert"))
    expected = vectors(folder, "torch", batch)
    np.testing.assert_allclose(
        vectors(written(folder, "torch", tmp_path / "out"), "exported", batch), expected, atol=TOLERANCE
    )


@pytest.mark.parametrize("pooling", ["cls", "mean", "max", "lasttoken"])
def test_an_exported_folder_keeps_its_pooling(exported_bert: Path, pooling: str) -> None:
    folder = add_modules(exported_bert, {"pooling_mode": pooling}, max_seq_length=50)
    built = build(folder, "onnxruntime")
    assert (built.most_length, built.settings.normalizes) == (50, True)
    batch = texts()
    np.testing.assert_allclose(vectors(folder, "onnxruntime", batch), vectors(folder, "torch", batch), atol=TOLERANCE)


def test_onnx_files_compute_pairs_and_scores_as_torch_does(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "model", "bert", labels=3)
    out = written(folder, "onnx", tmp_path / "out")
    batch = texts(pairs=True)
    np.testing.assert_allclose(vectors(out, "onnxruntime", batch), vectors(folder, "torch", batch), atol=TOLERANCE)


@pytest.mark.parametrize("converted", [False, True])
def test_openvino_computes_as_torch_does(exported_bert: Path, tmp_path: Path, converted: bool) -> None:
    """It reads what `weft export onnx` wrote, and converts a checkpoint."""
    pytest.importorskip("openvino")
    folder = make_encoder(tmp_path) if converted else exported_bert
    batch = texts(pairs=True)
    np.testing.assert_allclose(vectors(folder, "openvino", batch), vectors(folder, "torch", batch), atol=TOLERANCE)


def test_other_programs_may_pad_what_was_exported(exported_bert: Path) -> None:
    """The inputs and the output are those that other programs expect of an encoder."""
    session = onnxruntime.InferenceSession(exported_bert / "model.onnx")
    ids = np.array([[2, 7, 9, 3], [2, 8, 3, 0]])
    feeds = {"input_ids": ids, "attention_mask": (ids > 0).astype(np.int64), "token_type_ids": np.zeros_like(ids)}
    (states,) = session.run(["last_hidden_state"], feeds)
    (alone,) = session.run(["last_hidden_state"], {name: array[1:, :3] for name, array in feeds.items()})
    np.testing.assert_allclose(states[1, :3], alone[0], atol=TOLERANCE)


@pytest.mark.filterwarnings("ignore")
def test_scripts_of_torch_are_served(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path)
    network, _ = load_network(read_source(folder, read_raw(folder)), lambda *_: None)
    ids = torch.ones(2, 3, dtype=torch.int64)
    torch.jit.trace(network, (ids, ids, ids)).save(folder / "model.pt")  # type: ignore[no-untyped-call]
    batch = texts(pairs=True)
    np.testing.assert_allclose(vectors(folder, "exported", batch), vectors(folder, "torch", batch), atol=TOLERANCE)
    torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(2)).save(folder / "model.pt")  # type: ignore[no-untyped-call]
    with pytest.raises(CheckpointError, match=r"^model.pt takes input; an encoder takes input_ids, attention_mask, "):
        build(folder, "exported")


# ---- what cannot be served ----


def graph(inputs: Mapping[str, Sequence[Any]], outputs: Mapping[str, Sequence[Any]]) -> onnx.ModelProto:
    """A graph with these inputs and outputs; an output is zeros."""
    made = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, shape) for name, shape in inputs.items()]
    results = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in outputs.items()
    ]
    widths = {name: shape[-1] for name, shape in outputs.items()}
    zeros = {
        name: onnx.helper.make_tensor(name, onnx.TensorProto.FLOAT, [1, 1, width], [0.0] * width)
        for name, width in widths.items()
    }
    nodes = [onnx.helper.make_node("Constant", [], [name], value=zero) for name, zero in zeros.items()]
    whole = onnx.helper.make_graph(nodes, "graph", made, results)
    return onnx.helper.make_model(whole, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)


ANY = ["batch", "length"]
STATES = {"last_hidden_state": [1, 1, 32]}
REFUSED: dict[str, tuple[onnx.ModelProto, str]] = {
    "no tokens": (graph({"ids": ANY}, STATES), "model.onnx has no input input_ids: an encoder needs it"),
    "another input": (
        graph({"input_ids": ANY, "position_ids": ANY}, STATES),
        "model.onnx has an input position_ids that nothing feeds",
    ),
    "fixed length": (
        graph({"input_ids": ["batch", 128]}, STATES),
        r"model.onnx: input input_ids has shape \['any', 128\], \['any', 'any'\] is needed",
    ),
    "no states": (
        graph({"input_ids": ANY}, {"sentence_embedding": [1, 1, 32]}),
        "model.onnx has no output last_hidden_state or token_embeddings: an encoder needs it",
    ),
    "another width": (
        graph({"input_ids": ANY}, {"last_hidden_state": ["batch", "length", 48]}),
        "model.onnx: output last_hidden_state has 48 numbers, config.json says 32",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_graphs_that_are_no_encoders_are_refused(tmp_path: Path, name: str) -> None:
    made, reason = REFUSED[name]
    folder = make_encoder(tmp_path)
    onnx.save(made, folder / "model.onnx")
    with pytest.raises(CheckpointError, match=f"^{reason}$"):
        build(folder, "onnxruntime")


@pytest.mark.parametrize(
    ("engine", "options", "reason"),
    [
        ("compile", {}, "ENGINE=compile does not serve encoders"),
        ("tensorrt", {}, "ENGINE=tensorrt does not serve encoders"),
        ("onnxruntime", {"quantize": "int8"}, "ENGINE=onnxruntime cannot honour quantize: weights are rounded when"),
        ("exported", {"dtype": "bfloat16"}, "ENGINE=exported cannot honour dtype: it computes in the format of"),
        (
            "onnxruntime",
            {},
            "no model.onnx or onnx/model.onnx for ENGINE=onnxruntime in .*: weft export onnx",
        ),
        (
            "exported",
            {},
            "no model.pt2 or model.pt or model.ts for ENGINE=exported in .*: weft export torch",
        ),
    ],
)
def test_what_a_runtime_cannot_do_is_refused(
    tmp_path: Path, engine: str, options: Mapping[str, object], reason: str
) -> None:
    with pytest.raises(CheckpointError, match=f"^{reason}"):
        build(make_encoder(tmp_path), engine, **options)


def test_a_runtime_that_is_not_installed_is_named(exported_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(CheckpointError, match=r"^onnxruntime is not installed: pip install 'weft\[onnxruntime\]'$"):
        build(exported_bert, "onnxruntime")


# ---- an export beside the weights ----


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets how many times faster ONNX Runtime seems to be."""

    def set_ratio(ratio: float) -> None:
        monkeypatch.setattr(lone_texts, "_time", lambda runner, batch: 1.0 if hasattr(runner, "session") else ratio)

    return set_ratio


def test_lone_texts_are_computed_by_the_faster_runtime(exported_bert: Path, timed: Callable[[float], None]) -> None:
    # Where `weft export onnx MODEL MODEL/onnx` writes it, and where folders on the hub have it.
    beside = exported_bert / "onnx"
    beside.mkdir()
    for file in list(exported_bert.glob("model.onnx*")):
        file.rename(beside / file.name)
    timed(1.2)
    built = build(exported_bert, "auto")
    runner = built.engine.runner
    assert isinstance(runner, LoneTextRunner)
    assert built.computed_by == "torch+onnxruntime"
    alone: Any = runner.alone
    before = alone.computed_tokens
    batch = texts()
    expected = vectors(exported_bert, "torch", batch)
    for place, text in enumerate(batch):
        np.testing.assert_allclose(runner.collect(runner.launch([text]))[0], expected[place], atol=TOLERANCE)
    lone = sum(len(text.token_ids) for text in batch)
    assert alone.computed_tokens - before == lone
    np.testing.assert_allclose(runner.collect(runner.launch(batch)), expected, atol=TOLERANCE)
    assert alone.computed_tokens - before == lone


def test_long_texts_are_computed_with_torch() -> None:
    class Counted:
        depth, most_tokens, width = 1, 1000, 1

        def __init__(self) -> None:
            self.batches: list[int] = []

        def launch(self, batch: Sequence[TextTokens], /) -> Vectors:
            self.batches.append(len(batch))
            return np.zeros((len(batch), 1), np.float32)

        def collect(self, launched: Vectors, /) -> Vectors:
            return launched

    alone, together = Counted(), Counted()
    runner = LoneTextRunner(alone, together)
    short, long = TextTokens(array("i", [1] * SHORT)), TextTokens(array("i", [1] * (SHORT + 1)))
    for batch in ([short], [long], [short, short]):
        runner.collect(runner.launch(batch))
    assert (alone.batches, together.batches) == ([1], [1, 2])


@pytest.mark.parametrize("engine", ["auto", "torch"])
def test_an_export_that_is_not_faster_or_not_asked_for_is_not_used(
    exported_bert: Path, timed: Callable[[float], None], engine: str
) -> None:
    timed(1.04 if engine == "auto" else 2.0)
    built = build(exported_bert, engine)
    assert not isinstance(built.engine.runner, LoneTextRunner)
    assert built.computed_by == "torch"


@pytest.mark.parametrize("damage", ["other weights", "no encoder"])
def test_an_export_of_something_else_is_not_used(
    tmp_path: Path, timed: Callable[[float], None], logged: io.StringIO, damage: str
) -> None:
    timed(2.0)
    folder = make_encoder(tmp_path)
    outputs = STATES if damage == "other weights" else {"sentence_embedding": [1, 1, 32]}
    onnx.save(graph({"input_ids": ANY}, outputs), folder / "model.onnx")
    assert build(folder, "auto").computed_by == "torch"
    assert "the export beside the weights is not used" in logged.getvalue()
