"""API keys: created once, sent with every call, written nowhere."""

import hashlib
import re
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from protos import inference_pb2 as api
from services.gateway.access.tenants import parse
from tests.weft.fakes import Context, FakeMesh, served
from weft import Client
from weft.cli.app import app


class RecordsKeys(FakeMesh):
    """Records the key of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[str | None] = []

    async def ListModels(self, request: api.ListModelsRequest, context: Context) -> api.ListModelsResponse:
        self._record(context)
        return await super().ListModels(request, context)

    async def Tokenize(self, request: api.TokenizeRequest, context: Context) -> api.TokenizeResponse:
        self._record(context)
        return await super().Tokenize(request, context)

    async def Complete(self, request: api.GenerateRequest, context: Context) -> api.CompleteResponse:
        self._record(context)
        return await super().Complete(request, context)

    async def Generate(self, request: api.GenerateRequest, context: Context) -> AsyncIterator[api.GenerateResponse]:
        self._record(context)
        async for response in super().Generate(request, context):
            yield response

    def _record(self, context: Context) -> None:
        metadata = dict(context.invocation_metadata() or ())
        self.keys.append(metadata.get("authorization"))  # type: ignore[arg-type]


async def test_the_key_is_sent_with_every_call() -> None:
    mesh = RecordsKeys()
    async with served(mesh) as address:
        async with Client(address, api_key="weft-mine", deadline_s=10) as client:
            await client.models()
            await client.tokenize("Once upon")
            await client.complete("Once")
            await client.generate("Once").text()
        async with Client(address, deadline_s=10) as client:
            await client.models()
    assert mesh.keys == ["Bearer weft-mine"] * 4 + [None]


def test_a_key_is_printed_with_its_lines_for_the_tenants_file() -> None:
    made = CliRunner().invoke(app, ["key", "acme"])
    key, *lines = made.stdout.splitlines()
    assert re.fullmatch(r"weft-[A-Za-z0-9_-]{43}", key)
    text = "\n".join(lines)
    assert tomllib.loads(text)["tenant"][0]["keys"] == [f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"]
    tenant = parse(text.encode()).find(key)
    assert tenant is not None
    assert tenant.name == "acme"
    assert key not in text
    assert CliRunner().invoke(app, ["key", "a b"]).exit_code == 2


@pytest.mark.parametrize("command", ["generate", "chat", "models", "top"])
def test_help_does_not_show_the_key(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_API_KEY", "weft-secret")
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "WEFT_API_KEY" in result.stdout
    assert "weft-secret" not in result.stdout


def test_an_alias_must_name_a_served_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    result = CliRunner().invoke(app, ["serve", "--model", str(tmp_path), "--alias", "fox=owl"])
    assert result.exit_code == 2
    assert "--alias: fox=owl is not ALIAS=NAME" in result.stderr


def test_an_alias_must_not_be_the_name_that_a_model_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVED_MODEL_NAME", "fox")
    folder = tmp_path / "owl"
    folder.mkdir()
    (folder / "config.json").touch()
    result = CliRunner().invoke(app, ["serve", "--model", str(folder), "--alias", "fox=owl"])
    assert result.exit_code == 2
    assert result.stderr == "weft: --alias: fox is the name of a model: an alias of that name has no effect\n"
