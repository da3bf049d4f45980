"""Lanes: threads that each compute one batch of texts at a time. A lane knows its runner, no jobs and no policy."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from services.worker.runners.base import EncoderRunner, TextTokens, Vectors


class Lanes:
    """At most `count` batches at a time, by a runner that computes a batch when it is launched and that several threads
    may call."""

    def __init__(self, runner: EncoderRunner[Vectors], count: int, on_over: Callable[[], None]) -> None:
        """on_over: called by a lane's thread whenever a batch is over, computed or failed."""
        self.count = count
        self._runner, self._on_over = runner, on_over
        self._threads = ThreadPoolExecutor(count, "lane")

    def launch(self, batch: Sequence[TextTokens]) -> "Future[Vectors]":
        """Begin to compute a batch."""
        launched = self._threads.submit(self._compute, batch)
        launched.add_done_callback(lambda _: self._on_over())
        return launched

    def _compute(self, batch: Sequence[TextTokens]) -> Vectors:
        return self._runner.collect(self._runner.launch(batch))
