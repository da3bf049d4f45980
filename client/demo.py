"""The demonstration: a mesh of its own with the demo model, one streamed answer, its receipt."""

import os
from pathlib import Path

from rich.console import Console

from client import mesh
from client.api import Client
from client.local import Wanted
from client.terminal import print_receipt, say

PROMPT = "There was once a fox who lived at the edge of the forest. One winter morning"
MAX_TOKENS = 120
# Without it, a greedy answer of so small a model soon goes in circles.
REPETITION_PENALTY = 1.15
_MODELS = Path(__file__).resolve().parents[1] / "models"


class NoDemoModel(Exception):
    """There is no checkpoint in models/."""


def model_folder(models: Path = _MODELS) -> Path:
    """The largest checkpoint that ships with the project. Raises NoDemoModel."""
    folders = [config.parent for config in models.glob("*/config.json")]
    if not folders:
        raise NoDemoModel(f"no checkpoint in {models}: name one with --model, or make train-demo")
    return max(folders, key=lambda folder: sum(shard.stat().st_size for shard in folder.glob("*.safetensors")))


def home() -> Path:
    """Where a mesh started here keeps its data and logs: WEFT_HOME, else .weft in the current folder."""
    return Path(os.environ.get("WEFT_HOME") or ".weft").absolute()


async def run(prompt: str, out: Console) -> None:
    """Starts a mesh on free ports, streams the greedy answer to `prompt`, prints the receipt, stops the mesh.

    Greedy, so that the same prompt is answered from the result cache the next time.
    """
    wanted = Wanted(models=[str(model_folder())], home=home(), free_ports=True)
    async with mesh.up(wanted, out) as running, Client(running.address, deadline_s=120) as weft:
        out.print()
        out.print(prompt, style="bold", end="", markup=False)
        answer = weft.generate(prompt, max_tokens=MAX_TOKENS, temperature=0, repetition_penalty=REPETITION_PENALTY)
        async for delta in answer:
            say(delta.text)
        out.print("\n")
        assert answer.receipt is not None
        print_receipt(out, answer.receipt)
