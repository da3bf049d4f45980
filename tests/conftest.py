"""How tests are shared by several processes: a file's tests stay together, and what takes longest begins first."""

import pytest

LONGEST = (
    "tests/kernels/test_kernels.py",
    "tests/compress",
    "tests/mesh",
    "tests/worker/test_formats.py",
    "tests/worker/test_oracle.py",
    "tests/worker",
    "tests/cache",
    "tests/weft",
)
"""Files and folders by the time that they take, the longest first; the others follow."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each file a group of its own (`--dist loadgroup`), unless a test names one, and sort by LONGEST."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    items.sort(key=_place)


def _place(item: pytest.Item) -> int:
    return next((place for place, prefix in enumerate(LONGEST) if item.nodeid.startswith(prefix)), len(LONGEST))
