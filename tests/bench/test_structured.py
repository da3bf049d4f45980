"""A short set of random schemas, obeyed by the demo model: the program that measures a thousand of them."""

import json

import jsonschema
import pytest

from bench.engine import structured
from bench.engine.schemas import random_schema


def test_random_schemas_are_valid_and_differ() -> None:
    schemas = [random_schema(number) for number in range(50)]
    assert len(set(schemas)) == 50
    for schema in schemas:
        jsonschema.Draft202012Validator.check_schema(json.loads(schema))
    assert schemas == [random_schema(number) for number in range(50)], "a schema is a function of its number"


def test_every_finished_answer_is_valid(capsys: pytest.CaptureFixture[str]) -> None:
    assert structured.main(["--schemas", "12"]) == 0
    printed = capsys.readouterr().out
    finished = next(line for line in printed.splitlines() if line.startswith("answers that finished"))
    assert float(finished.split()[3]) >= 9
    assert "MISSED" not in printed
