"""Low-rank adapters for tests: folders as PEFT saves them, with random matrices, and PEFT's own answers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from services.worker.build.adapters import AdapterReader
from services.worker.job import Adapter
from tests.oracle import greedy


@dataclass(frozen=True)
class Recipe:
    """How an adapter is made."""

    rank: int = 4
    alpha: int = 8
    modules: Sequence[str] | str = "all-linear"
    seed: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of PEFT."""


def make_adapters(base: Path, into: Path, recipes: Mapping[str, Recipe]) -> dict[str, Path]:
    """Writes an adapter of the checkpoint `base` for each recipe. -> the folders by name."""
    return {name: _save(_with_adapter(base, recipe), into / name) for name, recipe in recipes.items()}


def read_all(read: AdapterReader, folders: Mapping[str, Path]) -> dict[str, Adapter]:
    """The adapters in these folders by name, as an engine reads them."""
    return {name: read(name, str(folder)) for name, folder in folders.items()}


def _with_adapter(base: Path, recipe: Recipe) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(recipe.seed)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    modules = recipe.modules if isinstance(recipe.modules, str) else list(recipe.modules)
    config = LoraConfig(
        r=recipe.rank, lora_alpha=recipe.alpha, target_modules=modules, task_type="CAUSAL_LM", **recipe.settings
    )
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.normal_(std=0.2)
    return adapted


def _save(adapted: Any, folder: Path) -> Path:
    adapted.save_pretrained(folder)
    return folder


def peft_answers(
    base: Path, adapter: Path | None, prompts: Iterable[Sequence[int]], tokens: int
) -> list[tuple[list[int], list[float]]]:
    """The greedy tokens of transformers and PEFT for each prompt, and their log-probabilities."""
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter)
    model.eval()
    return [(each.tokens, each.logprobs) for each in greedy(model, list(prompts), tokens)]
