"""The table of seeded bugs fits the code, and a few of them are caught; `make seeded-bugs` runs all."""

import ast
from dataclasses import replace

import pytest

from tests.faults.seeded_bugs import BUGS, BY_NAME, ROOT, caught

SHORT = ("prefixes are shared between tenants",)


def test_the_bugs_have_names_of_their_own() -> None:
    assert len(BY_NAME) == len(BUGS) >= 20


@pytest.mark.parametrize("name", BY_NAME)
def test_a_bug_changes_one_place_and_names_a_test(name: str) -> None:
    bug = BY_NAME[name]
    ast.parse(bug.source())
    file, _, test = bug.test.partition("::")
    assert f"def {test}(" in (ROOT / "tests" / file).read_text()


@pytest.mark.parametrize("name", SHORT)
def test_a_bug_is_caught(name: str) -> None:
    assert caught(BY_NAME[name]) == ""


def test_a_bug_that_no_test_catches_is_reported() -> None:
    harmless = replace(BY_NAME["attempts have no bound"], test="test_hashing.py")
    assert "ended with 0" in caught(harmless)
