"""Fills Triton's cache on disk: finds out which kernels some code would launch, then compiles them in several processes
at a time. Knows how Triton launches and compiles (3.6), never which kernels there are.
"""

# mypy: allow-untyped-calls

import hashlib
import os
import struct
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import triton
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.runtime.jit import JITFunction

_UNFILLED = (torch.empty, torch.empty_like, Tensor.new_empty)
_NUMBER = struct.Struct("=I")
_MOST_JOBS = 1 << 14
"""Jobs whose numbers fit into a pipe before it is read."""
_DONE, _FAILED = b"+", b"-"

Job = Callable[[], object]
Progress = Callable[[int, int], None]
"""Called with how many jobs are done, and of how many."""


@dataclass(frozen=True, slots=True)
class RecordedKernel:
    """A kernel with the specialization that a launch needs; calling it compiles it into the cache."""

    compile: Callable[..., object]
    kernel: Any
    arguments: tuple[Any, ...]

    def __call__(self) -> None:
        self.compile(self.kernel, *self.arguments)


@contextmanager
def recording() -> Iterator[list[RecordedKernel]]:
    """Inside the context kernels that this process has not compiled are neither compiled nor launched: each is added
    once to the list, slow ones first when the context ends.

    New tensors are filled with zeros, since no kernel fills them: whatever is an index is a valid one.

    A kernel's key in the cache depends on which kernels had theirs before: of a function that both call the second one
    counts the constants, too. Kernels get their keys here, so a process that launches them in this order finds them.
    """
    found: dict[tuple[Any, Any], RecordedKernel] = {}
    compiling = JITFunction._do_compile

    def record(kernel: Any, *arguments: Any) -> None:
        # A kernel's hash is its key in the cache, which is computed here.
        found.setdefault((kernel, arguments[0]), RecordedKernel(compiling, kernel, arguments))

    kernels: list[RecordedKernel] = []
    JITFunction._do_compile = record
    try:
        with _Zeroed():
            yield kernels
    finally:
        JITFunction._do_compile = compiling
    # Kernels in Gluon take longest to compile: if one were begun last, all processes would wait for it.
    kernels += sorted(found.values(), key=lambda each: not each.kernel.is_gluon())


class _Zeroed(TorchFunctionMode):
    """Fills what torch leaves unfilled."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in _UNFILLED else made


def run_jobs(jobs: Sequence[Job], processes: int, progress: Progress) -> int:
    """Run each job once in forked processes, each of which takes the next job when it is free -> how many failed.

    Jobs must not use a GPU, nor a lock that another thread may hold now: neither works in a forked process. A process
    that dies costs the job it was at; if all have died, the rest fails.
    """
    assert len(jobs) <= _MOST_JOBS, len(jobs)
    todo, numbers = os.pipe()
    answers, answer = os.pipe()
    os.write(numbers, b"".join(_NUMBER.pack(number) for number in range(len(jobs))))
    os.close(numbers)
    children = [_forked(jobs, todo, answer, answers) for _ in range(min(processes, len(jobs)))]
    os.close(todo)
    os.close(answer)
    done = good = 0
    progress(0, len(jobs))
    while outcome := os.read(answers, 1):  # empty when the last child is gone
        done += 1
        good += outcome == _DONE
        progress(done, len(jobs))
    os.close(answers)
    for child in children:
        os.waitpid(child, 0)
    return len(jobs) - good


def _forked(jobs: Sequence[Job], todo: int, answer: int, answers: int) -> int:
    """A new process that runs jobs -> its id."""
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, from Python 3.12 on
        child = os.fork()
    if child == 0:
        os.close(answers)
        _run(jobs, todo, answer, parent)
    return child


def _run(jobs: Sequence[Job], todo: int, answer: int, parent: int) -> NoReturn:
    """Run jobs until none is left or the parent is gone. What the parent does at its exit is not done here."""
    try:
        while os.getppid() == parent and (number := os.read(todo, _NUMBER.size)):
            try:
                jobs[_NUMBER.unpack(number)[0]]()
                os.write(answer, _DONE)
            except Exception:
                os.write(answer, _FAILED)
    finally:
        os._exit(0)


def cache_folder() -> Path:
    """Where Triton keeps compiled kernels on this machine."""
    return Path(triton.knobs.cache.dir)


def sources_digest(*launchers: Path) -> str:
    """SHA-256, in hexadecimal, of the compiler's version, of the sources of all kernels, and of those in the folders of
    code that launches them."""
    sha = hashlib.sha256(f"{triton.__version__} {torch.__version__}".encode())
    for folder in (Path(__file__).parent, *launchers):
        for path in sorted(folder.rglob("*.py")):
            content = path.read_bytes()
            sha.update(f"{path.relative_to(folder)} {len(content)} ".encode() + content)
    return sha.hexdigest()
