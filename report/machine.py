"""Describes the machine of a measurement: hardware, versions, load. Knows no figures."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

_PACKAGES = ("grpcio", "protobuf", "torch", "transformers", "triton")


def describe() -> dict[str, str]:
    """Names and values for people, in the order of printing."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts = {
        "cpu": f"{_cpu()}, {cores} cores",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "gpu": gpu(),
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "packages": ", ".join(f"{name} {version(name)}" for name in _PACKAGES if version(name)),
        "load average": load_average(),
        "commit": _commit(),
    }
    return {name: value for name, value in facts.items() if value}


def load_average() -> str:
    """The load average of the last minute and of the last five."""
    return " / ".join(f"{value:.1f}" for value in os.getloadavg()[:2])


def version(package: str) -> str:
    """The version of a package; empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def gpu() -> str:
    """The GPUs with the names that their driver gives; empty without one."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return "; ".join(line.strip() for line in answer.splitlines())


def need_gpu() -> None:
    """Ends the program with one line if there is no NVIDIA GPU."""
    if not gpu():
        sys.exit("this benchmark needs an NVIDIA GPU, and nvidia-smi finds none")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _commit() -> str:
    folder = Path(__file__).resolve().parents[1]
    try:
        query = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
        return subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
