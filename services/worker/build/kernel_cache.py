"""Compiles a model's kernels in parallel while its weights load, where the cache on disk lacks them. Knows when that is
worthwhile and how far it is, never which kernels there are.

The work is done by a process of its own, `services.worker.build.compile_kernels`, whose memory on the GPU is free again
when it ends. Whatever goes wrong there, the kernels are compiled one after the other when the engine first runs them.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import structlog
import torch

from services.worker.models.config import ModelConfig, count_embeddings, count_parameters
from services.worker.options import EngineOptions, Progress

log = structlog.get_logger("worker.kernels")

PHASE = "kernels"
_LAUNCHERS = [Path(__file__).parents[1] / room for room in ("models", "runners")]
_MODULE = "services.worker.build.compile_kernels"
_SILENCE_S = 120.0
"""Seconds without a report after which the process is given up; a kernel takes 20 s at most."""
_LOOK_S = 0.1
_BESIDE_LAYERS = 3 << 30
"""Bytes that the process needs on the GPU beside weights: its context, activations of a full step, workspaces."""
_WITHOUT_EFFECT = (
    "kv_blocks",
    "kv_bytes",
    "threads",
    "prefix_cache",
    "host_kv_bytes",
    "chunk_tokens",
    "paced_step_ms",
    "paced_prefill_rate",
)
"""Options that change no kernel."""


class Marker:
    """A file beside the compiled kernels. It exists once all kernels of a model are there."""

    def __init__(self, config: ModelConfig, quantization: Mapping[str, Any] | None, options: EngineOptions) -> None:
        """For this model with these options, on this machine's GPU."""
        from kernels import compile_cache  # Imports Triton, which engines on a CPU do without.

        shape = dataclasses.replace(with_layers(config, layer_kinds(config)), layers=0, eos_token_ids=())
        settings = {name: value for name, value in plain_options(options).items() if name not in _WITHOUT_EFFECT}
        parts = [compile_cache.sources_digest(*_LAUNCHERS), _device(), repr(shape), repr(quantization), repr(settings)]
        name = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
        self._path = compile_cache.cache_folder() / "weft" / name

    def is_set(self) -> bool:
        """Whether a start of this model has compiled everything before."""
        return self._path.exists()

    def set(self) -> None:
        """To be called when everything is compiled. A cache that cannot be written is no error."""
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch()


class Compilation:
    """The process that compiles, seen by the one that loads. Leaving the context ends it."""

    def __init__(self, command: Sequence[str], order: dict[str, Any], silence_s: float = _SILENCE_S) -> None:
        """Start `command`, which reads the order as one line and reports its progress in lines of JSON."""
        self._silence_s = silence_s
        self._done = self._total = 0
        self.error = ""
        """The message of its failure; empty if there was none."""
        self._last_report_s = time.monotonic()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self._reading = threading.Thread(target=self._read, name="kernels", daemon=True)
        self._reading.start()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # It has ended already; the reading thread reports why.
            # Its input stays open: it ends when this process is gone.
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() != 0:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # it and those that it has forked
        self._process.wait()
        self._reading.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def wait(self, progress: Progress) -> bool:
        """Wait until all kernels are compiled; whether they are. A failure is logged."""
        while self._process.poll() is None and time.monotonic() - self._last_report_s < self._silence_s:
            progress(PHASE, self._done, max(self._total, 1))
            time.sleep(_LOOK_S)
        self._reading.join(1.0)  # what it reported last
        good = self._process.poll() == 0 and not self.error
        if good:
            progress(PHASE, max(self._total, 1), max(self._total, 1))
        else:
            reason = self.error or f"exit code {self._process.poll()}"
            log.warning("kernels are compiled one after the other", reason=reason, done=self._done, total=self._total)
        return good

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._last_report_s = time.monotonic()
            with contextlib.suppress(AttributeError, TypeError, ValueError):  # Libraries may print, too.
                report = json.loads(line)
                self.error = str(report.get("error", ""))
                self._done, self._total = int(report.get("done", self._done)), int(report.get("total", self._total))


Compiling = contextlib.AbstractContextManager[Compilation | None]
"""A compilation while something else loads; None: nothing is compiled."""


@contextlib.contextmanager
def compiling(
    model_dir: Path, config: ModelConfig, options: EngineOptions, marker: Marker, spare_bytes: int
) -> Iterator[Compilation | None]:
    """Compiles the model's kernels meanwhile; None: the cache has them, or this machine has no room or cores for it.

    spare_bytes: memory of the GPU that the weights leave.
    """
    wanted = options.on_gpu and processes() > 1
    if not wanted or marker.is_set() or spare_bytes < needed_bytes(config, options):
        yield None
        return
    try:
        started = start(model_dir, options)
    except OSError as error:
        log.warning("kernels are compiled one after the other", reason=str(error))
        yield None
        return
    with started:
        yield started


def start(model_dir: Path, options: EngineOptions) -> Compilation:
    """Start to compile. Raises OSError if no process can be started."""
    return Compilation(command(), {"folder": str(model_dir), "options": plain_options(options)})


def command() -> list[str]:
    """The command line of the process that compiles."""
    # `-m` alone would import from the current folder, whatever lies there.
    path = [] if {"", os.getcwd()} & set(sys.path) else ["-P"]
    return [sys.executable, *path, "-m", _MODULE]


def processes() -> int:
    """How many processes compile at a time: as many as this one may use cores."""
    return len(os.sched_getaffinity(0))


def needed_bytes(config: ModelConfig, options: EngineOptions) -> int:
    """About what the process takes on the GPU: embeddings and a few layers, not yet rounded, and the rest."""
    item = 4 if options.numerics.dtype == "float32" else 2
    embeddings = count_embeddings(config)
    layer = (count_parameters(config) - embeddings) // config.layers
    return item * (2 * embeddings + 2 * layer * len(layer_kinds(config))) + _BESIDE_LAYERS


def layer_kinds(config: ModelConfig) -> Sequence[int]:
    """The first layer of each kind, for a small model that runs the kernels of all layers: layers with the same window
    and the same sort of MLP run the same ones, but a model's last layer computes its products for sampled rows alone,
    so another layer precedes it."""
    kinds: dict[tuple[int | None, bool], int] = {}
    for layer, window in enumerate(config.windows):
        kinds.setdefault((window, config.has_experts(layer)), layer)
    first = list(kinds.values())
    return first if config.layers == len(first) else [*first, first[-1]]


def with_layers(config: ModelConfig, layers: Sequence[int]) -> ModelConfig:
    """The configuration of a model of these layers alone, in this order."""
    windows, moe = tuple(config.windows[layer] for layer in layers), config.moe
    if moe is not None:
        moe = dataclasses.replace(moe, layers=tuple(moe.layers[layer] for layer in layers))
    return dataclasses.replace(config, layers=len(layers), windows=windows, moe=moe)


def plain_options(options: EngineOptions) -> dict[str, Any]:
    """The options as JSON."""
    return options.model_dump(mode="json", include=set(EngineOptions.model_fields))


def _device() -> str:
    """Name and compute capability of the GPU."""
    return f"{torch.cuda.get_device_name()} {torch.cuda.get_device_capability()}" if torch.cuda.is_available() else ""
