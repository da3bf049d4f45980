"""Converts a SentencePiece model (tokenizer.model) to the tokenizer.json that gateways build their tokenizer from.

Knows both formats, never a text: the result is checked as any tokenizer.json is. BPE and unigram models are converted,
with the rules of transformers where SentencePiece has none: special tokens, and how a text begins after one.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from protos import sentencepiece_pb2 as proto
from services.worker.errors import CheckpointError

NAME = "tokenizer.model"
_SPACE = "\u2581"
_UNIGRAM, _BPE = 1, 2
_NORMAL, _UNKNOWN, _CONTROL, _DEFINED, _BYTE = 1, 2, 3, 4, 6
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
"""The flags of an added token."""
_Json = dict[str, Any]


def tokenizer_json(model: bytes, settings: Mapping[str, Any]) -> bytes:
    """The tokenizer.json of a tokenizer.model and its tokenizer_config.json. Raises CheckpointError."""
    spec = proto.ModelProto()
    try:
        spec.ParseFromString(model)
    except DecodeError:
        raise CheckpointError(f"{NAME} is no SentencePiece model") from None
    unknown = spec.trainer_spec.unk_id
    if not spec.pieces or not 0 <= unknown < len(spec.pieces):
        raise CheckpointError(f"{NAME} is no SentencePiece model")
    if not spec.normalizer_spec.escape_whitespaces:
        raise CheckpointError(f"{NAME}: escape_whitespaces false is not supported: add a tokenizer.json")
    defined = any(piece.type == _DEFINED for piece in spec.pieces)
    if defined and spec.normalizer_spec.remove_extra_whitespaces:
        raise CheckpointError(f"{NAME}: remove_extra_whitespaces with user-defined pieces is not supported")
    prefix = bool(settings.get("add_prefix_space", spec.normalizer_spec.add_dummy_prefix))
    once = defined or settings.get("legacy") is False
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(spec, settings),
        "normalizer": _normalizer(spec, prefix and not once),
        "pre_tokenizer": _first_space() if prefix and once else None,
        "post_processor": _post_processor(spec, settings),
        "decoder": _decoder(prefix),
        "model": _model(spec),
    }
    return json.dumps(content, ensure_ascii=False).encode()


def _model(spec: proto.ModelProto) -> _Json:
    kind, fallback, unknown = spec.trainer_spec.model_type, spec.trainer_spec.byte_fallback, spec.trainer_spec.unk_id
    if kind == _UNIGRAM:
        scored = [[piece.piece, piece.score] for piece in spec.pieces]
        return {"type": "Unigram", "unk_id": unknown, "vocab": scored, "byte_fallback": fallback}
    if kind != _BPE:
        raise CheckpointError(f"{NAME} has a model of type {kind}; supported are unigram (1) and BPE (2)")
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": spec.pieces[unknown].piece,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": fallback,
        "vocab": {piece.piece: index for index, piece in enumerate(spec.pieces)},
        "merges": _merges(spec),
    }


def _merges(spec: proto.ModelProto) -> list[Sequence[str]]:
    """The merges that SentencePiece would do, best first: it joins the two pieces that make the piece of the highest
    score."""
    ids = {piece.piece: index for index, piece in enumerate(spec.pieces) if piece.type in (_NORMAL, _DEFINED)}
    merges = []
    for text, index in ids.items():
        score = spec.pieces[index].score
        halves = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        known = [(left, right) for left, right in halves if left in ids and right in ids]
        merges += [(-score, ids[left], ids[right], left, right) for left, right in known]
    return [(left, right) for *_, left, right in sorted(merges)]


def _first_space() -> _Json:
    """Puts a space before a text that begins with none, and before no part of it behind a special token."""
    return {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": "first", "split": False}


def _normalizer(spec: proto.ModelProto, prefix: bool) -> _Json:
    """prefix: puts a space before the text, also behind a special token, as SentencePiece itself does."""
    rules, steps = spec.normalizer_spec, list[_Json]()
    if rules.precompiled_charsmap:
        charsmap = base64.b64encode(rules.precompiled_charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if rules.remove_extra_whitespaces:
        steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if prefix:
        steps.append({"type": "Prepend", "prepend": _SPACE})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": _SPACE})
    return {"type": "Sequence", "normalizers": steps}


def _decoder(prefix: bool) -> _Json:
    steps: list[_Json] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _added_tokens(spec: proto.ModelProto, settings: Mapping[str, Any]) -> list[_Json]:
    """Control pieces and those that a user defined; and the tokens that tokenizer_config.json adds or describes."""
    tokens = {
        index: {"content": piece.piece, "special": piece.type != _DEFINED}
        for index, piece in enumerate(spec.pieces)
        if piece.type in (_UNKNOWN, _CONTROL, _DEFINED)
    }
    described = settings.get("added_tokens_decoder") or {}
    try:
        tokens |= {int(index): dict(token) for index, token in described.items()}
        return [
            {
                "id": index,
                "content": str(token["content"]),
                **{name: bool(token.get(name)) for name in _FLAGS},
            }
            for index, token in sorted(tokens.items())
        ]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise CheckpointError("tokenizer_config.json: added_tokens_decoder does not describe tokens") from None


def _post_processor(spec: proto.ModelProto, settings: Mapping[str, Any]) -> _Json | None:
    """Puts the first and last tokens of tokenizer_config.json around a text; by default only the first one."""
    begin, end = spec.trainer_spec.bos_id, spec.trainer_spec.eos_id
    before = [begin] if settings.get("add_bos_token", True) and 0 <= begin < len(spec.pieces) else []
    after = [end] if settings.get("add_eos_token", False) and 0 <= end < len(spec.pieces) else []
    if not before and not after:
        return None
    names = {index: spec.pieces[index].piece for index in (*before, *after)}

    def around(*sequences: str) -> list[_Json]:
        made = list[_Json]()
        for number, sequence in enumerate(sequences):
            made += [{"SpecialToken": {"id": names[index], "type_id": number}} for index in before]
            made.append({"Sequence": {"id": sequence, "type_id": number}})
            made += [{"SpecialToken": {"id": names[index], "type_id": number}} for index in after]
        return made

    special = {name: {"id": name, "ids": [index], "tokens": [name]} for index, name in names.items()}
    return {"type": "TemplateProcessing", "single": around("A"), "pair": around("A", "B"), "special_tokens": special}
