"""Compilations of kernels, remembered by the content of their source.

A kernel with the same source, arguments, options, target and version of Triton compiles to the same program. The files
in `compiled/` hold what the tests ask of each program, one line each. A call whose line exists compiles nothing, but
for a random sample; any other call compiles. `make compile-kernels` compiles everything and writes the files anew.
"""

import hashlib
import random
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend

FOLDER = Path(__file__).with_name("compiled")
SAMPLE = 0.05
"""Share of the remembered compilations that a run repeats, and compares."""


@dataclass(frozen=True)
class Compiled:
    """What the tests ask of a compiled kernel.

    shared: bytes of shared memory of one program. mma_sync, wgmma: products of tensor cores in its PTX.
    """

    shared: int
    mma_sync: int
    wgmma: int


class CompileRecord:
    """The compilations of one capability and type. fresh: whether to compile everything, whatever the file holds."""

    def __init__(self, name: str, fresh: bool = False) -> None:
        self.file = FOLDER / f"{name}.txt"
        self.fresh = fresh
        self.known = {} if fresh or not self.file.exists() else dict(map(_parsed, self.file.read_text().splitlines()))
        self.used: dict[str, Compiled] = {}
        self.compiled = 0
        """Kernels that were compiled, not remembered."""

    def compile(self, source: Any, target: GPUTarget, options: dict[str, Any]) -> Compiled:
        """Compile, or remember, a kernel. AssertionError: it compiles to something else than what is remembered."""
        key = f"{source.name} {_content_hash(source, target, options)}"
        result = self.known.get(key)
        if result is None or random.random() < SAMPLE:
            kernel = triton.compile(source, target=target, options=options)
            assert kernel.asm["cubin"]
            ptx = kernel.asm["ptx"]
            found = Compiled(kernel.metadata.shared, ptx.count("mma.sync"), ptx.count("wgmma.mma_async"))
            assert result in (None, found), f"{key}: {result} is remembered, {found} was compiled"
            result = found
            self.compiled += 1
        self.used[key] = result
        return result

    def write(self) -> None:
        """Replace the file by the compilations of this run."""
        lines = (" ".join(map(str, (key, *astuple(result)))) for key, result in sorted(self.used.items()))
        self.file.parent.mkdir(exist_ok=True)
        self.file.write_text("".join(f"{line}\n" for line in lines))


def _parsed(line: str) -> tuple[str, Compiled]:
    name, content, *figures = line.split()
    return f"{name} {content}", Compiled(*map(int, figures))


def _content_hash(source: Any, target: GPUTarget, options: dict[str, Any]) -> str:
    """Hash of what decides about a program: the kernel and what it calls, arguments, options, target, compiler."""
    backend = make_backend(target)
    parsed = backend.parse_options(options | source.parse_options())
    content = f"{triton.__version__} {source.hash()} {backend.hash()} {parsed.hash()}"
    return hashlib.sha256(content.encode()).hexdigest()[:24]
