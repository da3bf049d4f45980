"""Writes answers as they arrive and receipts as tables. Knows terminals, never calls."""

import io
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from protos import inference_pb2 as api
from protos import mesh_pb2 as mesh
from report.console import amount, console

# A model's text must not control the terminal: control characters are removed, except tab and line break.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_HOPS = ("tokenize", "cache", "queue", "prefill", "decode", "detokenize", "network", "unaccounted")
_BAR = 24
_MODELS = {
    "model": 0,
    "parameters": 1,
    "context": 1,
    "vocabulary": 4,
    "architecture": 3,
    "engine": 2,
    "workers": 0,
    "tasks": 2,
    "chat": 3,
    "aliases": 0,
    "adapter of": 0,
    "loading": 0,
}
"""The columns of the table of models, each with its level (see `fitted`)."""
_OPTIONAL = {"aliases", "adapter of", "loading"}
"""Columns that are shown only if a model has something in them."""
_RULER = Console(width=10_000, file=io.StringIO(), markup=False)


def write(text: str) -> None:
    """Writes a piece of an answer at once. Characters that the output cannot encode become question marks."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(_CONTROL.sub("", text).encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


class AnswerWriter:
    """Writes the deltas of an answer: a single continuation as it arrives, one of several when it is complete."""

    def __init__(self, n: int, logprobs: bool = False) -> None:
        self._single = n <= 1
        self._logprobs = logprobs
        self._texts: dict[int, str] = {}
        self._logprobs_of: dict[int, list[api.PositionLogprobs]] = {}

    def add(self, delta: api.Delta) -> None:
        """Adds the next delta."""
        text = self._texts[delta.index] = self._texts.get(delta.index, "") + delta.text
        self._logprobs_of.setdefault(delta.index, []).extend(delta.logprobs)
        if self._single:
            write(delta.text)
        if delta.finish_reason:
            write("\n" if self._single else f"[{delta.index}] {text}\n")
            if self._logprobs:
                console().print(_logprobs_table(self._logprobs_of[delta.index]))


def receipt_table(receipt: api.Receipt) -> Table:
    """The time of each stage with its share of the wall time, then wall time and time to first token."""
    timings = receipt.timings
    table = _table("hop", "ms", "share")
    for hop in _HOPS:
        seconds = float(getattr(timings, f"{hop}_s"))
        share = seconds / timings.wall_s if timings.wall_s > 0 else 0.0
        bar = "█" * round(share * _BAR) if table.box else ""
        table.add_row(hop, f"{seconds * 1e3:.2f}", f"{share:4.0%} {bar}".rstrip())
    table.add_section()
    table.add_row("wall", f"{timings.wall_s * 1e3:.2f}", "", style="bold")
    table.add_row("first token", f"{timings.first_token_s * 1e3:.2f}", "")
    return table


def receipt_facts(receipt: api.Receipt) -> dict[str, str]:
    """What the request cost and which workers served it: names and values for people, without empty ones."""
    result = "hit" if receipt.result_hit else "joined a running generation" if receipt.joined else "miss"
    facts = {
        "model": receipt.model,
        "result": result,
        "tokens": f"{receipt.completion_tokens} for a prompt of {receipt.prompt_tokens}",
        "prefill tokens": str(receipt.prefill_tokens),
        "cached tokens": str(receipt.cached_tokens),
        "fetched tokens": str(receipt.fetched_tokens or ""),
        "speculation": _speculation(receipt),
        "workers": ", ".join(receipt.workers) or "none",
        "attempts": str(receipt.attempts),
        "preemptions": str(receipt.preemptions or ""),
        "finish": api.FinishReason.Name(receipt.finish_reason).removeprefix("FINISH_REASON_").lower(),
        "seed": str(receipt.seed),
        "trace": receipt.trace_id,
        "request": receipt.request_id,
    }
    return {name: value for name, value in facts.items() if value}


def _speculation(receipt: api.Receipt) -> str:
    if not receipt.drafted_tokens:
        return ""
    share = receipt.accepted_tokens / receipt.drafted_tokens
    return f"{receipt.accepted_tokens} of {receipt.drafted_tokens} guessed tokens accepted ({share:.0%})"


def print_receipt(out: Console, receipt: api.Receipt) -> None:
    """Prints the whole receipt."""
    out.print(receipt_table(receipt))
    for name, value in receipt_facts(receipt).items():
        out.print(f"{name:<16}{value}", markup=False)


def speed(receipt: api.Receipt) -> str:
    """One line about an answer: time to first token, tokens per second of decoding, tokens."""
    timings = receipt.timings
    parts = [f"first token {timings.first_token_s * 1e3:.0f} ms", f"{receipt.completion_tokens} tokens"]
    if receipt.result_hit:
        parts.append("from the result cache")
    elif timings.decode_s > 0 and receipt.completion_tokens > 1:
        parts.insert(1, f"{(receipt.completion_tokens - 1) / timings.decode_s:.1f} tok/s")
    if receipt.cached_tokens:
        parts.append(f"{receipt.cached_tokens} of {receipt.prompt_tokens} prompt tokens cached")
    return ", ".join(parts)


def models_table(models: Iterable[api.Model], width: int) -> Table:
    """The models of a mesh, a row each, in as many columns as fit. Some columns are shown if they have anything."""
    models = list(models)
    rows = [
        (
            model.name,
            amount(model.parameters),
            str(model.context_length or ""),
            str(model.vocab_size or ""),
            model.architecture,
            model.engine,
            str(model.workers),
            ", ".join(model.tasks),
            "yes" if model.chat else "no",
            ", ".join(model.aliases),
            model.base,
            ", ".join(f"{each.phase} {each.percent}%" for each in model.loading),
        )
        for model in models
    ]
    used = [place for place, name in enumerate(_MODELS) if name not in _OPTIONAL or any(row[place] for row in rows)]
    columns = {name: level for place, (name, level) in enumerate(_MODELS.items()) if place in used}
    cells = [Row([row[place] for place in used]) for row in rows]
    return fitted(columns, cells, width, {"parameters"}, box.SIMPLE if sys.stdout.isatty() else None)


class Row(NamedTuple):
    """A row with a cell for every column, shown or not."""

    cells: Sequence[str]
    style: str = ""


def fitted(
    columns: Mapping[str, int],
    rows: Sequence[Row],
    width: int,
    numbers: Collection[str] = (),
    border: box.Box | None = box.SIMPLE_HEAD,
) -> Table:
    """A table of the columns (name: level) that fit into the width: those of the highest level are left out first.

    `numbers`: columns that are aligned at the right.
    """
    for level in range(max(columns.values()), -1, -1):
        table = Table(box=border, pad_edge=False)
        shown = [place for place, least in enumerate(columns.values()) if least <= level]
        for place in shown:
            name = list(columns)[place]
            table.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
        for row in rows:
            table.add_row(*(row.cells[place] for place in shown), style=row.style)
        if _RULER.measure(table).maximum <= width:
            break
    return table


def adapters_table(workers: Iterable[tuple[mesh.WorkerOverview, Sequence[mesh.AdapterState]]]) -> Table:
    """The adapters of each worker, a row each."""
    table = _table("adapter", "rank", "memory", "on the device", "worker")
    for worker, adapters in workers:
        for each in adapters:
            name, there = f"{worker.model}:{each.name}", "yes" if each.resident else "no"
            table.add_row(name, str(each.rank), f"{each.bytes / 2**20:.1f} MiB", there, worker.worker_id)
    return table


def _logprobs_table(positions: Sequence[api.PositionLogprobs]) -> Table:
    table = _table("token", "logprob", "most likely")
    for position in positions:
        top = "  ".join(f"{token.text!r} {token.logprob:.3f}" for token in position.top)
        table.add_row(repr(position.chosen.text), f"{position.chosen.logprob:.4f}", top)
    return table


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE if sys.stdout.isatty() else None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in ("ms", "logprob", "parameters") else "left")
    return table
