"""From the folder of an adapter to one that the engine can serve. Knows the loader and a runner's pages, no job."""

import os
from collections.abc import Callable
from pathlib import Path

from services.worker.errors import CheckpointError
from services.worker.job import Adapter
from services.worker.runners.base import PreparedPages

AdapterReader = Callable[[str, str], Adapter]
"""reader(name, folder) reads an adapter, in tenths of a second; any thread may call it. Raises CheckpointError."""


def adapter_reader(pages: PreparedPages | None, most_rank: int) -> AdapterReader:
    """The reader of adapters for an engine with these pages."""

    def read(name: str, place: str) -> Adapter:
        if pages is None:
            raise CheckpointError("this worker serves no adapters (MAX_LORAS is 0, or its engine has none)")
        from services.worker.loader.adapter import read_adapter  # imports torch, which not every engine needs

        stored = read_adapter(_folder(place), most_rank)
        weights, nbytes = pages.prepare(stored.modules)
        return Adapter(name, stored.fingerprint, stored.rank, nbytes, weights)

    return read


def _folder(place: str) -> Path:
    """The folder of this name. Raises CheckpointError if there is none."""
    if "\0" in place:
        raise CheckpointError("the name of the folder has a zero byte")
    try:
        folder = Path(place).expanduser()
    except RuntimeError:
        raise CheckpointError("the name of the folder begins with the home of an unknown user") from None
    if not os.path.isdir(folder):  # False for any name that no folder can have
        raise CheckpointError(f"the worker sees no folder at {place}")
    return folder
