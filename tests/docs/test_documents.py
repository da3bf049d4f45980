"""The documents agree with the code: links, commands, flags, paths and figures exist, and texts of pictures and tables
fit their boxes and cells."""

import ast
import functools
import inspect
import itertools
import json
import math
import re
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

import weft
from tests.deploy.code import SETTINGS, variables
from weft.cli.app import app

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
LEDGER = ROOT / "bench" / "LEDGER.md"
EXPERIMENTS = sorted((ROOT / "bench" / "ledger").glob("*.md"))
GUIDES = [README, *sorted((ROOT / "docs").glob("*.md")), ROOT / "deploy" / "README.md"]
PICTURES = [ROOT / "docs" / "mesh.svg", ROOT / "docs" / "worker.svg"]
WIDEST_CELL = 120
# An average character of a common sans-serif font is narrower: this leaves room for wide fonts.
EM_PER_CHARACTER = 0.62


def documents() -> list[Path]:
    """Every Markdown file that git tracks, or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    except (OSError, subprocess.CalledProcessError):  # a source archive without git
        return [*GUIDES, ROOT / "ARCHITECTURE.md", LEDGER, *EXPERIMENTS]
    return [ROOT / name for name in listed if name and (ROOT / name).is_file()]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 150


# ---- links and paths ----


def anchors(text: str) -> set[str]:
    """The link fragments of a Markdown page: one for each heading."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(file: Path, text: str) -> list[str]:
    """The relative links of a page whose file or heading does not exist."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, fragment = target.partition("#")
        there = (file.parent / path).resolve() if path else file
        if not there.exists() or (fragment and fragment not in anchors(there.read_text())):
            broken.append(target)
    return broken


@pytest.mark.parametrize("file", documents(), ids=named)
def test_every_relative_link_resolves(file: Path) -> None:
    assert broken_links(file, file.read_text()) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One heading\n")
    assert broken_links(page, "[a](page.md#one-heading) [b](#one-heading) [c](https://x.org)") == []
    assert broken_links(page, "[a](page.md#two) [b](gone.md)") == ["page.md#two", "gone.md"]


@pytest.mark.parametrize("file", GUIDES, ids=named)
def test_paths_of_the_code_exist(file: Path) -> None:
    """Paths such as `services/hashing.py` or `services/*/settings.py` exist below the root or the page's folder."""
    tops = "|".join(each.name for each in ROOT.iterdir() if each.is_dir() and not each.name.startswith("."))
    paths = re.findall(rf"`((?:{tops})/[\w/.*-]+)`", file.read_text())
    assert [path for path in paths if not any(ROOT.glob(path)) and not (file.parent / path).exists()] == []


# ---- commands ----


@functools.cache
def targets() -> set[str]:
    """The targets of the Makefile."""
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@functools.cache
def helped(*command: str) -> str:
    """What `weft COMMAND... --help` prints; empty if there is no such command."""
    wide = {"COLUMNS": "200", "TERMINAL_WIDTH": "200", "NO_COLOR": "1"}
    result = CliRunner().invoke(app, [*command, "--help"], env=wide, prog_name="weft")
    return result.stdout if result.exit_code == 0 else ""


class Call(NamedTuple):
    """A call of the `weft` command in a document: its subcommands and its flags."""

    command: tuple[str, ...]
    flags: tuple[str, ...]


def calls(text: str) -> Iterator[Call]:
    """All calls of `weft` in a page's code: in console lines and between backquotes."""
    lines = re.findall(r"^\$ (.*)$", text, re.MULTILINE)
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for line in [*lines, *re.findall(r"`([^`]+)`", prose)]:
        found = re.fullmatch(r"weft ([a-z]+)((?: .*)?)", line.split("  #")[0].strip())
        if found:
            command, rest = found.groups()
            words = rest.split()
            nested = words[:1] if command == "compress" and words else []
            yield Call((command, *nested), tuple(word.split("=")[0] for word in words if word.startswith("--")))


def wrong_calls(text: str) -> list[str]:
    """Calls of commands or flags that do not exist."""
    wrong = []
    for call in calls(text):
        printed = helped(*call.command)
        wrong += [" ".join(call.command)] if not printed else []
        wrong += [f"{' '.join(call.command)} {flag}" for flag in call.flags if flag not in printed]
    return wrong


@pytest.mark.parametrize("file", [*GUIDES, LEDGER], ids=named)
def test_every_make_target_exists(file: Path) -> None:
    asked = re.findall(r"(?:`|^\$ )make ([a-z][a-z-]*)", file.read_text(), re.MULTILINE)
    assert [target for target in asked if target not in targets()] == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("file", GUIDES, ids=named)
def test_every_weft_command_and_flag_exists(file: Path) -> None:
    assert wrong_calls(file.read_text()) == []


@pytest.mark.timeout(300)
def test_a_wrong_command_is_found() -> None:
    text = "`weft models` and `weft sing`\n```console\n$ weft serve --model x --loud   # `weft hum`\n```\n"
    assert wrong_calls(text) == ["serve --loud", "sing"]


@pytest.mark.parametrize("file", GUIDES, ids=named)
def test_every_variable_is_a_setting(file: Path) -> None:
    """Each WEFT_... name in a document is a setting of a service, or is read by the `weft` command or compose."""
    known = set(itertools.chain.from_iterable(variables(service) for service in SETTINGS))
    sources = [*(ROOT / "weft").rglob("*.py"), ROOT / "deploy" / "compose.yaml"]
    known |= {name for source in sources for name in re.findall(r"\bWEFT_[A-Z_]+\b", source.read_text())}
    asked = set(re.findall(r"\bWEFT_[A-Z_]+[A-Z]\b", file.read_text()))
    assert asked - known == set()


# ---- examples and figures of the README ----


def test_the_readmes_python_calls_existing_methods_of_the_client() -> None:
    code = [each for each in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL) if "openai" not in each]
    assert len(code) == 1
    tree = compile(code[0], "README.md", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    assert isinstance(tree, ast.Module)
    imported = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert [(node.module, [name.name for name in node.names]) for node in imported] == [("weft", ["Client"])]
    asked = next(
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "generate"
    )
    parameters = inspect.signature(weft.Client.generate).parameters
    names = {keyword.arg for keyword in asked.keywords}
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    assert takes_any or names <= parameters.keys()


def test_the_readmes_figures_are_rows_of_the_results() -> None:
    """Each row of the table beside vLLM is a row of bench/results/gpu.md, with the same ratio."""
    results = (ROOT / "bench" / "results" / "gpu.md").read_text()
    rows = re.findall(
        r"^\| (8B|1B) (\w+)[^|]*, (\d+)[^|]* \| ([\d,]+) \| ([\d,]+) \| ([\d.]+) \|$", README.read_text(), re.M
    )
    assert len(rows) == 6
    for model, form, many, ours, theirs, ratio in rows:
        name = f"{model.lower()} 1950/200" if form == "bf16" else f"{model.lower()} {form} 1950/200"
        line = next(line for line in results.splitlines() if line.startswith(f"| {name}, {many} at a time |"))
        cells = [cell.strip() for cell in line.split("|")]
        assert (cells[2], cells[8]) == (f"{ours} ({theirs})", ratio), name


def test_the_readmes_mean_over_vllm_is_that_of_the_results() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    rows = json.loads((ROOT / "bench" / "results" / "gpu.json").read_text())["rows"]
    assert rows, "the results have rows"
    cells = [line.split("|") for line in (ROOT / "bench" / "results" / "gpu.md").read_text().splitlines()]
    ratios = [
        float(ours.replace(",", "")) / float(theirs.replace(",", ""))
        for line in cells
        if len(line) > 8
        for ours, theirs in re.findall(r"^ ([\d,]+) \(([\d,]+)\) $", line[2])
    ]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    assert f"over all {len(ratios)} {mean:.2f}x" in re.sub(r"\s+", " ", page)


# ---- the ledger ----


def cells_of(text: str) -> Iterator[str]:
    """The cells of all tables of a Markdown page."""
    for line in text.splitlines():
        if line.startswith("|"):
            yield from (cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|")))


@pytest.mark.parametrize("file", [LEDGER, *EXPERIMENTS], ids=named)
def test_no_cell_of_the_ledger_is_wide(file: Path) -> None:
    assert [cell for cell in cells_of(file.read_text()) if len(cell) > WIDEST_CELL] == []


def test_the_index_and_the_files_of_the_ledger_agree() -> None:
    """One line for each experiment, with its file's number, date, commit and outcome."""
    rows = re.findall(r"^\| \[(\d{4})\]\(ledger/([^)]+)\) \| (.+) \|$", LEDGER.read_text(), re.MULTILINE)
    assert sorted(name for _, name, _ in rows) == [file.name for file in EXPERIMENTS]
    assert len({number for number, _, _ in rows}) == len(rows), "each number is used once"
    for number, name, rest in rows:
        date, commit, claim, predicted, measured, outcome = rest.split(" | ")
        head = (ROOT / "bench" / "ledger" / name).read_text().splitlines()[:3]
        assert name.startswith(f"{number}-")
        assert head[0] == f"# {number}: {claim}"
        assert head[2].endswith(f" · {date} · {commit} · {outcome}"), name
        assert predicted
        assert measured


# ---- pictures ----


class Box(NamedTuple):
    """A rectangle of a picture."""

    x: float
    y: float
    width: float
    height: float

    def holds(self, x: float, y: float) -> bool:
        """Whether the point lies inside."""
        return self.x <= x <= self.x + self.width and self.y <= y <= self.y + self.height


def too_wide(picture: ET.Element) -> list[str]:
    """Texts whose estimated width exceeds the smallest rectangle around their anchor, or that have no rectangle."""
    space = "{http://www.w3.org/2000/svg}"
    boxes = [
        Box(*(float(rect.get(name, "0")) for name in ("x", "y", "width", "height")))
        for rect in picture.iter(f"{space}rect")
    ]
    wrong = []
    for text in picture.iter(f"{space}text"):
        words, x, y = "".join(text.itertext()), float(text.get("x", "0")), float(text.get("y", "0"))
        width = len(words) * EM_PER_CHARACTER * float(text.get("font-size") or picture.get("font-size") or 16)
        left = x - {"middle": width / 2, "end": width}.get(text.get("text-anchor", "start"), 0.0)
        around = min((box for box in boxes if box.holds(x, y)), key=lambda box: box.width, default=None)
        if around is None or left < around.x or left + width > around.x + around.width:
            wrong.append(words)
    return wrong


@pytest.mark.parametrize("picture", PICTURES, ids=named)
def test_every_text_of_a_picture_fits_its_box(picture: Path) -> None:
    root = ET.parse(picture).getroot()
    assert len(list(root.iter("{http://www.w3.org/2000/svg}text"))) > 10
    assert too_wide(root) == []


def test_a_text_that_leaves_its_box_is_found() -> None:
    picture = ET.fromstring(
        '<svg xmlns="http://www.w3.org/2000/svg" font-size="10"><rect x="0" y="0" width="60" height="20"/>'
        '<text x="30" y="10" text-anchor="middle">nine char</text><text x="30" y="10">long</text>'
        '<text x="5" y="50">outside</text><text x="30" y="10" text-anchor="middle">ten chars!</text></svg>'
    )
    assert too_wide(picture) == ["outside", "ten chars!"]


def test_the_mesh_shows_two_gateways_two_workers_and_redis() -> None:
    words = "\n".join("".join(text.itertext()) for text in ET.parse(PICTURES[0]).iter() if text.tag.endswith("text"))
    for name in ("client", "gateway 1", "gateway 2", "worker 1", "worker 2", "scheduler", "cache service", "Redis"):
        assert name in words.splitlines()
