"""One training run: batches, optimizers, schedule, the weights best on held-out text. Knows no files."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from compress.training.run import optimizers_for, schedule, update
from models.corpus import Split, batch_at, training_windows
from models.network import add_dropout, distillation_loss, end_of_text, text_loss
from models.recipe import Recipe


@dataclass(frozen=True)
class Outcome:
    """What a run cost and reached; losses in nats per token."""

    steps: int
    tokens: int
    seconds: float
    heldout_losses: list[float]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def train(
    recipe: Recipe,
    model: LlamaForCausalLM,
    texts: Split,
    heldout: Split,
    teacher: LlamaForCausalLM | None = None,
) -> Outcome:
    """Train `model` in place and leave it, in eval mode, with the weights that did best on `heldout`.

    The model's device is where it trains. `teacher` is the model to learn from, where the recipe distills.
    """
    assert (teacher is not None) == recipe.distill, f"{recipe.name}: distill={recipe.distill}"
    device, bos = model.device, end_of_text(model)
    add_dropout(model, recipe.dropout)
    loss_of = _compiled(_loss_function(model, teacher), device)
    optimizers = optimizers_for(model.named_parameters(), recipe.learning_rate, recipe.matrix_weight_decay)
    steps = max(1, int(recipe.epochs * (len(texts) // recipe.window) // recipe.batch))
    pause = math.ceil(steps / recipe.evaluations)
    best, losses, began = None, [], time.perf_counter()
    for step, starts in zip(range(1, steps + 1), _batches(recipe, texts), strict=False):
        model.train()
        rate = recipe.learning_rate * schedule(step / steps, step / recipe.warmup_steps, recipe.decay_share)
        loss = loss_of(*batch_at(texts, starts, recipe.window, bos))
        torch.autograd.backward(loss)
        update(optimizers, rate, model)
        if step % pause == 0 or step == steps:
            losses.append(evaluate(model, heldout, recipe.window))
            if losses[-1] == min(losses):
                best = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
            _report(recipe, step, steps, loss.item(), losses[-1], time.perf_counter() - began)
    seconds = time.perf_counter() - began
    assert best is not None
    model.load_state_dict(best)
    model.train(False)
    return Outcome(steps, steps * recipe.batch * recipe.window, seconds, losses)


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, split: Split, window: int, batch: int = 16) -> float:
    """Mean loss in nats per token: every token once, windows side by side, nothing seen before each."""
    model.train(False)
    grid = torch.arange(0, len(split) - window + 1, window)
    rest = len(split) % window
    pieces = [(starts, window) for starts in torch.split(grid, batch)]
    if rest:
        pieces.append((torch.tensor([len(split) - rest]), rest))
    total = 0.0
    for starts, length in pieces:
        inputs, targets = batch_at(split, starts, length, end_of_text(model))
        total += text_loss(model, inputs, targets).item() * targets.numel()
    return total / len(split)


def _loss_function(model: LlamaForCausalLM, teacher: LlamaForCausalLM | None) -> Callable[[Tensor, Tensor], Tensor]:
    def loss_of(inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        if teacher is None:
            return text_loss(model, inputs_BT, targets_BT)
        return distillation_loss(model, teacher, inputs_BT)

    return loss_of


def _compiled(loss_of: Callable[[Tensor, Tensor], Tensor], device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    return torch.compile(loss_of) if device.type == "cuda" else loss_of


def _batches(recipe: Recipe, texts: Split) -> Iterator[Tensor]:
    """Window starts (batch,), epoch after epoch, without end."""
    generator = torch.Generator().manual_seed(0)
    waiting = torch.empty(0, dtype=torch.int64)
    while True:
        waiting = torch.cat([waiting, training_windows(texts, recipe.window, generator)])
        while waiting.numel() >= recipe.batch:
            yield waiting[: recipe.batch]
            waiting = waiting[recipe.batch :]


def _report(recipe: Recipe, step: int, steps: int, loss: float, heldout: float, seconds: float) -> None:
    speed = step * recipe.batch * recipe.window / seconds
    print(
        f"{recipe.name}: step {step}/{steps}, loss {loss:.3f}, held-out loss {heldout:.3f}, "
        f"perplexity {math.exp(heldout):.2f}, {speed:,.0f} tokens/s",
        flush=True,
    )
