"""Lets ONNX Runtime compute texts that come alone, where a folder has an export beside its weights and that is faster.

Knows two runners, no jobs.
"""

import logging
import time
from array import array
from collections.abc import Sequence

import numpy as np

from services.host import available_cores, available_memory
from services.worker.build.encoders.source import EncoderSource
from services.worker.build.runtimes import find_version
from services.worker.loader.exports import files_of, find_export, has_export
from services.worker.options import EngineOptions
from services.worker.runners.base import EncoderRunner, TextTokens, Vectors
from services.worker.runners.cpu.encoder_runner import CpuEncoderRunner
from services.worker.runners.lone_texts import LoneTextRunner

log = logging.getLogger(__name__)

RUNTIME = "onnxruntime"
_LENGTH, _ROUNDS, _CALLS = 16, 3, 8
"""Tokens of the texts by which the runners are compared, and how often."""
_MOST_THREADS = 4
"""For a text. Its threads take parts of a product as they come, and none waits for one without a core: so it has all
cores of a small machine, where torch leaves one to the messages."""
_FASTER = 1.05
"""How many times faster a second runner, which takes memory, has to be."""
_COSINE = 0.99999


def with_lone_texts(
    runner: CpuEncoderRunner, source: EncoderSource, options: EngineOptions
) -> CpuEncoderRunner | LoneTextRunner:
    """The runner, or one that has ONNX Runtime compute short texts that come alone. Raises CheckpointError."""
    if not (options.engine == "auto" and has_export(source.folder, RUNTIME) and find_version(RUNTIME)):
        return runner
    if options.quantize or options.numerics.dtype != "float32":
        return runner
    bytes_needed = sum(file.stat().st_size for file in files_of(find_export(source.folder, RUNTIME)))
    if bytes_needed > available_memory() / 2:
        return runner
    from services.worker.build.encoders.runtimes import make_runtime_runner

    threads = options.threads or min(available_cores(), _MOST_THREADS)
    chosen = options.model_copy(update={"engine": RUNTIME, "threads": threads})
    try:
        alone, _ = make_runtime_runner(source, runner.most_tokens, chosen, lambda *_: None)
        vectors = [each.collect(each.launch(_probe(source))) for each in (alone, runner)]
    except Exception as error:  # An export that cannot be used costs nothing but its speed.
        log.warning("the export beside the weights is not used: %s", error)
        return runner
    if not _are_alike(*vectors):
        log.warning("the export beside the weights is not used: it computes other vectors")
        return runner
    took_s = {each: min(_time(each, _probe(source)) for _ in range(_ROUNDS)) for each in (alone, runner)}
    return LoneTextRunner(alone, runner) if took_s[alone] * _FASTER < took_s[runner] else runner


def _probe(source: EncoderSource) -> list[TextTokens]:
    """A text."""
    length, words = min(_LENGTH, source.config.context_length), source.config.vocab_size
    return [TextTokens(array("i", [(1 + 7919 * place) % words for place in range(length)]))]


def _are_alike(a: Vectors, b: Vectors) -> bool:
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    return a.shape == b.shape and lengths > 0 and float((a * b).sum()) >= _COSINE * lengths


def _time(runner: EncoderRunner[Vectors], batch: Sequence[TextTokens]) -> float:
    began = time.perf_counter()
    for _ in range(_CALLS):
        runner.collect(runner.launch(batch))
    return time.perf_counter() - began
