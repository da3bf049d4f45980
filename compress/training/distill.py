"""Knowledge distillation: a student is trained on the teacher's distribution of each next token."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from compress import text
from compress.base.network import load
from compress.errors import CompressError
from compress.output import dense
from compress.output.checkpoint import Workspace
from compress.progress import Progress
from compress.training.parallel import CONFIG_KEY, parallel_aim
from compress.training.run import Plan, distillation, train


def distill(
    teacher: Path,
    student: Path,
    out: Path,
    windows_WT: Tensor,
    plan: Plan,
    progress: Progress,
    *,
    fresh: bool = False,
    temperature: float = 1.0,
    hard: float = 0.0,
    drafting: float = 0.0,
    guesses: int | None = None,
    mask_token: int | None = None,
) -> float:
    """Train the student's network, from its weights or (`fresh`) from random ones. -> the last loss, nats a token.

    `hard`: share of the loss that the next token itself has; `drafting`: that the rate of rejected drafts has, which a
    draft model is to lower (DistillSpec, Zhou et al., arXiv:2310.08461). `guesses`: tokens that the student learns to
    guess in one pass, in which `mask_token` stands for those unknown (PARD, arXiv:2504.18583). Raises CompressError.
    """
    model, its_teacher = _fresh(student) if fresh else load(student), load(teacher)
    if model.config.vocab_size != its_teacher.config.vocab_size:
        raise CompressError(
            f"{student} and {teacher} have different vocabularies: a student reads its teacher's tokens"
        )
    parallel = parallel_aim(student, model.config, windows_WT, guesses, mask_token) if guesses else None
    settings: dict[str, Any] = {
        "method": "distill",
        "teacher": teacher.resolve().name,
        "fresh": fresh,
        "temperature": temperature,
        "hard": hard,
        "drafting": drafting,
        "text": text.described(windows_WT),
        **asdict(plan),
        **(asdict(parallel) if parallel else {}),
    }
    workspace = Workspace(student, out, settings, dense.pieces(model), teacher)
    loss_of = distillation(model, its_teacher, temperature, hard, drafting, parallel)
    loss = train(model, windows_WT, loss_of, plan, workspace, progress)
    dense.write(model, student, workspace, {CONFIG_KEY: parallel.mask_token} if parallel else None)
    return loss


def _fresh(folder: Path) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    maker: Any = AutoModelForCausalLM
    model: PreTrainedModel = maker.from_config(config, dtype=torch.float32)
    return model
