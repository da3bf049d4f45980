"""The commands that look at a mesh and measure it: bench, top, doctor."""

from pathlib import Path
from typing import Annotated

import typer

from client.flags import LOCAL, LOCAL_SCHEDULER, Address, Caching, Model, Scheduler, fail, run


def bench(
    address: Annotated[
        str, typer.Option(envvar="WEFT_ADDRESS", help="host:port of the mesh; several gateways with commas.")
    ] = LOCAL,
    model: Model = "",
    requests: Annotated[int, typer.Option("--requests", "--limit", min=1, help="Most requests to measure.")] = 100,
    duration: Annotated[float | None, typer.Option(help="Seconds after which no request begins.")] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Most at a time.", show_default="8, or any")] = None,
    rate: Annotated[float | None, typer.Option(help="Requests per second, whatever is still running.")] = None,
    constant: Annotated[bool, typer.Option("--constant", help="They arrive evenly, not by chance (Poisson).")] = False,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of each prompt, drawn anew.")] = 128,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 128,
    prefix_len: Annotated[int, typer.Option(min=0, help="Of the prompt, tokens that requests share.")] = 0,
    prefixes: Annotated[int, typer.Option(min=1, help="How many such prefixes there are.")] = 1,
    trace: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Replay a Mooncake or Azure trace, .jsonl or .gz.")
    ] = None,
    time_scale: Annotated[float, typer.Option(help="How many times faster the trace runs.")] = 1.0,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    ignore_eos: Annotated[bool, typer.Option(help="Answers run to their full length.")] = True,
    cache: Annotated[Caching, typer.Option(help="What the caches may do.")] = Caching.READ_WRITE,
    deadline: Annotated[float, typer.Option(help="Seconds that an answer may take.")] = 600.0,
    warmup: Annotated[int, typer.Option(min=0, help="Requests beforehand that count for nothing.")] = 8,
    processes: Annotated[int, typer.Option(min=1, help="Client processes.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Of prompts and arrivals.", show_default="random")] = None,
    goodput: Annotated[
        list[str] | None, typer.Option(help="Bounds of a good answer in ms: 'ttft:200 tpot:50'.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the result there.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report with plots there.")] = None,
    profile: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Profile a worker meanwhile; its trace goes there (.json.gz, for Perfetto)."),
    ] = None,
    profile_steps: Annotated[int, typer.Option(min=1, max=1000, help="How many of its steps.")] = 32,
    scheduler: Scheduler = LOCAL_SCHEDULER,
) -> None:
    """Load a mesh and measure: latencies, throughput, where the time goes."""
    import secrets

    from bench.load.command import bench as measure
    from bench.load.plan import Plan, PlanError, goodput_from
    from bench.load.profile import ProfileError, Wish
    from bench.load.run import RunError
    from bench.load.traces import TraceError
    from client.errors import WeftError
    from client.terminal import console

    unbounded = concurrency is None and (rate is not None or trace is not None)
    try:
        plan = Plan(
            address=address,
            model=model,
            requests=requests,
            duration_s=duration,
            concurrency=None if unbounded else concurrency or 8,
            rate=rate,
            constant=constant,
            input_tokens=input_len,
            output_tokens=output_len,
            prefix_tokens=prefix_len,
            prefixes=prefixes,
            trace=str(trace.absolute()) if trace else "",
            time_scale=time_scale,
            temperature=temperature,
            ignore_eos=ignore_eos,
            cache=cache.value,
            deadline_s=deadline,
            warmup=warmup,
            processes=processes,
            seed=secrets.randbits(32) if seed is None else seed,
            goodput=goodput_from(goodput or []),
        )
        wish = Wish(profile_steps, profile.absolute(), scheduler) if profile else None
        code = measure(plan, console(), json, html, wish)
    except PlanError as error:
        fail(str(error), usage=True)
    except (RunError, TraceError, ProfileError, WeftError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    raise typer.Exit(code)


def top(
    scheduler: Scheduler = LOCAL_SCHEDULER,
    once: Annotated[bool, typer.Option("--once", help="One picture, no live view.")] = False,
) -> None:
    """Watch a mesh: its workers and models, how full and how fast they are."""
    from client import top as view
    from client.terminal import console

    try:
        run(view.show(scheduler, console(), once=once))
    except view.NoScheduler as error:
        fail(str(error))


def doctor(
    address: Address = LOCAL,
    scheduler: Scheduler = LOCAL_SCHEDULER,
    redis_url: Annotated[
        str, typer.Option(envvar=["WEFT_REDIS_URL", "REDIS_URL"], help="Your own Redis.", show_default="embedded")
    ] = "",
) -> None:
    """Look for what keeps a mesh from running, here and at an address. The exit code is 1 if something does."""
    import asyncio

    from client import doctor as examination
    from client.terminal import console

    raise typer.Exit(examination.tell(asyncio.run(examination.examine(address, scheduler, redis_url)), console()))
