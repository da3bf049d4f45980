"""JSON Web Tokens beside API keys: what is accepted, and every way in which a token is not."""

import base64
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import grpc
import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from protos import inference_pb2 as api
from services.gateway.access.bearer_tokens import BearerTokens, TokenKeysError
from tests.gateway.fakes import FakeMesh

KEY = ec.generate_private_key(ec.SECP256R1())
OTHER = ec.generate_private_key(ec.SECP256R1())
RSA = rsa.generate_private_key(65537, 2048)
API_KEY = "weft-an-api-key"


def public(key: Any) -> bytes:
    """The public half of a key, in PEM."""
    pem: bytes = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return pem


def token(key: Any = KEY, algorithm: str = "ES256", headers: dict[str, str] | None = None, **changes: Any) -> str:
    """A token for the tenant acme; a claim of None is left out."""
    claims = {"sub": "acme", "iss": "https://issuer", "aud": "weft", "exp": time.time() + 600, **changes}
    given = {name: value for name, value in claims.items() if value is not None}
    return jwt.encode(given, key, algorithm, headers)


def unsigned() -> str:
    """A token with the algorithm "none"."""
    parts = ({"alg": "none"}, {"sub": "acme", "iss": "https://issuer", "aud": "weft", "exp": time.time() + 600})
    return ".".join([*(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts), ""])


def confused() -> str:
    """A token that is signed with the public key as if it were a secret."""
    import hmac

    head, body = token().split(".")[:2]
    head = base64.urlsafe_b64encode(b'{"alg":"HS256","typ":"JWT"}').decode().rstrip("=")
    mac = hmac.new(public(KEY), f"{head}.{body}".encode(), hashlib.sha256).digest()
    return f"{head}.{body}.{base64.urlsafe_b64encode(mac).decode().rstrip('=')}"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Any]:
    """Settings of a gateway with tenants and keys."""
    hashed = hashlib.sha256(API_KEY.encode()).hexdigest()
    (tmp_path / "tenants.toml").write_text(f'[[tenant]]\nname = "acme"\nkeys = ["sha256:{hashed}"]\n')
    (tmp_path / "key.pem").write_bytes(public(KEY))
    return {
        "tenants_file": str(tmp_path / "tenants.toml"),
        "gateway_jwt_keys": str(tmp_path / "key.pem"),
        "gateway_jwt_issuer": "https://issuer",
        "gateway_jwt_audience": "weft",
    }


async def code_of(mesh: FakeMesh, credential: str) -> grpc.StatusCode:
    """How a call with this credential ends."""
    try:
        await mesh.stub.ListModels(api.ListModelsRequest(), metadata=(("authorization", f"Bearer {credential}"),))
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_a_valid_token_is_accepted_beside_keys_and_no_other_is(files: dict[str, Any]) -> None:
    valid = token()
    wrong = {
        "another key": token(OTHER),
        "another issuer": token(iss="https://other"),
        "another audience": token(aud="other"),
        "expired": token(exp=time.time() - 60),
        "not yet valid": token(nbf=time.time() + 600),
        "no expiry": token(exp=None),
        "no tenant": token(sub=None),
        "an unknown tenant": token(sub="stranger"),
        "no signature": unsigned(),
        "the public key as a secret": confused(),
        "a changed signature": valid[:-4] + ("AAAA" if not valid.endswith("AAAA") else "BBBB"),
        "no token": "a.b.c",
        "a long token": valid + "x" * 9000,
    }
    async with FakeMesh(**files) as mesh:
        for _ in range(2):  # The second time it is remembered.
            assert await code_of(mesh, valid) is grpc.StatusCode.OK
        assert await code_of(mesh, API_KEY) is grpc.StatusCode.OK
        for name, each in wrong.items():
            assert await code_of(mesh, each) is grpc.StatusCode.UNAUTHENTICATED, name


def test_a_remembered_token_expires(files: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = BearerTokens(files["gateway_jwt_keys"], "https://issuer", "weft", "sub")
    valid, now = token(), time.time()
    assert tokens.tenant(valid) == "acme"
    monkeypatch.setattr("services.gateway.access.bearer_tokens.time.time", lambda: now + 700)
    assert tokens.tenant(valid) is None


def test_keys_of_a_set_are_chosen_by_their_id(tmp_path: Path) -> None:
    entries = [
        {**json.loads(jwt.get_algorithm_by_name(kind).to_jwk(key.public_key())), "kid": kid}
        for kind, key, kid in (("ES256", KEY, "one"), ("RS256", RSA, "two"))
    ]
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": entries}))
    tokens = BearerTokens(str(path), "https://issuer", "weft", "sub")
    assert tokens.tenant(token(headers={"kid": "one"})) == "acme"
    assert tokens.tenant(token(RSA, "RS256", headers={"kid": "two"})) == "acme"
    assert tokens.tenant(token(headers={"kid": "two"})) is None
    assert tokens.tenant(token(OTHER, headers={"kid": "one"})) is None


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b'{"keys": [{"kty": "oct", "k": "c2VjcmV0"}]}', b"-----BEGIN X"]
)
def test_a_file_without_public_keys_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(TokenKeysError):
        BearerTokens(str(path), "https://issuer", "weft", "sub")


def test_issuer_and_audience_are_required(files: dict[str, Any]) -> None:
    for issuer, audience in (("", "weft"), ("https://issuer", "")):
        with pytest.raises(TokenKeysError, match="WEFT_GATEWAY_JWT_ISSUER"):
            BearerTokens(files["gateway_jwt_keys"], issuer, audience, "sub")
