"""Entry point of the `weft` command: makes the settings of gRPC, then imports the command, and gRPC with it."""

import importlib

from services.process import prepare_grpc


def main() -> None:
    """Run the `weft` command. A program that imports `weft.Client` makes these settings itself."""
    prepare_grpc()
    importlib.import_module("weft.cli.app").app()
