"""The option --part, by which several processes share the interpreter's cases."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--part I/N`: every N-th of the collected tests, from the I-th on."""
    parser.addoption("--part", default="0/1", help="run every N-th test from the I-th on: I/N")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the tests of the other parts."""
    first, parts = map(int, str(config.getoption("--part", "0/1")).split("/"))
    if parts > 1:
        items[:] = items[first::parts]
