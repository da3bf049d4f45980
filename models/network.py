"""The network of a demo model: transformers' Llama, its losses and its dropout. Knows no files or schedules.

Legend: B windows, T tokens of a window, V vocabulary, C hidden width, H query heads, K kv heads, D head dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from compress.training.attention import WHOLE_WINDOWS
from compress.training.run import logits, soft_loss
from models.recipe import CONTEXT, Shape


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
    model: LlamaForCausalLM = LlamaForCausalLM(config)
    model.set_attn_implementation(WHOLE_WINDOWS)
    model.generation_config = GenerationConfig(
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


def text_loss(model: LlamaForCausalLM, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean cross entropy of the targets, nats per token."""
    return F.cross_entropy(logits(model, inputs_BT).float().flatten(0, 1), targets_BT.flatten())


def distillation_loss(model: LlamaForCausalLM, teacher: LlamaForCausalLM, inputs_BT: Tensor) -> Tensor:
    """Mean cross entropy of the teacher's distribution, nats per token."""
    with torch.no_grad():
        wanted_BTV = logits(teacher, inputs_BT)
    return soft_loss(logits(model, inputs_BT), wanted_BTV)
