"""Tiny encoders with random weights, as folders that transformers has written. Knows shapes, never engines."""

import json
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AlbertConfig, BertConfig, DistilBertConfig, PreTrainedConfig, RobertaConfig, XLMRobertaConfig
from transformers.models.auto.modeling_auto import AutoModel, AutoModelForSequenceClassification

CLS, SEP = 2, 3
CONTEXT = 64
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXTS = [
    "the quick brown fox",
    "jumps",
    "over the lazy dog and runs through the forest until the evening",
    "a cold winter morning",
    "hunting for food in the deep snow",
    "jumps high",
]
_SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
}
_ROBERTA = {**_SHAPE, "max_position_embeddings": CONTEXT + 2, "pad_token_id": 1, "type_vocab_size": 1}
_CONFIGS: Mapping[str, tuple[type[PreTrainedConfig], Mapping[str, Any]]] = {
    "bert": (BertConfig, _SHAPE),
    "roberta": (RobertaConfig, _ROBERTA),
    "xlm-roberta": (XLMRobertaConfig, _ROBERTA),
    "distilbert": (
        DistilBertConfig,
        {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": CONTEXT,
         "initializer_range": 0.2},
    ),
    "albert": (AlbertConfig, {**_SHAPE, "num_hidden_layers": 4, "num_hidden_groups": 2, "embedding_size": 16}),
}  # fmt: skip
FAMILIES = tuple(_CONFIGS)


def make_tokenizer() -> Tokenizer:
    """A small WordPiece tokenizer with BERT's special tokens and pairs."""
    letters = string.ascii_lowercase
    words = sorted({word for text in TEXTS for word in text.split()})[::2]  # The others are spelt.
    pieces = [*_SPECIAL, *letters, *(f"##{letter}" for letter in letters), *(word for word in words if len(word) > 1)]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS))
    return tokenizer


def make_encoder(folder: Path, family: str = "bert", labels: int = 0, **settings: Any) -> Path:
    """Write a tiny random encoder of this family, with a head if it has labels, and return the folder."""
    tokenizer = make_tokenizer()
    kind, shape = _CONFIGS[family]
    given = {**shape, "vocab_size": tokenizer.get_vocab_size(), **settings}
    if labels:
        given["num_labels"] = labels
    torch.manual_seed(0)
    config = kind(**given)
    maker: Any = AutoModelForSequenceClassification if labels else AutoModel
    model = maker.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # Norms and biases are ones and zeros otherwise, which would hide a mistake.
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            assert torch.isfinite(parameter).all(), name
    model.eval().save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def add_modules(
    folder: Path,
    pooling: Mapping[str, object] | None = None,
    normalize: bool = True,
    prompts: Mapping[str, str] | None = None,
    **texts: object,
) -> Path:
    """Make a folder that of sentence-transformers: pooling is the content of 1_Pooling/config.json."""
    types = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    entries = [
        {"idx": index, "name": str(index), "path": f"{index}_{kind}" if index else "",
         "type": f"sentence_transformers.models.{kind}"}
        for index, kind in enumerate(types)
    ]  # fmt: skip
    (folder / "1_Pooling").mkdir(exist_ok=True)
    files: Mapping[str, object] = {
        "modules.json": entries,
        "1_Pooling/config.json": pooling or {"pooling_mode_mean_tokens": True},
        "sentence_bert_config.json": texts,
        "config_sentence_transformers.json": {"prompts": prompts or {}, "default_prompt_name": None},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder
