"""The shipped demo models: standard checkpoints of the stated size that predict English."""

import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from models.recipe import DRAFT, STORY

FOLDER = Path(__file__).parents[2] / "models"
NAMES = [STORY.name, DRAFT.name]
SNIPPET = (
    "There was once an old woman who lived in a cottage by the sea. Every morning she went down to the shore to "
    "gather driftwood for her fire, and every evening she sat at the window and looked out over the water.\n\n"
    '"What do you see?" asked the cat.\n\n"Nothing yet," said the old woman.'
)


@cache
def model_named(name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER / name, dtype=torch.float32)


@cache
def tokenizer_named(name: str) -> Any:
    return AutoTokenizer.from_pretrained(FOLDER / name)


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_is_a_standard_one_with_the_shape_of_its_recipe(name: str) -> None:
    config = model_named(name).config
    shape = {STORY.name: STORY, DRAFT.name: DRAFT}[name].shape
    assert config.architectures == ["LlamaForCausalLM"]
    assert (config.hidden_size, config.num_hidden_layers) == (shape.hidden, shape.layers)
    assert (config.num_attention_heads, config.num_key_value_heads) == (shape.heads, shape.kv_heads)
    assert (config.head_dim, config.max_position_embeddings, config.tie_word_embeddings) == (64, 2048, True)
    assert GenerationConfig.from_pretrained(FOLDER / name).eos_token_id == config.eos_token_id == 0


@pytest.mark.parametrize("name", NAMES)
def test_shards_are_bf16_small_and_all_in_the_index(name: str) -> None:
    index = json.loads((FOLDER / name / "model.safetensors.index.json").read_text())
    shards = sorted((FOLDER / name).glob("*.safetensors"))
    held: dict[str, str] = {}
    for shard in shards:
        assert shard.stat().st_size <= 15_000_000
        with safe_open(shard, framework="pt") as file:
            held |= dict.fromkeys(file.keys(), shard.name)
            assert {file.get_tensor(key).dtype for key in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    assert held == index["weight_map"]


def test_both_models_fit_in_28_megabytes_and_share_one_tokenizer() -> None:
    assert sum(file.stat().st_size for name in NAMES for file in (FOLDER / name).iterdir()) <= 28_000_000
    assert len({(FOLDER / name / "tokenizer.json").read_bytes() for name in NAMES}) == 1


@pytest.mark.parametrize("name", NAMES)
def test_the_card_states_the_true_size_and_a_likely_perplexity(name: str) -> None:
    card = (FOLDER / name / "README.md").read_text()
    stated = re.search(r"([\d,]+) parameters", card)
    figures = re.search(r"\| (\d\.\d{4}) \| (\d+\.\d\d) \| (\d\.\d{4}) \|", card)
    assert stated is not None
    assert figures is not None
    loss, perplexity, bits_per_byte = (float(figure) for figure in figures.groups())
    assert int(stated[1].replace(",", "")) == sum(weight.numel() for weight in model_named(name).parameters())
    assert perplexity == pytest.approx(math.exp(loss), rel=1e-3)
    assert 1.0 < bits_per_byte < 1.5


@pytest.mark.parametrize(("name", "most"), [(STORY.name, 3.2), (DRAFT.name, 3.7)])
def test_the_loss_on_english_is_far_below_chance(name: str, most: float) -> None:
    ids = torch.tensor([tokenizer_named(name)(SNIPPET).input_ids])
    with torch.no_grad():
        loss = model_named(name)(ids, labels=ids).loss.item()
    assert loss < most < math.log(model_named(name).config.vocab_size) / 2


def test_a_story_continues_in_english_words() -> None:
    tokenizer, model = tokenizer_named(STORY.name), model_named(STORY.name)
    prompt = tokenizer("Once upon a time there was a king who had three", return_tensors="pt")
    written = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert tokenizer.decode(written[0], skip_special_tokens=True).split()[11].startswith(("sons", "daughters"))


def test_the_chat_template_joins_messages_as_paragraphs() -> None:
    tokenizer = tokenizer_named(STORY.name)
    messages = [{"role": "system", "content": "A tale."}, {"role": "user", "content": " It rained. "}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|endoftext|>A tale.\n\nIt rained."
    assert prompt == rendered + "\n\n"


def test_an_encoded_text_begins_with_one_start_token() -> None:
    tokenizer = tokenizer_named(STORY.name)
    assert tokenizer("A tale.").input_ids[0] == tokenizer.bos_token_id == tokenizer.eos_token_id == 0
    assert 0 not in tokenizer("A tale.", add_special_tokens=False).input_ids


def test_a_blank_line_is_one_token_at_any_place() -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / STORY.name / "tokenizer.json"))
    at_the_end = tokenizer.encode("He ran.\n\n").tokens
    assert at_the_end[-1] == "ĊĊ"
    assert tokenizer.encode("He ran.\n\nHe hid.").tokens[: len(at_the_end)] == at_the_end


TOKENIZER = Tokenizer.from_file(str(FOLDER / STORY.name / "tokenizer.json"))


@given(st.text())
def test_any_text_survives_the_tokenizer(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert all(0 <= each < 6144 for each in ids)
