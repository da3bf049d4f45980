"""The tiny models that real writers quantize for the golden files. Knows no writer; runs in their environments."""

import json
import random
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

library: Any = transformers  # The version depends on the writer's environment.
FOLDER = Path(__file__).parent
EXPECTED = "expected.safetensors"
GROUP = 32
WORDS = ["<s>", "</s>", "the", "weft", "is", "what", "woven", "through", "warp", "thread", "after", "and"]


FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 24},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 32},
}
"""Config fields of each family that differ from Llama's. Qwen2 also has biases."""


def plain(family: str = "Llama") -> Path:
    """Writes the unquantized model of a family to a temporary folder and returns it."""
    torch.manual_seed(0)
    config = getattr(library, f"{family}Config")(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=1,
        **FAMILIES[family],
    )
    model = getattr(library, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(std=0.05)
    folder = Path(tempfile.mkdtemp())
    model.half().save_pretrained(folder)
    return folder


def emptied(name: str) -> Path:
    """The folder of a golden checkpoint, after its content was deleted."""
    shutil.rmtree(FOLDER / name, ignore_errors=True)
    return FOLDER / name


def tokenizer() -> Any:
    """A tokenizer with one token per word of WORDS."""
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<s>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return library.PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def calibration() -> list[str]:
    """Texts with which a writer calibrates its quantization."""
    chance = random.Random(0)
    return [" ".join(chance.choices(WORDS[2:], k=80)) for _ in range(32)]


def finish(folder: Path, weights: Mapping[str, Any]) -> None:
    """Reduces a folder to one safetensors file, the config and the writer's dequantized `weights`, [N, K] float16."""
    written = list(folder.glob("*.safetensors"))
    tensors: dict[str, Any] = {}
    for path in written:
        tensors |= load_file(path)
        path.unlink()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    save_file({name: each.half().contiguous() for name, each in weights.items()}, folder / EXPECTED)
    for path in folder.iterdir():
        if path.name not in ("config.json", "model.safetensors", EXPECTED):
            path.unlink()
    config = json.loads((folder / "config.json").read_text())
    config.pop("_name_or_path", None)
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
