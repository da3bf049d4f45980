"""Runs a function in a process for each rank. Knows no measurement."""

import multiprocessing
import tempfile
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any


def on_ranks(ranks: int, work: Callable[..., None], *arguments: Any) -> None:
    """Calls work(rank, meeting, *arguments) in a process of each rank; `meeting` is a path that all have in common.
    Ends all of them, and this process with exit code 1, if one fails."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="weft-ranks-") as folder:
        processes = [spawn.Process(target=work, args=(rank, f"{folder}/meeting", *arguments)) for rank in range(ranks)]
        for process in processes:
            process.start()
        running = processes
        while running:
            wait([process.sentinel for process in running])
            running = [process for process in processes if process.exitcode is None]  # What fails later is among them.
            if any(process.exitcode for process in processes):  # The others would wait for it for ever.
                for process in running:
                    process.kill()
                raise SystemExit(1)
