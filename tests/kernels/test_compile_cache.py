"""Kernels are recorded without being launched, and compiled in several processes; no GPU is needed for either."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("triton")

from kernels import compile_cache
from kernels.compile_cache import run_jobs


def test_each_job_is_run_once_and_counted(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    def job(number: int) -> None:
        with (tmp_path / str(number)).open("x") as file:
            file.write(str(os.getpid()))

    failed = run_jobs([partial(job, number) for number in range(40)], 3, lambda *progress: seen.append(progress))
    assert failed == 0
    assert seen == [(done, 40) for done in range(41)]
    assert {path.name for path in tmp_path.iterdir()} == {str(number) for number in range(40)}
    assert str(os.getpid()) not in {path.read_text() for path in tmp_path.iterdir()}


def test_jobs_run_in_parallel() -> None:
    began = time.monotonic()
    assert run_jobs([lambda: time.sleep(0.5)] * 6, 6, lambda done, total: None) == 0
    assert time.monotonic() - began < 2.5


def test_a_failed_job_does_not_affect_others(tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError("this kernel does not compile")

    good = [(tmp_path / str(number)).touch for number in range(5)]
    assert run_jobs([good[0], fail, *good[1:]], 2, lambda done, total: None) == 1
    assert len(list(tmp_path.iterdir())) == 5


def test_a_process_that_dies_loses_only_its_current_job(tmp_path: Path) -> None:
    good = [(tmp_path / str(number)).touch for number in range(5)]
    assert run_jobs([lambda: os.kill(os.getpid(), signal.SIGKILL), *good], 2, lambda done, total: None) == 1
    assert len(list(tmp_path.iterdir())) == 5


def test_jobs_without_a_remaining_process_have_failed() -> None:
    assert run_jobs([lambda: os.kill(os.getpid(), signal.SIGKILL)] * 3, 1, lambda done, total: None) == 3


def test_no_jobs() -> None:
    assert run_jobs([], 4, lambda done, total: None) == 0


RECORDS = """
import json, sys
import torch, triton
from kernels import activation, compile_cache, norm
from tests.kernels import reported_gpu

reported_gpu.use()
with compile_cache.recording() as found:
    for rows in (1, 4, 4):
        x = torch.empty(rows, 64, dtype=torch.bfloat16)
        assert not x.any() and not torch.empty_like(x).any() and not x.new_empty(3).any()
        assert norm.rms_norm(x, torch.ones(64), 1e-5).shape == x.shape
    activation.silu_and_mul(torch.ones(4, 64))
hits = []
def listen(src, metadata, metadata_group, times, cache_hit): hits.append(cache_hit)
failed = compile_cache.run_jobs(found, 2, lambda done, total: None)
triton.knobs.compilation.listener = listen
for each in found:
    each()
print(json.dumps({"found": len(found), "failed": failed, "hits": sum(hits), "asked": len(hits)}))
"""


def test_the_kernels_of_a_launch_are_compiled_in_other_processes(tmp_path: Path) -> None:
    """A launch records its kernel once for each specialization; afterwards the cache on disk has it."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", RECORDS], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["found"] >= 2
    assert result == {"found": result["found"], "failed": 0, "hits": result["found"], "asked": result["found"]}


# Two kernels that call one function. With an argument: they are compiled in two processes, the second kernel first.
SHARED = """
import sys
import torch, triton
from triton import language as tl
from kernels import compile_cache
from tests.kernels import reported_gpu

reported_gpu.use()
CONSTANT = tl.constexpr(3)

@triton.jit
def shared(x):
    return x + CONSTANT

@triton.jit
def first(x):
    tl.store(x, shared(tl.load(x)))

@triton.jit
def second(x):
    tl.store(x, 2 * shared(tl.load(x)))

with compile_cache.recording() as found:
    for kernel in (first, second):
        kernel[(1,)](torch.ones(4))
hits = []
def listen(src, metadata, metadata_group, times, cache_hit): hits.append(cache_hit)
triton.knobs.compilation.listener = listen
if sys.argv[1:]:
    assert compile_cache.run_jobs(found[::-1], 2, lambda done, total: None) == 0
else:
    for each in found:
        each()
    print(hits)
"""


def test_kernels_that_call_the_same_function_are_found_in_whatever_order_they_were_compiled(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_INTERPRET": "0"}
    (tmp_path / "shared.py").write_text(SHARED)
    command = [sys.executable, str(tmp_path / "shared.py")]
    environment["PYTHONPATH"] = os.getcwd()
    for arguments, said in (["compile"], ""), ([], "[True, True]\n"):
        done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, said), done.stderr


def test_other_kernels_have_another_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = compile_cache.sources_digest()
    assert before == compile_cache.sources_digest()
    (tmp_path / "kernel.py").write_text("changed")
    monkeypatch.setattr(compile_cache, "__file__", str(tmp_path / "compile_cache.py"))
    assert compile_cache.sources_digest() != before
