"""The `weft` command: flags, output, errors in one line."""

import asyncio
import importlib.metadata
import io
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

from protos import inference_pb2 as api
from services.errors import WeftError, invalid
from services.security.certificates import Authority
from tests.mesh.forked import Forked
from tests.mesh.harness import ROOT, WITH_PARENT
from tests.ports import free_port
from tests.weft.fakes import WORDS, Context, FakeMesh, fails, served
from weft.cli import demo, serve
from weft.cli.app import app
from weft.cli.chat import Conversation
from weft.cli.terminal import models_table

WEFT = [sys.executable, "-W", "error", "-c", "from weft.cli.app import app; app()"]
TEXT = "".join(f" {word}" for word in WORDS)
Weft = Callable[..., Awaitable[Result]]


@pytest.fixture
def mesh() -> FakeMesh:
    return FakeMesh()


@pytest.fixture
async def weft(mesh: FakeMesh) -> AsyncIterator[Weft]:
    """Runs the command against the fake mesh."""
    async with served(mesh) as address:

        async def run(*arguments: str, typed: str | bytes = "", charset: str = "utf-8") -> Result:
            environment = {"WEFT_ADDRESS": address, "COLUMNS": "100"}
            runner = CliRunner(charset=charset)
            return await asyncio.to_thread(runner.invoke, app, arguments, input=typed, env=environment)

        yield run


async def test_generate_writes_the_answer_and_nothing_else(weft: Weft) -> None:
    result = await weft("generate", "Once")
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{TEXT}\n", "")


async def test_generate_sends_every_flag(weft: Weft, mesh: FakeMesh) -> None:
    flags = """--model fox --max-tokens 9 --min-tokens 2 --temperature 0.5 --top-k 40 --top-p 0.75 --min-p 0.25
        --repetition-penalty 1.5 --presence-penalty 0.5 --frequency-penalty -0.5 --seed 7 --stop end --stop .
        --ignore-eos --stop-token-id 3 --logit-bias 4=-1.5 --logprobs 2 --n 2 --priority 3 --cache bypass
        --request-id r-1"""
    result = await weft("generate", "-", *flags.split(), typed="from a pipe")
    assert result.exit_code == 0
    assert mesh.requests == [
        api.GenerateRequest(
            model="fox",
            prompt=api.Prompt(text="from a pipe"),
            sampling=api.Sampling(
                max_tokens=9,
                min_tokens=2,
                temperature=0.5,
                top_k=40,
                top_p=0.75,
                min_p=0.25,
                repetition_penalty=1.5,
                presence_penalty=0.5,
                frequency_penalty=-0.5,
                seed=7,
                stop=["end", "."],
                stop_token_ids=[3],
                logit_bias={4: -1.5},
                logprobs=2,
                ignore_eos=True,
            ),
            n=2,
            priority=3,
            cache=api.CACHE_POLICY_BYPASS,
            request_id="r-1",
        )
    ]


async def test_generate_sends_the_form_of_the_answer(weft: Weft, mesh: FakeMesh, tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "sums.gbnf"
    schema.write_text('{"type": "null"}')
    grammar.write_text("root ::= [0-9]")
    forms = {
        ("--json-schema", '{"type": "integer"}'): api.Structured(json_schema='{"type": "integer"}'),
        ("--json-schema", str(schema)): api.Structured(json_schema='{"type": "null"}'),
        ("--json-object",): api.Structured(json_object=True),
        ("--regex", "a+"): api.Structured(regex="a+"),
        ("--choice", "a", "--choice", "b"): api.Structured(choice=api.Choices(texts=["a", "b"])),
        ("--grammar", str(grammar)): api.Structured(grammar="root ::= [0-9]"),
    }
    for flags, form in forms.items():
        result = await weft("generate", "Once", *flags)
        assert result.exit_code == 0, result.stderr
        assert mesh.requests[-1].sampling.structured == form
    for flags, words in {
        ("--regex", "a", "--json-object"): "--json-object, --regex: an answer has one form",
        ("--grammar", str(tmp_path / "none")): "No such file",
    }.items():
        result = await weft("generate", "Once", *flags)
        assert result.exit_code == 1
        assert words in result.stderr
    assert len(mesh.requests) == len(forms)


async def test_no_number_of_continuations_means_one(weft: Weft) -> None:
    result = await weft("generate", "Once", "--n", "0")
    assert result.stdout == f"{TEXT}\n"


async def test_several_continuations_are_numbered(weft: Weft) -> None:
    result = await weft("generate", "Once", "--n", "2")
    assert result.stdout == f"[0] {TEXT}\n[1] {TEXT}\n"


async def test_stats_print_the_receipt(weft: Weft) -> None:
    result = await weft("generate", "Once", "--stats", "--seed", "5")
    rows = {line.split("  ")[0]: line.split() for line in result.stdout.splitlines() if line}
    assert rows["prefill"] == ["prefill", "20.00", "20%"]
    assert rows["wall"] == ["wall", "100.00"]
    assert rows["prefill tokens"][-1] == "4"
    assert rows["workers"][-1] == "worker-a"
    assert rows["result"][-1] == "miss"
    assert rows["seed"][-1] == "5"
    assert "\x1b" not in result.stdout


async def test_control_characters_of_a_model_are_removed(weft: Weft, mesh: FakeMesh) -> None:
    mesh.words = ["\x1b[2Jboo\x07", "tab\tline\n"]
    result = await weft("generate", "Once")
    assert result.stdout == " [2Jboo tab\tline\n\n"


async def test_characters_that_the_output_cannot_encode_are_replaced(weft: Weft, mesh: FakeMesh) -> None:
    mesh.words = ["na\u00efve", "\u65e5", "end"]
    assert (await weft("generate", "Once", charset="iso-8859-1")).stdout == " na\u00efve ? end\n"


async def test_a_prompt_that_is_not_utf8_is_refused_in_one_line(weft: Weft, mesh: FakeMesh) -> None:
    result = await weft("generate", "-", typed=b"caf\xe9")
    assert (result.exit_code, len(result.stderr.splitlines()), mesh.requests) == (2, 1, [])


async def test_a_line_that_is_not_utf8_does_not_end_the_chat(weft: Weft, mesh: FakeMesh) -> None:
    result = await weft("chat", typed=b"caf\xe9\nfine\n")
    assert (result.exit_code, result.stderr) == (0, "")
    assert [request.prompt.text.split()[0] for request in mesh.requests] == ["caf\ufffd", "caf\ufffd"]


async def test_a_refusal_is_reported_in_one_line(weft: Weft, mesh: FakeMesh) -> None:
    mesh.faults = [fails(0, invalid("sampling.top_p", "above 0 to 1"))]
    result = await weft("generate", "Once", "--top-p", "7")
    assert result.exit_code == 1
    assert result.stderr == "weft: INVALID_ARGUMENT/INVALID_FIELD: sampling.top_p: above 0 to 1\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--logit-bias", "x"], "weft: --logit-bias: 'x' is not ID=BIAS\n"),
        (["--max-tokens", "-3"], "weft: max_tokens: Value out of range: -3\n"),
        (["--stop", "\udcff"], "weft: stop: no text that UTF-8 can hold\n"),
        (["--api-key", "key\n"], "weft: api_key: printable ASCII characters alone\n"),
    ],
)
async def test_impossible_flags_are_refused_before_a_call(
    weft: Weft, mesh: FakeMesh, flags: list[str], message: str
) -> None:
    result = await weft("generate", "Once", *flags)
    assert (result.exit_code, result.stderr, mesh.requests) == (2, message, [])


@pytest.mark.parametrize("command", [["generate", "Once"], ["bench"], ["top"], ["doctor"]])
@pytest.mark.parametrize("address", ["", "localhost", "http://127.0.0.1:8000", "127.0.0.1:many"])
def test_what_is_no_address_is_refused(command: list[str], address: str) -> None:
    result = CliRunner().invoke(app, [*command, "--address", address])
    assert result.exit_code == 2
    assert result.stderr == f"weft: --address: {address!r} is neither host:port nor https://host:port\n"


@pytest.mark.parametrize("command", [["generate", "Once"], ["bench"], ["top"]])
@pytest.mark.parametrize(("content", "reason"), [(None, "No such file or directory"), ("x", "not a PEM file with a ")])
def test_a_wrong_file_of_authorities_is_named(
    tmp_path: Path, command: list[str], content: str | None, reason: str
) -> None:
    file = tmp_path / "ca.crt"
    if content is not None:
        file.write_text(content)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"https://127.0.0.1:{server.getsockname()[1]}"
        result = CliRunner().invoke(app, [*command, "--address", address], env={"WEFT_CA_FILE": str(file)})
    assert result.exit_code == 2
    assert result.stderr.startswith(f"weft: WEFT_CA_FILE: {file}: {reason}")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", [["models"], ["top"], ["bench", "--requests", "1"]])
async def test_a_key_that_cannot_be_sent_is_refused_in_one_line(
    weft: Weft, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setenv("WEFT_API_KEY", "weft-secret\n")
    result = await weft(*command)
    assert (result.exit_code, result.stderr) == (2, "weft: api_key: printable ASCII characters alone\n")


async def test_doctor_reports_a_key_that_cannot_be_sent(weft: Weft, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_API_KEY", "weft-secret\n")
    result = await weft("doctor")
    assert result.exit_code == 1
    for check in ("models", "workers"):
        assert re.search(rf"^bad  {check} +unknown: api_key: printable ASCII characters alone$", result.stdout, re.M)


async def test_a_gateway_that_stops_before_its_first_snapshot_is_reported_in_one_line(
    weft: Weft, mesh: FakeMesh
) -> None:
    mesh.snapshots = 0
    result = await weft("top", "--once")
    assert result.exit_code == 1
    assert result.stderr == "weft: UNAVAILABLE: the gateway stopped before its first snapshot\n"
    result = await weft("doctor")
    assert not isinstance(result.exception, Exception)
    assert re.search(r"^note workers +unknown without a mesh$", result.stdout, re.M)


def test_output_that_cannot_be_written_is_reported_in_one_line() -> None:
    command = [sys.executable, "-c", "from weft.main import main; main()", "key", "acme"]
    with open("/dev/full", "w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (result.returncode, result.stderr.splitlines()[1:]) == (1, ["weft: No space left on device"])


async def test_closed_standard_streams_are_as_good_as_empty_ones(mesh: FakeMesh) -> None:
    async with served(mesh) as address:
        program = f"exec {sys.executable} -c 'from weft.main import main; main()' generate - --address {address}"
        process = await asyncio.create_subprocess_exec(
            *("sh", "-c", f"{program} <&- >&-"), stderr=asyncio.subprocess.PIPE, cwd=ROOT
        )
        _, errors = await process.communicate()
    assert (process.returncode, errors) == (0, b"")
    assert [request.prompt.text for request in mesh.requests] == [""]


@pytest.mark.parametrize("command", [["generate", "Once"], ["bench"]])
def test_a_missing_mesh_is_reported_in_one_line_with_advice(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--address", "127.0.0.1:1"])
    assert result.exit_code == 1
    assert result.stderr == "weft: no mesh at 127.0.0.1:1: start one with `weft serve`\n"


async def test_a_server_that_is_no_gateway_is_reported() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    arguments = ["generate", "Once", "--address", f"127.0.0.1:{port}"]
    result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    await server.stop(0)
    assert (result.exit_code, result.stderr) == (1, f"weft: 127.0.0.1:{port} is no gateway of Weft\n")


@pytest.mark.parametrize("command", [["generate", "Once"], ["chat"], ["bench"]])
async def test_a_broken_connection_is_reported_in_one_line(command: list[str]) -> None:
    """A server accepts connections and closes them at once."""

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    code, output = await run_weft(*command, "--address", f"127.0.0.1:{port}", home=Path("/nowhere"))
    server.close()
    await server.wait_closed()
    assert (code, len(output.splitlines())) == (1, 1), output
    assert not any(raw in output for raw in ("ipv4:", "last error", "failed to connect", "Socket closed"))
    if command[0] != "bench":
        assert "perhaps it is the HTTP port or needs https" in output


async def test_embed_writes_a_vector_for_each_line_of_a_file(weft: Weft, tmp_path: Path) -> None:
    file = tmp_path / "texts"
    file.write_text("a line\u2028separator\n\nform\x0cfeed\r\nlast", encoding="utf-8")
    result = await weft("embed", "--file", str(file))
    assert result.stdout == "[16.0, 0.5]\n[9.0, 0.5]\n[4.0, 0.5]\n"
    file.write_bytes(b"\xff")
    for name, reason in ((file, "not a text file"), (tmp_path / "none", "No such file or directory")):
        result = await weft("embed", "--file", str(name))
        assert (result.exit_code, result.stderr) == (1, f"weft: {name} cannot be read: {reason}\n")


def test_the_version_is_printed() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"weft {importlib.metadata.version('weft')}\n")


async def test_names_are_not_cut_in_pipes(weft: Weft, mesh: FakeMesh) -> None:
    mesh.model = "the-quick-brown-fox-" * 10
    result = await weft("models")
    assert mesh.model in result.stdout.splitlines()[1]
    assert len(result.stdout.splitlines()) == 2


@pytest.mark.parametrize("command", ["chat", "bench"])
async def test_a_model_that_is_not_served_is_named_beside_those_that_are(weft: Weft, command: str) -> None:
    result = await weft(command, "--model", "badger")
    assert result.exit_code in (1, 2)
    assert re.fullmatch(r"weft: 127\.0\.0\.1:\d+ serves no model 'badger': it serves fox\n", result.stderr)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--engine", "gpx"], "--engine: 'gpx' is none of auto, gpu, torch, onnxruntime, openvino, "),
        (["--quantize", "int3"], "--quantize: 'int3' is none of int8, int4, fp8, nf4"),
        (["--kv-dtype", "fp9"], "--kv-dtype: 'fp9' is none of auto, fp8, int8"),
        (["--kv-scales", "some"], "--kv-scales: 'some' is none of checkpoint, dynamic"),
        (["--role", "prompts"], "--role: 'prompts' is none of both, prefill, decode"),
        (["--model", "/nowhere/fox"], "--model: there is no folder /nowhere/fox, "),
        (["--model", "foxx"], "--model: there is no folder foxx, "),
        (["--model", "random:foxx"], "--model: random:foxx is none of random:"),
        (["--model", "HERE"], "--model: HERE is no checkpoint: it has no config.json"),
        (["--max-seq-length", "4x"], "--max-seq-length: '4x' is not a number of tokens"),
        (["--alias", "x"], "--alias: x= is not ALIAS=NAME with one of the models weft-story-11m"),
        (["--alias", "x=weft-story-11m", "--alias", "x=y"], "--alias: x is given to weft-story-11m and to y"),
        (
            ["--alias", "weft-story-11m=weft-story-11m"],
            "--alias: weft-story-11m is the name of a model: an alias of that name has no effect",
        ),
        (["--model", "org/fox", "--model", "us/fox"], "--model: org/fox and us/fox would have one name, fox"),
        (["--adapter", "poems"], "--adapter: poems is not [MODEL:]NAME=FOLDER"),
        (["--adapter", "poems=HERE"], "--adapter: HERE is no adapter: it has no adapter_config.json"),
    ],
)
@pytest.mark.parametrize("part", [[], ["worker"]])
def test_wrong_flags_of_serve_are_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: list[str], flags: list[str], message: str
) -> None:
    if part and "--alias" in flags:
        message = "several models and aliases are for the whole mesh"
    if part and flags.count("--model") == 2:
        message = "several models and aliases are for the whole mesh"
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MODEL_NAME", raising=False)
    here = [flag.replace("HERE", str(tmp_path)) for flag in flags]
    result = CliRunner().invoke(app, ["serve", *part, *here])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"weft: {message.replace('HERE', str(tmp_path))}")
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "home").exists()


def test_several_models_do_not_share_a_served_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SERVED_MODEL_NAME", "animals")
    result = CliRunner().invoke(app, ["serve", "--model", "org/fox", "--model", "org/owl"])
    message = "weft: --model: org/fox and org/owl would have one name, animals\n"
    assert (result.exit_code, result.stderr) == (2, message)


def test_a_taken_port_is_reported_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_HOME", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app, ["serve", "--port", str(port)])
    message = f"weft: port {port} is taken: stop what listens there or choose another with --port\n"
    assert (result.exit_code, result.output) == (1, message)


def test_a_home_that_cannot_be_used_is_reported_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "file" / "home"))
    result = CliRunner().invoke(app, ["serve", "--port", str(free_port()), "--http-port", "0"])
    assert (result.exit_code, result.stderr) == (
        1,
        f"weft: {tmp_path}/file/home: Not a directory: see WEFT_HOME\n",
    )


@pytest.mark.parametrize("url", ["foo", "redis://:secret@[::1"])
def test_what_is_no_redis_url_is_refused_and_not_printed(url: str) -> None:
    result = CliRunner().invoke(app, ["serve", "--redis-url", url])
    message = "weft: --redis-url: not a redis://, rediss:// or unix:// URL\n"
    assert (result.exit_code, result.output) == (1, message)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--quantize", "int3"], "--quantize: 'int3' is none of int8, int4, fp8, nf4"),
        (["--kv-dtype", "fp9"], "--kv-dtype: 'fp9' is none of auto, fp8, int8"),
    ],
)
def test_warm_refuses_what_serve_refuses(flags: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["warm", "--model", "org/fox", *flags])
    assert (result.exit_code, result.stderr) == (2, f"weft: {message}\n")


def test_a_host_that_is_open_to_others_needs_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_HOME", str(tmp_path))
    result = CliRunner().invoke(app, ["serve", "--host", "0.0.0.0"])
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
    assert result.stderr.startswith("weft: --host 0.0.0.0 is open to other machines: set WEFT_TENANTS_FILE to ")
    assert "WEFT_TENANTS_FILE" in result.stderr


@pytest.mark.parametrize(
    ("part", "host", "port", "listen"),
    [
        ("gateway", "0.0.0.0", None, "0.0.0.0:50051"),
        ("scheduler", None, 7, "127.0.0.1:7"),
        ("cache", "::1", None, "[::1]:50053"),
    ],
)
def test_one_service_listens_at_the_given_host_and_port(
    part: str, host: str | None, port: int | None, listen: str
) -> None:
    assert serve._listen(serve.ServiceName(part), host, port) == listen


def test_names_of_models_are_whole_in_a_terminal_of_80_columns() -> None:
    model = api.Model(
        name="Meta-Llama-3.1-8B-Instruct", parameters=8 * 10**9, context_length=131_072, vocab_size=128_256,
        architecture="LlamaForCausalLM", engine="gpu", workers=2, tasks=["generate"], chat=True,
    )  # fmt: skip
    narrow, wide = (models_table([model], width) for width in (80, 200))
    assert Console(file=io.StringIO(), width=200).measure(narrow).maximum <= 80
    assert "architecture" not in [column.header for column in narrow.columns]
    assert [column.header for column in wide.columns][-1] == "chat"


async def test_models_are_listed(weft: Weft) -> None:
    result = await weft("models")
    assert result.stdout.split("\n")[1].split() == ["fox", "11.3", "M", "512", "4096", "Fox", "1", "no"]


async def test_chat_reads_lines_and_answers(weft: Weft, mesh: FakeMesh) -> None:
    mesh.words = ["indeed"]
    result = await weft("chat", "--stats", "--temperature", "0", typed="It rains.\n\nStill.\n/exit\nnever read\n")
    assert result.exit_code == 0
    assert result.stdout.count(" indeed\nfirst token 30 ms, ") == 2
    texts = [request.prompt.text for request in mesh.requests]
    assert texts == ["It rains.", "It rains. indeed Still."]


async def test_chat_asks_for_a_model_where_several_are_served() -> None:
    class Several(FakeMesh):
        names: tuple[str, ...] = ("fox", "fox:poems", "hare")

        async def ListModels(self, request: api.ListModelsRequest, context: Context) -> api.ListModelsResponse:
            models = [api.Model(name=name, base="fox" if ":" in name else "", workers=1) for name in self.names]
            return api.ListModelsResponse(models=models)

    mesh = Several()
    async with served(mesh) as address:
        chat = ["chat", "--address", address]
        result = await asyncio.to_thread(CliRunner().invoke, app, chat, input="hello\n")
        assert (result.exit_code, result.stderr) == (2, "weft: --model: one of fox, hare\n")
        mesh.names = ("fox", "fox:poems")
        result = await asyncio.to_thread(CliRunner().invoke, app, chat, input="hello\n")
        assert (result.exit_code, TEXT in result.stdout) == (0, True)


async def test_a_failed_question_does_not_end_the_chat(weft: Weft, mesh: FakeMesh) -> None:
    full = WeftError(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", "the queue is full")
    mesh.faults = [fails(0, full)]
    result = await weft("chat", typed="One.\nTwo.\n")
    assert result.exit_code == 0
    assert "RESOURCE_EXHAUSTED/QUEUE_FULL: the queue is full" in result.stdout
    assert [request.prompt.text for request in mesh.requests] == ["One.", "Two."]


def test_a_conversation_with_a_template_is_a_list_of_turns() -> None:
    conversation = Conversation(chat=True, system="Be brief.")
    conversation.ask("Hi")
    conversation.answered("Hello.")
    conversation.ask("lost")
    conversation.not_answered()
    assert conversation.ask("Bye") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Bye"},
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gateway", "--workers", "2"], "--workers is for the whole mesh: start `weft serve gateway` once for each"),
        (["cache", "--max-batch-size", "2"], "the cache has no MAX_BATCH_SIZE"),
        (["gateway", "--kv-dtype", "fp8"], "the gateway has no KV_DTYPE"),
        (["cache", "--http-port", "8001"], "the cache has no --http-port"),
        (
            ["--role", "prefill", "--role", "decode"],
            "--role: 2 roles need --workers 2 or more",
        ),
        (["cache", "--kv-scales", "dynamic"], "the cache has no KV_SCALES"),
        (["cache", "--tensor-parallel", "2"], "the cache has no WEFT_TENSOR_PARALLEL"),
        (["gateway", "--pipeline-parallel", "2"], "the gateway has no WEFT_PIPELINE_PARALLEL"),
        (["scheduler", "--expert-parallel"], "the scheduler has no WEFT_EXPERT_PARALLEL"),
        (["scheduler", "--model", "x"], "the scheduler has no --model"),
        (["worker", "--redis-url", "redis://x"], "the worker has no --redis-url"),
        (["--max-seq-length", "\u00b2"], "--max-seq-length: '\u00b2' is not a number of tokens such as 4096 or 4k"),
        (["--max-seq-length", "long"], "--max-seq-length: 'long' is not a number of tokens such as 4096 or 4k"),
    ],
)
def test_serve_refuses_flags_that_it_would_ignore(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert (result.exit_code, result.stderr) == (2, f"weft: {message}\n")


def test_an_adapter_belongs_to_the_model_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").touch()
    given = [f"poems={tmp_path}", f"fox:code={tmp_path}"]
    assert serve._adapters_by_model(given, ["fox"]) == {"fox": [f"poems={tmp_path}", f"code={tmp_path}"]}
    with pytest.raises(typer.Exit):
        serve._adapters_by_model(given, ["fox", "owl"])


def test_numbers_of_tokens_are_parsed() -> None:
    assert [serve._tokens(text) for text in ("4096", "4k", "32K", None)] == [4096, 4096, 32768, None]


def test_help_is_quick_and_needs_no_torch() -> None:
    script = "import sys; from weft.cli.app import app; sys.exit(any(m in sys.modules for m in ('torch', 'services')))"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_the_client_package_needs_only_grpcio_and_protobuf() -> None:
    script = """
import sys

ALLOWED = {'weft', 'protos', 'grpc', 'google', 'typing_extensions', *sys.stdlib_module_names}

class NothingElse:
    def find_spec(self, name, path=None, target=None):
        if name.startswith('google.rpc') or name.partition('.')[0] not in ALLOWED:
            raise ImportError(name)

sys.meta_path.insert(0, NothingElse())
import weft
weft.SyncClient().close()
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


async def test_a_bad_checkpoint_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    code, output = await run_weft("serve", "--model", str(tmp_path), "--port", str(free_port()), home=tmp_path / "home")
    last = output.strip().splitlines()[-1]
    assert code == 1
    assert last.startswith("weft: worker-1 ended with exit code")
    assert "Traceback" not in output


async def test_serve_prints_what_it_serves_and_stops_at_ctrl_c(tmp_path: Path) -> None:
    port = free_port()
    arguments = ("serve", "--host", "0.0.0.0", "--port", str(port), "--redis-url", "redis://me:secret@127.0.0.1:1/0")
    pair = Authority.random().issue(["localhost"])
    tls = {"WEFT_GATEWAY_TLS_CERT": tmp_path / "door.crt", "WEFT_GATEWAY_TLS_KEY": tmp_path / "door.key"}
    for path, content in zip(tls.values(), (pair.certificate, pair.key), strict=True):
        path.write_bytes(content)
    settings = {"WEFT_ALLOW_UNPROTECTED": "true", "ENGINE": "paced", **{name: str(path) for name, path in tls.items()}}
    process = await start_weft(*arguments, home=tmp_path, **settings)
    lines = await lines_of_start(process)
    assert lines[0] == "redis: redis://127.0.0.1:1/0\n"
    assert any(line.startswith("OpenAI's API: https://localhost:") and line.endswith("/v1\n") for line in lines)
    assert any(line.startswith("playground and live view: https://localhost:") for line in lines)
    assert lines[-1] == f"try: weft generate 'Once upon a time' --address https://localhost:{port}   (Ctrl-C stops)\n"
    assert any(line.startswith("serving ") and line.endswith(f" at localhost:{port}\n") for line in lines)
    assert f"listening at 0.0.0.0:{port}: open to other machines\n" in lines
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert (await process.stdout.read()).decode() == "stopped\n"
    assert await process.wait() == 0


async def test_a_single_service_keeps_its_process_and_imports_nothing_from_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "services").mkdir()
    (tmp_path / "services" / "__init__.py").write_text("raise SystemExit('not this one')")
    process = await asyncio.create_subprocess_exec(
        *(str(Path(sys.executable).with_name("weft")), "serve", "scheduler", "--port", str(free_port())),
        env={"PATH": "/usr/bin:/bin"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=tmp_path,
    )
    assert process.stdout is not None
    assert b'"ready"' in await process.stdout.readline()
    process.terminate()
    assert b"Traceback" not in await process.stdout.read()
    assert await process.wait() == 0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("WEFT_ALLOW_UNPROTECTED", "many", "settings: WEFT_ALLOW_UNPROTECTED: Input should be a valid boolean"),
        ("WEFT_LISTEN", "localhost", "localhost is not host:port"),
        (
            "WEFT_LISTEN",
            "0.0.0.0:0",
            "0.0.0.0:0 is open to other machines, without TLS and authentication: see SECURITY.md",
        ),
    ],
)
def test_a_service_with_a_wrong_setting_prints_one_line(tmp_path: Path, name: str, value: str, message: str) -> None:
    environment = {"WEFT_HOME": str(tmp_path), "PATH": "/usr/bin:/bin", name: value}
    parts = [part for part in serve.ServiceName if part is not serve.ServiceName.WORKER]
    processes = {part: Forked(f"services.{part}", environment, ROOT, tmp_path / part) for part in parts}
    for part, process in processes.items():
        assert process.wait(60) == os.EX_CONFIG
        output = (tmp_path / part).read_text()
        [reason] = [line for line in output.splitlines() if line[0] != "{"]  # the output without the log
        assert reason.startswith(f"weft: {message}")
        assert "many" not in output


async def test_a_gateway_whose_http_port_is_taken_prints_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, output = await run_weft(
            "serve", "gateway", "--port", str(free_port()), "--http-port", port, home=tmp_path
        )
    assert (code, output) == (os.EX_CONFIG, f"weft: WEFT_GATEWAY_HTTP_PORT {port}: Address already in use\n")


async def test_a_service_whose_port_is_taken_prints_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, output = await run_weft("serve", "scheduler", "--port", port, home=tmp_path)
    message = f"weft: cannot listen at 127.0.0.1:{port}: another process may use the port\n"
    assert (code, output) == (1, message)


async def test_a_malformed_list_prints_one_line(tmp_path: Path) -> None:
    code, output = await run_weft("serve", "worker", home=tmp_path, WEFT_ALIASES="fox")
    assert (code, "Traceback" in output) == (os.EX_CONFIG, False)
    assert "aliases" in output.splitlines()[-1]


async def test_the_second_demo_is_a_cache_hit(tmp_path: Path) -> None:
    patient = {"WEFT_GATEWAY_CACHE_BUDGET_S": "2"}  # a busy machine may exceed the default
    _, first = await run_weft("demo", home=tmp_path, **patient)
    code, second = await run_weft("demo", home=tmp_path, **patient)
    assert code == 0
    assert first.startswith("redis: embedded ")
    assert [fact(output, "result") for output in (first, second)] == ["miss", "hit"]
    assert (fact(second, "prefill tokens"), fact(second, "workers")) == ("0", "none")
    assert fact(first, "prefill tokens") != "0"
    story = first[first.index(demo.PROMPT) : first.index("\nhop ")]
    assert story in second


async def lines_of_start(process: asyncio.subprocess.Process) -> list[str]:
    """The lines that `weft serve` prints until it serves."""
    assert process.stdout is not None
    lines: list[str] = []
    while not (lines and lines[-1].startswith("try: ")):
        lines.append((await process.stdout.readline()).decode())
        assert lines[-1], lines
    return lines


def fact(output: str, name: str) -> str:
    """The value of the named line of the printed receipt."""
    return next(line for line in output.splitlines() if line.startswith(f"{name}  ")).removeprefix(name).strip()


async def start_weft(*arguments: str, home: Path, **settings: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *WITH_PARENT,
        str(os.getpid()),
        str(int(signal.SIGTERM)),
        *WEFT,
        *arguments,
        env={"WEFT_HOME": str(home), "PATH": "/usr/bin:/bin", "WEFT_THREADS": "1", **settings},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=ROOT,
    )


async def run_weft(*arguments: str, home: Path, **settings: str) -> tuple[int, str]:
    """Exit code and output of the command."""
    process = await start_weft(*arguments, home=home, **settings)
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()
