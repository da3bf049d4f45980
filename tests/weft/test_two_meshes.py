"""Two real meshes on one machine, started together in one folder: they share neither processes nor data."""

import asyncio
import re
import signal
from pathlib import Path

from tests.ports import free_port
from tests.weft.test_cli import lines_of_start, run_weft, start_weft
from weft import Client

START_S = 100.0
# What the workers compute decides nothing here; the cache has time to answer before their first tokens.
SETTINGS = {"WEFT_GATEWAY_CACHE_BUDGET_S": "5", "ENGINE": "paced", "WEFT_PACED_STEP_MS": "200"}


async def serve(home: Path, port: int) -> tuple[asyncio.subprocess.Process, list[str]]:
    """Starts a mesh and returns its process and the lines that it printed until it served."""
    process = await start_weft("serve", "--port", str(port), home=home, **SETTINGS)
    async with asyncio.timeout(START_S):
        return process, await lines_of_start(process)


async def stop(process: asyncio.subprocess.Process) -> None:
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert (await process.stdout.read()).decode() == "stopped\n"
    assert await process.wait() == 0


async def ask(client: Client, prompt: str) -> tuple[bool, list[str]]:
    """Whether the answer was a hit of the result cache, and the workers that computed it."""
    receipt = (await client.complete(prompt, max_tokens=4, temperature=0)).receipt
    return receipt.result_hit, list(receipt.workers)


async def workers_of_a_hit(client: Client) -> list[str]:
    """Asks until the answer is a hit: an answer is stored after it was delivered, and a fast worker answers before the
    cache."""
    async with asyncio.timeout(START_S):
        while True:
            hit, workers = await ask(client, "Once")
            if hit:
                return workers


async def use_tools(home: Path, printed: list[str]) -> None:
    """Runs the command that the mesh has printed for its inner ports, if any: without it the defaults reach it."""
    for line in printed:
        if command := re.search(r"as in: (?:WEFT_HOME=(\S+) )?weft (adapters list.*)", line):
            folder, arguments = command.groups()
            code, output = await run_weft(*arguments.split(), home=Path(folder or home))
            assert code == 0, output


async def test_two_meshes_in_one_folder_share_nothing(tmp_path: Path) -> None:
    ports = (free_port(), free_port())
    (first, printed), (second, printed_too) = await asyncio.gather(*(serve(tmp_path, port) for port in ports))
    data = {re.search(r"data in (\S+)", lines[0])[1] for lines in (printed, printed_too)}  # type: ignore[index]
    assert len(data) == 2
    assert not any("open to other machines" in line for line in printed + printed_too)
    for lines in (printed, printed_too):
        await use_tools(tmp_path, lines)
    async with Client(f"127.0.0.1:{ports[0]}") as one, Client(f"127.0.0.1:{ports[1]}") as other:
        # Each computes the same prompt anew: they share neither workers nor a Redis.
        (hit, workers), (hit_too, workers_too) = await ask(one, "Once"), await ask(other, "Once")
        assert (hit, hit_too, len(workers), len(workers_too)) == (False, False, 1, 1)
        assert workers != workers_too
        for client in (one, other):
            assert await workers_of_a_hit(client) == []
            assert [model.workers for model in await client.models()] == [1]
        await stop(first)
        assert await workers_of_a_hit(other) == []
        assert (await ask(other, "Twice"))[0] is False
        await stop(second)
