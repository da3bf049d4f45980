"""Parts of one request that run side by side and end together."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


async def run_together(parts: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Runs all parts. When one fails, or the caller is cancelled, cancels the others and waits for their end.

    Raises what the first part that failed raised.
    """
    parts = list(parts)
    if len(parts) == 1:  # A task would cost a single part several turns of the event loop.
        await parts[0]
        return
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
