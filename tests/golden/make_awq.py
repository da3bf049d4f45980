"""Writes tests/golden/awq*: tiny models that AutoAWQ quantizes and saves, with the weights as it dequantizes them.

    python -m venv env && env/bin/pip install torch 'transformers==4.51.3' autoawq==0.2.9
    env/bin/python -m tests.golden.make_awq

AutoAWQ is no longer developed and needs an old transformers, hence the separate environment.
"""

import torch
from awq import AutoAWQForCausalLM
from awq.utils.packing_utils import dequantize_gemm

from tests.golden.tiny import GROUP, calibration, emptied, finish, plain, tokenizer

KINDS = {"awq": "Llama", "awq-mistral": "Mistral", "awq-qwen2": "Qwen2"}


def main() -> None:
    """Quantizes and saves each model, and stores the weights that AutoAWQ dequantizes."""
    settings = {"zero_point": True, "q_group_size": GROUP, "w_bit": 4, "version": "GEMM"}
    how = {"quant_config": settings, "calib_data": calibration(), "max_calib_seq_len": 128, "apply_clip": False}
    for kind, family in KINDS.items():
        model = AutoAWQForCausalLM.from_pretrained(str(plain(family)), device_map="cpu", torch_dtype=torch.float16)
        model.quantize(tokenizer(), **how)
        folder = emptied(kind)
        model.save_quantized(str(folder))
        layer = model.model.model.layers[0]
        linears = {f"model.layers.0.{name}": each for name, each in layer.named_modules() if hasattr(each, "qweight")}
        weights = {
            name: dequantize_gemm(each.qweight, each.qzeros, each.scales, 4, GROUP).T for name, each in linears.items()
        }
        finish(folder, weights)


if __name__ == "__main__":
    main()
