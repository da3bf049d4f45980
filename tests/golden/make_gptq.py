"""Writes tests/golden/gptq*: tiny models that AutoGPTQ quantizes and saves, with the weights as it dequantizes them.

    python -m venv env && env/bin/pip install torch 'transformers==4.51.3' peft==0.13.2 auto_gptq==0.7.1
    env/bin/python -m tests.golden.make_gptq

AutoGPTQ is no longer developed and needs an old transformers, hence the separate environment.
"""

from unittest import mock

import torch
from auto_gptq import BaseQuantizeConfig
from auto_gptq.modeling import _base
from auto_gptq.modeling.llama import LlamaGPTQForCausalLM
from auto_gptq.modeling.mistral import MistralGPTQForCausalLM
from auto_gptq.modeling.qwen2 import Qwen2GPTQForCausalLM
from transformers import AutoModelForCausalLM

from tests.golden.tiny import GROUP, calibration, emptied, finish, plain, tokenizer

KINDS = {
    "gptq": ("Llama", {"desc_act": False, "sym": True}),
    "gptq-act-order": ("Llama", {"desc_act": True, "sym": True}),
    "gptq-asymmetric": ("Llama", {"desc_act": True, "sym": False}),
    "gptq-mistral": ("Mistral", {"desc_act": True, "sym": True}),
    "gptq-qwen2": ("Qwen2", {"desc_act": False, "sym": False}),
}
MAKERS = {"Llama": LlamaGPTQForCausalLM, "Mistral": MistralGPTQForCausalLM, "Qwen2": Qwen2GPTQForCausalLM}


def main() -> None:
    """Quantizes and saves each model, and stores the weights that AutoGPTQ dequantizes."""
    _base.CUDA_0 = torch.device("cpu")  # AutoGPTQ assumes a GPU, which this does not need.
    words = tokenizer()
    examples = [words(text, return_tensors="pt", truncation=True, max_length=64) for text in calibration()]
    for name, (family, kind) in KINDS.items():
        torch.manual_seed(0)
        settings = BaseQuantizeConfig(bits=4, group_size=GROUP, **kind)
        # Its `from_pretrained` refuses to run without a GPU.
        model = MAKERS[family](AutoModelForCausalLM.from_pretrained(plain(family)), False, settings)
        with mock.patch.object(torch.cuda, "synchronize"):
            model.quantize(examples, use_triton=False)
        folder = emptied(name)
        model.save_quantized(str(folder), use_safetensors=True)
        linears = {
            f"model.layers.0.{path}": each
            for path, each in model.model.model.layers[0].named_modules()
            if hasattr(each, "qweight")
        }
        weights = {
            path: (each(torch.eye(each.infeatures)) - each(torch.zeros(1, each.infeatures))).T
            for path, each in linears.items()
        }
        finish(folder, weights)


if __name__ == "__main__":
    main()
