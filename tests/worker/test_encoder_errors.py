"""Folders of encoders that cannot be served: one line each, which names what is wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from services.worker.build.encoders.assemble import build_encoder
from services.worker.errors import CheckpointError
from services.worker.options import EngineOptions
from tests.encoders import add_modules, make_encoder

Damage = Callable[[Path], object]


def config(**changes: Any) -> Damage:
    """Change settings of config.json."""

    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def pooling(**content: Any) -> Damage:
    """A sentence-transformers folder with this 1_Pooling/config.json."""
    return lambda folder: add_modules(folder, content)


def modules(*types: str) -> Damage:
    """A modules.json of these types."""
    entries = [{"path": str(place) if place else "", "type": f"x.{kind}"} for place, kind in enumerate(types)]
    return lambda folder: (folder / "modules.json").write_text(json.dumps(entries))


def tensors(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Change the tensors."""

    def damage(folder: Path) -> None:
        stored = load_file(folder / "model.safetensors")
        change(stored)
        save_file(stored, folder / "model.safetensors")

    return damage


def write(name: str, content: Any) -> Damage:
    """A sentence-transformers folder in which a file has another content."""

    def damage(folder: Path) -> None:
        add_modules(folder)
        (folder / name).write_text(json.dumps(content))

    return damage


QUERY = "encoder.layer.0.attention.self.query.weight"
CASES: dict[str, tuple[Damage, str]] = {
    "missing tensor": (tensors(lambda stored: stored.pop(QUERY)), f"tensor {QUERY} is missing"),
    "wrong shape": (tensors(lambda stored: stored.update({QUERY: stored[QUERY][:5].clone()})), "has shape [5, 32]"),
    "unknown tensor": (tensors(lambda stored: stored.update({"extra.weight": stored[QUERY].clone()})), "extra.weight"),
    "not finite": (tensors(lambda stored: stored[QUERY].fill_(float("nan"))), f"tensor {QUERY} holds numbers"),
    "relative positions": (config(position_embedding_type="relative_key"), "position_embedding_type relative_key"),
    "a decoder": (config(is_decoder=True), "is_decoder True is not supported"),
    "activation": (config(hidden_act="relu"), "hidden_act relu is not supported"),
    "heads": (config(num_attention_heads=5), "hidden_size 32 is not 5 heads"),
    "dimensions": (config(matryoshka_dimensions=[64]), "matryoshka_dimensions must be"),
    "unknown pooling": (pooling(pooling_mode="weightedmean"), "pooling weightedmean is not supported"),
    "two poolings": (pooling(pooling_mode_cls_token=True, pooling_mode_max_tokens=True), "pooling cls, max"),
    "no pooling": (pooling(pooling_mode_cls_token=False), "pooling none is not supported"),
    "prompt left out": (pooling(pooling_mode="mean", include_prompt=False), "include_prompt false"),
    "dense module": (modules("Transformer", "Pooling", "Dense"), "Transformer, Pooling, Dense is not supported"),
    "no transformer": (modules("WordEmbeddings", "Pooling"), "WordEmbeddings, Pooling is not supported"),
    "outside": (write("modules.json", [{"path": "../x", "type": "a.Transformer"}]), "a folder outside"),
    "not a list": (write("modules.json", {"a": 1}), "modules.json cannot be read"),
    "default prompt": (
        write("config_sentence_transformers.json", {"prompts": {}, "default_prompt_name": "query"}),
        "default_prompt_name names no prompt",
    ),
    "prompts": (write("config_sentence_transformers.json", {"prompts": {"a": 5}}), "prompts are not"),
    "prompts of another kind": (
        write("config_sentence_transformers.json", {"prompts": [1]}),
        "config_sentence_transformers.json: prompts is not an object",
    ),
    "pooling without its file": (
        lambda folder: (add_modules(folder) / "1_Pooling/config.json").unlink(),
        "1_Pooling/config.json is missing",
    ),
    "a setting of the pooling": (pooling(pooling_mode_cls_token=1), "1_Pooling/config.json: pooling_mode_cls"),
    "an embedder of another family": (
        lambda folder: [add_modules(folder), config(architectures=["MPNetModel"])(folder)],
        "MPNetModel is not supported as an embedder",
    ),
}
OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "paced": ({"engine": "paced"}, "ENGINE=paced does not serve encoders"),
    "deterministic": (
        {"deterministic": True},
        "an encoder cannot honour deterministic: a vector's last bits depend on",
    ),
    "speculate": ({"speculate": "ngram"}, "an encoder cannot honour speculate: it has no tokens to guess"),
    "keys and values": ({"kv_dtype": "fp8"}, "an encoder cannot honour kv_dtype: it stores no keys and values"),
    "length": ({"max_seq_length": 65}, "max_seq_length 65 exceeds the model's context of 64"),
}


def refusal(folder: Path, **options: Any) -> str:
    """The one line with which a start is refused."""
    with pytest.raises(CheckpointError) as refused:
        build_encoder(folder, EngineOptions.model_validate({"engine": "torch", **options}), lambda *_: None)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("case", CASES)
def test_a_folder_that_cannot_be_served_is_refused_by_name(tmp_path: Path, case: str) -> None:
    damage, words = CASES[case]
    damage(make_encoder(tmp_path))
    assert words in refusal(tmp_path)


@pytest.mark.parametrize("case", OPTIONS)
def test_an_option_that_encoders_do_not_have_is_refused_by_name(tmp_path: Path, case: str) -> None:
    options, words = OPTIONS[case]
    assert words in refusal(make_encoder(tmp_path), **options)


def test_regression_of_several_values_is_refused(tmp_path: Path) -> None:
    """Their scores would be reported as shares of labels."""
    folder = make_encoder(tmp_path, labels=3)
    config(problem_type="regression")(folder)
    assert "problem_type regression is not supported with 3 labels" in refusal(folder)
