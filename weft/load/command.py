"""Runs `weft bench`: executes a plan, prints the result, writes the files that were asked for."""

import asyncio
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from report.console import console, progress
from weft.load import metrics, page, profile, run, terminal
from weft.load.plan import Plan


def bench(
    plan: Plan,
    out: Console,
    json_file: Path | None,
    html_file: Path | None,
    profiled: profile.ProfileSpec | None = None,
) -> int:
    """Runs the load. -> the exit code: 1 if no request was answered.

    Raises PlanError, TraceError, RunError and WeftError; ProfileError once the result is printed and written.
    """
    with progress(console(stderr=True)) as show:
        result, failure = asyncio.run(_measured(plan, lambda ended, total: show("requests", ended, total), profiled))
    terminal.show(out, result)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
    if html_file is not None:
        html_file.write_text(page.page(result))
        out.print(f"report: {html_file}", markup=False)
    if failure is not None:
        raise failure
    return 0 if result["completed"] else 1


async def _measured(
    plan: Plan, notify: run.Progress, profiled: profile.ProfileSpec | None
) -> tuple[dict[str, Any], profile.ProfileError | None]:
    """The result of the load, and why it has no profile although one is wanted. That starts when the warm-up has
    ended."""
    if profiled is None:
        return metrics.result(await run.run(plan, notify)), None
    warm = asyncio.Event()

    def on_progress(ended: int, total: int) -> None:
        warm.set()
        notify(ended, total)

    async def taken() -> dict[str, Any]:
        await warm.wait()
        return await profile.take(profiled, plan.model)

    taking = asyncio.create_task(taken())
    try:
        result = metrics.result(await run.run(plan, on_progress))
        return {**result, "profile": await profile.finish(taking)}, None
    except profile.ProfileError as error:
        return result, error
    finally:
        taking.cancel()
