"""Entry point of the `weft` command: chooses how gRPC polls, then imports the command. Imports no gRPC before that."""

import importlib

from services.process import choose_polling


def main() -> None:
    """Run the `weft` command. A program that imports `weft.Client` chooses for itself how gRPC polls."""
    choose_polling()
    importlib.import_module("weft.cli.app").app()
