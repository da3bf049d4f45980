"""Checkpoints with a SentencePiece model alone: SentencePiece and transformers are the references of its conversion."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import Tokenizer
from transformers import LlamaTokenizer

from services.worker.errors import CheckpointError
from services.worker.loader.checkpoint import read_bundle
from tests.checkpoints import make_checkpoint, sentencepiece_model

TEXTS = (
    "the weft is woven through the warp",
    "  thread  after   thread ",
    "tab\tand\nline, größer: 漢字 🧵",
    "",
    " ",
    "wefts'weft-warp warpwarp 1234",
)


def converted(folder: Path, model: bytes, **settings: Any) -> Tokenizer:
    """The tokenizer of the bundle that gateways get."""
    (folder / "tokenizer.model").write_bytes(model)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer.from_str(read_bundle(folder).tokenizer_json.decode())


@pytest.mark.parametrize(
    "how",
    [
        {"model_type": "bpe", "normalization_rule_name": "identity", "remove_extra_whitespaces": False},
        {"model_type": "bpe"},
        {"model_type": "bpe", "normalization_rule_name": "identity", "remove_extra_whitespaces": False,
         "add_dummy_prefix": False, "user_defined_symbols": ["<tool>"]},
        {"model_type": "unigram"},
    ],
    ids=["llama", "normalized", "gemma", "unigram"],
)  # fmt: skip
def test_texts_have_the_ids_that_sentencepiece_gives_them(tmp_path: Path, how: dict[str, Any]) -> None:
    model = sentencepiece_model(**how)
    reference = sentencepiece.SentencePieceProcessor(model_proto=model)
    tokenizer = converted(tmp_path, model)
    for text in (*TEXTS, "use a <tool> here"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == reference.encode(text), text
        assert tokenizer.decode(ids, skip_special_tokens=False) == reference.decode(ids), text
        assert tokenizer.encode(text).ids == [reference.bos_id(), *ids]


@pytest.mark.parametrize("legacy", [False, True])
def test_special_tokens_are_treated_as_transformers_treats_them(tmp_path: Path, legacy: bool) -> None:
    model = sentencepiece_model(model_type="bpe", normalization_rule_name="identity", remove_extra_whitespaces=False)
    added = {"320": {"content": "<|im_end|>", "special": True, "normalized": False}}
    settings = {"legacy": legacy, "add_bos_token": True, "add_eos_token": True, "added_tokens_decoder": added}
    tokenizer = converted(tmp_path, model, **settings)
    vocab = tokenizer.get_vocab()
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    reference: Any = LlamaTokenizer(
        vocab={token: index for token, index in vocab.items() if index < 320},
        merges=[tuple(merge) for merge in merges], legacy=legacy, add_bos_token=True, add_eos_token=True,
        extra_special_tokens=["<|im_end|>"],
    )  # fmt: skip
    texts = ["<s>the weft</s>the warp", "<|im_end|>weft"]
    # As SentencePiece, a legacy tokenizer puts a space before one that is there already; transformers 5 does not.
    for text in texts if legacy else [*texts, "a<|im_end|> thread"]:
        assert tokenizer.encode(text).ids == reference(text).input_ids, text


def test_the_fingerprint_covers_the_model(tmp_path: Path) -> None:
    from services.worker.loader.checkpoint import start_hashing

    folder = make_checkpoint(tmp_path / "tiny")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(sentencepiece_model())
    with start_hashing(folder) as digests:
        assert "tokenizer.model" in {name for name, _ in digests.result()}


@pytest.mark.parametrize(
    ("model", "settings", "reason"),
    [
        (b"\xff\xff", {}, "tokenizer.model is no SentencePiece model"),
        (b"", {}, "tokenizer.model is no SentencePiece model"),
        (b"IQ== 0\nIg== 1\n", {}, "tokenizer.model is no SentencePiece model"),
        (lambda: sentencepiece_model(model_type="char"), {}, "tokenizer.model has a model of type 4; supported are"),
        (lambda: sentencepiece_model(user_defined_symbols=["<x>"]), {}, "remove_extra_whitespaces with user-defined"),
        (sentencepiece_model, {"added_tokens_decoder": {"x": 1}}, "added_tokens_decoder does not describe tokens"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(
    tmp_path: Path, model: bytes | Callable[[], bytes], settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(CheckpointError, match=reason):
        converted(tmp_path, model() if callable(model) else model, **settings)


def test_a_checkpoint_without_any_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has neither tokenizer.json nor tokenizer.model"):
        read_bundle(tmp_path)
