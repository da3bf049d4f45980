"""The start of a process: before gRPC is imported, and once it serves; and the end of a process that cannot serve.

gRPC reads its settings when it is imported, so the entry point makes them first.
"""

import gc
import importlib
import importlib.util
import os
import sys
from typing import NoReturn

POLLING = "-event_engine_client,-event_engine_listener"
"""Experiments of gRPC that are switched off. With its event engine a message passes three threads and a contended lock
before it reaches the Python thread; without it, that thread polls the connections itself."""

_YOUNG = 1_000
"""New objects after which the garbage collector looks through them, for 0.3 to 1 ms."""
_OLDER = 10_000
"""Such looks after which it also looks through those that were alive: for 100 ms where 1,000 requests wait. Few of them
are garbage by then."""


def run(module: str) -> None:
    """Imports the main module of a process and calls its `run()`, which returns when the process ends.

    If a package is missing that the extra of the service's name installs, the process ends with one line that names the
    extra.
    """
    prepare_grpc()
    try:
        importlib.import_module(module).run()
    except ModuleNotFoundError as error:
        package, service = (error.name or "").partition(".")[0], module.split(".")[1]
        installed = package and importlib.util.find_spec(package) is not None
        if installed or not module.startswith("services."):
            raise
        refuse_to_serve(f"the {service} needs {package}, which is not installed: pip install 'weft[{service}]'")


def refuse_to_serve(reason: str) -> NoReturn:
    """Ends the process with one line on stderr and exit code 78 (EX_CONFIG): a supervisor must not restart it."""
    print(f"weft: {reason}", file=sys.stderr)
    sys.exit(os.EX_CONFIG)


def prepare_grpc() -> None:
    """Switches the experiments and the handlers of forks off unless the environment has set their variables.

    uvloop forks each child before the child becomes another program. gRPC's handlers would start its threads again in
    between, which write to the connections of the parent: its clients received bytes twice.
    """
    os.environ.setdefault("GRPC_EXPERIMENTS", POLLING)
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


def keep_pauses_short() -> None:
    """Sets garbage collection for a process that serves from now on: many short pauses instead of a few long ones.

    Python frees most objects as soon as nothing refers to them. The collector looks for those that refer to one
    another, and stops all threads meanwhile: 0.3 us for an object in the processor's caches, 1 to 2 us for another
    one. Requests that wait or run are tens of thousands of objects, and none of them is garbage. The objects that there
    are now live as long as the process and are not looked through again: 150 ms for the imports of a worker.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _OLDER)
