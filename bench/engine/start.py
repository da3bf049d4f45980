"""Seconds until a worker's engine is ready on this GPU: kernels compiled one after the other, in parallel, and before.

    python -m bench.engine.start [--model random:llama-3.1-8b] [--formats bf16 fp8] [--only serial parallel warm]

Each start is a process of its own. The first two begin with an empty cache of kernels, the third with that of the
second. `compiled here` counts kernels that the engine's process had to compile itself.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODES = ("serial", "parallel", "warm")
QUANTIZE = {"bf16": None, "fp8": "fp8", "int4": "int4", "int8": "int8"}


def started(model: str, quantize: Any, compile_ahead: bool) -> dict[str, Any]:
    """Start an engine in this process -> seconds of its phases, and kernels that were compiled here."""
    import triton

    from services.worker.build.choose import build_engine
    from services.worker.loader.checkpoint import locate
    from services.worker.options import EngineOptions

    compiled: list[str] = []
    phases: dict[str, float] = {}
    last, since = "", time.monotonic()

    def listen(src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        if not cache_hit:
            compiled.append(src.name)

    def progress(phase: str, done: int, total: int) -> None:
        nonlocal last, since
        now = time.monotonic()
        phases[last] = phases.get(last, 0.0) + now - since
        last, since = phase, now

    triton.knobs.compilation.listener = listen
    options = EngineOptions(
        engine="gpu", max_batch_size=256, step_tokens=8192, chunk_tokens=200, quantize=quantize,
        kv_dtype="fp8" if quantize == "fp8" else "auto",
    )  # fmt: skip
    began = time.monotonic()
    build_engine(locate(model), options, progress, compile_ahead=compile_ahead)
    progress("", 0, 0)
    phases.pop("", None)
    return {"engine s": time.monotonic() - began, "phases s": phases, "compiled here": compiled}


def measured(mode: str, model: str, format: str, cache: Path) -> dict[str, Any]:
    """As `started`, in a new process with this cache; with the seconds of the whole process."""
    began = time.monotonic()
    command = [sys.executable, "-m", "bench.engine.start", "--one", mode, "--model", model, "--formats", format]
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    measures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"process s": time.monotonic() - began, **measures}


def main() -> None:
    """Prints a line for each start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:llama-3.1-8b")
    parser.add_argument("--formats", nargs="+", choices=QUANTIZE, default=["bf16"])
    parser.add_argument("--only", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--one", choices=MODES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(started(given.model, QUANTIZE[given.formats[0]], given.one != "serial")))
        sys.stdout.flush()
        os._exit(0)
    for format in given.formats:
        with tempfile.TemporaryDirectory() as folder:
            for mode in (each for each in MODES if each in given.only):
                cache = Path(folder) / ("serial" if mode == "serial" else "parallel")
                measures = measured(mode, given.model, format, cache)
                phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in measures["phases s"].items())
                print(
                    f"{given.model} {format} {mode}: engine ready in {measures['engine s']:.1f} s ({phases}), process "
                    f"{measures['process s']:.1f} s, {len(measures['compiled here'])} kernels compiled here"
                    + (f": {', '.join(sorted(set(measures['compiled here'])))}" if mode != "serial" else ""),
                    flush=True,
                )


if __name__ == "__main__":
    main()
