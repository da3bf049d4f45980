"""The client at a real mesh: when its gateway is killed, it receives the whole answer nevertheless."""

from pathlib import Path

from tests.mesh.conftest import demo_model
from tests.mesh.harness import Mesh, Process
from weft import Client

TOKENS = 250


async def read(client: Client, gateway: Process | None = None) -> tuple[list[int], str]:
    """Tokens and text of a sampled answer. `gateway` is killed and started again after 50 tokens."""
    answer = client.generate(
        "Once upon a time", max_tokens=TOKENS, temperature=0.8, seed=9, ignore_eos=True, cache="bypass"
    )
    tokens: list[int] = []
    text = ""
    async for delta in answer:
        assert delta.position == len(tokens) or not delta.token_ids
        tokens += delta.token_ids
        text += delta.text
        if gateway is not None and len(tokens) >= 50:
            gateway.kill()
            gateway.start()
            gateway = None
    assert answer.receipt is not None
    assert gateway is None
    return tokens, text


async def test_a_killed_gateway_costs_the_client_no_token_and_repeats_none(tmp_path: Path) -> None:
    async with Mesh(tmp_path, demo_model()) as mesh:
        (gateway,) = mesh.gateways
        # The deadline bounds the attempts: on a busy machine a gateway takes longer to restart than the usual ones do.
        async with Client(gateway.address, deadline_s=60, retries=1000) as client:
            undisturbed = await read(client)
            assert len(undisturbed[0]) == TOKENS
            assert await read(client, gateway) == undisturbed
