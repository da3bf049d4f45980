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


class CaFileError(ValueError):
    """The file of authorities cannot be read; the message is one line."""


def open_channel(address: str, options: Sequence[tuple[str, Any]] = (), ca_file: str = "") -> aio.Channel:
    """A channel to a gateway. `ca_file` takes precedence over WEFT_CA_FILE. Raises CaFileError."""
    if not address.startswith(TLS_PREFIX):
        return aio.insecure_channel(address, options=list(options))
    credentials = grpc.ssl_channel_credentials(authorities(address, ca_file))
    return aio.secure_channel(address.removeprefix(TLS_PREFIX).rstrip("/"), credentials, options=list(options))


def authorities(address: str, ca_file: str = "") -> bytes | None:
    """The authorities that a server at this address is checked against, in PEM; None: those of the system, or none.

    Raises CaFileError.
    """
    path = ca_file or os.environ.get(CA_FILE, "")
    if not path or not address.startswith(TLS_PREFIX):
        return None
    name = "ca_file" if ca_file else CA_FILE
    try:
        pem = Path(path).read_bytes()
    except OSError as error:
        raise CaFileError(f"{name}: {path}: {error.strerror}") from None
    if b"-----BEGIN CERTIFICATE-----" not in pem:
        raise CaFileError(f"{name}: {path}: not a PEM file with a certificate")
    return pem
