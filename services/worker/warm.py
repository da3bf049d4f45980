"""`python -m services.worker.warm`: compiles the kernels of the model that a worker's settings name, and ends. Knows no
mesh and loads no weights; a worker that starts with the same settings on this machine then compiles nothing.
"""

import time

from services import process
from services.worker.build import kernel_cache
from services.worker.build.choose import resolve_engine
from services.worker.build.kernel_cache import Marker
from services.worker.errors import CheckpointError
from services.worker.loader import checkpoint, presets
from services.worker.loader.config import read_config
from services.worker.settings import WorkerSettings


def run() -> None:
    """Compile what the cache lacks. Exits with the reason in a line if it cannot."""
    try:
        print(compile_all(WorkerSettings()))
    except (CheckpointError, OSError) as error:
        process.refuse_to_serve(str(error))


def compile_all(settings: WorkerSettings) -> str:
    """Compile the kernels -> a line about what was done. Raises CheckpointError or OSError."""
    settings = resolve_engine(settings.model_copy(update={"engine": "gpu"}))
    folder = checkpoint.locate(settings.model)
    config = read_config(folder)
    marker = Marker(config.model, config.quantization, settings)
    if marker.is_set():
        return "all kernels of this model are compiled already"
    began, shown = time.monotonic(), _Tenths()
    with kernel_cache.start(folder, settings) as compilation:
        if not compilation.wait(shown):
            raise CheckpointError(f"the kernels could not be compiled: {compilation.error or 'see above'}")
    marker.set()
    presets.remove_folders()
    return f"compiled {shown.total} kernels in {time.monotonic() - began:.1f} s"


class _Tenths:
    """Prints a line for each tenth of the work."""

    def __init__(self) -> None:
        self.total = 0
        self._last = -1

    def __call__(self, phase: str, done: int, total: int) -> None:
        self.total = total
        if 10 * done // total != self._last:
            self._last = 10 * done // total
            print(f"{phase} {10 * self._last}%", flush=True)


if __name__ == "__main__":
    process.run("services.worker.warm")
