"""What the scheduler's tests share."""

import pytest

from tests.scheduler.stage import Stage


@pytest.fixture
def stage() -> Stage:
    """A pool with a gateway."""
    stage = Stage()
    stage.gateway("g1")
    return stage
