"""Two real meshes on one machine, started together in one folder: they share neither processes nor data."""

import asyncio
import re
import signal
from pathlib import Path

from tests.ports import free_port
from tests.weft.test_cli import fact, run_weft, start_weft

START_S = 100.0
PATIENT = {"WEFT_GATEWAY_CACHE_BUDGET_S": "5"}


async def serve(home: Path, port: int) -> tuple[asyncio.subprocess.Process, list[str]]:
    """Starts a mesh and returns its process and the lines that it printed until it served."""
    process = await start_weft("serve", "--port", str(port), home=home, **PATIENT)
    assert process.stdout is not None
    lines: list[str] = []
    async with asyncio.timeout(START_S):
        while not (lines and lines[-1].startswith("try: ")):
            lines.append((await process.stdout.readline()).decode())
            assert lines[-1], lines
    return process, lines


async def stop(process: asyncio.subprocess.Process) -> None:
    process.send_signal(signal.SIGINT)
    assert await process.wait() == 0


async def ask(home: Path, port: int, prompt: str) -> tuple[str, str]:
    """Whether the answer was a hit of the result cache, and the workers that computed it, as printed."""
    address = f"127.0.0.1:{port}"
    arguments = ("generate", prompt, "--address", address, "--max-tokens", "4", "--temperature", "0", "--stats")
    code, output = await run_weft(*arguments, home=home)
    assert code == 0, output
    return fact(output, "result"), fact(output, "workers")


def workers_of(listing: str) -> str:
    """The last model's workers in the output of `weft models`."""
    header, *_, row = (line.split() for line in listing.splitlines() if line.strip())
    return row[header.index("workers") - len(header)]


async def test_two_meshes_in_one_folder_share_nothing(tmp_path: Path) -> None:
    ports = (free_port(), free_port())
    (first, printed), (second, printed_too) = await asyncio.gather(*(serve(tmp_path, port) for port in ports))
    data = {re.search(r"data in (\S+)", lines[0])[1] for lines in (printed, printed_too)}  # type: ignore[index]
    assert len(data) == 2
    # Each computes the same prompt anew: they share neither workers nor a Redis.
    one, other = await ask(tmp_path, ports[0], "Once"), await ask(tmp_path, ports[1], "Once")
    assert (one[0], other[0], one[1] != other[1]) == ("miss", "miss", True)
    for port in ports:
        async with asyncio.timeout(START_S):  # An answer is stored after it was delivered.
            while (await ask(tmp_path, port, "Once"))[0] != "hit":
                pass
    listings = [await run_weft("models", "--address", f"127.0.0.1:{port}", home=tmp_path) for port in ports]
    assert [workers_of(output) for _, output in listings] == ["1", "1"]
    await stop(first)
    assert await ask(tmp_path, ports[1], "Once") == ("hit", "none")
    assert (await ask(tmp_path, ports[1], "Twice"))[0] == "miss"
    await stop(second)
