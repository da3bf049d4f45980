"""The certificate of the public door, for gRPC and HTTP, and how a local probe checks it. Knows TLS alone.

The files are read again when they change, so that a renewed certificate needs no restart.
"""

import os
import ssl

import grpc

from services.security.identity import IdentityError, read

CERT, KEY = "WEFT_GATEWAY_TLS_CERT", "WEFT_GATEWAY_TLS_KEY"


class DoorCertificate:
    """A certificate chain and its key, in PEM files."""

    def __init__(self, certificate: str, key: str) -> None:
        """Paths of the files. Raises IdentityError."""
        for name, path in ((CERT, certificate), (KEY, key)):
            if not path:
                raise IdentityError(f"{name} is required: TLS at the public door needs both {CERT} and {KEY}")
        self._paths = certificate, key
        self._pair()
        self._stamps = self._stamp()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        """For HTTP servers."""
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._check()
        self._load()
        self.context.sni_callback = self._on_handshake

    def grpc(self) -> grpc.ServerCredentials:
        """For gRPC servers. Callers need no certificate."""
        seen = self._stamp()

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal seen
            if (now := self._stamp()) == seen:
                return None
            seen = now
            try:
                self._check()
                return _configuration(*self._pair())
            except IdentityError:  # The old certificate stays in use.
                return None

        return grpc.dynamic_ssl_server_credentials(_configuration(*self._pair()), fetch, False)  # type: ignore[arg-type]

    def _on_handshake(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Loads a changed certificate, for the next connections."""
        if (now := self._stamp()) != self._stamps:
            self._stamps = now
            try:
                self._check()
            except IdentityError:
                return
            self._load()

    def _load(self) -> None:
        try:
            self.context.load_cert_chain(*self._paths)
        except (ssl.SSLError, OSError):
            raise IdentityError(f"{CERT} and {KEY} are no valid certificate and key") from None

    def _check(self) -> None:
        """Raises IdentityError unless the files belong together and the certificate has a name."""
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*self._paths)
            names = _names(self._pair()[0])
        except (ssl.SSLError, OSError, ValueError):
            raise IdentityError(f"{CERT} and {KEY} are no valid certificate and key") from None
        if not names:
            raise IdentityError(f"{CERT} has no name by which clients could know its server")

    def _pair(self) -> tuple[bytes, bytes]:
        return read(self._paths[0], CERT), read(self._paths[1], KEY)

    def _stamp(self) -> tuple[int, ...]:
        """Changes when a file changes. Links are followed, as Kubernetes replaces links."""
        try:
            return tuple(value for path in self._paths for value in _stamp_of(path))
        except OSError:
            return ()


def probe(certificate: bytes) -> tuple[grpc.ChannelCredentials, str]:
    """For a probe on the same machine: credentials that accept this very certificate, and the name to expect."""
    return grpc.ssl_channel_credentials(certificate), _names(certificate)[0].replace("*", "probe", 1)


def name_at(certificate: bytes, host: str) -> str:
    """By which name clients on the same machine reach a door at this host: one that the certificate has; the host if it
    has none for them."""
    names = _names(certificate)
    return next((name for name in (host, "localhost", *names) if name in names and "*" not in name), host)


def _names(certificate: bytes) -> list[str]:
    """The names that gRPC compares with that of a server: without alternative ones, the common one."""
    from cryptography import x509

    parsed = x509.load_pem_x509_certificate(certificate)
    try:
        names = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return [str(each.value) for each in parsed.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)]
    return [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]


def _configuration(certificate: bytes, key: bytes) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(key, certificate)])


def _stamp_of(path: str) -> tuple[int, int, int]:
    stat = os.stat(path)
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
