"""Services refuse ports that others reach and that are not both encrypted and authenticated, and wrong credentials."""

import asyncio
import os
import stat
import tempfile
from pathlib import Path

import pytest

from services.security.certificates import main, write_all
from services.security.identity import IdentityError, load, named
from tests.mesh.conftest import demo_model
from tests.mesh.forked import Forked
from tests.mesh.harness import ROOT, Mesh, ask, generate
from tests.security.conftest import KEY, PACED, SECRET, Files
from weft.launch.reach import Reach

START_S = 60
UNPROTECTED = "is open to other machines, without TLS and authentication: see SECURITY.md"


async def outcome(service: str, **env: str) -> str:
    """Starts a service at all addresses -> its last line if it ends by itself; "listens" if it starts."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("WEFT_")}
    settings = {"WEFT_LISTEN": "0.0.0.0:0", "WEFT_GATEWAY_HTTP_PORT": "0", "WEFT_LOG_FORMAT": "json", **env}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        log.touch()
        process = Forked(f"services.{service}", {**own, **settings}, ROOT, log)
        try:
            async with asyncio.timeout(START_S):
                while process.poll() is None:
                    if '"listening"' in log.read_text() or '"ready"' in log.read_text():
                        return "listens"
                    await asyncio.sleep(0.02)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == os.EX_CONFIG
        reasons = [line for line in log.read_text().splitlines() if not line.startswith("{")]
        assert len(reasons) == 1, reasons
        return reasons[0]


@pytest.mark.parametrize("service", ["scheduler", "cache", "gateway"])
async def test_a_port_that_others_reach_needs_protection(service: str) -> None:
    assert UNPROTECTED in await outcome(service)


@pytest.mark.parametrize("service", ["scheduler", "cache"])
async def test_a_secret_protects_an_inner_port(service: str) -> None:
    assert await outcome(service, WEFT_MESH_SECRET=SECRET) == "listens"


async def test_the_danger_can_be_accepted_by_name() -> None:
    assert await outcome("scheduler", WEFT_ALLOW_UNPROTECTED="true") == "listens"


async def test_a_gateway_needs_both_tls_and_tenants(files: Files) -> None:
    tls = {name: value for name, value in files.env.items() if "TLS" in name}
    tenants = {name: value for name, value in files.env.items() if "TENANTS" in name}
    assert UNPROTECTED in await outcome("gateway", **tls)
    assert UNPROTECTED in await outcome("gateway", **tenants)
    assert UNPROTECTED in await outcome("gateway", **tenants, WEFT_MESH_SECRET=SECRET)
    assert await outcome("gateway", **tls, **tenants) == "listens"


async def test_wrong_files_are_refused_in_one_line_without_their_contents(files: Files, tmp_path: Path) -> None:
    write_all(tmp_path / "certs", ["localhost"])
    paths = {name: str(tmp_path / "certs" / name) for name in ("ca.crt", "worker.crt", "worker.key", "mesh-secret")}
    tls = dict(zip(("WEFT_TLS_CA", "WEFT_TLS_CERT", "WEFT_TLS_KEY"), paths.values(), strict=False))
    with_secret = {**tls, "WEFT_MESH_SECRET_FILE": paths["mesh-secret"]}
    assert load("worker", named(with_secret)).protected
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "short").write_text("tooshort")
    for wrong, reason in (
        (tls, "WEFT_MESH_SECRET_FILE is required"),
        ({**with_secret, "WEFT_TLS_CA": ""}, "WEFT_TLS_CA is required"),
        ({**with_secret, "WEFT_TLS_CERT": str(tmp_path / "none")}, "WEFT_TLS_CERT: No such file"),
        ({**with_secret, "WEFT_TLS_KEY": paths["ca.crt"]}, "WEFT_TLS_KEY: not a PEM file"),
        ({"WEFT_MESH_SECRET_FILE": str(tmp_path / "empty")}, "WEFT_MESH_SECRET_FILE is empty"),
        ({"WEFT_MESH_SECRET_FILE": str(tmp_path / "short")}, "at least 32 characters"),
        ({"WEFT_MESH_SECRET": "tooshort"}, "at least 32 characters"),
        ({"WEFT_MESH_SECRET": SECRET, "WEFT_MESH_SECRET_FILE": paths["mesh-secret"]}, "are both set"),
    ):
        with pytest.raises(IdentityError, match=reason) as caught:
            load("worker", named(wrong))
        assert "tooshort" not in str(caught.value)
    assert "WEFT_GATEWAY_TLS_KEY is required" in await outcome(
        "gateway", WEFT_GATEWAY_TLS_CERT=files.env["WEFT_GATEWAY_TLS_CERT"], WEFT_LISTEN="127.0.0.1:0"
    )
    assert "at least 32 characters" in (line := await outcome("scheduler", WEFT_MESH_SECRET="tooshort"))
    assert "tooshort" not in line


async def test_a_mesh_runs_with_the_certificates_of_make_certs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each process has the certificate of its role; a process with that of another role does not serve."""
    certs = tmp_path / "certs"
    assert main(["--out", str(certs), "--public", "localhost"]) == 0
    assert main(["--out", str(certs)]) == 1  # Nothing is overwritten.
    assert "File exists" in capsys.readouterr().err
    assert {stat.S_IMODE(path.stat().st_mode) for path in certs.iterdir()} == {0o600}

    def env(role: str) -> dict[str, str]:
        return {
            "WEFT_TLS_CA": str(certs / "ca.crt"),
            "WEFT_TLS_CERT": str(certs / f"{role}.crt"),
            "WEFT_TLS_KEY": str(certs / f"{role}.key"),
            "WEFT_MESH_SECRET_FILE": str(certs / "mesh-secret"),
        }

    reach = Reach(load("admin", named(env("admin"))))
    mesh = Mesh(tmp_path / "mesh", demo_model(), worker_env=PACED, reach=reach)
    for process in mesh.processes:
        process.env.update(env(process.module.rpartition(".")[2]))
    async with mesh:
        assert len((await generate(mesh.stub(), ask("hello", max_tokens=3))).ids) == 3
        impostor = mesh.new_worker(7, **PACED, **env("cache"))
        impostor.start()
        while "refuses this process" not in impostor.tail():
            assert impostor.popen is not None
            assert impostor.popen.poll() is None, impostor.tail()
            await asyncio.sleep(0.05)
        impostor.stop()
        assert "ROLE_DENIED" not in mesh.gateways[0].tail()
    assert KEY not in mesh.scheduler.tail()
