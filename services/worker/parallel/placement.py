"""Which cores each rank uses: those beside its GPU, or those of a NUMA node of the machine. Knows sysfs, no model."""

import os
from collections.abc import Sequence
from pathlib import Path

_NODES = Path("/sys/devices/system/node")
_PCI = Path("/sys/bus/pci/devices")


def numa_nodes(nodes_at: Path = _NODES) -> list[set[int]]:
    """The cores of each NUMA node that this process may use, without nodes of which it may use none; empty where the
    system does not say."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    lists = sorted(nodes_at.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name.removeprefix("node")))
    nodes = [read_cores(path.read_text()) & allowed for path in lists]
    return [cores for cores in nodes if cores]


def read_cores(text: str) -> set[int]:
    """The cores of a list such as 0-3,8-11."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def cores_of(rank: int, ranks: int, nodes: list[set[int]]) -> set[int]:
    """The cores that a rank is pinned to; empty: none, because there is one node alone. Neighbouring ranks, which
    exchange most, share a node."""
    return nodes[rank * len(nodes) // ranks] if len(nodes) > 1 else set()


def cores_beside(gpu: str, devices_at: Path = _PCI) -> set[int]:
    """The cores of the NUMA node of a GPU, by its PCI address; empty: none, because all cores that this process may use
    are of this node, or the system does not say."""
    try:
        beside = read_cores((devices_at / gpu / "local_cpulist").read_text())
    except OSError:
        return set()
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    return set() if allowed <= beside else allowed & beside


def cores_of_ranks(ranks: int, gpus: Sequence[str] = ()) -> list[set[int]]:
    """The cores that each rank is pinned to; empty: none. gpus: the PCI addresses of their GPUs, if they have any."""
    if gpus:
        return [cores_beside(gpu) for gpu in gpus]
    nodes = numa_nodes()
    return [cores_of(rank, ranks, nodes) for rank in range(ranks)]


def pin(cores: set[int]) -> None:
    """Pin all threads of this process to these cores; to none: leave them as they are."""
    for task in os.listdir("/proc/self/task") if cores else ():
        os.sched_setaffinity(int(task), cores)


def describe(cores: Sequence[set[int]], gpus: Sequence[str] = ()) -> str:
    """One line for people. cores: of each rank."""
    where = [f"{rank} on {_short(each)}" if each else f"{rank} not pinned" for rank, each in enumerate(cores)]
    if gpus:
        where = [f"{each}, GPU {gpu}" for each, gpu in zip(where, gpus, strict=True)]
    elif not any(cores):
        return f"{len(cores)} ranks on one NUMA node, not pinned"
    return f"{len(cores)} ranks: {'; '.join(where)}"


def _short(cores: set[int]) -> str:
    return f"cores {min(cores)}-{max(cores)}"
