"""docs/kserve.md lists every method, field and tensor of the Open Inference Protocol's door."""

import ast
import re
from pathlib import Path
from unittest import mock

from protos import kserve_pb2
from services import metrics
from services.gateway.doors.http_routes import HttpRoutes
from services.gateway.doors.kserve.http_door import KServeHttpDoor
from services.gateway.doors.kserve.requests import ALIASES, FIELDS, KNOWN, OUTPUTS, OWN, PROMPTS, PROTOCOL, REFUSED

PAGE = (Path(__file__).parents[2] / "docs" / "kserve.md").read_text()


def names(heading: str, title: str = "") -> set[str]:
    """The names in the first cells of the table with this heading, behind a title."""
    table = PAGE.partition(f"## {title}")[2].partition(f"\n| {heading} |")[2].partition("\n\n")[0]
    return {name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split("|")[1])}


def test_every_method_is_in_its_table() -> None:
    service = kserve_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    assert names("method", "Methods") == {method.name for method in service.methods}


def test_every_path_is_in_its_table() -> None:
    routes = HttpRoutes(metrics.Metrics())
    KServeHttpDoor(mock.Mock(), mock.Mock(), mock.Mock()).add_to(routes)
    served = {
        f"{method} {str(route.path).replace('{model}', 'NAME')}"  # type: ignore[attr-defined]
        for route in routes.app().routes
        for method in (route.methods or set()) - {"HEAD"}  # type: ignore[attr-defined]
    }
    table = PAGE.partition("## Paths")[2].partition("\n\n`/versions/1`")[0]
    listed = set(re.findall(r"`([A-Z]+ /v2[^`]*)`", table))
    assert served == listed | {each.replace("NAME", "NAME/versions/{version}") for each in listed}


def test_every_field_is_in_its_table() -> None:
    assert names("tensor", "The prompt") == PROMPTS.keys()
    assert names("field", "Fields") == PROTOCOL.keys() | OWN.keys() | ALIASES.keys()
    assert names("refused", "Fields") == REFUSED.keys() - FIELDS.keys()
    assert names("tensor", "Answers") == OUTPUTS.keys()
    examples = re.findall(r"fields? or|`(\w+)`", PAGE.partition("has its own name here:")[2].partition("\n\n")[0])
    assert {name for name in examples if name} - {"logit_bias"} <= KNOWN


def test_the_example_is_a_program_with_known_fields() -> None:
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    [send] = [call for call in calls if ast.unparse(call.func).endswith("async_stream_infer")]
    [parameters] = [ast.literal_eval(each.value) for each in send.keywords if each.arg == "parameters"]
    assert parameters.keys() <= KNOWN
    assert parameters.keys()
