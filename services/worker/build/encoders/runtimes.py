"""Builds the runner of an encoder that another runtime computes. Knows which runtimes there are, no jobs."""

import torch

from services.host import available_cores
from services.worker.build.encoders.export import load_network, trace
from services.worker.build.encoders.source import EncoderSource
from services.worker.errors import CheckpointError
from services.worker.loader.exports import files_of, find_export, has_export
from services.worker.options import EngineOptions, Progress
from services.worker.runners.exported import ExportedTexts
from services.worker.runners.onnxruntime import OnnxTexts
from services.worker.runners.openvino import OpenvinoTexts
from services.worker.runners.runtime.text_runner import RuntimeTextRunner
from services.worker.runners.runtime.text_session import TextSession

_FLOAT_BYTES = 4


def make_runtime_runner(
    source: EncoderSource, most_tokens: int, options: EngineOptions, progress: Progress
) -> tuple[RuntimeTextRunner, int]:
    """The runner, and about the numbers in the checkpoint. Raises CheckpointError."""
    try:
        session, parameters = _load(source, options, progress)
    except ImportError as error:
        raise CheckpointError(f"{error.name} is not installed: pip install 'weft[{options.engine}]'") from None
    return RuntimeTextRunner(session, source.config, source.settings.pooling, most_tokens), parameters


def _load(source: EncoderSource, options: EngineOptions, progress: Progress) -> tuple[TextSession, int]:
    threads = options.threads or torch.get_num_threads()
    if options.engine == "openvino" and not has_export(source.folder, options.engine):
        network, parameters = load_network(source, progress)
        progress("compile", 0, 1)
        converted = OpenvinoTexts(trace(network), source.config, threads)
        progress("compile", 1, 1)
        return converted, parameters
    file = find_export(source.folder, options.engine)
    progress("weights", 0, 1)
    session: TextSession
    if options.engine == "exported":
        session = ExportedTexts(str(file), source.config)
    elif options.engine == "openvino":
        session = OpenvinoTexts(str(file), source.config, threads)
    else:
        # Its threads take parts of a product as they come: none waits for one without a core.
        session = OnnxTexts(str(file), source.config, options.threads or available_cores())
    progress("weights", 1, 1)
    return session, sum(each.stat().st_size for each in files_of(file)) // _FLOAT_BYTES
