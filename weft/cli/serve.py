"""The commands that run a mesh here, or one of its services: serve, demo."""

import contextlib
import os
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.flags import RedisUrl, fail, run


class ServiceName(StrEnum):
    """A service of the mesh."""

    GATEWAY = "gateway"
    SCHEDULER = "scheduler"
    WORKER = "worker"
    CACHE = "cache"


OnePart = Annotated[ServiceName | None, typer.Argument(help="Run this service alone, here.", show_default="all")]
Models = Annotated[
    list[str] | None,
    typer.Option(help="Folder of a checkpoint, or name on the hub; may be repeated.", show_default="MODEL_NAME"),
]
Aliases = Annotated[
    list[str] | None, typer.Option(metavar="ALIAS=NAME", help="Another name for a model; may be repeated.")
]
Workers = Annotated[int, typer.Option(min=1, help="How many workers, of each model.")]
Port = Annotated[int | None, typer.Option(min=1, max=65535, help="Where to listen.", show_default="50051")]
MaxBatchSize = Annotated[int | None, typer.Option(min=1, help="Most sequences in a worker's batch.")]
MaxSeqLength = Annotated[str | None, typer.Option(help="Most tokens of prompt and answer: 4096, 4k, 32k.")]
Engine = Annotated[str | None, typer.Option(help="What computes.", show_default="the best there is")]
Quantize = Annotated[str | None, typer.Option(help="Round a plain checkpoint's weights to int8, int4, fp8 or nf4.")]
KvDtype = Annotated[
    str | None, typer.Option(help="Of stored keys and values: fp8 or int8.", show_default="the model's")
]
KvScales = Annotated[
    str | None, typer.Option(help="Of keys and values in fp8: dynamic.", show_default="the checkpoint's, else 1")
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Logs on stderr instead of in files.")]


def serve(
    part: OnePart = None,
    model: Models = None,
    alias: Aliases = None,
    workers: Workers = 1,
    redis_url: RedisUrl = "",
    port: Port = None,
    max_batch_size: MaxBatchSize = None,
    max_seq_length: MaxSeqLength = None,
    engine: Engine = None,
    quantize: Quantize = None,
    kv_dtype: KvDtype = None,
    kv_scales: KvScales = None,
    verbose: Verbose = False,
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
    from report.console import console
    from weft.launch import demo_model, mesh
    from weft.launch.home import default_home
    from weft.launch.plan import MeshSpec, model_name

    with _mesh_errors():
        models = models or [str(demo_model.model_folder())]
        wanted = MeshSpec(
            models=models,
            home=default_home(),
            aliases=_aliases(alias or [], {model_name(each) for each in models}),
            workers=workers,
            redis_url=redis_url,
            port=port,
            settings=environment,
        )
        run(mesh.serve(wanted, console(), verbose=verbose))


def demonstrate(
    prompt: Annotated[str, typer.Option(help="What to continue.", show_default="the beginning of a story")] = "",
) -> None:
    """Start a mesh with the demo model, stream one answer, print its receipt, stop."""
    from report.console import console
    from weft.cli import demo

    with _mesh_errors():
        run(demo.run(prompt or demo.PROMPT, console()))


def _serve_part(
    part: ServiceName, environment: dict[str, str], *, model: str, workers: int, redis_url: str, port: int | None
) -> None:
    """Becomes one service. Its settings come from the environment; flags that it would ignore are refused."""
    if workers != 1:
        fail(f"--workers is for the whole mesh: start `weft serve {part}` once for each", usage=True)
    if part is not ServiceName.WORKER and environment:
        fail(f"the {part} has no {', '.join(sorted(environment))}", usage=True)
    for flag, value, owner, name in (
        ("--model", model and _model_path(model), ServiceName.WORKER, "MODEL_NAME"),
        ("--redis-url", redis_url, ServiceName.CACHE, "WEFT_REDIS_URL"),
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


@contextlib.contextmanager
def _mesh_errors() -> Iterator[None]:
    """What can keep a mesh from running, told in one line."""
    from services.cache.embedded import NoRedisError
    from weft.client.errors import WeftError
    from weft.launch.demo_model import NoDemoModel
    from weft.launch.plan import PortTaken
    from weft.launch.supervisor import GaveUp

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
