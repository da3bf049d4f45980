"""Steps under observation: what the host spends them on, what the device computes, and a trace of both.

The engine's thread marks its phases; while nobody observes, a mark costs a look. Knows clocks and torch's profiler,
which only engines that compute bring, never jobs or tokens.
"""

import contextlib
import gzip
import json
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

PHASES = ("arrivals", "planning", "packing", "launch", "waiting", "collecting", "publishing")
"""Of a step, in order: waiting is for the device, where the host is ahead of it."""
ELSEWHERE = "elsewhere"
"""What is no phase: telling the tokens, and other threads that hold the interpreter."""
# The first family of which a word is in a kernel's or operator's name.
_FAMILIES = (
    ("norms", ("norm",)),
    ("rope and KV", ("rope", "copy_blocks")),
    ("step inputs", ("unpack_kernel", "store_sampled_kernel", "finite_kernel", "edit_kernel")),
    ("sampling", ("scan_kernel", "choose_kernel", "top_kernel", "sample", "topk", "argmax", "sort", "multinomial")),
    ("attention", ("attention", "prefill_hopper", "decode_hopper", "short_prefill", "tile_kernel", "split_kernel",
                   "shared_prefix", "schedule_kernel", "flash", "softmax")),
    ("quantized linear", ("packed_", "dequantize", "round_rows")),
    ("linear", ("gemm", "gemv", "nvjet", "cutlass", "matmul", "linear", "mm", "dense_hopper", "invariant", "split",
    "qkv")), ("activation", ("silu", "gelu")),
    ("copies", ("memcpy", "memset", "copy", "index", "fill", "cat", "stack")),
)  # fmt: skip
_OTHER = "other"
_UNTIMED = contextlib.nullcontext()


class Recorder(Protocol):
    """What a profile is made with, from its first step to its last."""

    def begin(self) -> None:
        """Now."""

    def mark(self, phase: str) -> contextlib.AbstractContextManager[Any]:
        """A phase in the trace."""

    def end(self) -> None:
        """No more."""

    def trace(self) -> dict[str, Any]:
        """All that was seen, in Chrome's format. May be called from any thread, once, after the end."""


class TorchRecorder:
    """Operators of the CPU and kernels of the GPU, as torch sees them."""

    def __init__(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile, record_function

        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._profile = profile(activities=kinds)
        self._mark = record_function

    def begin(self) -> None:
        """Now."""
        self._profile.start()

    def mark(self, phase: str) -> contextlib.AbstractContextManager[Any]:
        """A phase in the trace."""
        marked: contextlib.AbstractContextManager[Any] = self._mark(phase)
        return marked

    def end(self) -> None:
        """No more."""
        self._profile.stop()

    def trace(self) -> dict[str, Any]:
        """All that was seen, in Chrome's format."""
        with tempfile.TemporaryDirectory(prefix="weft-profile-") as home:
            file = Path(home) / "trace.json"
            self._profile.export_chrome_trace(str(file))
            trace: dict[str, Any] = json.loads(file.read_text())
        return trace


class PhaseRecorder:
    """The phases alone, for an engine that computes nothing."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []

    def begin(self) -> None:
        """Now."""

    @contextlib.contextmanager
    def mark(self, phase: str) -> Any:
        """A phase in the trace."""
        began = time.perf_counter_ns()
        yield
        now = time.perf_counter_ns()
        event = {"ph": "X", "cat": "user_annotation", "name": phase, "ts": began / 1e3, "dur": (now - began) / 1e3}
        self._events.append({**event, "pid": 0, "tid": threading.get_native_id()})

    def end(self) -> None:
        """No more."""

    def trace(self) -> dict[str, Any]:
        """All that was seen, in Chrome's format."""
        return {"traceEvents": self._events, "displayTimeUnit": "ms"}


@dataclass(frozen=True, slots=True)
class Observation:
    """Steps that were observed."""

    steps: int
    seconds: float
    """From the beginning of the first to the end of the last."""
    phases: Mapping[str, float]
    """Seconds of each, over all steps."""
    recorder: Recorder

    def report(self) -> "Profile":
        """What they were spent on. Takes its time: not for the engine's thread."""
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
    """What computed, by family of kernels (of operators, on a CPU), the most first."""
    on_gpu: bool
    trace: bytes
    """Chrome's format, compressed with gzip."""


class Profiler:
    """Observes steps when somebody asks. `order` may be called from any thread, the rest from the engine's."""

    def __init__(self, computes: bool) -> None:
        """computes: the engine runs torch."""
        self._make = TorchRecorder if computes else PhaseRecorder
        self._ordered: tuple[int, Future[Observation]] | None = None
        self._recorder: Recorder | None = None
        self._phases: dict[str, float] = defaultdict(float)
        self._steps = 0
        self._began = 0.0

    def order(self, steps: int) -> "Future[Observation] | None":
        """The next so many steps, when they are over; None if somebody else's are under observation. If the future is
        cancelled, observation ends at the next step."""
        if self._ordered is not None:
            return None
        future: Future[Observation] = Future()
        self._ordered = steps, future
        return future

    def step_begins(self) -> None:
        """Begins or ends what was ordered."""
        if self._ordered is None:
            return
        wanted, future = self._ordered
        if self._recorder is None and not future.cancelled():
            self._recorder = self._make()
            self._phases, self._steps = defaultdict(float), 0
            self._recorder.begin()
            self._began = time.perf_counter()
            return
        self._steps += 1
        if self._steps >= wanted or future.cancelled():
            self._end(future)

    def phase(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """A `with` block for a phase of a step."""
        return _UNTIMED if self._recorder is None else self._timed(name, self._recorder)

    @contextlib.contextmanager
    def _timed(self, name: str, recorder: Recorder) -> Any:
        began = time.perf_counter()
        with recorder.mark(name):
            yield
        self._phases[name] += time.perf_counter() - began

    def _end(self, future: Future[Observation]) -> None:
        seconds, recorder = time.perf_counter() - self._began, self._recorder
        self._ordered, self._recorder = None, None
        if recorder is not None:
            recorder.end()
            if future.set_running_or_notify_cancel():
                future.set_result(Observation(self._steps, seconds, self._phases, recorder))


def _families(events: Iterable[dict[str, Any]]) -> tuple[bool, dict[str, float]]:
    """Whether a GPU computed, and seconds by family: of its kernels, else of the CPU's operators. No moment of the GPU,
    or of a thread, counts twice."""
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
    kernels = [event for event in timed if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    chosen = kernels or [{**event, "pid": 0} for event in timed if event.get("cat") == "cpu_op"]
    seconds: dict[str, float] = defaultdict(float)
    over: dict[tuple[Any, Any], float] = {}
    # A moment belongs to what began first: a kernel may be launched early and wait, an operator may call others.
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
