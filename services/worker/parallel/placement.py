"""Which cores each rank uses: ranks are spread over the NUMA nodes of the machine. Knows sysfs, no model."""

import os
from pathlib import Path

_NODES = Path("/sys/devices/system/node")


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


def pin(cores: set[int]) -> None:
    """Pin all threads of this process to these cores; to none: leave them as they are."""
    for task in os.listdir("/proc/self/task") if cores else ():
        os.sched_setaffinity(int(task), cores)


def describe(ranks: int, nodes: list[set[int]]) -> str:
    """One line for people."""
    if len(nodes) < 2:
        return f"{ranks} ranks on one NUMA node, not pinned"
    places = [f"{rank} on {_short(cores_of(rank, ranks, nodes))}" for rank in range(ranks)]
    return f"{ranks} ranks pinned to the cores of {len(nodes)} NUMA nodes: {', '.join(places)}"


def _short(cores: set[int]) -> str:
    return f"{min(cores)}-{max(cores)}"
