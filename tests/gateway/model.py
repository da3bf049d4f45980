"""The model that all fakes of workers serve: its tokenizer, its card and its answer."""

import hashlib
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from protos import mesh_pb2

LOREM = "the quick brown fox jumps over the lazy dog and naïve café owners say 日本語 émoji 😀 to the world"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def small_tokenizer(vocab_size: int = 420) -> Tokenizer:
    """A byte-level BPE whose rarer characters take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([LOREM.split("日")[0]] * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


TOKENIZER = small_tokenizer()
BUNDLE = mesh_pb2.Bundle(
    tokenizer_json=TOKENIZER.to_str().encode(),
    chat_template=TEMPLATE,
    special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
).SerializeToString(deterministic=True)


def make_card(**changes: Any) -> mesh_pb2.ModelCard:
    """The card of the model that all fake workers serve."""
    fields: dict[str, Any] = {
        "name": "fake",
        "aliases": ["alias"],
        "architecture": "FakeForCausalLM",
        "fingerprint": b"f" * 32,
        "context_length": 512,
        "vocab_size": TOKENIZER.get_vocab_size(),
        "parameters": 7,
        "block_size": 4,
        "bundle_digest": hashlib.sha256(BUNDLE).digest(),
    }
    return mesh_pb2.ModelCard(**(fields | changes))


def ids_of(text: str) -> list[int]:
    """The tokens of a text, without special tokens."""
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


ANSWER = ids_of(LOREM)
