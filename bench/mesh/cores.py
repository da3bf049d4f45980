"""Divides the cores of a machine between a mesh and its clients, so that neither takes the other's time."""

import os
from pathlib import Path

_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def divided(count: int, of: int = 0) -> tuple[set[int], set[int]]:
    """`count` of the cores that a process may use (0: this one), and the others. Raises SystemExit if none is left.

    Threads of one physical core stay on one side as far as `count` allows.
    """
    ours = sorted(os.sched_getaffinity(of), key=lambda core: (_first_sibling(core), core))
    if not 0 < count < len(ours):
        raise SystemExit(f"{count} cores of {len(ours)} leave none to the other processes")
    return set(ours[:count]), set(ours[count:])


def _first_sibling(core: int) -> int:
    """The least number of a core that is a thread of the same physical core."""
    file = Path(_SIBLINGS.format(core))
    text = file.read_text().strip() if file.exists() else str(core)
    return min(int(part.split("-")[0]) for part in text.split(","))
