"""Runs a part of the interpreter's cases, so that several processes share them."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--part I/N`: of the collected tests, every N-th from the I-th on."""
    parser.addoption("--part", default="0/1", help="run every N-th test from the I-th on: I/N")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep this part."""
    first, parts = map(int, str(config.getoption("--part", "0/1")).split("/"))
    if parts > 1:
        items[:] = items[first::parts]
