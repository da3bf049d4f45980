"""The `weft` command: its commands and flags. What they do is imported when they run, so that --help is quick."""

import contextlib
import os
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from client import measuring
from client.flags import LOCAL, Address, ApiKey, Caching, Deadline, Model, fail, nobody, run

if TYPE_CHECKING:
    from client.blocking import SyncClient
    from client.requests import Options

app = typer.Typer(
    name="weft",
    help="Serves large language models in real time as a mesh of small gRPC services.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Part(StrEnum):
    """A service of the mesh."""

    GATEWAY = "gateway"
    SCHEDULER = "scheduler"
    WORKER = "worker"
    CACHE = "cache"


MaxTokens = Annotated[int | None, typer.Option(help="Most tokens to produce.", show_default="up to 256")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy.", show_default="1")]
TopK = Annotated[int | None, typer.Option(help="Keep the k most likely tokens; 0 keeps all.", show_default="0")]
TopP = Annotated[float | None, typer.Option(help="Keep the most likely tokens up to this probability.")]
MinP = Annotated[float | None, typer.Option(help="Keep tokens this likely, relative to the most likely one.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same draws.", show_default="random")]
Stats = Annotated[bool, typer.Option("--stats", help="Say what the answer cost.")]


@app.command()
def serve(
    part: Annotated[Part | None, typer.Argument(help="Run this service alone, here.", show_default="all")] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="Folder of a checkpoint, or name on the hub; may be repeated.", show_default="MODEL_NAME"),
    ] = None,
    alias: Annotated[
        list[str] | None, typer.Option(metavar="ALIAS=NAME", help="Another name for a model; may be repeated.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="How many workers, of each model.")] = 1,
    redis_url: Annotated[
        str, typer.Option(envvar=["WEFT_REDIS_URL", "REDIS_URL"], help="Your own Redis.", show_default="embedded")
    ] = "",
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Where to listen.", show_default="50051")] = None,
    max_batch_size: Annotated[int | None, typer.Option(min=1, help="Most sequences in a worker's batch.")] = None,
    max_seq_length: Annotated[str | None, typer.Option(help="Most tokens of prompt and answer: 4096, 4k, 32k.")] = None,
    engine: Annotated[str | None, typer.Option(help="What computes.", show_default="the best there is")] = None,
    quantize: Annotated[
        str | None, typer.Option(help="Round a plain checkpoint's weights to int8, int4, fp8 or nf4.")
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="Of stored keys and values: fp8 or int8.", show_default="the model's")
    ] = None,
    kv_scales: Annotated[
        str | None, typer.Option(help="Of keys and values in fp8: dynamic.", show_default="the checkpoint's, else 1")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Logs on stderr instead of in files.")] = False,
) -> None:
    """Serve one or several models: the whole mesh, or one of its services by name."""
    models = [_model_path(each) for each in model or [os.environ.get("MODEL_NAME", "")] if each]
    settings = {
        "MAX_BATCH_SIZE": max_batch_size,
        "MAX_SEQ_LENGTH": _tokens(max_seq_length),
        "ENGINE": engine,
        "QUANTIZE": quantize,
        "KV_DTYPE": kv_dtype,
        "KV_SCALES": kv_scales,
    }
    environment = {name: str(value) for name, value in settings.items() if value is not None}
    if part is not None:
        if len(models) > 1 or alias:
            fail("several models and aliases are for the whole mesh", usage=True)
        _serve_part(part, environment, model="".join(model or []), workers=workers, redis_url=redis_url, port=port)
        return
    from client import demo, mesh
    from client.local import Wanted, model_name
    from client.terminal import console

    with _mesh_errors():
        models = models or [str(demo.model_folder())]
        wanted = Wanted(
            models=models,
            home=demo.home(),
            aliases=_aliases(alias or [], {model_name(each) for each in models}),
            workers=workers,
            redis_url=redis_url,
            port=port,
            settings=environment,
        )
        run(mesh.serve(wanted, console(), verbose=verbose))


@app.command("demo")
def demonstrate(
    prompt: Annotated[str, typer.Option(help="What to continue.", show_default="the beginning of a story")] = "",
) -> None:
    """Start a mesh with the demo model, stream one answer, print its receipt, stop."""
    from client import demo
    from client.terminal import console

    with _mesh_errors():
        run(demo.run(prompt or demo.PROMPT, console()))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to continue; - reads it from standard input.")],
    address: Address = LOCAL,
    api_key: ApiKey = "",
    model: Model = "",
    max_tokens: MaxTokens = None,
    min_tokens: Annotated[int | None, typer.Option(help="Fewest tokens before the answer may end.")] = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1: fewer repetitions.")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="Taken from tokens that the answer has.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="The same, times their count.")] = None,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this string; may be repeated.")] = None,
    stop_token_id: Annotated[list[int] | None, typer.Option(help="End at this token; may be repeated.")] = None,
    logit_bias: Annotated[
        list[str] | None, typer.Option(metavar="ID=BIAS", help="Add to a token's logit; may be repeated.")
    ] = None,
    logprobs: Annotated[int | None, typer.Option(help="Show log-probabilities, with this many alternatives.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Do not end at the model's end tokens.")] = False,
    n: Annotated[int, typer.Option(help="How many continuations.")] = 1,
    priority: Annotated[int, typer.Option(help="Higher is sooner when the mesh is full.")] = 0,
    cache: Annotated[Caching | None, typer.Option(help="What the caches may do.", show_default="read_write")] = None,
    request_id: Annotated[str, typer.Option(help="A name for the request.", show_default="random")] = "",
    deadline: Deadline = None,
    stats: Stats = False,
) -> None:
    """Continue a prompt, token by token."""
    options: dict[str, Any] = {
        "model": model,
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "seed": seed,
        "stop": stop,
        "stop_token_ids": stop_token_id,
        "logit_bias": _biases(logit_bias) if logit_bias else None,
        "logprobs": logprobs,
        "ignore_eos": ignore_eos,
        "n": n,
        "priority": priority,
        "cache": cache,
        "request_id": request_id,
    }
    with _client(address, api_key, deadline) as client:
        text = sys.stdin.read() if prompt == "-" else prompt
        _answer(client, text, options, n, logprobs is not None, stats)  # type: ignore[arg-type]


@app.command()
def chat(
    address: Address = LOCAL,
    api_key: ApiKey = "",
    model: Model = "",
    system: Annotated[str, typer.Option(help="What the model is told first.")] = "",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = None,
    deadline: Deadline = None,
    stats: Stats = False,
) -> None:
    """Talk with a model; --stats tells time to first token and speed after each answer."""
    from client import chat as conversation

    options: dict[str, Any] = {
        "model": model,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
    }
    with _client(address, api_key, deadline) as client:
        served = [known for known in client.models() if known.workers and model in ("", known.name, *known.aliases)]
        if not served:
            fail(f"{address} does not serve {model}" if model else f"{address} serves no model yet")
        conversation.run(client, served[0], system, options, stats)  # type: ignore[arg-type]


@app.command()
def models(address: Address = LOCAL, api_key: ApiKey = "") -> None:
    """List the models that a mesh serves, and how far those are that it is loading."""
    from client.terminal import console, models_table

    with _client(address, api_key, deadline_s=10) as client:
        console().print(models_table(client.models()))


@app.command()
def key(
    name: Annotated[str, typer.Argument(help="Name of the tenant that it is for.")],
) -> None:
    """Make an API key, and the lines for the file of tenants; the key itself is kept nowhere."""
    import hashlib
    import re
    import secrets

    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
        fail("a tenant's name is 1 to 64 characters of A-Z a-z 0-9 . _ -", usage=True)
    made = f"weft-{secrets.token_urlsafe(32)}"
    typer.echo("for its owner, who alone will have it:", err=True)
    typer.echo(made)
    typer.echo("\nfor the gateways' WEFT_TENANTS_FILE:", err=True)
    hashed = hashlib.sha256(made.encode()).hexdigest()
    typer.echo(f'[[tenant]]\nname = "{name}"\nkeys = ["sha256:{hashed}"]')


for _command in (measuring.bench, measuring.top, measuring.doctor):
    app.command()(_command)


_DELEGATED = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command("compress", context_settings=_DELEGATED)
def make_smaller(context: typer.Context) -> None:
    """Make a checkpoint smaller: AWQ, GPTQ, SmoothQuant, FP8, INT8, pruning, distillation."""
    _delegate("compress", context.args)


@app.command("verify", context_settings=_DELEGATED)
def prove(context: typer.Context) -> None:
    """Prove that a compressed checkpoint is still the model it was made from."""
    _delegate("verify", context.args)


def _answer(client: "SyncClient", prompt: str, options: "Options", n: int, logprobs: bool, stats: bool) -> None:
    from client.terminal import Speaker, console, print_receipt

    speaker = Speaker(n, logprobs)
    answer = client.generate(prompt, **options)
    for delta in answer:
        speaker.add(delta)
    if stats and answer.receipt is not None:
        print_receipt(console(), answer.receipt)


def _serve_part(
    part: Part, environment: dict[str, str], *, model: str, workers: int, redis_url: str, port: int | None
) -> None:
    """Becomes one service. Its settings come from the environment; flags that it would ignore are refused."""
    if workers != 1:
        fail(f"--workers is for the whole mesh: start `weft serve {part}` once for each", usage=True)
    if part is not Part.WORKER and environment:
        fail(f"the {part} has no {', '.join(sorted(environment))}", usage=True)
    for flag, value, owner, name in (
        ("--model", model and _model_path(model), Part.WORKER, "MODEL_NAME"),
        ("--redis-url", redis_url, Part.CACHE, "WEFT_REDIS_URL"),
    ):
        if value and part is not owner and value != os.environ.get(name):
            fail(f"the {part} has no {flag}", usage=True)
        if value and part is owner:
            environment[name] = value
    if port is not None:
        environment["WEFT_LISTEN"] = f"127.0.0.1:{port}"
    os.environ.update(environment)
    # `-m` alone would import from the current folder, whatever lies there.
    path = [] if {"", os.getcwd()} & set(sys.path) else ["-P"]
    os.execv(sys.executable, [sys.executable, *path, "-m", f"services.{part}"])


def _delegate(package: str, arguments: list[str]) -> None:
    """Becomes another package's command line."""
    import importlib.util
    import runpy

    missing = [name for name in (package, "compressed_tensors") if importlib.util.find_spec(name) is None]
    if missing:
        fail(f"{package} needs {missing[0]}, which is not installed: make set-up, or pip install 'weft[compress]'")
    sys.argv = [f"weft {package}", *arguments]
    runpy.run_module(package, run_name="__main__", alter_sys=True)


@contextlib.contextmanager
def _client(address: str, api_key: str, deadline_s: float | None) -> "Iterator[SyncClient]":
    """A client of the mesh at `address`, with its errors told in one line."""
    from client.blocking import SyncClient
    from client.errors import WeftError
    from client.reach import listens

    if not listens(address):
        fail(nobody(address))
    with SyncClient(address, api_key=api_key, deadline_s=deadline_s) as client:
        try:
            yield client
        except WeftError as error:
            if not error.reason and error.code.name in ("UNAVAILABLE", "UNIMPLEMENTED"):
                fail(nobody(address) if error.code.name == "UNAVAILABLE" else f"{address} is no gateway of Weft")
            fail(str(error))
        except (TypeError, ValueError) as error:
            fail(str(error), usage=True)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


@contextlib.contextmanager
def _mesh_errors() -> Iterator[None]:
    """What can keep a mesh from running, told in one line."""
    from client.demo import NoDemoModel
    from client.errors import WeftError
    from client.local import PortTaken
    from services.cache.embedded import NoRedisError
    from services.supervisor import GaveUp

    try:
        yield
    except (GaveUp, PortTaken, NoRedisError, NoDemoModel, WeftError) as error:
        fail(str(error))


def _model_path(model: str) -> str:
    """An absolute path for a folder, anything else (a name on the hub) as it is."""
    return str(Path(model).absolute()) if model and Path(model).is_dir() else model


def _aliases(pairs: list[str], names: set[str]) -> dict[str, str]:
    """ALIAS=NAME as alias and name, which must be one of `names`."""
    aliases = dict(pair.partition("=")[::2] for pair in pairs)
    for alias, name in aliases.items():
        if not alias or name not in names:
            known = ", ".join(sorted(names))
            fail(f"--alias: {alias}={name} is not ALIAS=NAME with one of the models {known}", usage=True)
    return aliases


def _tokens(text: str | None) -> int | None:
    """4096, 4k or 32k as a number of tokens, k being 1024."""
    if text is None:
        return None
    digits, factor = (text[:-1], 1024) if text[-1:] in ("k", "K") else (text, 1)
    if not digits.isdecimal() or int(digits) == 0:
        fail(f"--max-seq-length: {text!r} is not a number of tokens such as 4096 or 4k", usage=True)
    return int(digits) * factor


def _biases(pairs: list[str]) -> dict[int, float]:
    biases = {}
    for pair in pairs:
        token_id, _, bias = pair.partition("=")
        try:
            biases[int(token_id)] = float(bias)
        except ValueError:
            fail(f"--logit-bias: {pair!r} is not ID=BIAS", usage=True)
    return biases
