"""Runs the tests of `interpreted/` in Triton's interpreter, but for those whose content passed before.

Run as a program: `python -m tests.kernels.interpret`. `--fresh` runs all and records them (`remembered_tests.py`). A
failure is repeated by the seed that it printed: `--seed 5 -k test_masks`.
"""

import argparse
import os
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # Before Triton is imported.
os.environ["OMP_NUM_THREADS"] = "1"  # Ranks are forks of this process, which would wait for threads that they lack.

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from kernels import attention
from tests.kernels.content_record import ContentRecord
from tests.kernels.remembered_tests import RememberedTests

TESTS = Path(__file__).with_name("interpreted")
# numpy warns about the interpreter's use of scalars and infinities.
OPTIONS = ("-q", "-p", "no:cacheprovider", "-o", "timeout=0", f"--confcutdir={TESTS}",
           "-W", "ignore::DeprecationWarning", "-W", "ignore::RuntimeWarning")  # fmt: skip


class _Kept:
    """The scope of replaced functions that stay replaced."""

    def restore(self) -> None:
        """Restores nothing."""


def replace_once() -> None:
    """The interpreter's functions replace those of Triton's language once, instead of at each call of any function,
    which took a third of the time: nothing in this process compiles."""
    replace_functions: Callable[[Any], object] = interpreter._patch_lang
    done: set[tuple[object, ...]] = set()

    def replaced(function: Any) -> _Kept:
        modules = tuple(module for module in (tl, tl.core) if module in function.__globals__.values())
        if modules not in done:
            replace_functions(function)
            done.add(modules)
        return _Kept()

    interpreter._patch_lang = replaced


def make_types_once() -> None:
    """The interpreter makes a table of numpy's types for each operation, and the type of each shape, which nothing
    reads: together a third of the time."""
    numpy_type: Callable[[Any], object] = interpreter._get_np_dtype
    found: dict[str, object] = {}

    def kept(kind: Any) -> object:
        name = kind.scalar.name
        if name not in found:
            found[name] = numpy_type(kind)
        return found[name]

    def begin(values: Any, args: Any, type: Any = None) -> None:
        values.values = list(args)
        if type is not None:
            values.type = type if isinstance(type, tl.core.tuple_type) else tl.core.tuple_type(type)

    when_read = cached_property(lambda values: tl.core._type_for_tuple_values(values.values))
    when_read.__set_name__(tl.core.tuple, "type")
    interpreter._get_np_dtype = kept
    tl.core.tuple.type, tl.core.tuple.__init__ = when_read, begin


class Surroundings:
    """What surrounds each test. seed: of its random values; if None, a fresh one."""

    def __init__(self, seed: int | None) -> None:
        self.seed = seed

    @pytest.fixture(autouse=True)
    def values(self) -> None:
        """Random values that can be repeated."""
        seed = random.SystemRandom().getrandbits(32) if self.seed is None else self.seed
        random.seed(seed)
        torch.manual_seed(seed)
        print(f"repeat with --seed {seed}")

    @pytest.fixture(autouse=True)
    def few_programs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A GPU's 264 programs and more divide the keys of a step; of the keys of these steps most had none."""
        served = attention.config_for
        monkeypatch.setattr(
            attention, "config_for", lambda *of, **more: replace(served(*of, **more), split_programs=20)
        )


def main() -> int:
    """Run the tests; pytest's exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fresh", action="store_true", help="run all tests and record them")
    parser.add_argument("--seed", type=int, help="of the random values of each test")
    parser.add_argument("-k", default="", help="expression of names: the tests to run, which are not recorded")
    arguments = parser.parse_args()
    replace_once()
    make_types_once()
    record = ContentRecord(TESTS / "passed.txt", arguments.fresh)
    remembered = RememberedTests(record, TESTS.parents[2], Path(__file__))
    plugins = [Surroundings(arguments.seed), *([] if arguments.k else [remembered])]
    files = sorted(map(str, TESTS.glob("[!_]*.py")))  # A pattern in python_files would have pytest rewrite libraries.
    return pytest.main([*OPTIONS, "-k", arguments.k, *files], plugins=plugins)


if __name__ == "__main__":
    sys.exit(main())
