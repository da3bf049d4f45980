"""Writes tests/golden/llm-compressor*: tiny models quantized and saved by llm-compressor itself, with its own idea of
the weights.

    python -m venv env && env/bin/pip install torch llmcompressor==0.14.0
    env/bin/python -m tests.golden.make_llm_compressor

It brings a hundred packages that nothing else here needs, hence an environment of its own.
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
    """INT4 in groups."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": symmetric}
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"]}


def named(scheme: str, **more: Any) -> dict[str, Any]:
    """One of its own schemes."""
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
    """Quantize, save, and store the numbers that llm-compressor reads back."""
    words = tokenizer()
    data = Dataset.from_list([dict(words(text, truncation=True, max_length=64)) for text in calibration()])
    for name, (family, recipe) in KINDS.items():
        model = AutoModelForCausalLM.from_pretrained(plain(family), dtype=torch.float32)
        # Its AWQ takes a GPU for granted, though none of this needs one.
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
