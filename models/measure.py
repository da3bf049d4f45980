"""Measures a trained model: held-out perplexity, samples, and how often a draft model agrees with it."""

import math
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from compress.training.attention import WHOLE_WINDOWS
from compress.training.run import logits
from models.corpus import Split, batch_at
from models.network import end_of_text
from models.trainer import evaluate

PROMPT = "Once upon a time there was a little fox who lived at the edge of a great dark wood."


@dataclass(frozen=True)
class Quality:
    """Held-out figures of the weights as they ship."""

    loss: float  # nats per token
    bits_per_byte: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


@dataclass(frozen=True)
class Agreement:
    """How a draft model stands to the model it drafts for, on held-out text."""

    greedy: float  # share of positions where both find the same token likeliest
    sampled: float  # mean chance that a token drafted at temperature 1 is accepted: sum of min(p, q)


def quality(model: LlamaForCausalLM, heldout: Split, window: int) -> Quality:
    """Loss over all of `heldout`; bits are counted against the bytes of its text."""
    loss = evaluate(model, heldout, window)
    return Quality(loss, loss * len(heldout) / math.log(2) / heldout.text_bytes)


@torch.no_grad()
def agreement(draft: LlamaForCausalLM, model: LlamaForCausalLM, heldout: Split, window: int) -> Agreement:
    """Compare the two models' next-token distributions on the first windows of `heldout`."""
    grid = torch.arange(0, len(heldout) - window + 1, window)[:64]
    greedy, sampled, positions = 0.0, 0.0, 0
    for starts in torch.split(grid, 8):
        inputs, _ = batch_at(heldout, starts, window, end_of_text(model))
        p, q = (logits(each, inputs).float().softmax(-1) for each in (model, draft))
        greedy += (p.argmax(-1) == q.argmax(-1)).sum().item()
        sampled += torch.minimum(p, q).sum().item()
        positions += inputs.numel()
    return Agreement(greedy / positions, sampled / positions)


@torch.no_grad()
def continuation(
    model: LlamaForCausalLM, tokenizer: Tokenizer, temperature: float, prompt: str = PROMPT, tokens: int = 160
) -> str:
    """What the model writes after `prompt`: greedy at temperature 0, else sampled with a fixed seed."""
    torch.manual_seed(1)
    ids = torch.tensor([tokenizer.encode(prompt).ids], device=model.device)
    how = {"do_sample": True, "temperature": temperature, "top_p": 0.95} if temperature else {"do_sample": False}
    model.set_attn_implementation("sdpa")  # reads one token at a time
    written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, **how)
    model.set_attn_implementation(WHOLE_WINDOWS)
    return tokenizer.decode(written[0, ids.shape[1] :].tolist())
