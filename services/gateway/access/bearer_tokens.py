"""Checks JSON Web Tokens, which name a tenant instead of an API key. Knows public keys, no tenants and no limits.

A token is accepted if a key of the file signed it with an asymmetric algorithm, and if issuer, audience and times are
right. It must expire. One of its claims names the tenant.
"""

import contextlib
import hashlib
import json
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import jwt

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Asymmetric ones alone: with a symmetric one, those who can check tokens could make them. Never "none"."""
_MOST_BYTES = 8 << 10
_MOST_KEPT = 4096
_LEEWAY_S = 30
_MOST_FILE_BYTES = 1 << 20


class TokenKeysError(Exception):
    """The file of keys is invalid. The message is one line and quotes nothing of the file."""


class BearerTokens:
    """The tokens of one issuer for one audience."""

    def __init__(self, keys_file: str, issuer: str, audience: str, claim: str) -> None:
        """`keys_file`: a JWK set, or one public key in PEM; `claim` has the tenant's name. Raises TokenKeysError."""
        if not issuer or not audience:
            raise TokenKeysError("needs WEFT_GATEWAY_JWT_ISSUER and WEFT_GATEWAY_JWT_AUDIENCE")
        self._keys = _read(Path(keys_file))
        self._issuer, self._audience, self._claim = issuer, audience, claim
        self._kept: OrderedDict[bytes, tuple[str, float]] = OrderedDict()

    @staticmethod
    def looks_like_one(credential: str) -> bool:
        """Whether a credential has the form of a token; API keys have no dots."""
        return credential.count(".") == 2

    def tenant(self, token: str) -> str | None:
        """The name of the tenant whom a token names; None for a token that is not valid now."""
        if len(token) > _MOST_BYTES:
            return None
        digest, now = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest(), time.time()
        known = self._kept.get(digest)
        if known is None:
            known = self._checked(token)
            if known is None:
                return None
            self._kept[digest] = known
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        name, expires = known
        return name if now < expires + _LEEWAY_S else None

    def _checked(self, token: str) -> tuple[str, float] | None:
        try:
            named = jwt.get_unverified_header(token).get("kid")
        except (jwt.PyJWTError, ValueError):
            return None
        for kid, key in self._keys:
            if kid is not None and named is not None and kid != named:
                continue
            try:
                claims: dict[str, Any] = jwt.decode(
                    token,
                    key,
                    algorithms=list(ALGORITHMS),
                    issuer=self._issuer,
                    audience=self._audience,
                    leeway=_LEEWAY_S,
                    options={"require": ["exp", "iss", "aud", self._claim]},
                )
            except (jwt.PyJWTError, ValueError, TypeError):
                continue
            name = claims[self._claim]
            return (name, float(claims["exp"])) if isinstance(name, str) else None
        return None


def _read(path: Path) -> list[tuple[str | None, Any]]:
    """The keys of a file with their ids. Raises TokenKeysError."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_FILE_BYTES)
    except OSError as error:
        raise TokenKeysError(f"cannot be read: {error.strerror}") from None
    try:
        if b"-----BEGIN" in data:
            if b"PRIVATE" in data:
                raise TokenKeysError("has a private key; it needs a public one")
            for algorithm in ("RS256", "ES256", "EdDSA"):
                with contextlib.suppress(TypeError, ValueError, jwt.PyJWTError):
                    return [(None, jwt.get_algorithm_by_name(algorithm).prepare_key(data))]
            raise TokenKeysError("has no public key that can be used")
        return [(key.key_id, key.key) for key in jwt.PyJWKSet.from_dict(json.loads(data)).keys if _is_public(key)]
    except (jwt.PyJWTError, ValueError, TypeError, AttributeError):
        raise TokenKeysError("is neither a JWK set nor a public key in PEM") from None


def _is_public(key: jwt.PyJWK) -> bool:
    """Whether a key is one that only checks; secrets and private keys do not belong here."""
    if key.key_type == "oct" or hasattr(key.key, "private_bytes"):
        raise TokenKeysError("has a secret or private key; it needs public ones")
    return True
