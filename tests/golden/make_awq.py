"""Writes tests/golden/awq: a tiny Llama quantized and saved by AutoAWQ itself, with its own idea of the weights.

    python -m venv env && env/bin/pip install torch 'transformers==4.51.3' autoawq==0.2.9
    env/bin/python -m tests.golden.make_awq

AutoAWQ is no longer developed and wants an old transformers, hence an environment of its own.
"""

import torch
from awq import AutoAWQForCausalLM
from awq.utils.packing_utils import dequantize_gemm

from tests.golden.tiny import GROUP, calibration, emptied, finish, plain_llama, tokenizer


def main() -> None:
    """Quantize, save, and store the numbers that AutoAWQ reads back."""
    plain = plain_llama()
    model = AutoAWQForCausalLM.from_pretrained(str(plain), device_map="cpu", torch_dtype=torch.float16)
    settings = {"zero_point": True, "q_group_size": GROUP, "w_bit": 4, "version": "GEMM"}
    model.quantize(
        tokenizer(), quant_config=settings, calib_data=calibration(), max_calib_seq_len=128, apply_clip=False
    )
    folder = emptied("awq")
    model.save_quantized(str(folder))
    layers = model.model.model.layers
    linears = {f"model.layers.0.{name}": each for name, each in layers[0].named_modules() if hasattr(each, "qweight")}
    weights = {
        name: dequantize_gemm(each.qweight, each.qzeros, each.scales, 4, GROUP).T for name, each in linears.items()
    }
    finish(folder, weights)


if __name__ == "__main__":
    main()
