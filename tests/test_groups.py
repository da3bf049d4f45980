"""The distribution of tests over processes."""

import pytest


def test_the_tests_of_a_file_run_in_one_process(request: pytest.FixtureRequest) -> None:
    """pytest-xdist appends the group to a test's name; a version of pytest that it does not know makes it omit that."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("tests run in one process, or are not grouped")
    assert request.node.nodeid.endswith("@tests/test_groups.py")
