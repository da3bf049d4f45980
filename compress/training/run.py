"""A training run that can be resumed: batches, optimizers, schedule, saved state. Knows no file formats.

Legend: W windows of text, B of them in a batch, T tokens of a window, V vocabulary.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.base.network import compute_device
from compress.output.checkpoint import Workspace
from compress.progress import Progress
from compress.training.attention import read_whole_windows
from compress.training.parallel import Parallel, random_places

_STATE = "training"
_KEPT_TIMES = 20
"""How many times a run saves its state."""
_UNKNOWN = -100
"""The token after a window's last one."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a run: warm-up, constant learning rate, linear decay to zero."""

    steps: int
    batch: int = 8
    """Windows per step."""
    learning_rate: float = 1e-3
    warmup: int = 10
    decay_share: float = 0.6
    """Share of the steps in which the learning rate decays."""
    weight_decay: float = 0.0


def train(
    model: nn.Module,
    windows_WT: Tensor,
    loss_of: Callable[[Tensor], Tensor],
    plan: Plan,
    workspace: Workspace,
    progress: Progress,
    after_step: Callable[[], None] = lambda: None,
) -> float:
    """Train `model` in place, on its device; `loss_of` takes ids [B, T]. -> mean loss of the last tenth of all steps.

    What an earlier run of the same settings kept on the bench is where it goes on. What torch's generator draws in a
    step is a function of the step's number.
    """
    windows_WT = windows_WT.to(next(model.parameters()).device)
    optimizers = optimizers_for(model.named_parameters(), plan.learning_rate, plan.weight_decay)
    begun, losses = _restore(workspace.kept(_STATE), model, optimizers), []
    model.train()
    for step in range(begun, plan.steps):
        progress("steps", step, plan.steps)
        torch.manual_seed(step)
        loss = loss_of(_batch(windows_WT, plan.batch, step))
        torch.autograd.backward(loss)
        rate = schedule((step + 1) / plan.steps, (step + 1) / plan.warmup, plan.decay_share)
        update(optimizers, plan.learning_rate * rate, model)
        after_step()
        losses.append(loss.detach())
        if (step + 1) % math.ceil(plan.steps / _KEPT_TIMES) == 0:
            workspace.keep(_STATE, _snapshot(step + 1, model, optimizers))
    progress("steps", plan.steps, plan.steps)
    model.train(False)
    return torch.stack(losses[-max(1, plan.steps // 10) :]).mean().item() if losses else math.nan


def schedule(progress: float, warmth: float, decay_share: float) -> float:
    """The share of the full learning rate: a warm-up, a plateau, a straight fall to zero at progress 1."""
    return min(1.0, warmth, (1 - progress) / decay_share)


def optimizers_for(
    named: Iterable[tuple[str, nn.Parameter]], rate: float, matrix_decay: float
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks (Jordan et al., 2024), AdamW for embeddings, heads and norms."""
    trained = [(name, weight) for name, weight in named if weight.requires_grad]
    outside = ("embed", "lm_head")
    matrices = [weight for name, weight in trained if weight.ndim == 2 and not any(part in name for part in outside)]
    others = [weight for name, weight in trained if weight.ndim != 2 or any(part in name for part in outside)]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=matrix_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.01),
    ]


def update(optimizers: list[torch.optim.Optimizer], rate: float, model: nn.Module) -> None:
    """One step of all optimizers, with gradients clipped to a norm of 1."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


# ---- losses ----


def logits(model: PreTrainedModel, ids_BT: Tensor, **where: Any) -> Tensor:
    """[B, T, V], computed in bf16 on a GPU and in float32 on a CPU.

    where: positions and attention of the ids, if they are not a plain row of tokens.
    """
    with torch.autocast("cuda", torch.bfloat16, enabled=ids_BT.is_cuda):
        hidden = model.get_submodule("model")(input_ids=ids_BT, use_cache=False, **where).last_hidden_state
        return F.linear(hidden, model.get_submodule("lm_head").get_parameter("weight"))


def soft_loss(logits_BTV: Tensor, teacher_BTV: Tensor, temperature: float = 1.0) -> Tensor:
    """Mean cross entropy of the teacher's distribution, nats a token (Hinton et al., arXiv:1503.02531)."""
    wanted = (teacher_BTV.float() / temperature).softmax(-1)
    spoken = logits_BTV.float() / temperature
    return F.cross_entropy(spoken.flatten(0, 1), wanted.flatten(0, 1)) * temperature**2


def rejection(logits_BTV: Tensor, teacher_BTV: Tensor) -> Tensor:
    """Mean share of drafts at temperature 1 that the teacher rejects: half the L1 distance (arXiv:2310.08461)."""
    return (logits_BTV.float().softmax(-1) - teacher_BTV.float().softmax(-1)).abs().sum(-1).mean() / 2


def to_trainer(*models: nn.Module) -> None:
    """Move networks to the fastest device for training."""
    for model in models:
        model.to(compute_device())


def distillation(
    model: PreTrainedModel,
    teacher: PreTrainedModel,
    temperature: float = 1.0,
    hard: float = 0.0,
    drafting: float = 0.0,
    parallel: Parallel | None = None,
) -> Callable[[Tensor], Tensor]:
    """The loss of ids [B, T]: the teacher's distribution; by a share of `hard` the next token itself, of `drafting`
    how often the teacher would reject a draft. `parallel`: the student also reads masks, which weigh as tokens do.

    Both networks move to the GPU, if there is one.
    """
    to_trainer(model, teacher)
    read_whole_windows(teacher)
    if parallel is None:
        read_whole_windows(model)

    def loss_of(ids_BT: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = logits(teacher, ids_BT)
        following = F.pad(ids_BT[:, 1:], (0, 1), value=_UNKNOWN)
        if parallel is None:
            return mixed(logits(model, ids_BT), wanted, following)
        places = random_places(ids_BT.shape[1], parallel.guesses, ids_BT.device)
        spoken = logits(model, places.filled(ids_BT, parallel.mask_token), **places.where(model.config))
        return mixed(spoken, wanted[:, places.position_S], following[:, places.position_S])

    def mixed(spoken: Tensor, wanted: Tensor, following: Tensor) -> Tensor:
        loss = spoken.new_zeros((), dtype=torch.float32)
        if soft := 1 - hard - drafting:
            loss = loss + soft * soft_loss(spoken, wanted, temperature)
        if hard:
            loss = loss + hard * F.cross_entropy(
                spoken.float().flatten(0, 1), following.flatten(), ignore_index=_UNKNOWN
            )
        if drafting:
            loss = loss + drafting * rejection(spoken, wanted)
        return loss

    return torch.compile(loss_of) if model.device.type == "cuda" else loss_of


# ---- state ----


def _batch(windows_WT: Tensor, batch: int, step: int) -> Tensor:
    """The windows of a step, a function of its number; each window is used once per epoch."""
    count = len(windows_WT)
    epochs = range(step * batch // count, (step * batch + batch - 1) // count + 1)
    orders = [torch.randperm(count, generator=torch.Generator().manual_seed(epoch)) for epoch in epochs]
    at = step * batch - epochs[0] * count
    return windows_WT[torch.cat(orders)[at : at + batch].to(windows_WT.device)]


def _snapshot(step: int, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {f"weight/{name}": weight.detach() for name, weight in model.named_parameters()}
    for place, weight, optimizer in _places(optimizers):
        tensors |= {f"{place}/{key}": torch.as_tensor(value) for key, value in optimizer.state[weight].items()}
    return tensors | {"step": torch.tensor(step)}


def _restore(tensors: dict[str, Tensor] | None, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> int:
    """Restore saved state -> the next step."""
    if tensors is None:
        return 0
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(tensors[f"weight/{name}"])
    for place, trained, optimizer in _places(optimizers):
        found = {key.removeprefix(f"{place}/"): value for key, value in tensors.items() if key.startswith(f"{place}/")}
        optimizer.state[trained] = {
            key: value if value.ndim == 0 else value.to(trained.device) for key, value in found.items()
        }
    return int(tensors["step"])


def _places(optimizers: list[torch.optim.Optimizer]) -> Iterable[tuple[str, Tensor, torch.optim.Optimizer]]:
    for number, optimizer in enumerate(optimizers):
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        yield from ((f"{number}/{index}", weight, optimizer) for index, weight in enumerate(weights))
