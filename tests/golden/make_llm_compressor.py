"""Writes tests/golden/llm-compressor*: tiny models that llm-compressor quantizes and saves, with the
weights as it dequantizes them.

    python -m venv env && env/bin/pip install torch llmcompressor==0.14.0
    env/bin/python -m tests.golden.make_llm_compressor

llm-compressor installs about a hundred packages that nothing else needs, hence the separate environment.
"""

from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from tests.golden.tiny import GROUP, calibration, emptied, finish, plain, tokenizer


def fours(*, symmetric: bool) -> dict[str, Any]:
    """Quantization arguments of INT4 in groups."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": symmetric}
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"]}


def named(scheme: str, **more: Any) -> dict[str, Any]:
    """A recipe with one of llm-compressor's named schemes."""
    return {"scheme": scheme, "targets": ["Linear"], "ignore": ["lm_head"], **more}


HEADS = {"num_bits": 8, "type": "float", "strategy": "attn_head", "symmetric": True, "dynamic": False}
KINDS: Mapping[str, tuple[str, list[Any]]] = {
    "gptq": ("Qwen2", [GPTQModifier(**fours(symmetric=True))]),
    "awq": ("Mistral", [AWQModifier(), QuantizationModifier(**fours(symmetric=False))]),
    "w8a8": ("Qwen3", [GPTQModifier(**named("W8A8"))]),
    "fp8-dynamic": ("Qwen2", [QuantizationModifier(**named("FP8_DYNAMIC"))]),
    "fp8-heads": ("Llama", [QuantizationModifier(**named("FP8", kv_cache_scheme=HEADS))]),
}


def main() -> None:
    """Quantizes and saves each model, and stores the weights that llm-compressor dequantizes."""
    words = tokenizer()
    data = Dataset.from_list([dict(words(text, truncation=True, max_length=64)) for text in calibration()])
    for name, (family, recipe) in KINDS.items():
        model = AutoModelForCausalLM.from_pretrained(plain(family), dtype=torch.float32)
        # Its AWQ assumes a GPU, which this does not need.
        with mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor):
            oneshot(model=model, dataset=data, recipe=recipe, max_seq_length=64, tokenizer=words)
        folder = emptied(f"llm-compressor-{name}")
        model.save_pretrained(folder, save_compressed=True)
        plainly = CompressedTensorsConfig(run_compressed=False)
        again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=plainly)
        layer = again.get_submodule("model.layers.0")
        linears = {path: each for path, each in layer.named_modules() if path.endswith("_proj")}
        finish(folder, {f"model.layers.0.{path}": each.weight.data for path, each in linears.items()})


if __name__ == "__main__":
    main()
