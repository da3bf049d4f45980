"""A worker on a GPU whose guesses count as right with the chance in BENCH_ACCEPTANCE, whatever is drawn; 1.0 or no such
variable: as they are. For measurements through a mesh.

    python -m bench.speculation.forced_worker
"""

import os
from unittest.mock import patch

from services import process
from services.worker import main as worker
from services.worker.build.load import LoadedModel, load_model
from services.worker.engine.generation import GenerationEngine
from services.worker.options import Progress
from services.worker.runners.cuda.runner import GpuRunner
from services.worker.settings import WorkerSettings

ACCEPTANCE = "BENCH_ACCEPTANCE"
"""The variable's name."""


def load(settings: WorkerSettings, name: str, progress: Progress) -> LoadedModel:
    """The model, whose graphs with guesses are captured anew."""
    loaded = load_model(settings, name, progress)
    assert isinstance(loaded.engine, GenerationEngine)
    runner, chance = loaded.engine.runner, float(os.environ.get(ACCEPTANCE, "1"))
    if chance < 1:
        assert isinstance(runner, GpuRunner), "acceptance is forced on a GPU alone"
        runner.force_acceptance(chance)
    return loaded


if __name__ == "__main__":
    process.prepare_grpc()
    with patch.object(worker, "load_model", load):
        worker.run()
