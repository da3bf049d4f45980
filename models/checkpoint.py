"""Writes a model as an ordinary Hugging Face checkpoint in small bf16 shards. Knows files, never training."""

import json
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from models.recipe import CONTEXT
from models.tokenizer import save_tokenizer

SHARD_BYTES = 14_000_000  # below 15 MB, with room for the header


def save_checkpoint(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the config, the generation config, the tokenizer and the weights, which must be bf16, to `folder`."""
    assert model.dtype == torch.bfloat16, model.dtype
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("*.safetensors"):
        stale.unlink()
    model.config.architectures = [type(model).__name__]
    model.config.dtype = model.dtype
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    save_tokenizer(tokenizer, folder, CONTEXT)
    _save_shards(model, folder)


def _save_shards(model: LlamaForCausalLM, folder: Path) -> None:
    weights = {name: weight.detach().cpu().contiguous() for name, weight in model.named_parameters()}
    plan = split_torch_state_dict_into_shards(
        weights, filename_pattern="model{suffix}.safetensors", max_shard_size=SHARD_BYTES
    )
    shards = {
        f"model-{n:05}-of-{len(plan.filename_to_tensors):05}.safetensors": names
        for n, names in enumerate(plan.filename_to_tensors.values(), 1)
    }
    for filename, names in shards.items():
        save_file({name: weights[name] for name in names}, folder / filename, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(weight.nbytes for weight in weights.values())},
        "weight_map": {name: filename for filename, names in shards.items() for name in sorted(names)},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
