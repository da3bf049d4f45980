"""The report of `weft verify` as one HTML page: its plots and tables. Knows names of figures, no models."""

from collections.abc import Iterable, Mapping
from typing import Any

from report import html, plot
from report.plot import Axis, Line
from verify.compare import PARTS
from verify.figures import ROWS, cell, draft_rows, number
from verify.rounding import KINDS

_SAID = {
    "gates": "A candidate fails if one figure is beyond its limit.",
    "kl": "Distance of the next-token distribution from the base's: curves further left are closer.",
    "rows": "Rows of weights that differ most from the base's, honest rounding and moved factors divided out.",
    "norm": "Honest rounding hardly changes norms; a wrong scale shows as an outlier in one layer.",
    "drafts": "Share of the guesses at each depth that the base keeps: they are right, and all before them are.",
    "error": "Relative change of this part by rounding; it should grow slowly and have no peak.",
}
_WORDS = {"queries": "queries", "keys": "keys", "attention": "what attention adds", "mlp": "what the MLP adds"}


def page(result: Mapping[str, Any]) -> str:
    """The whole document."""
    base, candidates = result["base"], result["candidates"]
    verdicts = (
        (candidate["name"], "+passes" if candidate["passes"] else "!fails", candidate["name"])
        for candidate in candidates
    )
    device = "a GPU in bfloat16" if result["device"] == "cuda" else "the CPU in float32"
    below = f"against {base['name']}, {result['tokens']:,} held-out tokens, computed by the worker's code on {device}"
    body = (html.tiles(verdicts), html.cards(_cards(result)))
    return html.document("weft verify", below, body, result)


def _cards(result: Mapping[str, Any]) -> Iterable[str]:
    base, candidates = result["base"], result["candidates"]
    models = [base, *candidates]
    rows = [[words, *(cell(model, name, form) for model in models)] for name, words, form in ROWS]
    yield html.card("Figures", html.table(["", *(model["name"] for model in models)], rows), wide=True)
    if result["drafts"]:
        yield _drafts(result["drafts"])
    if candidates:
        gates = html.table(["", *(candidate["name"] for candidate in candidates)], _gates(candidates))
        yield html.card("Gates", gates, said=_SAID["gates"], wide=True)
    for candidate in candidates:
        if candidate["worst_rows"]:
            worst = [[row["text"]] for row in candidate["worst_rows"]]
            yield html.card(f"Worst rows of {candidate['name']}", html.table([], worst), said=_SAID["rows"])
    if candidates:
        curves = [Line(candidate["name"], candidate["kl_curve"]) for candidate in candidates]
        drawing = plot.lines(curves, Axis("nats", log=True), Axis("% of tokens"))
        yield html.card("KL from the base, token by token", drawing, said=_SAID["kl"])
    layered = [candidate for candidate in candidates if candidate["ratios"]]
    for part in PARTS if layered else ():
        ratios = [Line(t["name"], [(n, (g[part] - 1) * 100) for n, g in enumerate(t["ratios"])]) for t in layered]
        title = f"Norm of {_WORDS[part]}, each layer on the base's stream"
        yield html.card(title, plot.lines(ratios, Axis("layer", whole=True), Axis("% off 1")), said=_SAID["norm"])
    for part in PARTS if layered else ():
        angles = [Line(t["name"], [(n, (1 - c[part]) * 100) for n, c in enumerate(t["angles"])]) for t in layered]
        title = f"Error of {_WORDS[part]}, each layer on the base's stream"
        yield html.card(
            title, plot.lines(angles, Axis("layer", whole=True), Axis("1 - cosine, %")), said=_SAID["error"]
        )
    if result["rounding"]:
        yield from _granularity(result["rounding"])
    yield html.card("Machine", html.table([], html.pairs(result["machine"])))


def _drafts(drafts: list[Mapping[str, Any]]) -> str:
    """How often the base accepts a guess, by its depth."""
    lines = [
        Line(
            f"{draft['name']} at {draft['temperature']:g}",
            [(n + 1, share * 100) for n, share in enumerate(draft["by_depth"])],
        )
        for draft in drafts
    ]
    deepest = max(len(draft["by_depth"]) for draft in drafts)
    head = ["", "temperature", "tokens a step", *(f"guess {place + 1}" for place in range(deepest))]
    drawing = plot.lines(lines, Axis("guess", whole=True), Axis("% right"))
    figures = drawing + html.table(head, draft_rows(drafts))
    return html.card("Guesses that the base accepts", figures, said=_SAID["drafts"], wide=True)


def _gates(candidates: list[Mapping[str, Any]]) -> Iterable[list[str]]:
    """A row for each gate of any candidate; a cell is empty if the gate does not apply to that candidate."""
    asked = dict.fromkeys(gate["gate"] for candidate in candidates for gate in candidate["gates"])
    for words in asked:
        found = ({gate["gate"]: gate for gate in candidate["gates"]}.get(words) for candidate in candidates)
        yield [
            words,
            *("" if gate is None else f"{'+' if gate['holds'] else '!'}{number(gate['value'])}" for gate in found),
        ]


def _granularity(rounding: list[Mapping[str, Any]]) -> Iterable[str]:
    series = [Line(kind, [(n, linear[kind] * 100) for n, linear in enumerate(rounding)]) for kind in KINDS]
    title = "Per channel and per tensor: relative error of each linear of the base, rounded to nearest"
    rows = [[linear["linear"], *(f"{linear[kind]:.3%}" for kind in KINDS)] for linear in rounding]
    drawing = plot.lines(series, Axis("linear, first layer to last", whole=True), Axis("% of the weight's norm"))
    yield html.card(title, drawing + html.table(["layer, linear", *KINDS], rows), wide=True)
