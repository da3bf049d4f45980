"""Makes the certificates of a mesh: its authority, and one certificate for each role. Knows X.509, no network.

The authority's key is derived from the mesh secret or drawn at random. Two processes that derive it from the same
secret trust each other's certificates without exchanging a file.

    python -m services.security.certificates --out certs      # for development: `make certs`
"""

import argparse
import datetime
import ipaddress
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from services.security.roles import ROLES, role_name

_CURVE = ec.SECP256R1()
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Order of the group of P-256: private keys are 1 to this minus 1."""
_YEAR = datetime.timedelta(days=365)
_CLOCK_SKEW = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate and its private key, both in PEM."""

    certificate: bytes
    key: bytes


class Authority:
    """Signs the certificates of one mesh."""

    def __init__(self, key: ec.EllipticCurvePrivateKey) -> None:
        self._key = key
        public = key.public_key()
        # Every process that derives the key makes the same subject and key id, so that chains can be built.
        self._identifier = x509.SubjectKeyIdentifier.from_public_key(public)
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"weft {self._identifier.digest.hex()[:16]}")])
        signed = (
            _builder(self._name, self._name, public, 10 * _YEAR)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(self._identifier, critical=False)
            .sign(key, hashes.SHA256())
        )
        self.certificate = signed.public_bytes(serialization.Encoding.PEM)

    @classmethod
    def derived(cls, secret: bytes) -> "Authority":
        """The authority of the mesh that has this secret."""
        wide = HKDF(hashes.SHA256(), 48, None, b"weft/mesh-authority/1").derive(secret)
        return cls(ec.derive_private_key(int.from_bytes(wide, "big") % (_ORDER - 1) + 1, _CURVE))

    @classmethod
    def random(cls) -> "Authority":
        """A new authority."""
        return cls(ec.generate_private_key(_CURVE))

    def issue(self, names: Sequence[str], valid: datetime.timedelta = _YEAR) -> KeyPair:
        """A new certificate for these DNS names and IP addresses, for servers and clients."""
        key = ec.generate_private_key(_CURVE)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        signed = (
            _builder(subject, self._name, key.public_key(), valid)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.SubjectAlternativeName([_general(name) for name in names]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(self._identifier), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return KeyPair(signed.public_bytes(serialization.Encoding.PEM), private)


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, valid: datetime.timedelta
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + valid)
    )


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def write_all(folder: Path, public_names: Sequence[str]) -> list[Path]:
    """Writes a mesh secret, an authority, a certificate for each role and one for the gateway's public door.

    The authority's private key is not written: new certificates need a new folder.
    """
    authority = Authority.random()
    contents = {"ca.crt": authority.certificate, "mesh-secret": secrets.token_hex(32).encode() + b"\n"}
    for name, names in [*((role, [role_name(role)]) for role in ROLES), ("public", list(public_names))]:
        pair = authority.issue(names)
        contents |= {f"{name}.crt": pair.certificate, f"{name}.key": pair.key}
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in contents.items():
        write_private(folder / name, data)
    return [folder / name for name in contents]


def write_private(path: Path, data: bytes) -> None:
    """Writes a new file that only its owner may read. Raises FileExistsError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def main(arguments: Sequence[str]) -> int:
    """Writes the files of one mesh; returns the exit code."""
    parser = argparse.ArgumentParser(description="Makes certificates for the development of one mesh.")
    parser.add_argument("--out", type=Path, required=True, help="a folder that holds no certificates yet")
    parser.add_argument("--public", nargs="+", default=["localhost", "127.0.0.1"], help="names of the public gateway")
    given = parser.parse_args(arguments)
    try:
        written = write_all(given.out, given.public)
    except OSError as error:
        print(f"weft: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    print("\n".join(map(str, written)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
