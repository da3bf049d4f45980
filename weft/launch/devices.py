"""The GPUs of this machine and how workers share them. Knows their numbers, nothing of drivers or models."""

import shutil
import subprocess
from collections.abc import Mapping, Sequence

VISIBLE = "CUDA_VISIBLE_DEVICES"


def gpus(environment: Mapping[str, str]) -> list[str]:
    """The names of the GPUs that processes with this environment may use, as CUDA_VISIBLE_DEVICES has them."""
    if VISIBLE in environment:
        return [name for name in environment[VISIBLE].split(",") if name]
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        listed = subprocess.run([program, "--list-gpus"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [str(number) for number in range(sum(line.startswith("GPU ") for line in listed.splitlines()))]


def visible_to(worker: int, each: int, names: Sequence[str]) -> dict[str, str]:
    """The environment of the worker with this number, from 0, of workers that compute on `each` GPUs. Its own come
    first; it sees the others, too, because it may copy blocks out of their memory. Empty if there is one at most."""
    if len(names) < 2:
        return {}
    first = worker * each % len(names)
    return {VISIBLE: ",".join([*names[first:], *names[:first]])}
