"""The demo model and a fast mesh without weights for tests of traces and metrics."""

from pathlib import Path

import pytest

from tests.mesh.conftest import demo_model

PACED = {"ENGINE": "paced", "WEFT_PACED_STEP_MS": "5"}
"""A worker that takes no time for prompts and 5 ms for each token."""
SLOW_PREFILL = {**PACED, "WEFT_PACED_PREFILL_RATE": "30"}
"""A worker whose prefill is so slow that the result cache answers first."""
LONG_TIMEOUTS = {"WEFT_GATEWAY_CACHE_BUDGET_S": "5", "WEFT_CACHE_BUDGET_MS": "5000"}
"""Time-outs that a look-up meets on a busy machine, too."""


@pytest.fixture(scope="session")
def model() -> Path:
    """The demo model."""
    return demo_model()
