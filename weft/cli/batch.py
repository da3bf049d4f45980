"""The command `weft batch`: a file of requests in, a file of answers out."""

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.flags import ApiKey, fail

Input = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Requests in OpenAI's batch format, .jsonl.")]
Out = Annotated[Path, typer.Argument(dir_okay=False, help="Answers, .jsonl. A file that exists is continued.")]
Url = Annotated[str, typer.Option(envvar="WEFT_URL", help="URL of the mesh's HTTP port.")]
Concurrency = Annotated[int, typer.Option(min=1, max=4096, help="Most requests at a time.")]
Priority = Annotated[
    int,
    typer.Option(min=-100, max=100, help="Priority of requests that name none; those of higher priority run first."),
]
Patience = Annotated[float, typer.Option(min=0, help="Seconds without any answer after which to stop.")]
LOCAL_URL = "http://127.0.0.1:8000"


def batch(
    requests: Input,
    answers: Out,
    url: Url = LOCAL_URL,
    api_key: ApiKey = "",
    concurrency: Concurrency = 64,
    priority: Priority = -100,
    patience: Patience = 600.0,
) -> None:
    """Answer a file of requests at low priority. The same command continues a batch that was interrupted."""
    import asyncio
    import time

    from report.console import amount, console, progress
    from weft.batch import lines
    from weft.batch.output import Output, OutputError
    from weft.batch.run import Batch, MeshGone, Spec
    from weft.client.channel import CaFileError

    out = console(stderr=True)
    _check_url(url)
    try:
        expected = lines.check(requests)
        with Output(answers, expected) as output, progress(out) as show:
            if output.done:
                out.print(f"{len(output.done)} of {len(expected)} requests are answered in {answers}", markup=False)
            spec = Spec(url.rstrip("/"), api_key, min(concurrency, max(1, len(expected))), priority, patience)

            def on_wait(reason: str) -> None:
                out.print(f"{spec.url} {reason}: waiting for up to {patience:g} s", markup=False)

            work = Batch(spec, output, lambda done: show("requests", done, len(expected)), on_wait)
            asyncio.run(work.run(lines.read(requests)))
            totals, failed = work.totals, output.failed
    except (lines.InputError, OutputError, MeshGone, CaFileError) as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename or answers}: {error.strerror or error}")
    except KeyboardInterrupt:
        typer.echo("weft: interrupted; the same command continues the batch", err=True)
        raise typer.Exit(130) from None
    seconds = time.monotonic() - totals.began
    out.print(
        f"{totals.lines} requests in {seconds:.1f} s: {amount(totals.prompt_tokens)} prompt tokens, "
        f"{amount(totals.completion_tokens)} answer tokens; {failed} of {len(expected)} lines have an error",
        markup=False,
    )
    if failed:
        raise typer.Exit(1)


def _check_url(url: str) -> None:
    """Refuses what is no URL of an HTTP port."""
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound:
        fail(f"--url: {url!r} is no http:// or https:// URL", usage=True)
