"""Resources of this machine. Knows the operating system, nothing of the project."""

import hashlib
import os
from pathlib import Path


def available_memory(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory that this process may still use: the machine's, or less in a container with a limit.

    The cgroup counts cached pages of files (`inactive_file`), such as a checkpoint's, as used; they are reclaimable and
    so count as available here.
    """
    free = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = [int(fields["MemAvailable"].split()[0]) * 1024]
    limit, used, kinds = (group / f"memory.{name}" for name in ("max", "current", "stat"))
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        of = dict(line.split() for line in kinds.read_text().splitlines()) if kinds.exists() else {}
        free.append(int(limit.read_text()) - int(used.read_text()) + int(of.get("inactive_file", 0)))
    return max(min(free), 0)


def identity(root: Path = Path("/")) -> str:
    """The same for all processes of this host since it was started, and for no other: a digest of the ids of boot and
    machine; empty if the system does not tell them. Containers of one host may have different ones."""
    boot, machine = (root / name for name in ("proc/sys/kernel/random/boot_id", "etc/machine-id"))
    if not boot.exists():
        return ""
    known = boot.read_text().strip() + (machine.read_text().strip() if machine.exists() else "")
    return hashlib.sha256(b"weft/host/1\0" + known.encode()).hexdigest()


def available_cores(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may use: those of its affinity, or fewer in a container with a limit; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = group / "cpu.max"
    quota, _, period = limit.read_text().strip().partition(" ") if limit.exists() else ("max", "", "")
    if quota.isdecimal() and period.isdecimal():
        cores = min(cores, -(-int(quota) // int(period)))
    return max(1, cores)
