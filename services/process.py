"""The start of a process, before gRPC is imported, and the end of a process that cannot serve.

gRPC reads its settings when it is imported, so the entry point makes them first.
"""

import importlib
import importlib.util
import os
import sys
from typing import NoReturn

POLLING = "-event_engine_client,-event_engine_listener"
"""Experiments of gRPC that are switched off. With its event engine a message passes three threads and a contended lock
before it reaches the Python thread; without it, that thread polls the connections itself."""


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
