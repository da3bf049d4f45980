"""The commands that observe and measure a mesh: bench, top, doctor."""

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.flags import (
    LOCAL,
    LOCAL_SCHEDULER,
    Address,
    ApiKey,
    Caching,
    Model,
    RedisUrl,
    Scheduler,
    fail,
    run,
)

Addresses = Annotated[
    str, typer.Option(envvar="WEFT_ADDRESS", help="host:port of the mesh; several gateways with commas.")
]
Requests = Annotated[int, typer.Option("--requests", "--limit", min=1, help="Most requests to measure.")]
Duration = Annotated[float | None, typer.Option(help="Seconds after which no request begins.")]
Concurrency = Annotated[int | None, typer.Option(min=1, help="Most requests at a time.", show_default="8, or any")]
Rate = Annotated[float | None, typer.Option(help="Requests per second, independent of how many still run.")]
Constant = Annotated[bool, typer.Option("--constant", help="Requests arrive evenly instead of as a Poisson process.")]
InputLen = Annotated[int, typer.Option(min=1, help="Tokens of each prompt, drawn at random.")]
OutputLen = Annotated[int, typer.Option(min=1, help="Tokens of each answer.")]
PrefixLen = Annotated[int, typer.Option(min=0, help="Tokens at the start of the prompt that requests share.")]
Prefixes = Annotated[int, typer.Option(min=1, help="Number of such prefixes.")]
Trace = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="Replay a Mooncake or Azure trace, .jsonl or .gz.")
]
TimeScale = Annotated[float, typer.Option(help="Replay the trace faster by this factor.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
IgnoreEos = Annotated[bool, typer.Option(help="Do not end answers at the model's end tokens.")]
Cache = Annotated[Caching, typer.Option(help="Use of the caches.")]
Deadline = Annotated[float, typer.Option(help="Seconds that an answer may take.")]
Warmup = Annotated[int, typer.Option(min=0, help="Requests before the measurement, not counted.")]
Processes = Annotated[int, typer.Option(min=1, help="Client processes.")]
Seed = Annotated[int | None, typer.Option(help="Seed of prompts and arrivals.", show_default="random")]
Goodput = Annotated[list[str] | None, typer.Option(help="Bounds of a good answer in ms: 'ttft:200 tpot:50 itl:80'.")]
Json = Annotated[Path | None, typer.Option(dir_okay=False, help="Write the result to this file.")]
Html = Annotated[Path | None, typer.Option(dir_okay=False, help="Write a report with plots to this file.")]
Profile = Annotated[
    Path | None,
    typer.Option(dir_okay=False, help="Profile a worker under the load; write the trace here (.json.gz, Perfetto)."),
]
ProfileSteps = Annotated[int, typer.Option(min=1, max=1000, help="Number of steps to profile.")]


def bench(
    address: Addresses = LOCAL,
    model: Model = "",
    requests: Requests = 100,
    duration: Duration = None,
    concurrency: Concurrency = None,
    rate: Rate = None,
    constant: Constant = False,
    input_len: InputLen = 128,
    output_len: OutputLen = 128,
    prefix_len: PrefixLen = 0,
    prefixes: Prefixes = 1,
    trace: Trace = None,
    time_scale: TimeScale = 1.0,
    temperature: Temperature = 0.0,
    ignore_eos: IgnoreEos = True,
    cache: Cache = Caching.READ_WRITE,
    deadline: Deadline = 600.0,
    warmup: Warmup = 8,
    processes: Processes = 1,
    seed: Seed = None,
    goodput: Goodput = None,
    json: Json = None,
    html: Html = None,
    profile: Profile = None,
    profile_steps: ProfileSteps = 32,
    scheduler: Scheduler = LOCAL_SCHEDULER,
) -> None:
    """Send load to a mesh and measure latencies, throughput and the time spent in each stage."""
    from report.console import console
    from weft.cli.reach import require_mesh
    from weft.load.command import bench as measure
    from weft.load.plan import Plan, goodput_from
    from weft.load.profile import ProfileSpec

    unbounded = concurrency is None and (rate is not None or trace is not None)
    seed = secrets.randbits(32) if seed is None else seed
    with _refusals():
        plan = Plan(
            address, model, requests=requests, duration_s=duration, concurrency=None if unbounded else concurrency or 8,
            rate=rate, constant=constant, input_tokens=input_len, output_tokens=output_len,
            prefix_tokens=prefix_len, prefixes=prefixes, trace=str(trace.absolute()) if trace else "",
            time_scale=time_scale, temperature=temperature, ignore_eos=ignore_eos, cache=cache.value,
            deadline_s=deadline, warmup=warmup, processes=processes, seed=seed, goodput=goodput_from(goodput or []),
        )  # fmt: skip
        for file in (json, html, profile):
            if file is not None and not file.absolute().parent.is_dir():
                fail(f"{file}: there is no such folder", usage=True)
        require_mesh(*address.split(","))
        if profile:
            from weft.launch.admin import assume_admin

            assume_admin()
        profiled = ProfileSpec(profile_steps, profile.absolute(), scheduler) if profile else None
        code = measure(plan, console(), json, html, profiled)
    raise typer.Exit(code)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Ends the command with one line for what can keep a load from being run."""
    from weft.client.errors import HeaderError, WeftError
    from weft.load.plan import PlanError
    from weft.load.profile import ProfileError
    from weft.load.run import RunError
    from weft.load.traces import TraceError

    try:
        yield
    except (PlanError, HeaderError) as error:
        fail(str(error), usage=True)
    except (RunError, TraceError, ProfileError, WeftError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def top(
    address: Address = LOCAL,
    api_key: ApiKey = "",
    once: Annotated[
        bool, typer.Option("--once", help="Print one snapshot, no live view; as wherever the output is no terminal.")
    ] = False,
) -> None:
    """Watch a mesh: its models, workers and gateways, their load and their speed."""
    from report.console import console
    from weft.cli import top as view
    from weft.cli.reach import require_mesh
    from weft.client.errors import HeaderError, WeftError

    require_mesh(address)
    try:
        run(view.show(address, api_key, console(), once=once))
    except HeaderError as error:
        fail(str(error), usage=True)
    except WeftError as error:
        fail(str(error))


def doctor(
    address: Address = LOCAL,
    scheduler: Scheduler = LOCAL_SCHEDULER,
    redis_url: RedisUrl = "",
) -> None:
    """Check what a mesh needs to run, on this machine and at an address. The exit code is 1 if a check fails."""
    import asyncio

    from report.console import console
    from weft.cli import doctor as checks
    from weft.cli.reach import require_address

    require_address(address)
    findings = asyncio.run(checks.examine(address, scheduler, redis_url))
    raise typer.Exit(checks.print_findings(findings, console()))
