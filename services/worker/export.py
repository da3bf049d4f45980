"""`python -m services.worker.export FORMAT MODEL OUT`: writes a model's network for another runtime, and ends. Knows no
mesh."""

import sys
import time
from pathlib import Path

from services import process
from services.worker.build.export import export
from services.worker.errors import CheckpointError
from services.worker.loader import checkpoint


def run() -> None:
    """Write what the arguments ask for. Exits with the reason in a line if it cannot."""
    form, model, out = sys.argv[1:]
    began, phases = time.monotonic(), _Phases()
    try:
        export(checkpoint.locate(model), Path(out), form, phases)
    except (CheckpointError, OSError) as error:
        process.refuse_to_serve(str(error))
    print(f"wrote {out} in {time.monotonic() - began:.1f} s")


class _Phases:
    """Prints a line when a phase begins."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, phase: str, done: int, total: int) -> None:
        if phase != self._last:
            print(phase, flush=True)
        self._last = phase


if __name__ == "__main__":
    process.run("services.worker.export")
