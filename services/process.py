"""The first lines of our processes, before gRPC is there: how it waits is decided when it is imported."""

import importlib
import os
from collections.abc import MutableMapping

POLLING = "-event_engine_client,-event_engine_listener"
"""Experiments of gRPC that our processes do without. By its event engine a message passes three threads and a contended
lock before the thread that knows Python hears of it; without, that thread polls the connections itself."""


def run(module: str) -> None:
    """Imports a service's module and calls its `run`, which takes nothing and returns at the service's end."""
    poll(os.environ)
    importlib.import_module(module).run()


def weft() -> None:
    """The `weft` command. Who imports the client into a program of their own decides how gRPC waits there."""
    poll(os.environ)
    importlib.import_module("client.cli").app()


def poll(environment: MutableMapping[str, str]) -> None:
    """Lets processes that begin with this environment poll, unless it says how they shall wait."""
    environment.setdefault("GRPC_EXPERIMENTS", POLLING)
