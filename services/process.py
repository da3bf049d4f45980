"""The first lines of every service's process, before gRPC is there: how it waits is decided when it is imported."""

import importlib
import os

POLLING = "-event_engine_client,-event_engine_listener"
"""Experiments of gRPC that a service does without. By its event engine a message passes three threads and a contended
lock before the thread that knows Python hears of it; without, that thread polls the connections itself."""


def run(module: str) -> None:
    """Imports a service's module and calls its `run`, which takes nothing and returns at the service's end."""
    os.environ.setdefault("GRPC_EXPERIMENTS", POLLING)
    importlib.import_module(module).run()
