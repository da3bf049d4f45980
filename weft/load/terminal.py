"""Prints a result as tables. Knows the names of figures, never how they are measured."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

_RATES = (
    ("request_throughput", "requests/s"),
    ("request_goodput", "good requests/s"),
    ("output_throughput", "output tokens/s"),
    ("total_token_throughput", "total tokens/s"),
)
LATENCIES = (
    ("ttft", "time to first token"),
    ("tpot", "time per output token"),
    ("itl", "between messages"),
    ("e2el", "whole answer"),
)


def show(out: Console, result: dict[str, Any]) -> None:
    """Prints the run in 12 to 24 lines."""
    out.print(headline(result), style="bold", markup=False)
    rates = _table("rate", "value")
    for name, words in _RATES:
        if name in result:
            rates.add_row(words, f"{result[name]:,.1f}")
    out.print(rates)
    latencies = _table("latency, ms", "mean", "median", "p90", "p99", "max")
    for name, words in LATENCIES:
        cells = [f"{result[f'{figure}_{name}_ms']:,.2f}" for figure in ("mean", "median", "p90", "p99", "max")]
        latencies.add_row(f"{words} ({name})", *cells)
    out.print(latencies)
    hops = _table("time by stage, ms", "mean", "p99")
    for hop, values in result["receipts"]["hops"].items():
        hops.add_row(hop, f"{values['mean_ms']:,.2f}", f"{values['p99_ms']:,.2f}")
    out.print(hops)
    if "profile" in result:
        out.print(_profile(result["profile"]))
    for line in facts(result):
        out.print(line, markup=False)


def headline(result: dict[str, Any]) -> str:
    """The run in one line."""
    settings = result["settings"]
    if settings["trace"]:
        load = f"trace {settings['trace'].rpartition('/')[2]} at {settings['time_scale']:g} times its speed"
    elif settings["rate"]:
        load = f"{settings['rate']:g} requests/s, {'evenly' if settings['constant'] else 'Poisson'}"
    else:
        load = f"concurrency {settings['concurrency']}"
    ended = f"{result['completed']} answered, {result['failed']} failed in {result['duration']:.1f} s"
    return f"{result['model']['name']}: {load}: {ended}"


def facts(result: dict[str, Any]) -> list[str]:
    """Further facts of the run, a line each."""
    receipts = result["receipts"]
    tokens = f"{result['total_input_tokens']:,} tokens in, {result['total_output_tokens']:,} out"
    found = f"{receipts.get('cached_tokens', 0):,} found in prefix caches ({receipts['cached_share']:.1%})"
    lines = [f"{tokens}; {found}, {receipts.get('prefill_tokens', 0):,} computed"]
    for name, words in (("preemptions", "preemptions"), ("result_hits", "result hits"), ("joined", "joined")):
        if receipts.get(name):
            lines.append(f"{receipts[name]:,} {words}")
    if receipts.get("drafted_tokens"):
        drafted, accepted = receipts["drafted_tokens"], receipts.get("accepted_tokens", 0)
        lines.append(f"{drafted:,} tokens guessed, {accepted:,} of them right ({accepted / drafted:.1%})")
    retried = {attempts: count for attempts, count in receipts["attempts"].items() if attempts not in ("0", "1")}
    lines += [f"{count:,} requests took {attempts} attempts" for attempts, count in sorted(retried.items())]
    lines += [f"{count:,} times {code}" for code, count in sorted(result["errors"].items())]
    if result["clipped_requests"]:
        context = result["model"]["context_length"]
        lines.append(f"{result['clipped_requests']:,} requests were shortened to the model's context of {context:,}")
    if result.get("p99_send_lag_ms", 0.0) > 10:
        lines.append(f"requests were sent late: p99 {result['p99_send_lag_ms']:.0f} ms (try more --processes)")
    return lines


def profile_rows(profile: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Rows of name, milliseconds of a step, share of a step: the host's phases, then groups of kernels or operators."""
    device = "GPU" if profile["on_gpu"] else "operators"
    parts = [(name, seconds) for name, seconds in profile["host"].items()]
    parts += [(f"{device}: {name}", seconds) for name, seconds in profile["device"].items()]
    if profile["on_gpu"]:
        parts.append(("GPU: idle", max(0.0, profile["seconds"] - sum(profile["device"].values()))))
    parts.append(("a step", profile["seconds"]))
    return [
        (name, f"{seconds / profile['steps'] * 1e3:,.3f}", f"{seconds / profile['seconds']:.1%}")
        for name, seconds in parts
    ]


def _profile(profile: dict[str, Any]) -> Table:
    table = _table(f"{profile['steps']} steps of {profile['worker']}", "ms a step", "share")
    for row in profile_rows(profile):
        table.add_row(*row)
    table.caption = f"trace: {profile['trace']} (ui.perfetto.dev)"
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table
