"""The demo model and a fast mesh without weights for the stories about traces and metrics."""

from pathlib import Path

import pytest

from tests.mesh.conftest import demo_model

PACED = {"ENGINE": "paced", "WEFT_PACED_STEP_MS": "5"}
"""A worker that answers at once, at a token each 5 ms."""


@pytest.fixture(scope="session")
def model() -> Path:
    """The demo model."""
    return demo_model()
