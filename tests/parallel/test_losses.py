"""A killed rank takes its worker with it, and costs the clients nothing."""

import signal
from pathlib import Path

import pytest

from tests.checkpoints import SMALL_DEMO
from tests.parallel.losses import signal_rank, streams_survive

pytestmark = pytest.mark.asyncio(loop_scope="function")


async def test_a_killed_rank_ends_its_worker_and_streams_go_on_elsewhere(tmp_path: Path) -> None:
    """Two stages and one process compute the same bits, so that each may continue the other's answers."""
    workers = [{"WEFT_PIPELINE_PARALLEL": "2"}, {}]
    await streams_survive(tmp_path, workers, signal_rank(1, signal.SIGKILL), model=SMALL_DEMO)
