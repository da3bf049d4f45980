"""Demo models compressed by the `weft compress` command, once per method for all tests that read the output."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from compress import text
from compress.cli import app
from tests.checkpoints import DEMO, SMALL_DEMO

_FEW = ("--windows", "6", "--length", "128")
METHODS = {
    "int8": ("int8",),
    "w8a8": ("int8", "--dynamic"),
    "int8-tensor": ("int8", "--per-tensor"),
    "fp8": ("fp8",),
    "fp8-static": ("fp8", "--granularity", "tensor", "--static", "--kv", *_FEW),
    "fp8-block": ("fp8", "--granularity", "block"),
    "awq": ("awq", "--group", "8", *_FEW),  # Of so narrow a model larger groups exceed the limits of `weft verify`.
    "awq-nearest": ("awq", "--no-compensate", *_FEW),
    "gptq": ("gptq", *_FEW),
    "gptq-act-order": ("gptq", "--act-order", "--no-symmetric", *_FEW),
    "smoothquant": ("smoothquant", *_FEW),
}

_VARIANTS = ("fp8-static", "fp8-block", "awq-nearest", "gptq-act-order", "smoothquant")
"""Made of the first layer of the larger demo model; the others are made of the whole smaller one, whose two layers add
up differences between two ways of rounding inputs."""
Made = Callable[[str], Path]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logging: Any = transformers.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def _short_text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The beginnings of the held-out stories: to tokenize all of them would take a fifth of each run's time."""
    short = tmp_path_factory.mktemp("text") / "heldout.txt"
    short.write_text(text.END_OF_TEXT.join(story[:4000] for story in text.read(text.HELD_OUT)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "HELD_OUT", short)
        yield


@pytest.fixture(scope="session")
def base_of(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A function from a method to the folder of the model that the method compresses."""
    short = shutil.copytree(DEMO, tmp_path_factory.mktemp("short") / "base")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    (short / "model.safetensors.index.json").unlink()
    tensors = {name: tensor for file in short.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for file in short.glob("*.safetensors"):
        file.unlink()
    inside = re.compile(r"model\.layers\.[1-9]")
    kept = {name: tensor for name, tensor in tensors.items() if not inside.match(name)}
    save_file(kept, short / "model.safetensors", {"format": "pt"})
    return lambda name: short if name in _VARIANTS else SMALL_DEMO


@pytest.fixture(scope="session")
def made(base_of: Made, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A function from a method to the folder that it wrote; the method runs at the first call."""

    @cache
    def folder(name: str) -> Path:
        method, *flags = METHODS[name]
        out = tmp_path_factory.mktemp("made") / name
        result = CliRunner().invoke(app, [method, str(base_of(name)), str(out), *flags], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return out

    return folder
