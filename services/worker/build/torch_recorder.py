"""Records operators of the CPU and kernels of the GPU for profiles of steps. Knows torch's profiler, no engine."""

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function


class TorchRecorder:
    """A `Recorder` for runners that compute with torch."""

    def __init__(self) -> None:
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._profile = profile(activities=kinds)

    def begin(self) -> None:
        """Begin to record."""
        self._profile.start()

    def mark(self, phase: str) -> contextlib.AbstractContextManager[Any]:
        """A `with` block that appears in the trace as a phase."""
        marked: contextlib.AbstractContextManager[Any] = record_function(phase)
        return marked

    def end(self) -> None:
        """Stop recording."""
        self._profile.stop()

    def trace(self) -> dict[str, Any]:
        """The record in Chrome's format."""
        with tempfile.TemporaryDirectory(prefix="weft-profile-") as home:
            file = Path(home) / "trace.json"
            self._profile.export_chrome_trace(str(file))
            trace: dict[str, Any] = json.loads(file.read_text())
        return trace
