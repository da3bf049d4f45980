"""The demo model and a fast mesh without weights for the stories about traces and metrics."""

from pathlib import Path

import pytest

from tests.mesh.conftest import demo_model

PACED = {"ENGINE": "paced", "WEFT_PACED_STEP_MS": "5"}
"""A worker that answers at once, at a token each 5 ms."""
THOUGHTFUL = {**PACED, "WEFT_PACED_PREFILL_RATE": "30"}
"""One whose first token takes so long that the result cache is sooner."""
PATIENT = {"WEFT_GATEWAY_CACHE_BUDGET_S": "5", "WEFT_CACHE_BUDGET_MS": "5000"}
"""Look-ups that a busy machine does not make misses."""


@pytest.fixture(scope="session")
def model() -> Path:
    """The demo model."""
    return demo_model()
