"""Trains the byte-level BPE tokenizer that both demo models share. Knows text, never tensors."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from models.corpus import END_OF_TEXT, PARAGRAPH_BREAK

# Newlines are a piece of their own, so that a prompt that ends with a blank line has the ids seen in training
# (GPT-2's pattern cuts the same blank line in one way at the end of a prompt and in another inside a text).
PIECES = (
    r"'(?:s|t|re|ve|m|ll|d)\b| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+"  # words, digits, punctuation
    r"|\n+|[^\S\n]+(?=[^\S\n])|[^\S\n]+"  # newlines, spaces before a last space, other space
)

# Messages follow one another as paragraphs; the model goes on with the next paragraph.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] | trim }}"
    "{% if add_generation_prompt or not loop.last %}{{ '\\n\\n' }}{% endif %}{% endfor %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer of at most `vocab_size` ids that encodes any text, END_OF_TEXT being id 0.

    Encoding begins every text with END_OF_TEXT unless `add_special_tokens=False`.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(END_OF_TEXT, special=True, normalized=False)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # all 256 bytes: no text is out of reach
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts, PARAGRAPH_BREAK * 2], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A",
        special_tokens=[(END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))],
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write tokenizer.json and the tokenizer_config.json that transformers reads beside it."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
