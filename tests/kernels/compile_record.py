"""Compilations of kernels, remembered by the content of their source.

A kernel with the same source, arguments, options, target and version of Triton compiles to the same program. The files
in `compiled/` hold what the tests ask of each program, one line each. A call whose line exists compiles nothing, but
for a random sample; any other call compiles.
"""

import hashlib
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend

from tests.kernels.content_record import ContentRecord, key_of

FOLDER = Path(__file__).with_name("compiled")
SAMPLE = 0.01
"""Share of the remembered compilations that a run repeats, and compares."""


@dataclass(frozen=True)
class Compiled:
    """What the tests ask of a compiled kernel.

    shared: bytes of shared memory of one program. mma_sync, wgmma: products of tensor cores in its PTX.
    """

    shared: int
    mma_sync: int
    wgmma: int


class CompileRecord(ContentRecord):
    """The compilations of one capability and type. fresh: whether to compile everything, whatever the file holds."""

    def __init__(self, name: str, fresh: bool = False) -> None:
        super().__init__(FOLDER / f"{name}.txt", fresh)
        self.compiled = 0
        """Kernels that were compiled, not remembered."""

    def compile(self, source: Any, target: GPUTarget, options: dict[str, Any]) -> Compiled:
        """Compile, or remember, a kernel. AssertionError: it compiles to something else than what is remembered."""
        key = key_of(source.name, _content_hash(source, target, options))
        result = self.known.get(key)
        if result is None or random.random() < SAMPLE:
            kernel = triton.compile(source, target=target, options=options)
            assert kernel.asm["cubin"]
            ptx = kernel.asm["ptx"]
            found = f"{kernel.metadata.shared} {ptx.count('mma.sync')} {ptx.count('wgmma.mma_async')}"
            assert result in (None, found), f"{key}: {result} is remembered, {found} was compiled"
            result = found
            self.compiled += 1
        self.used[key] = result
        return Compiled(*map(int, result.split()))


def _content_hash(source: Any, target: GPUTarget, options: dict[str, Any]) -> str:
    """Hash of what decides about a program: the kernel and what it calls, arguments, options, target, compiler."""
    backend = make_backend(target)
    parsed = backend.parse_options(options | source.parse_options())
    content = f"{triton.__version__} {source.hash()} {backend.hash()} {parsed.hash()}"
    return hashlib.sha256(content.encode()).hexdigest()[:24]
