"""Who a process of a mesh is: its role, its certificate and the mesh secret. Knows TLS, no service and no method.

With a mesh secret (one machine) or mounted certificates (several), every connection between services uses TLS in both
directions: a client accepts a server of the expected role alone, a server accepts only certificates of its mesh and
reads the caller's role from them. Without either, connections are plain and callers are not authenticated.
"""

import hashlib
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import grpc

from services.process import refuse_to_serve
from services.security.roles import Role, role_name

LEAST_SECRET_CHARS = 32
_MOST_FILE_BYTES = 1 << 20


class IdentitySettings(Protocol):
    """The settings that an identity is made of."""

    @property
    def mesh_secret_file(self) -> str:
        """The file with the mesh secret, or empty."""

    @property
    def tls_ca(self) -> str:
        """The PEM file of the authority, or empty."""

    @property
    def tls_cert(self) -> str:
        """The PEM file of the certificate, or empty."""

    @property
    def tls_key(self) -> str:
        """The PEM file of its key, or empty."""

    def secret(self) -> str:
        """The mesh secret from the environment, or empty."""


VARIABLES = ("WEFT_MESH_SECRET", "WEFT_MESH_SECRET_FILE", "WEFT_TLS_CA", "WEFT_TLS_CERT", "WEFT_TLS_KEY")
"""The variables that an identity is made of."""


@dataclass(frozen=True, slots=True)
class _Named:
    """The part of the settings that an identity is made of, without the other settings."""

    mesh_secret: str = field(repr=False)
    mesh_secret_file: str
    tls_ca: str
    tls_cert: str
    tls_key: str

    def secret(self) -> str:
        """The mesh secret, or empty."""
        return self.mesh_secret


def named(environment: Mapping[str, str]) -> IdentitySettings:
    """The settings that these variables describe, for programs that read no others."""
    return _Named(*(environment.get(name, "") for name in VARIABLES))


class IdentityError(Exception):
    """The settings do not describe an identity. The message is one line, and contains no secret."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a process presents and accepts, in PEM."""

    authority: bytes
    certificate: bytes
    key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Identity:
    """A role, and what proves it."""

    role: Role
    secret: bytes = field(default=b"", repr=False)
    """The mesh secret; empty for none."""
    credentials: Credentials | None = None
    """None: connections are plain."""

    @property
    def protected(self) -> bool:
        """Connections are encrypted, and both ends authenticated."""
        return self.credentials is not None

    def subkey(self, purpose: bytes) -> bytes:
        """32 bytes derived from the mesh secret for one purpose; empty without a secret."""
        return hmac.new(self.secret, b"weft/subkey/1\0" + purpose, hashlib.sha256).digest() if self.secret else b""

    def server(self) -> grpc.ServerCredentials | None:
        """The credentials of a port for the mesh: callers must present a certificate. None for a plain port."""
        own = self.credentials
        if own is None:
            return None
        return grpc.ssl_server_credentials([(own.key, own.certificate)], own.authority, require_client_auth=True)

    def client(self) -> grpc.ChannelCredentials | None:
        """The credentials of a connection to another service; None for a plain one."""
        own = self.credentials
        if own is None:
            return None
        return grpc.ssl_channel_credentials(own.authority, own.key, own.certificate)


NOBODY = Identity("admin")
"""Presents nothing and accepts everybody."""
_current: Identity = NOBODY


def current() -> Identity:
    """The identity of this process; NOBODY until `assume`."""
    return _current


def assume(identity: Identity) -> Identity:
    """Makes this the identity of the process: its connections use it unless they name another."""
    global _current
    _current = identity
    return identity


def setup(role: Role, settings: IdentitySettings) -> Identity:
    """Assumes the identity that the settings describe. Ends the process with one line on stderr if they are wrong."""
    try:
        return assume(load(role, settings))
    except IdentityError as error:
        refuse_to_serve(str(error))


def load(role: Role, settings: IdentitySettings) -> Identity:
    """The identity that the settings describe. Raises IdentityError."""
    secret = _secret(settings)
    files = {"WEFT_TLS_CA": settings.tls_ca, "WEFT_TLS_CERT": settings.tls_cert, "WEFT_TLS_KEY": settings.tls_key}
    if not any(files.values()):
        return of_secret(role, secret) if secret else Identity(role)
    for name, path in files.items():
        if not path:
            raise IdentityError(f"{name} is required: certificates need all of {', '.join(files)}")
    if not secret:
        raise IdentityError("WEFT_MESH_SECRET_FILE is required with certificates: it keys cached values and tenants")
    credentials = Credentials(*(read(path, name) for name, path in files.items()))
    identity = Identity(role, secret, credentials)
    _check(identity)
    return identity


def of_secret(role: Role, secret: bytes) -> Identity:
    """The identity of a role in the mesh with this secret, with a new certificate of the authority derived from it."""
    from services.security.certificates import Authority  # Costs tenths of a second, and only some processes need it.

    authority = Authority.derived(secret)
    pair = authority.issue([role_name(role)])
    return Identity(role, secret, Credentials(authority.certificate, pair.certificate, pair.key))


def read(path: str, setting: str) -> bytes:
    """The contents of a file that a setting names. Raises IdentityError."""
    try:
        with Path(path).open("rb") as file:
            return file.read(_MOST_FILE_BYTES)
    except OSError as error:
        raise IdentityError(f"{setting}: {error.strerror}") from None


def _secret(settings: IdentitySettings) -> bytes:
    """The mesh secret, from the environment or its file; empty for none. Raises IdentityError."""
    given, name = settings.secret().encode(), "WEFT_MESH_SECRET"
    if settings.mesh_secret_file:
        if given:
            raise IdentityError("WEFT_MESH_SECRET and WEFT_MESH_SECRET_FILE are both set")
        given, name = read(settings.mesh_secret_file, "WEFT_MESH_SECRET_FILE").strip(), "WEFT_MESH_SECRET_FILE"
        if not given:
            raise IdentityError("WEFT_MESH_SECRET_FILE is empty")
    if given and len(given) < LEAST_SECRET_CHARS:
        raise IdentityError(f"{name}: a secret has at least {LEAST_SECRET_CHARS} characters")
    return given


def _check(identity: Identity) -> None:
    """Raises IdentityError for files that TLS does not accept, before the first connection does."""
    makers: tuple[Callable[[], object], ...] = (identity.client, identity.server)
    own = identity.credentials
    assert own is not None
    for setting, data, mark in (
        ("WEFT_TLS_CA", own.authority, b"CERTIFICATE"),
        ("WEFT_TLS_CERT", own.certificate, b"CERTIFICATE"),
        ("WEFT_TLS_KEY", own.key, b"PRIVATE KEY"),
    ):
        if mark not in data:
            raise IdentityError(f"{setting}: not a PEM file with a {mark.decode().lower()}")
    for make in makers:
        try:
            make()
        except Exception:
            raise IdentityError("WEFT_TLS_CERT and WEFT_TLS_KEY are no valid certificate and key") from None
