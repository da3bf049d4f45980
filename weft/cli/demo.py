"""The demonstration: starts a mesh with the demo model, streams one answer, prints its receipt."""

from rich.console import Console

from weft.cli.terminal import print_receipt, write
from weft.client.api import Client
from weft.launch import mesh
from weft.launch.demo_model import model_folder
from weft.launch.home import default_home
from weft.launch.plan import MeshSpec

PROMPT = "There was once a fox who lived at the edge of the forest. One winter morning"
MAX_TOKENS = 120
# Without a penalty, a greedy answer of so small a model soon repeats itself.
REPETITION_PENALTY = 1.15


async def run(prompt: str, out: Console) -> None:
    """Starts a mesh on free ports, streams the greedy answer to `prompt`, prints the receipt, stops the mesh.

    Greedy, so that the same prompt is answered from the result cache the next time.
    """
    spec = MeshSpec(models=[str(model_folder())], home=default_home(), free_ports=True, gateways=1)
    async with mesh.up(spec, out) as running, Client(running.address, deadline_s=120) as weft:
        out.print()
        out.print(prompt, style="bold", end="", markup=False)
        answer = weft.generate(prompt, max_tokens=MAX_TOKENS, temperature=0, repetition_penalty=REPETITION_PENALTY)
        async for delta in answer:
            write(delta.text)
        out.print("\n")
        assert answer.receipt is not None
        print_receipt(out, answer.receipt)
