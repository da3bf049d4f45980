"""Ranks as threads of this process, for tests: they meet, load and compute as the processes do."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from services.worker.build.choose import BuiltEngine
from services.worker.build.ranks import rank, rank_process
from services.worker.engine.generation import GenerationEngine
from services.worker.parallel.channel import Channel
from services.worker.runners.ranks import RanksRunner
from tests.worker.drive import built


class RankFailed(Exception):
    """A rank has failed where a worker would end."""


def _start(number: int) -> Channel:
    own, its = socket.socketpair()
    channel = Channel(its)

    def compute() -> None:
        # A model may be refused by one rank while others still meet.
        with contextlib.closing(channel), contextlib.suppress(RuntimeError):
            rank.compute(channel, channel.receive)

    threading.Thread(target=compute, name=f"rank-{number}", daemon=True).start()
    return Channel(own)


def _lost(reason: str) -> None:
    raise RankFailed(reason)


@contextlib.contextmanager
def grid_built(folder: Path, tensor: int = 1, pipeline: int = 1, **options: Any) -> Iterator[BuiltEngine]:
    """An engine on a grid of ranks, and what reads its adapters."""
    settings: dict[str, Any] = {"kv_blocks": 128, "max_batch_size": 16, "threads": 1, **options}
    with patch.object(rank_process, "start", _start), patch.object(rank_process, "end_worker", _lost):
        made = built(folder, tensor_parallel=tensor, pipeline_parallel=pipeline, **settings)
    try:
        yield made
    finally:
        assert isinstance(made.engine.runner, RanksRunner)
        made.engine.runner.close()


@contextlib.contextmanager
def grid_engine(folder: Path, tensor: int = 1, pipeline: int = 1, **options: Any) -> Iterator[GenerationEngine]:
    """An engine on a grid of ranks."""
    with grid_built(folder, tensor, pipeline, **options) as made:
        yield made.engine
