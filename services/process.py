"""The first lines of our processes, before gRPC is there: how it waits is decided when it is imported."""

import importlib
import os

POLLING = "-event_engine_client,-event_engine_listener"
"""Experiments of gRPC that our processes do without. By its event engine a message passes three threads and a contended
lock before the thread that knows Python hears of it; without, that thread polls the connections itself."""


def run(module: str) -> None:
    """Imports a process's module and calls its `run`, which takes nothing and returns at the process's end."""
    _poll()
    importlib.import_module(module).run()


def weft() -> None:
    """The `weft` command. Who imports the client into a program of their own decides how gRPC waits there."""
    _poll()
    importlib.import_module("client.cli").app()


def _poll() -> None:
    """Unless the environment says how gRPC shall wait."""
    os.environ.setdefault("GRPC_EXPERIMENTS", POLLING)
