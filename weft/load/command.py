"""What `weft bench` does: runs a plan, shows the result, writes the files that were asked for."""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from weft.load import metrics, page, profile, run, terminal
from weft.load.plan import Plan


def bench(
    plan: Plan, out: Console, json_file: Path | None, html_file: Path | None, wish: profile.Wish | None = None
) -> int:
    """The exit code: 1 if no request was answered.

    Raises PlanError, TraceError, RunError, WeftError and ProfileError.
    """
    with _bar(out) as progress:
        result = asyncio.run(_measured(plan, progress, wish))
    terminal.show(out, result)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
    if html_file is not None:
        html_file.write_text(page.page(result))
        out.print(f"report: {html_file}", markup=False)
    return 0 if result["completed"] else 1


async def _measured(plan: Plan, progress: run.Progress, wish: profile.Wish | None) -> dict[str, Any]:
    """The result; with a wish, of a load under which a worker was profiled as soon as the warm-up was over."""
    if wish is None:
        return metrics.result(await run.run(plan, progress))
    begun = asyncio.Event()

    def note(ended: int, total: int) -> None:
        begun.set()
        progress(ended, total)

    async def taken() -> dict[str, Any]:
        await begun.wait()
        return await profile.take(wish, plan.model)

    taking = asyncio.create_task(taken())
    try:
        result = metrics.result(await run.run(plan, note))
        return {**result, "profile": await profile.finish(taking)}
    finally:
        taking.cancel()


@contextlib.contextmanager
def _bar(out: Console) -> Iterator[run.Progress]:
    """A progress bar, on a terminal."""
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as bar:
        task = bar.add_task("requests", total=None)
        yield lambda ended, total: bar.update(task, completed=ended, total=total)
