"""The first lines of our processes, before gRPC is there: how it waits is decided when it is imported. And the last one
of a process that cannot serve."""

import importlib
import importlib.util
import os
import sys
from typing import NoReturn

POLLING = "-event_engine_client,-event_engine_listener"
"""Experiments of gRPC that our processes do without. By its event engine a message passes three threads and a contended
lock before the thread that knows Python hears of it; without, that thread polls the connections itself."""


def run(module: str) -> None:
    """Imports a process's module and calls its `run`, which takes nothing and returns at the process's end. A package
    that is not installed, of those that the extra of a service's own name brings, is told in one line."""
    choose_polling()
    try:
        importlib.import_module(module).run()
    except ModuleNotFoundError as error:
        package, service = (error.name or "").partition(".")[0], module.split(".")[1]
        installed = package and importlib.util.find_spec(package) is not None
        if installed or not module.startswith("services."):
            raise
        refuse_to_serve(f"the {service} needs {package}, which is not installed: pip install 'weft[{service}]'")


def refuse_to_serve(reason: str) -> NoReturn:
    """Ends the process with one line on stderr and the exit code that tells a supervisor not to try again."""
    print(f"weft: {reason}", file=sys.stderr)
    sys.exit(os.EX_CONFIG)


def choose_polling() -> None:
    """Unless the environment says how gRPC shall wait."""
    os.environ.setdefault("GRPC_EXPERIMENTS", POLLING)
