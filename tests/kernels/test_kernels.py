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


@pytest.mark.timeout(600)
def test_every_kernel_under_the_interpreter() -> None:
    # numpy warns of what the interpreter does with scalars and with infinities.
    quiet = ["-W", "ignore::DeprecationWarning", "-W", "ignore::RuntimeWarning"]
    run(["-m", "pytest", "-q", "-p", "no:cacheprovider", *quiet, "tests/kernels/interpreted.py"], TRITON_INTERPRET="1")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("capability", "dtypes"), [(80, ["bfloat16"]), (89, ["float16"]), (90, ["bfloat16", "float32"])]
)
def test_every_kernel_compiles_ahead_of_time(capability: int, dtypes: list[str]) -> None:
    run(["-m", "tests.kernels.compile_ahead", str(capability), *dtypes], TRITON_INTERPRET="0")
