"""The network of a demo model: transformers' Llama, its losses and its dropout. Knows no files or schedules.

Legend: B windows, T tokens of a window, V vocabulary, C hidden width, H query heads, K kv heads, D head dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from models.recipe import CONTEXT, Shape

# Under torch.compile, transformers' own "sdpa" builds a (T, T) mask, which bars the flash kernel. Training and
# measuring read whole windows, where "causal" says all.
WHOLE_WINDOWS = "whole-windows"


def _attend(
    module: nn.Module, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, mask: None, scaling: float, **_: object
) -> tuple[Tensor, None]:
    attended = F.scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, is_causal=True, scale=scaling, enable_gqa=True)
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register(WHOLE_WINDOWS, _attend)
AttentionMaskInterface.register(WHOLE_WINDOWS, lambda *_, **__: None)


def build(shape: Shape, vocab: int, end_id: int) -> LlamaForCausalLM:
    """A fresh float32 model; the id `end_id` both begins and ends a text."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=end_id,
        eos_token_id=end_id,
    )
    model: LlamaForCausalLM = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    model.set_attn_implementation(WHOLE_WINDOWS)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=end_id, eos_token_id=end_id, do_sample=True, temperature=0.7, top_p=0.95
    )
    return model


def end_of_text(model: LlamaForCausalLM) -> int:
    """The id that begins and ends a text."""
    assert isinstance(model.config.bos_token_id, int), model.config.bos_token_id
    return model.config.bos_token_id


def add_dropout(model: LlamaForCausalLM, probability: float) -> None:
    """Drop parts of what each block adds to the residual stream, while the model is in training mode.

    Llama has no such dropout of its own; hooks leave the checkpoint an ordinary one.
    """

    def drop(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return F.dropout(output, probability, module.training)

    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.down_proj.register_forward_hook(drop)


def logits(model: LlamaForCausalLM, inputs_BT: Tensor) -> Tensor:
    """Logits (B, T, V), computed in bf16 on a GPU and in float32 on a CPU."""
    with torch.autocast("cuda", torch.bfloat16, enabled=inputs_BT.is_cuda):
        hidden_BTC = model.model(input_ids=inputs_BT, use_cache=False).last_hidden_state
        return F.linear(hidden_BTC, model.lm_head.weight)


def text_loss(model: LlamaForCausalLM, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean cross entropy of the targets, nats a token."""
    return F.cross_entropy(logits(model, inputs_BT).float().flatten(0, 1), targets_BT.flatten())


def distillation_loss(model: LlamaForCausalLM, teacher: LlamaForCausalLM, inputs_BT: Tensor) -> Tensor:
    """Mean cross entropy of the teacher's distribution, nats a token (Hinton et al., arXiv:1503.02531)."""
    with torch.no_grad():
        teacher_BTV = logits(teacher, inputs_BT).float().softmax(-1)
    return F.cross_entropy(logits(model, inputs_BT).float().flatten(0, 1), teacher_BTV.flatten(0, 1))
