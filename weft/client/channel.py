"""Opens the connection of a client to a gateway: plain to host:port, with TLS to https://host:port."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc import aio

TLS_PREFIX = "https://"
CA_FILE = "WEFT_CA_FILE"
"""Names the PEM file of the authorities that a gateway's certificate is checked against; unset: those of the system."""


def open_channel(address: str, options: Sequence[tuple[str, Any]] = (), ca_file: str = "") -> aio.Channel:
    """A channel to a gateway. `ca_file` takes precedence over WEFT_CA_FILE. Raises OSError if it cannot be read."""
    if not address.startswith(TLS_PREFIX):
        return aio.insecure_channel(address, options=list(options))
    path = ca_file or os.environ.get(CA_FILE, "")
    credentials = grpc.ssl_channel_credentials(Path(path).read_bytes() if path else None)
    return aio.secure_channel(address.removeprefix(TLS_PREFIX).rstrip("/"), credentials, options=list(options))
