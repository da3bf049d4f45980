"""Entry point of the `weft` command: makes the settings of gRPC, then imports the command, and gRPC with it."""

import importlib
import os
import sys

from services.process import prepare_grpc


def main() -> None:
    """Run the `weft` command. A program that imports `weft.Client` makes these settings itself.

    Ends with one line for a file that cannot be read or written, standard output included, and with exit code 130 for
    Ctrl-C at any moment.
    """
    _open_closed_streams()
    try:
        prepare_grpc()
        importlib.import_module("weft.cli.app").app()
    except OSError as error:
        _drop_output()
        name = f"{error.filename}: " if error.filename else ""
        sys.exit(f"weft: {name}{error.strerror or error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _open_closed_streams() -> None:
    """Opens standard streams that the caller has closed, so that no other file takes their descriptors."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (open as long as the process)


def _drop_output() -> None:
    """Lets the end of the process write nothing: what is left may be what could not be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
