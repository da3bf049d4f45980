"""The gateway's ports answer nobody without a key, and nobody without TLS, whatever the method or route."""

import asyncio
import datetime
import itertools
import json
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from grpc import aio
from typer.testing import CliRunner

from services.gateway.doors.http_routes import HttpRoutes
from services.health import ROLE_OF, check
from services.security.certificates import Authority
from services.security.door_tls import DoorCertificate, name_at, probe
from services.security.identity import IdentityError
from tests.gateway.fakes import FakeMesh
from tests.mesh.harness import Mesh, ask, generate
from tests.security import callers
from tests.security.conftest import KEY, Files
from weft.cli.app import app
from weft.client.api import Client

pytestmark = pytest.mark.asyncio(loop_scope="session")
CODES = grpc.StatusCode
OPEN_METHODS = (
    "/grpc.health.v1.Health/",
    "/inference.GRPCInferenceService/ServerLive",
    "/inference.GRPCInferenceService/ServerReady",
)
OPEN_ROUTES = {("GET", path) for path in ("/health", "/startupz", "/v2/health/live", "/v2/health/ready")}
BEARER = (("authorization", f"Bearer {KEY}"),)


def secured(mesh: Mesh, files: Files) -> aio.Channel:
    """A channel to the gateway that trusts the authority of its certificate."""
    credentials = grpc.ssl_channel_credentials(files.ca.read_bytes())
    return aio.secure_channel(mesh.gateways[0].address, credentials)


def https(mesh: Mesh, files: Files) -> httpx.AsyncClient:
    """A client of the gateway's HTTP port."""
    import ssl

    context = ssl.create_default_context(cafile=str(files.ca))
    return httpx.AsyncClient(base_url=mesh.url().replace("http:", "https:"), verify=context)


@pytest.fixture
async def routes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Every method and path that a gateway adds to its HTTP server."""
    added: list[tuple[str, str]] = []
    add = HttpRoutes.add

    def recorded(self: HttpRoutes, method: str, path: str, *rest: Any, **named: Any) -> None:
        added.append((method, path))
        add(self, method, path, *rest, **named)

    monkeypatch.setattr(HttpRoutes, "add", recorded)
    from tests.ports import free_port

    async with FakeMesh(http_port=free_port()):
        pass
    return added


async def test_no_method_answers_without_a_key(mesh: Mesh, files: Files) -> None:
    async with secured(mesh, files) as channel:
        for method in callers.all_public_methods():
            for metadata in ({}, {"authorization": "Bearer wrong"}, {"authorization": KEY}):
                code = await callers.ended_with(channel, method, metadata)
                if method.startswith(OPEN_METHODS):
                    assert code in (CODES.OK, CODES.NOT_FOUND, CODES.UNIMPLEMENTED), method
                else:
                    assert code is CODES.UNAUTHENTICATED, method


async def test_no_inner_method_is_served_at_the_public_port(mesh: Mesh, files: Files) -> None:
    async with secured(mesh, files) as channel:
        for method in callers.all_inner_methods() - set(callers.all_public_methods()):
            assert await callers.ended_with(channel, method, dict(BEARER)) is CODES.UNIMPLEMENTED, method


async def test_no_route_answers_without_a_key(mesh: Mesh, files: Files, routes: list[tuple[str, str]]) -> None:
    assert set(routes) > OPEN_ROUTES
    async with https(mesh, files) as client:
        for method, path in routes:
            for headers in ({}, {"authorization": "Bearer wrong"}):
                answer = await client.request(method, _filled(path), headers=headers, content=b"{}")
                if (method, path) in OPEN_ROUTES or path == "/" or path.startswith("/page/"):
                    assert answer.status_code == 200
                else:
                    assert answer.status_code == 401, (method, path)


async def test_plain_connections_are_refused(mesh: Mesh, routes: list[tuple[str, str]]) -> None:
    async with aio.insecure_channel(mesh.gateways[0].address) as channel:
        for method in callers.all_public_methods():
            assert await callers.ended_with(channel, method, dict(BEARER)) is CODES.UNAVAILABLE
    async with httpx.AsyncClient(base_url=mesh.url()) as client:
        for method, path in routes:
            with pytest.raises(httpx.TransportError):
                await client.request(method, _filled(path))


async def test_our_client_and_plain_ones_are_answered_over_tls(mesh: Mesh, files: Files) -> None:
    address = f"https://localhost:{mesh.gateways[0].port}"
    async with Client(address, api_key=KEY, ca_file=str(files.ca)) as client:
        assert [model.name for model in await client.models()] == ["weft-story-2m"]
        answer = client.generate("hello", max_tokens=4, temperature=0.0)
        assert sum([len(delta.token_ids) async for delta in answer]) == 4
    async with secured(mesh, files) as channel:
        from protos.inference_pb2_grpc import InferenceStub

        got = await generate(InferenceStub(channel), ask("hello", max_tokens=4), metadata=BEARER)
        assert len(got.ids) == 4
    async with https(mesh, files) as http:
        body = {"model": "weft-story-2m", "prompt": "hello", "max_tokens": 4}
        reply = await http.post("/v1/completions", json=body, headers=dict(BEARER))
        assert json.loads(reply.content)["usage"]["completion_tokens"] == 4


async def test_a_batch_is_answered_over_tls(mesh: Mesh, files: Files, tmp_path: Path) -> None:
    line = {"custom_id": "one", "url": "/v1/completions", "body": {"prompt": "hello", "max_tokens": 4}}
    (tmp_path / "in.jsonl").write_text(json.dumps(line))
    paths = [str(tmp_path / name) for name in ("in.jsonl", "out.jsonl")]
    url = mesh.url().replace("http://127.0.0.1", "https://localhost")
    result = await asyncio.to_thread(
        CliRunner().invoke, app, ["batch", *paths, "--url", url],
        env={"WEFT_CA_FILE": str(files.ca), "WEFT_API_KEY": KEY},
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert json.loads((tmp_path / "out.jsonl").read_text())["response"]["status_code"] == 200
    strange = await asyncio.to_thread(CliRunner().invoke, app, ["batch", paths[0], f"{paths[1]}.2", "--url", url])
    assert strange.exit_code == 1
    assert strange.stderr.splitlines()[-1] == f"weft: the certificate of {url} is not trusted: see WEFT_CA_FILE"
    other = url.replace("localhost", "127.1")  # another way to write 127.0.0.1, which is not in the certificate
    arguments = ["batch", paths[0], f"{paths[1]}.3", "--url", other]
    named = await asyncio.to_thread(CliRunner().invoke, app, arguments, env={"WEFT_CA_FILE": str(files.ca)})
    assert named.stderr.splitlines()[-1] == f"weft: the certificate of {other} is for another name"


async def test_a_client_refuses_a_gateway_with_a_certificate_of_a_stranger(mesh: Mesh) -> None:
    credentials = grpc.ssl_channel_credentials(Authority.random().certificate)
    async with aio.secure_channel(mesh.gateways[0].address, credentials) as channel:
        for method in callers.all_public_methods():
            assert await callers.ended_with(channel, method, dict(BEARER)) is CODES.UNAVAILABLE


async def test_the_health_command_checks_every_encrypted_port(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    for process in mesh.processes:
        with monkeypatch.context() as patch:
            for name, value in process.env.items():
                patch.setenv(name, value)
            role = ROLE_OF[process.health]
            names = [process.health, *(["weft.v1.Gateway"] if role == "gateway" else [])]
            for name, listening in itertools.product(names, (False, True)):
                assert await asyncio.to_thread(check, process.address, name, listening) == "SERVING"


def _filled(path: str) -> str:
    """The path with a value for each of its parameters."""
    return "/".join("x" if part.startswith("{") else part for part in path.split("/"))


@pytest.mark.parametrize(
    ("names", "name"),
    [
        (["localhost"], "localhost"),
        (["weft.example", "localhost", "127.0.0.1"], "127.0.0.1"),
        (["*.example", "weft.example"], "weft.example"),
        (["*.example"], "127.0.0.1"),
    ],
)
async def test_callers_on_this_machine_are_given_a_name_of_the_certificate(names: list[str], name: str) -> None:
    certificate = Authority.random().issue(names).certificate
    assert name_at(certificate, "127.0.0.1") == name


def self_signed(name: x509.Name) -> tuple[bytes, bytes]:
    """A certificate without alternative names, and its key."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    valid = builder.not_valid_before(now - datetime.timedelta(1)).not_valid_after(now + datetime.timedelta(1))
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return valid.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM), private


async def test_a_certificate_without_a_name_is_refused(tmp_path: Path) -> None:
    """No client could check it, and no probe."""
    country = x509.Name([x509.NameAttribute(NameOID.COUNTRY_NAME, "DE")])
    paths = [tmp_path / name for name in ("cert.pem", "key.pem")]
    for path, content in zip(paths, self_signed(country), strict=True):
        path.write_bytes(content)
    with pytest.raises(IdentityError, match="has no name by which clients could know its server"):
        DoorCertificate(*map(str, paths))


async def test_a_probe_accepts_a_certificate_with_a_common_name_alone() -> None:
    pem, private = self_signed(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "weft.ex")]))
    server = aio.server()
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(private, pem)]))
    await server.start()
    credentials, expected = probe(pem)
    options = [("grpc.ssl_target_name_override", expected)]
    async with aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options) as channel:
        await asyncio.wait_for(channel.channel_ready(), 30)
    await server.stop(None)
    assert name_at(pem, "127.0.0.1") == "weft.ex"
