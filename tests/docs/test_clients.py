"""docs/clients.md lists every path and field of the HTTP door, and its examples are requests that the door takes."""

import ast
import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from services import metrics
from services.gateway.doors.http_routes import HttpRoutes
from services.gateway.doors.metrics import MetricsDoor
from services.gateway.doors.openai.door import OpenAIDoor
from services.gateway.doors.openai.embeddings import EmbeddingsDoor
from services.gateway.doors.openai.requests import EXTENSIONS, HONOURED, REFUSED, parse
from services.gateway.doors.page import PageDoor
from services.gateway.doors.probes import Probes
from services.gateway.doors.watch import WatchDoor

PAGE = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()
README = (Path(__file__).parents[2] / "README.md").read_text()
BOTH = {"chat": ("chat",), "completions": ("completions",), "both": ("chat", "completions")}


def rows(heading: str) -> list[list[str]]:
    """The cells of the table that begins with this heading."""
    table = PAGE.partition(f"\n| {heading} |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def fields(heading: str) -> dict[str, set[str]]:
    """The fields of a table by API; all of one without APIs."""
    found: dict[str, set[str]] = {"chat": set(), "completions": set()}
    for names, where, *_ in rows(heading):
        for kind in BOTH.get(where, BOTH["both"]):
            found[kind].update(re.findall(r"`(\w+)`", names))
    return found


@pytest.mark.parametrize("kind", HONOURED)
def test_every_field_is_in_its_table(kind: str) -> None:
    assert fields("honoured")[kind] == HONOURED[kind].keys() - EXTENSIONS[kind].keys()
    assert fields("extension")[kind] == EXTENSIONS[kind].keys()
    assert fields("refused")[kind] == REFUSED[kind].keys()


def test_every_path_is_in_its_table() -> None:
    routes = HttpRoutes(metrics.Metrics())
    OpenAIDoor(mock.Mock(), mock.Mock(), mock.Mock()).add_to(routes)
    EmbeddingsDoor(mock.Mock(), mock.Mock()).add_to(routes)
    Probes(mock.Mock()).add_to(routes)
    WatchDoor(mock.Mock()).add_to(routes)
    MetricsDoor(mock.Mock(), mock.Mock()).add_to(routes)
    PageDoor().add_to(routes)
    served = {
        f"{method} {str(route.path).replace('{name:path}', 'NAME')}"  # type: ignore[attr-defined]
        for route in routes.app().routes
        for method in (route.methods or set()) - {"HEAD"}  # type: ignore[attr-defined]
        if not str(route.path).startswith("/page/")  # type: ignore[attr-defined]
    }
    assert {name for row in rows("path") for name in re.findall(r"`([A-Z]+ [^`]+)`", row[0])} == served


def test_the_example_for_curl_is_a_request() -> None:
    body = re.search(r"-d '(\{.*?\})'", PAGE, re.DOTALL)
    assert body is not None
    asked = parse("chat", json.loads(body[1]))
    assert (asked.stream, asked.request.sampling.max_tokens) == (True, 64)


@pytest.mark.parametrize(("page", "count"), [(PAGE, 2), (README, 1)])
def test_the_examples_for_openais_client_are_requests(page: str, count: int) -> None:
    examples = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "from openai" in code]
    assert len(examples) == count
    for example in examples:
        tree = ast.parse(example)
        names = {
            target.id: ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        [create] = [call for call in calls if ast.unparse(call.func).endswith(".create")]
        body: dict[str, Any] = {str(each.arg): value_of(each.value, names) for each in create.keywords}
        body |= body.pop("extra_body", {})
        asked = parse("chat" if "chat" in ast.unparse(create.func) else "completions", body)
        assert asked.stream or asked.request.prompt.chat.tools


def value_of(node: ast.AST, names: dict[str, Any]) -> Any:
    """The value of an expression of literals and names."""
    if isinstance(node, ast.Name):
        return names[node.id]
    if isinstance(node, ast.List):
        return [value_of(each, names) for each in node.elts]
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {ast.literal_eval(key): value_of(value, names) for key, value in pairs if key is not None}
    return ast.literal_eval(ast.unparse(node))
