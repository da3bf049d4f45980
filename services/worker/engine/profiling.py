"""Profiles of steps: the time of each phase of the host, of each family of kernels, and a trace of both.

The engine's thread marks the phase that begins; without an observation that costs one comparison. Knows clocks and
recorders, never jobs or tokens.
"""

import contextlib
import gzip
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from services.worker.engine.base import StepObservation

PHASES = ("arrivals", "planning", "packing", "launch", "waiting", "collecting", "publishing")
"""The phases of a step, in order. In `waiting` the host is ahead of the device and waits for it."""
ELSEWHERE = "elsewhere"
"""Time outside the steps: delivering the tokens, and other threads that hold the interpreter."""
# A kernel or operator belongs to the first family with a word that its name contains.
_FAMILIES = (
    ("exchanges of ranks", ("of_ranks_kernel", "stage_kernel")),
    ("linear", ("resident_norm",)),
    ("norms", ("norm",)),
    ("texts", ("embed_texts", "pool_texts")),
    ("rope and KV", ("rope", "copy_blocks", "keep_kernel", "before_kernel")),
    ("step inputs", ("unpack_kernel", "store_sampled_kernel", "finite_kernel", "edit_kernel", "advance_kernel",
                     "follow_kernel", "begin_masks_kernel", "store_guesses_kernel")),
    ("experts", ("choose_experts", "route_few", "router_kernel", "count_kernel", "place_kernel", "grouped_kernel",
                 "add_weighted")),
    ("adapters", ("shrink_kernel", "expand_kernel", "adapted_kernel")),
    ("sampling", ("scan_kernel", "choose_kernel", "top_kernel", "mask_kernel", "accept_kernel", "sample", "topk",
                  "argmax", "sort", "multinomial")),
    ("attention", ("attention", "prefill_hopper", "decode_hopper", "short_prefill", "tile_kernel", "split_kernel",
                   "shared_prefix", "schedule_kernel", "flash", "softmax")),
    ("quantized linear", ("packed_", "dequantize", "round_rows")),
    ("linear", ("gemm", "gemv", "nvjet", "cutlass", "matmul", "linear", "mm", "dense_hopper", "resident_hopper",
                "invariant", "split", "qkv")),
    ("activation", ("silu", "gelu", "gated_kernel")),
    ("copies", ("memcpy", "memset", "copy", "index", "fill", "cat", "stack")),
)  # fmt: skip
_OTHER = "other"


class Recorder(Protocol):
    """Records some steps of the engine."""

    def begin(self) -> None:
        """Begin to record."""

    def mark(self, phase: str) -> contextlib.AbstractContextManager[Any]:
        """A `with` block that appears in the trace as a phase."""

    def end(self) -> None:
        """Stop recording."""

    def trace(self) -> dict[str, Any]:
        """The record in Chrome's format. May be called from any thread, once, after `end`."""


class PhaseRecorder:
    """Records the phases alone, for runners that compute nothing."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []

    def begin(self) -> None:
        """Nothing is to be done."""

    @contextlib.contextmanager
    def mark(self, phase: str) -> Any:
        """A `with` block that appears in the trace as a phase."""
        began = time.perf_counter_ns()
        yield
        now = time.perf_counter_ns()
        event = {"ph": "X", "cat": "user_annotation", "name": phase, "ts": began / 1e3, "dur": (now - began) / 1e3}
        self._events.append({**event, "pid": 0, "tid": threading.get_native_id()})

    def end(self) -> None:
        """Nothing is to be done."""

    def trace(self) -> dict[str, Any]:
        """The record in Chrome's format."""
        return {"traceEvents": self._events, "displayTimeUnit": "ms"}


@dataclass(frozen=True, slots=True)
class Observation:
    """Steps that were observed."""

    steps: int
    seconds: float
    """From the beginning of the first to the end of the last."""
    phases: Mapping[str, float]
    """Seconds of each phase, over all steps."""
    recorder: Recorder

    def report(self) -> "Profile":
        """Evaluate the record. Takes seconds: not for the engine's thread or the event loop."""
        trace = self.recorder.trace()
        host = {phase: self.phases[phase] for phase in PHASES if phase in self.phases}
        host[ELSEWHERE] = max(0.0, self.seconds - sum(host.values()))
        on_gpu, families = _families(trace["traceEvents"])
        packed = gzip.compress(json.dumps(trace).encode(), compresslevel=6)
        return Profile(self.steps, self.seconds, host, families, on_gpu, packed)


@dataclass(frozen=True, slots=True)
class Profile:
    """Where the time of some steps went, in seconds over all of them."""

    steps: int
    seconds: float
    host: Mapping[str, float]
    """By phase; they add up to `seconds`."""
    families: Mapping[str, float]
    """By family of kernels (on a CPU: of operators), the longest first."""
    on_gpu: bool
    trace: bytes
    """Chrome's format, compressed with gzip."""


class Profiler:
    """Observes steps on request. `order` may be called from any thread, the rest from the engine's."""

    def __init__(self, make_recorder: Callable[[], Recorder]) -> None:
        self._make_recorder = make_recorder
        self._ordered: tuple[int, Future[StepObservation]] | None = None
        self._recorder: Recorder | None = None
        self._phases: dict[str, float] = defaultdict(float)
        self._steps = 0
        self._began = 0.0
        self._phase: contextlib.AbstractContextManager[Any] | None = None

    def order(self, steps: int) -> "Future[StepObservation] | None":
        """Observe the next `steps` steps. None while other steps are being observed, or will be. If the future is
        cancelled, the observation ends at the next step."""
        if self._ordered is not None and not (self._recorder is None and self._ordered[1].cancelled()):
            return None
        future: Future[StepObservation] = Future()
        self._ordered = steps, future
        return future

    def step_begins(self) -> None:
        """Begin or end the observation that was ordered."""
        if self._ordered is None:
            return
        wanted, future = self._ordered
        if self._recorder is None:
            if not future.cancelled():  # Otherwise the next order replaces it.
                self._begin()
            return
        self._steps += 1
        if self._steps >= wanted or future.cancelled():
            self._end(future)

    def enter(self, phase: str) -> None:
        """A phase of the step begins, and the one before it ends."""
        if self._recorder is not None:
            self.step_ends()
            self._phase = self._timed(phase, self._recorder)
            self._phase.__enter__()

    def step_ends(self) -> None:
        """The last phase of the step ends."""
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
            self._phase = None

    @contextlib.contextmanager
    def _timed(self, name: str, recorder: Recorder) -> Any:
        began = time.perf_counter()
        with recorder.mark(name):
            yield
        self._phases[name] += time.perf_counter() - began

    def _begin(self) -> None:
        self._recorder = self._make_recorder()
        self._phases, self._steps = defaultdict(float), 0
        self._recorder.begin()
        self._began = time.perf_counter()

    def _end(self, future: Future[StepObservation]) -> None:
        seconds, recorder = time.perf_counter() - self._began, self._recorder
        self._ordered, self._recorder = None, None
        if recorder is not None:
            recorder.end()
            if future.set_running_or_notify_cancel():
                future.set_result(Observation(self._steps, seconds, self._phases, recorder))


def _families(events: Iterable[dict[str, Any]]) -> tuple[bool, dict[str, float]]:
    """Whether a GPU computed, and seconds by family: of its kernels, otherwise of the CPU's operators. No moment of the
    GPU, or of a thread, counts twice."""
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
    kernels = [event for event in timed if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    chosen = kernels or [{**event, "pid": 0} for event in timed if event.get("cat") == "cpu_op"]
    seconds: dict[str, float] = defaultdict(float)
    over: dict[tuple[Any, Any], float] = {}
    # A moment counts for the event that began first: a kernel may wait after its launch, an operator may call others.
    for event in sorted(chosen, key=lambda event: (event["ts"], -event["dur"])):
        where = (event["pid"], None if kernels else event["tid"])
        end = event["ts"] + event["dur"]
        seconds[family_of(event["name"])] += max(0.0, end - max(event["ts"], over.get(where, 0.0))) / 1e6
        over[where] = max(end, over.get(where, 0.0))
    return bool(kernels), dict(sorted(seconds.items(), key=lambda item: -item[1]))


def family_of(name: str) -> str:
    """The family of a kernel or an operator, by its name."""
    low = name.lower()
    return next((family for family, words in _FAMILIES if any(word in low for word in words)), _OTHER)
