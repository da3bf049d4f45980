"""The client at a real mesh: when its gateway is killed, it receives the whole answer nevertheless."""

import os
import signal
from pathlib import Path

from weft import Client
from weft.launch import demo_model, plan
from weft.launch.supervisor import Supervisor

TOKENS = 250


async def read(client: Client, kill: int | None = None) -> tuple[list[int], str]:
    """Tokens and text of a sampled answer. The process `kill` is killed after 50 tokens."""
    answer = client.generate(
        "Once upon a time", max_tokens=TOKENS, temperature=0.8, seed=9, ignore_eos=True, cache="bypass"
    )
    tokens: list[int] = []
    text = ""
    async for delta in answer:
        assert delta.position == len(tokens) or not delta.token_ids
        tokens += delta.token_ids
        text += delta.text
        if kill is not None and len(tokens) >= 50:
            os.kill(kill, signal.SIGKILL)
            kill = None
    assert answer.receipt is not None
    return tokens, text


async def test_a_killed_gateway_costs_the_client_no_token_and_repeats_none(tmp_path: Path) -> None:
    spec = plan.MeshSpec(models=[str(demo_model.model_folder())], home=tmp_path, free_ports=True)
    async with plan.planned(spec) as mesh:
        supervisor = Supervisor(mesh.specs, tmp_path / "logs")
        await compare(supervisor, mesh.address)


async def compare(supervisor: Supervisor, address: str) -> None:
    # The deadline bounds the attempts: on a busy machine a gateway takes longer to restart than the usual ones do.
    async with supervisor.running(), Client(address, deadline_s=60, retries=1000) as client:
        await supervisor.during(plan.wait_served(address, 1))
        undisturbed = await read(client)
        assert len(undisturbed[0]) == TOKENS
        gateway = supervisor.processes["gateway"]
        assert await read(client, kill=gateway.pid) == undisturbed
        assert gateway.restarts == 1
