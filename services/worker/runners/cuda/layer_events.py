"""Events between the layers of launched steps: how many layers the device has computed. Knows no blocks and no rows."""

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from services.worker.kvcache.pool import PARTS
from services.worker.models.decoder import Decoder
from services.worker.runners.cuda.kv_pool import GpuPool

_POLL_S, _LAST_POLL_S = 0.0005, 0.0001
"""Seconds between two looks at a step while other workers wait for its layers, and after the last event before its
end."""

Mark = tuple[int, Any]
"""The number of layers that are computed when the event is complete, and the event."""


class LayerEvents:
    """Marks eager steps while they are launched, and reports what is computed while the engine's thread waits for them.
    A step of a captured graph has no marks."""

    def __init__(self, model: Decoder, pool: GpuPool) -> None:
        """What is computed is reported to the call that the pool was given; without one nothing is recorded."""
        self._model, self._pool = model, pool

    @contextlib.contextmanager
    def recorded(self) -> Iterator[list[Mark]]:
        """Record an event after each quarter of the layers that the block launches, but the last one. -> these events,
        when the block is over."""
        marks: list[Mark] = []
        apart = -(-len(self._model.layers) // PARTS)

        def mark(layers: int) -> None:
            if layers and layers % apart == 0:
                marks.append((layers, self._event()))

        self._model.between_layers = None if self._pool.call is None else mark
        try:
            yield marks
        finally:
            self._model.between_layers = None

    def follow(self, marks: Sequence[Mark], done: Any) -> None:
        """Report again and again how many layers of a step are computed, until it is over or nobody wants more of it.
        done: the event of its end."""
        call, ahead, computed = self._pool.call, deque(marks), 0
        while marks and call is not None and not done.query():
            while ahead and ahead[0][1].query():
                computed, _ = ahead.popleft()
            if not call(computed, len(self._model.layers)):
                return
            time.sleep(_POLL_S if ahead else _LAST_POLL_S)

    def _event(self) -> Any:
        return torch.cuda.current_stream(self._pool.device).record_event()
