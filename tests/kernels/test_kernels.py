"""Kernels without a GPU: run by Triton's interpreter, and compiled ahead of time for every served capability."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")


def run(arguments: list[str], **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, *arguments], env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def case(*values: object, name: str) -> object:
    """A parameter set with a name."""
    return pytest.param(*values, id=name)


# A repetition would draw another sample of what is remembered, and so clear no failure.
# Each of the two groups keeps one processor busy from its first to its last test, beside tests that wait.
@pytest.mark.flaky(reruns=0)
@pytest.mark.timeout(1200)
@pytest.mark.xdist_group("compiled kernels")
@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        case(90, "bfloat16", name="sm_90 bfloat16"),
        case(90, "float32", name="sm_90 float32"),
        case(89, "float16", name="sm_89 float16"),
        case(80, "bfloat16", name="sm_80 bfloat16"),
    ],
)
def test_every_kernel_compiles_ahead_of_time(capability: int, dtype: str) -> None:
    run(["-m", "tests.kernels.compile_ahead", str(capability), dtype], TRITON_INTERPRET="0")


@pytest.mark.flaky(reruns=0)
@pytest.mark.timeout(1200)
@pytest.mark.xdist_group("interpreted kernels")
def test_every_kernel_under_the_interpreter() -> None:
    run(["-m", "tests.kernels.interpret"])
