"""The fixture of the scheduler's tests: a core with a connected gateway."""

import pytest

from tests.scheduler.stage import Stage


@pytest.fixture
def stage() -> Stage:
    """A core with one attached gateway, `g1`."""
    stage = Stage()
    stage.gateway("g1")
    return stage
